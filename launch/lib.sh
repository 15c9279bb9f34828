# shellcheck shell=bash
# What the launchers have in common. Sourced by launch/*.sh and slurm/*.sbatch: defines functions and does nothing else.

job::die() {
  echo "megarl: $*" >&2
  exit 1
}

# Puts the virtual environment of a repository first on PATH, for this script and every rank.
env::activate() {
  local -r repository=$1
  [[ -f $repository/.venv/bin/activate ]] || job::die "$repository has no .venv; make it with launch/setup.sh"
  # shellcheck disable=SC1091
  source "$repository/.venv/bin/activate"
  export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} # several ranks share a node's cores
  export HF_HUB_OFFLINE=${HF_HUB_OFFLINE:-1}   # models and tokenizers are directories
  if ((EUID == 0)); then                       # the user of many containers, whom mpirun otherwise refuses
    export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
    export PRTE_ALLOW_RUN_AS_ROOT=1 PRTE_ALLOW_RUN_AS_ROOT_CONFIRM=1
  fi
}

# Removes what killed runs of this user left in shared memory more than a day ago. A run that still has such a file
# mapped keeps its mapping.
env::sweep_shared_memory() {
  find /dev/shm -maxdepth 1 -user "$EUID" -mmin +1440 \
    \( -name 'sglang_loads_*' -o -name 'sem.mp-*' -o -name 'sm_segment.*' \) -delete 2>/dev/null || true
}

# Prints why the run ended: the first cause that a rank has left in the run directory since `start`, in Unix seconds.
run::print_cause() {
  local -r run_dir=$1 start=$2
  python - "$run_dir/failure.jsonl" "$start" >&2 <<'PYTHON'
import json, pathlib, sys

path, start = pathlib.Path(sys.argv[1]), int(sys.argv[2])
rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
# a rank that was ended because of another one tells nothing new
rows = [row for row in rows if row["time"] >= start and not row["cause"].startswith("ended by SIG")]
if rows:
    first = min(rows, key=lambda row: row["time"])
    print(f"megarl: the run failed: rank {first['rank']}: {first['cause']}")
else:
    print("megarl: the run was ended from outside or a rank was killed; the launcher's lines above tell which")
PYTHON
}
