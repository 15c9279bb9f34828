# shellcheck shell=bash
# What the job scripts beside this file have in common. They source it after launch/lib.sh; it defines functions and does
# nothing else.
#
# They run on the first node of the job, in the directory from which it was submitted.

# The run directory of a recipe with its overrides: its own run_dir, else runs/NAME-JOB. Fails on a wrong recipe.
recipe::run_dir() {
  python - "$@" <<'PYTHON'
import os, pathlib, sys
from megarl.config import RecipeError, load_recipe

words = [word for word in sys.argv[1:] if not word.startswith("--")]
if not words:
    sys.exit("megarl: no recipe; usage: sbatch [options] slurm/rl.sbatch RECIPE [key.path=value...] [--resume]")
try:
    recipe = load_recipe(pathlib.Path(words[0]), words[1:])
except RecipeError as error:
    sys.exit(str(error))
print(recipe.run_dir or f"runs/{recipe.name}-{os.environ['SLURM_JOB_ID']}")
PYTHON
}

# mpi or tcp: MEGARL_CONTROL, else mpi where this Slurm can start MPI programs through PMIx.
control::choose() {
  case ${MEGARL_CONTROL:-} in
    mpi | tcp) echo "$MEGARL_CONTROL" ;;
    "") if [[ $(srun --mpi=list 2>&1) == *pmix* ]]; then echo mpi; else echo tcp; fi ;;
    *) job::die "MEGARL_CONTROL=$MEGARL_CONTROL: expected mpi or tcp" ;;
  esac
}

# What `srun --mpi=` takes for a control plane.
control::srun_mpi() {
  local -r control=$1
  case $control in
    mpi) echo pmix ;;
    tcp) echo none ;;
  esac
}

# Exports MASTER_ADDR and MASTER_PORT: this node, and a port that is free on it. Ports below the ephemeral range are
# not given to outgoing connections or to servers that ask for any port, so it is still free when rank 0 binds it.
control::export_rendezvous() {
  local hosts
  mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
  ((${#hosts[@]})) || job::die "scontrol names no host for the node list $SLURM_JOB_NODELIST"
  MASTER_ADDR=${hosts[0]}
  while MASTER_PORT=$((10000 + RANDOM % 20000)) && (: <>"/dev/tcp/$MASTER_ADDR/$MASTER_PORT") 2>/dev/null; do :; done
  export MASTER_ADDR MASTER_PORT
}

# Runs an srun command as the job's step 0 and returns its exit code. A USR1 that this shell gets meanwhile goes on to
# the ranks, each time; they count it once.
step::run() {
  local forwarded=0 rc=0
  trap 'forwarded=1; step::forward_usr1' USR1
  "$@" </dev/null &
  local -r pid=$!
  wait "$pid" || rc=$?
  while ((forwarded)); do # that wait was ended by the signal, not by srun
    forwarded=0 rc=0
    wait "$pid" || rc=$?
  done
  trap - USR1
  return "$rc"
}

step::forward_usr1() {
  echo "megarl: USR1: asking the ranks to save and end" >&2
  scancel --signal=USR1 "$SLURM_JOB_ID.0" || echo "megarl: the ranks cannot be reached" >&2
}
