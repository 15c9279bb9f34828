#!/usr/bin/env bash
# Usage: launch/quickstart.sh [--seed N] [--steps N]
#
# Set up what is missing, then train a tiny model to add: supervised fine-tuning, then GRPO, on two CPU cores in a few
# minutes. Ends with accuracies, samples and a reward curve. Ctrl-C ends everything.

set -euo pipefail

root="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)"
readonly root
cd -- "$root"
# shellcheck source=launch/lib.sh
source launch/lib.sh

if [[ " $* " == *" -h "* || " $* " == *" --help "* ]]; then
  sed -n '2,/^$/s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
  exit 0
fi
bash launch/setup.sh
env::activate "$root"
exec python launch/quickstart.py "$@"
