#!/usr/bin/env bash
# Usage: tests/run.sh [pytest arguments]
#
# Set up what is missing, check style and types, and run the tests: all of them, or those that the arguments name, as in
#
#   tests/run.sh tests/unit -k journal
#
# Every check runs even when an earlier one fails; the exit code is that of the first failure.

set -euo pipefail

root="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)"
readonly root
first_failure=0

check() {
  local status=0
  "$@" || status=$?
  ((first_failure != 0)) || first_failure=$status
}

# What the tests and the processes that they start need to know.
prepare_environment() {
  export PATH="$root/.venv/bin:$PATH"
  # Many small processes share the cores; with a thread pool each, they spend their time waiting for one another.
  export OMP_NUM_THREADS=1
  # Models and tokenizers are made or shipped by the tests; nothing may be fetched.
  export HF_HUB_OFFLINE=1
  # mpirun refuses to start as root, which a container's user often is.
  if ((EUID == 0)); then
    export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
    export PRTE_ALLOW_RUN_AS_ROOT=1 PRTE_ALLOW_RUN_AS_ROOT_CONFIRM=1
  fi
}

main() {
  cd -- "$root"
  bash launch/setup.sh
  prepare_environment
  check ruff check --quiet .
  check ruff format --check --quiet .
  check mypy megarl
  if ((first_failure != 0)); then
    echo "tests/run.sh: style or types need work (above); the tests run all the same, and this run will fail" >&2
  fi
  if (($# > 0)); then
    check python -m pytest "$@"
    return
  fi
  # Two files at a time, the long ones first; then, one at a time, whatever starts engines, which fill two cores.
  check python -m pytest --numprocesses=2 --dist=loadfile --no-loadscope-reorder tests/distributed tests/unit
  check python -m pytest --ignore=tests/distributed --ignore=tests/unit
  if ((first_failure != 0)); then
    echo "tests/run.sh: something has failed (above)" >&2
  fi
}

main "$@"
exit "$first_failure"
