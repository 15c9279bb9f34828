#!/usr/bin/env bash
# Usage: launch/setup.sh [--cpu | --gpu]
#
# Make .venv at the root of this repository, with everything megarl needs. Needs no root rights and can be run again at
# any time: a finished environment is left as it is, an outdated one is brought up to date, a half-made one made anew.
#
#   --cpu   what requirements-cpu.txt names, and a stub for SGLang's compiled kernels
#   --gpu   what requirements.txt names; needs nvcc for Transformer Engine
#
# Without either: what the environment already is; for a new one, --gpu where nvidia-smi lists a GPU, otherwise --cpu.
# On a cluster run it once where the compiler is, with --gpu, since login nodes often show no GPU.

set -euo pipefail

root="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)"
readonly root
readonly venv="$root/.venv"
# Written last, removed before anything is changed: it lies there only while the environment is whole.
readonly stamp="$venv/megarl-setup"
readonly stub="$root/cpu_development/sglang_kernel_stub"
readonly lock_wait_s=3600 # a GPU set-up compiles for half an hour

say() { printf 'setup: %s\n' "$*"; }

fail() {
  printf 'setup: %s\n' "$*" >&2
  exit 1
}

usage() { sed -n '2,/^$/s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; }

# The kind of the whole environment that is there, if any.
existing_flavour() {
  [[ -x "$venv/bin/python" && -f "$stamp" ]] && head -n 1 "$stamp" | grep -xE 'cpu|gpu'
}

gpu_seen() { [[ "$(nvidia-smi -L 2>/dev/null)" == "GPU "* ]]; }

choose_flavour() {
  local -r asked="$1"
  if [[ -n "$asked" ]]; then
    echo "$asked"
  elif existing_flavour; then
    return
  elif gpu_seen; then
    echo gpu
  else
    echo cpu
  fi
}

# What a whole environment is made of: its kind, its place (scripts in it name it), and the files that say how.
fingerprint() {
  local -r flavour="$1"
  printf '%s\n%s\n' "$flavour" "$root"
  cd -- "$root"
  sha256sum requirements.txt requirements-cpu.txt pyproject.toml launch/setup.sh "$stub/pyproject.toml"
}

up_to_date() {
  local -r flavour="$1"
  [[ "$(existing_flavour)" == "$flavour" && "$(<"$stamp")" == "$(fingerprint "$flavour")" ]]
}

# The open file is held by the packages' installer too, so a set-up that was killed is waited for until all of it ended.
take_lock() {
  local descriptor status=0
  exec {descriptor}>>"$root/launch/setup.sh" # appending nothing; a lock over NFS needs a file open for writing
  flock --nonblock "$descriptor" || status=$?
  case "$status" in
    0) ;;
    1)
      say "waiting for another set-up of $venv"
      flock --timeout "$lock_wait_s" "$descriptor" || fail "the other set-up has not ended in $lock_wait_s s"
      ;;
    *) say "this file system has no locks: make sure that no other set-up of $venv runs" ;;
  esac
}

python_version() {
  local -r python="$1"
  "$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null
}

find_python() {
  local candidate version found=""
  for candidate in python3.11 python3.12 python3; do
    version="$(python_version "$candidate")" || continue
    if [[ "$version" =~ ^3\.([0-9]+)$ ]] && ((BASH_REMATCH[1] >= 11)); then
      echo "$candidate"
      return
    fi
    found="$candidate is $version"
  done
  fail "no Python 3.11 or later on PATH (${found:-none of python3.11, python3.12 and python3 runs}):" \
    "install Python 3.11, or load the module that has it, and run this again"
}

# A whole environment of the same kind and place is updated; anything else is made from nothing.
make_venv() {
  local -r flavour="$1"
  local python
  if [[ "$(existing_flavour)" == "$flavour" && "$(sed -n 2p "$stamp")" == "$root" ]]; then
    say "updating $venv"
    rm -f -- "$stamp"
    return
  fi
  python="$(find_python)"
  say "making $venv for the $flavour with $python ($(python_version "$python"))"
  rm -f -- "$stamp"
  "$python" -m venv --clear "$venv"
  pip_install --upgrade 'pip>=25'
}

# Errors only: pip and setuptools warn of what is usual here, such as indexes without some package.
pip_install() { "$venv/bin/python" -m pip install --quiet --quiet --disable-pip-version-check "$@"; }

install_cpu() {
  local packages
  say "installing what requirements-cpu.txt names (for a new environment 2.7 GB, a few minutes)"
  # torch first and with what it needs: where its CPU build is not to be had, that is CUDA's libraries
  pip_install "$(grep -oE '^torch==[^ ]+' "$root/requirements-cpu.txt")"
  pip_install --no-deps --requirement "$root/requirements-cpu.txt"
  # torchvision registers shape rules for its compiled operators, which its wheel offers only together with CUDA; without
  # them the registration fails and so does the import. SGLang's server needs the import, and none of the operators.
  packages="$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
  : >"$packages/torchvision/_meta_registrations.py"
  pip_install --no-deps --no-build-isolation --editable "$stub"
}

install_gpu() {
  say "installing torch"
  grep -oE '^(torch|setuptools)==[^ ]+' "$root/requirements.txt" >"$venv/torch.txt"
  pip_install --requirement "$venv/torch.txt"
  say "installing what requirements.txt names (compiles Transformer Engine: up to half an hour)"
  pip_install --no-build-isolation --requirement "$root/requirements.txt"
}

check_imports() {
  local -r flavour="$1"
  if [[ "$flavour" == gpu ]] && ! gpu_seen; then
    say "no GPU here: the packages are not tried"
    return
  fi
  say "trying the packages"
  SGLANG_USE_CPU_ENGINE="$([[ "$flavour" == cpu ]] && echo 1 || echo 0)" \
    "$venv/bin/python" -W ignore -c 'import megatron.core, megarl, sglang, torch' ||
    fail "the packages are installed but cannot be imported (see above)"
}

set_up() {
  local -r flavour="$1"
  local made_of
  made_of="$(fingerprint "$flavour")" # before they are read, so that a later change is noticed by the next run
  make_venv "$flavour"
  "install_$flavour"
  pip_install --no-deps --no-build-isolation --editable "$root"
  check_imports "$flavour"
  printf '%s\n' "$made_of" >"$stamp.new"
  mv -- "$stamp.new" "$stamp"
  say "done: $venv ($flavour)"
}

main() {
  local asked="" flavour
  while (($# > 0)); do
    case "$1" in
      --cpu | --gpu) asked="${1#--}" ;;
      -h | --help)
        usage
        return
        ;;
      *) fail "unknown argument '$1'; see launch/setup.sh --help" ;;
    esac
    shift
  done

  flavour="$(choose_flavour "$asked")"
  up_to_date "$flavour" && return
  take_lock
  flavour="$(choose_flavour "$asked")" # again: another set-up may just have ended
  up_to_date "$flavour" || set_up "$flavour"
}

main "$@"
