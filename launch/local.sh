#!/usr/bin/env bash
# Usage: launch/local.sh -n RANKS [--torchrun] RECIPE [key.path=value...] [--resume] [--dry-run]
#
# Run a recipe on this machine with RANKS ranks, one a GPU or CPU core.
#
#   --torchrun   start the ranks with torchrun and its TCP store instead of mpirun
#   --resume     continue the run in run_dir from its newest checkpoint
#   --dry-run    check everything and print the resolved recipe and what each rank would do
#
# Example: launch/local.sh -n 2 launch/recipes/carry_addition_rl.yaml steps=10 run_dir=runs/try

set -euo pipefail

root="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)"
readonly root
# shellcheck source=launch/lib.sh
source "$root/launch/lib.sh"

usage() { sed -n '2,/^$/s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; }

# Becomes the launcher.
launch() {
  local -r launcher="$1" ranks="$2"
  shift 2
  case "$launcher" in
    # the mpirun beside this python: another one on PATH would be another MPI; it may start more ranks than cores
    mpirun) exec "$root/.venv/bin/mpirun" --map-by :OVERSUBSCRIBE -n "$ranks" python "$root/launch/train.py" "$@" ;;
    torchrun) exec python -m torch.distributed.run --standalone --nproc-per-node "$ranks" "$root/launch/train.py" "$@" ;;
  esac
}

main() {
  local ranks="" launcher=mpirun
  while (($#)); do
    case "$1" in
      -n) ranks="${2:-}" && shift 2 || break ;;
      --torchrun) launcher=torchrun && shift ;;
      -h | --help) usage && return ;;
      *) break ;;
    esac
  done
  [[ "$ranks" =~ ^[1-9][0-9]*$ && $# -gt 0 ]] || { usage >&2 && return 2; }
  env::activate "$root"
  env::sweep_shared_memory
  if [[ " $* " == *" --dry-run "* ]]; then
    python "$root/launch/train.py" "$@" --ranks "$ranks"
    return
  fi
  local run_dir rc=0
  local -r start="$(date +%s)"
  run_dir="$(python "$root/launch/train.py" "$@" --check --ranks "$ranks")"
  # in the background, because bash would attend to a signal only after the launcher's end
  launch "$launcher" "$ranks" "$@" </dev/null &
  local -r launched=$!
  trap 'kill -TERM "$launched" 2>/dev/null || true' INT TERM HUP
  while kill -0 "$launched" 2>/dev/null; do
    rc=0
    wait "$launched" || rc=$?
  done
  if ((rc)); then run::print_cause "$run_dir" "$start"; fi
  return "$rc"
}

main "$@"
