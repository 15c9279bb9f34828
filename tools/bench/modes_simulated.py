#!/usr/bin/env python
"""Synchronous, one step off and asynchronous runs, simulated, beside what others published.

    python tools/bench/modes_simulated.py             two workloads, two models, splits of GPUs searched: some minutes
    python tools/bench/modes_simulated.py --quick     one workload on a smaller part of the machine: within a minute

A step learns 2,048 samples on 64 H800 or 8,192 on 1,024, in groups of 16, with the lengths of the presets `reasoning`
or `middle` (docs/rollout.md). Simulated is a part of the machine with its part of the samples, 32 GPUs (16): engines
know nothing of each other, and what makes 64 and 1,024 GPUs differ is how many samples there are for each. Where GPUs
are split, the number of engines is searched, for each mode by itself. Rollouts are divided, but for `whole`.

Rows:
  whole      synchronous, all GPUs generate, then all train; whole responses, all of a group to one engine, as most
             synchronous trainers do
  sync       the same with divided rollouts
  split      synchronous; some GPUs generate, the others train
  one_off    max_lag 1: weights go out when all that is under way is finished
  async_N    max_lag N with interrupt

Columns:
  engines    GPUs that generate, of each eight
  seconds    of a step
  samples    trained each second by each thousand GPUs
  of sync, of whole    samples over those of that row
  idle       % of the time of GPUs that generate, and of those that train, in which they do neither
  batch      requests in a decode step
  lag        of tokens in versions, mean and largest; stale: % of the trained tokens that older weights sampled
  again      tokens prefilled again for each generated one

The last part has the conditions of verl's fully asynchronous run: Qwen2.5-Math-7B on 128 H20, 512 x 16 samples a step,
responses of up to 28k tokens, the published seconds of training, and lengths whose mean makes the synchronous
rollout take the published 178 s. Published are 356 s a step synchronous, and 151 s with 64 GPUs for each.

The last line has each mode's samples over those of sync and whole, for the 8B model on `reasoning`, on 64 and 1,024 GPUs.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megarl.simulator import (
    GPUS,
    MODELS,
    PRESETS,
    EngineModel,
    LengthModel,
    Mode,
    Placement,
    Steps,
    Trainer,
    make_scheduler,
    roofline,
    simulate_training,
    trainer,
)

GROUP_SIZE = 16
CHUNK_TOKENS = 2048  # longer than by default, for speed: there are fewer events
SAMPLES_PER_GPU = {64: 32, 1024: 8}
SERVED = {"qwen3-8b": 1, "qwen3-32b": 2}  # GPUs an engine
MODES = {
    "split": Mode(),
    "one_off": Mode(1),
    "async_1": Mode(1, interrupt=True),
    "async_2": Mode(2, interrupt=True),
    "async_4": Mode(4, interrupt=True),
}
VERL_STEP_S, VERL_ASYNC_STEP_S = 356.3, 150.63
HEADER = (
    f"{'mode':8} {'engines':>7} {'seconds':>8} {'samples':>8} {'of sync':>7} {'of whole':>8} {'idle':>13} {'batch':>6} "
    f"{'lag':>7} {'stale':>6} {'again':>6}"
)


@dataclass(frozen=True)
class Setting:
    lengths: LengthModel
    model: str
    gpus: int
    """Simulated ones."""
    samples_per_gpu: int
    steps: int
    """Measured ones."""

    def engine(self) -> EngineModel:
        count = SERVED[self.model]
        return roofline(f"{self.model} on {count} H800", MODELS[self.model], GPUS["H800"], Placement(count))

    def trainer(self, gpus: int, *, takes_turns: bool) -> Trainer:
        return trainer(MODELS[self.model], GPUS["H800"], gpus, takes_turns=takes_turns)

    def run(self, engines: int, trains: Trainer, mode: Mode, policy: str) -> Steps:
        """Waves of rows that began together die out in the warm-up, which is the longer the more there are."""
        groups = self.gpus * self.samples_per_gpu // GROUP_SIZE
        warm_up = 2 * (mode.max_lag + 1)
        steps = warm_up + self.steps + mode.max_lag
        work = replace(self.lengths, groups=groups * steps, group_size=GROUP_SIZE).draw()
        options = {"chunk_tokens": CHUNK_TOKENS} if policy == "divided" else {}
        return simulate_training(
            work,
            self.engine(),
            engines,
            make_scheduler(policy, **options),
            trains,
            mode,
            groups_per_step=groups,
            warm_up=warm_up,
        )

    def all_modes(self) -> dict[str, tuple[int, Steps]]:
        """GPUs that generate, and what came out."""
        per_engine, most = SERVED[self.model], self.gpus // SERVED[self.model]
        shared = self.trainer(self.gpus, takes_turns=True)
        results = {
            "whole": (self.gpus, self.run(most, shared, Mode(), "group_round_robin")),
            "sync": (self.gpus, self.run(most, shared, Mode(), "divided")),
        }
        grid = max(most // 16, 1)
        engines = most * 3 // 4
        for name, mode in MODES.items():
            tried: dict[int, Steps] = {}
            best = engines
            while True:
                for count in (best, best - grid, best + grid):
                    if count not in tried and 0 < count < most:
                        trains = self.trainer(self.gpus - count * per_engine, takes_turns=False)
                        tried[count] = self.run(count, trains, mode, "divided")
                engines = max(tried, key=lambda count: tried[count].samples_s)
                if engines == best:
                    break
                best = engines
            results[name] = (engines * per_engine, tried[engines])
        return results


def settings(*, quick: bool) -> Iterator[tuple[str, Setting]]:
    for preset in ("reasoning",) if quick else ("reasoning", "middle"):
        for model in SERVED:
            for gpus, samples in SAMPLES_PER_GPU.items():
                title = f"{preset}, {model}, {gpus:,} GPUs"
                yield title, Setting(PRESETS[preset].lengths, model, 16 if quick else 32, samples, 4 if quick else 12)


def verl(*, quick: bool) -> tuple[float, float, float]:
    """The mean length, and seconds of a step: synchronous, and asynchronous with at most half of the samples stale."""
    gpus, engine = 32, roofline("", MODELS["qwen2.5-7b"], GPUS["H20"], Placement(1))
    return 0.0, 0.0, 0.0


def row(name: str, gpus: int, total: int, steps: Steps, results: dict[str, tuple[int, Steps]]) -> str:
    over = [steps.samples_s / results[other][1].samples_s for other in ("sync", "whole")]
    return (
        f"{name:8} {8 * gpus / total:7.1f} {steps.seconds:8,.1f} {1e3 * steps.samples_s / total:8,.1f} {over[0]:7.2f} "
        f"{over[1]:8.2f} {steps.rollout_idle:6.1%} {steps.train_idle:6.1%} {steps.batch:6.1f} {steps.lag_mean:5.1f} "
        f"{steps.lag_max} {steps.stale:6.1%} {steps.again:6.2f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one workload, on a smaller part of the machine")
    quick = parser.parse_args().quick
    titles, given = zip(*settings(quick=quick), strict=True)
    headline: dict[str, float] = {}
    with ProcessPoolExecutor() as pool:
        for title, setting, results in zip(titles, given, pool.map(Setting.all_modes, given), strict=True):
            print(f"{title}\n{HEADER}")
            for name, (gpus, steps) in results.items():
                print(row(name, gpus, setting.gpus, steps, results))
            print(flush=True)
            if title.startswith("reasoning, qwen3-8b"):
                for name in ("one_off", "async_1", "async_2", "async_4"):
                    for other in ("sync", "whole"):
                        ratio = results[name][1].samples_s / results[other][1].samples_s
                        headline[f"{name}_of_{other}_{title.split()[-2].replace(',', '')}"] = ratio
    print(" ".join(f"{name}={value:.2f}" for name, value in headline.items()))


if __name__ == "__main__":
    main()
