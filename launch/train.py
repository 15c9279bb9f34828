#!/usr/bin/env python
"""What every rank runs: python launch/train.py RECIPE [key.path=value ...]

Started by launch/local.sh (mpirun or torchrun) or slurm/rl.sbatch (srun); alone it is a job of one rank.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import traceback
from pathlib import Path

from megarl.config import RecipeError, dump_recipe, load_recipe
from megarl.data import DataError
from megarl.rollout_engine import CoordinatorError, EngineError
from megarl.runtime import Guard, launcher_pid, rank_info
from megarl.trainer import describe_models, describe_ranks, preflight, run_rank

_BAD_INPUT = 2
# A dead engine, coordinator or rank first shows as a request or a collective that fails. Whoever watched it knows more
# and ends the job meanwhile.
_CHILD_FIRST_S = 2.0


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description="Train as a recipe says. Every rank of a job runs this; launch/local.sh starts a job here.",
        epilog="Example: launch/local.sh -n 2 launch/recipes/carry_addition_rl.yaml steps=10 seed=1",
    )
    parser.add_argument("recipe", type=Path, help="YAML file; see launch/recipes/ and docs/recipes.md")
    parser.add_argument("overrides", nargs="*", metavar="key.path=value", help="settings that replace the recipe's")
    parser.add_argument("--resume", action="store_true", help="continue the run in run_dir from its newest checkpoint")
    parser.add_argument(
        "--dry-run", action="store_true", help="check everything, print the resolved recipe and each rank's part"
    )
    parser.add_argument(
        "--check", action="store_true", help="check everything and print the run directory, or every problem"
    )
    parser.add_argument(
        "--ranks", type=_positive, metavar="N", help="with --dry-run or --check: as if N ranks were started (default 1)"
    )
    args = parser.parse_intermixed_args()  # options and overrides in any order
    if args.ranks is not None and not (args.check or args.dry_run):
        parser.error("--ranks starts none and needs --dry-run or --check; launch/local.sh -n N starts N ranks")
    return args


def _positive(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"expected a positive whole number, got {text!r}")
    return int(text)


def check_only(args: argparse.Namespace) -> None:
    """--check and --dry-run: one process, no ranks."""
    world = args.ranks or 1
    recipe = load_recipe(args.recipe, args.overrides)
    shape = preflight(recipe, world=world, ranks_per_node=world, resume=args.resume)
    if args.dry_run:
        print(dump_recipe(recipe))
        print("\n".join(f"# {line}" for line in describe_models(recipe, shape, world=world)))
        print(f"# run directory: {recipe.directory}")
        print("# what each rank would do; everything is counted from 0:")
        print("\n".join(f"# {line}" for line in describe_ranks(recipe, shape, world=world)))
    else:
        print(recipe.directory)


def main() -> None:
    args = parse_arguments()
    if args.check or args.dry_run:
        try:
            return check_only(args)
        except (RecipeError, DataError) as error:
            print(error, file=sys.stderr)
            sys.exit(_BAD_INPUT)
    try:
        guard = Guard(rank_info().rank, launcher_pid())
    except ValueError as error:  # an environment that no launcher makes
        print(f"megarl: {error}", file=sys.stderr)
        sys.exit(_BAD_INPUT)
    from megarl.transfer_queue import QueueError  # not above: a dry run need not wait for what it imports

    try:
        run_rank(args.recipe, args.overrides, guard, resume=args.resume)
    except (RecipeError, DataError) as error:
        guard.die(str(error), code=_BAD_INPUT)
    except FloatingPointError as error:
        guard.die(str(error))
    except (EngineError, CoordinatorError, QueueError) as error:
        time.sleep(_CHILD_FIRST_S)
        guard.die(str(error))
    except BaseException:  # noqa: BLE001 - whatever it is, the other ranks must not wait for this one
        cause = traceback.format_exc()
        time.sleep(_CHILD_FIRST_S)
        guard.die(cause)
    sys.stdout.flush()
    # torch's and MPI's exit handlers can hang on a peer that left first; everything is written and all ranks agreed
    os._exit(0)


if __name__ == "__main__":  # spawned helpers import this file again
    main()
