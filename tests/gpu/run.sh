#!/usr/bin/env bash
# Usage: tests/gpu/run.sh [pytest arguments]
#
# The checks that need a GPU, with the numbers that they measure; under ten minutes on an H200. Set up with
# `launch/setup.sh --gpu` first. On a machine without a GPU everything is skipped.

set -euo pipefail

root="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../.." && pwd -P)"
readonly root

cd -- "$root"
export PATH="$root/.venv/bin:$PATH" HF_HUB_OFFLINE=1
exec python -m pytest tests/gpu -m gpu -s "$@"
