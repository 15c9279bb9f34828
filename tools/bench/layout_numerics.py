#!/usr/bin/env python
"""Every model family at every parallel layout beside transformers: how far are logits, gradients and losses?

    python tools/bench/layout_numerics.py             all layouts on up to 4 ranks: about 5 minutes on 2 quiet cores
    python tools/bench/layout_numerics.py --quick     2 families at the layouts on up to 2 ranks: under a minute
    python tools/bench/layout_numerics.py --layouts tp2,cp2_ep2 --families deepseek_v3,gpt_oss

A small random model of each family, with the structure of the real ones, is trained for two steps on packed sequences
of very unequal length, by real Megatron ranks on the CPU in float32 and by transformers with torch's AdamW, one
sequence at a time. Columns:
  logits     largest absolute difference of a logit (limit 1e-5)
  gradient   largest difference of a gradient over the largest element of its tensor (limit 1e-5), and of which tensor
  grad norm  relative difference of the norm of the whole gradient (limit 1e-5)
  next loss  relative difference of the loss after the first step (limit 1e-5)

A row over a limit ends in "over". The exit code is 1 if there is any.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import textwrap
from collections.abc import Iterable
from pathlib import Path

import msgspec
import transformers

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.distributed import numerics  # noqa: E402 - the tests compare in the same way, with fewer layouts
from tests.distributed.launch import run  # noqa: E402
from tests.families import FAMILIES  # noqa: E402

QUICK = ["qwen3", "deepseek_v3"]


def main() -> int:
    layouts = [name for chosen in numerics.LAYOUTS.values() for name in chosen]
    arguments = parse(layouts)
    transformers.utils.logging.disable_progress_bar()
    few = [name for ranks in (1, 2) for name in numerics.LAYOUTS[ranks]]
    layouts = chosen(arguments.layouts, "layout", few if arguments.quick else layouts, layouts)
    families = chosen(arguments.families, "family", QUICK if arguments.quick else list(FAMILIES), list(FAMILIES))
    with tempfile.TemporaryDirectory() as directory:
        found = compare(layouts, families, Path(directory))
    if not found:
        print("no family fits the layouts: those that spread experts are for models with experts", file=sys.stderr)
        return 2
    over = sum(not errors.good for errors in found)
    print(
        f"combinations={len(found)} over={over} logits_max={max(e.logits for e in found):.1e}"
        f" gradient_max={max(e.gradient for e in found):.1e} grad_norm_max={max(e.grad_norm for e in found):.1e}"
        f" next_loss_max={max(e.next_loss for e in found):.1e}"
        f" gradient_median={statistics.median(e.gradient for e in found):.1e}"
    )
    return 1 if over else 0


def parse(layouts: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog=f"{listed('layouts', layouts)}\n\n{listed('families', FAMILIES)}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help="a minute's worth")
    parser.add_argument("--layouts", default="", metavar="NAME,...", help="these, instead of all")
    parser.add_argument("--families", default="", metavar="NAME,...", help="these, instead of all")
    return parser.parse_args()


def listed(what: str, names: Iterable[str]) -> str:
    """argparse itself breaks a long list within names."""
    return textwrap.fill(", ".join(names), 110, initial_indent=f"{what}: ", subsequent_indent="  ")


def chosen(text: str, what: str, default: list[str], known: list[str]) -> list[str]:
    names = [name for name in text.split(",") if name] or default
    if unknown := [name for name in names if name not in known]:
        sys.exit(f"unknown {what} {', '.join(unknown)}; known are {', '.join(known)}")
    return names


def compare(layouts: list[str], families: list[str], directory: Path) -> list[numerics.Errors]:
    """Start the ranks once for each number of them; prints a row for each layout and family."""
    for number, family in enumerate(families, 1):
        print(f"\rtransformers {number}/{len(families)}: {family:20}", end="", file=sys.stderr, flush=True)
        numerics.write_reference(family, directory / "references" / family)
    print(f"\r{'':50}", end="\r", file=sys.stderr, flush=True)
    print(f"{'layout':30} {'family':20} logits   gradient grad norm next loss gradient of", flush=True)
    found = []
    for ranks, known in numerics.LAYOUTS.items():
        mine = {name: layout for name, layout in known.items() if name in layouts}
        out = directory / f"{ranks}_ranks"
        out.mkdir()
        fit = {name: [f for f in families if f in numerics.families_of(layout)] for name, layout in mine.items()}
        if not any(fit.values()):
            continue
        plan = numerics.Plan(references=directory / "references", layouts=mine, families=fit, out=out)
        plan.write(out / "plan")
        run("mpirun", ranks, "tests.distributed.payload_numerics", out / "plan", log=out / "log")
        for layout in mine:
            for family in fit[layout]:
                errors = msgspec.json.decode((out / f"{layout}.{family}.json").read_bytes(), type=numerics.Errors)
                found.append(errors)
                print(
                    f"{layout:30} {family:20} {errors.logits:.1e}  {errors.gradient:.1e}  {errors.grad_norm:.1e}  "
                    f" {errors.next_loss:.1e}   {errors.gradient_name}{'' if errors.good else '  over'}",
                    flush=True,
                )
    return found


if __name__ == "__main__":
    sys.exit(main())
