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

The last part has the conditions of verl's fully asynchronous run (docs/advance/fully_async.md there): a 7B model on 128
H20, 512 x 16 samples a step, responses of up to 28k tokens, `ask` 1.5 steps, the published seconds of training, and
lengths whose mean makes the synchronous rollout take the published 178 s. What is left to predict is the asynchronous
step, with 64 GPUs for each, for which 151 s are published.

The last line has samples over those of sync and whole, for the 8B model on `reasoning` on 64 and 1,024 GPUs.
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
VERL_STEP_S, VERL_ROLLOUT_S = 356.30, 177.85
VERL_ASYNC_STEP_S, VERL_ASYNC_TRAIN_S = 150.63, 150.63 - 33.14
"""Of a step, on 128 H20 and on 64 and 64: verl's docs/advance/fully_async.md; 33 s of it the trainer waits."""
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
                yield title, Setting(PRESETS[preset].lengths, model, 16 if quick else 32, samples, 8 if quick else 15)


def verl(*, quick: bool) -> tuple[float, Steps, Steps]:
    """Mean length, and what came out synchronous and asynchronous; a quarter of the machine, an eighth if `quick`."""
    gpus, groups = (16, 64) if quick else (32, 128)
    engine = roofline("", MODELS["qwen2.5-7b"], GPUS["H20"], Placement(1))

    def run(mean: float, engines: int, train_s: float, mode: Mode, steps: int) -> Steps:
        lengths = replace(
            PRESETS["reasoning"].lengths, mean=mean, cap=28 * 1024, groups=groups * (steps + 3 + mode.max_lag)
        )
        trains = Trainer(0.0, train_s, 0.0, takes_turns=engines == gpus)
        work = replace(lengths, group_size=GROUP_SIZE).draw()
        options = make_scheduler("least_loaded"), trains, mode
        return simulate_training(work, engine, engines, *options, groups_per_step=groups, warm_up=3)

    low, high = 1e3, 2e4
    while high / low > 1.01:
        mean = (low * high) ** 0.5
        too_long = run(mean, gpus, 0.0, Mode(), 8).seconds > VERL_ROLLOUT_S
        low, high = (low, mean) if too_long else (mean, high)
    synchronous = run(mean, gpus, VERL_STEP_S - VERL_ROLLOUT_S, Mode(), 8)
    half = Mode(4, interrupt=True, ask=groups * 3 // 2)  # how much is stale is bounded there, not how old it is
    return mean, synchronous, run(mean, gpus // 2, VERL_ASYNC_TRAIN_S, half, 8 if quick else 16)


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
        verl_run = pool.submit(verl, quick=quick)
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
        mean, synchronous, asynchronous = verl_run.result()
    ratio = synchronous.seconds / asynchronous.seconds
    print(
        f"verl, 128 H20, mean length {mean:,.0f}: {synchronous.seconds:.1f} s a step synchronous, "
        f"{asynchronous.seconds:.1f} s asynchronous (published: {VERL_STEP_S:.1f}, {VERL_ASYNC_STEP_S:.1f}), ratio "
        f"{ratio:.2f} ({VERL_STEP_S / VERL_ASYNC_STEP_S:.2f}); asynchronous GPUs idle {asynchronous.rollout_idle:.1%}, "
        f"{asynchronous.train_idle:.1%}\n"
    )
    headline["verl_async"] = ratio
    print(" ".join(f"{name}={value:.2f}" for name, value in headline.items()))


if __name__ == "__main__":
    main()
