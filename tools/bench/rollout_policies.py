#!/usr/bin/env python
"""Every scheduling policy on the six simulated rollout phases, beside what others published and what is possible.

    python tools/bench/rollout_policies.py             five draws of lengths: some minutes
    python tools/bench/rollout_policies.py --quick     one draw: within a minute on 2 cores

The phases are the presets of `tools/simulate_rollout.py`, whose engines are models of H800 (docs/rollout.md). Of
several draws the medians are printed; all policies have the same ones.

Columns:
  seconds     of the phase
  throughput  tokens a second, as a multiple of group_round_robin's, which is what synchronous trainers do
  tail        seconds from the finish of 90 % of the requests to the end, as a change from group_round_robin's
  of oracle   throughput, as a fraction of that of the policy that knows all lengths
  over bound  seconds over the lower bound: all work shared evenly, or the longest response alone
  idle        % of the engines' time without anything to do
  prefill     % of it spent in prefill, nearly all of it for the second time
  preempted   requests that engines took back since their cache was full
  seer        throughput that Seer (arXiv 2511.14617 v3) has over a synchronous trainer, without speculation; it also
              has 96 % of an oracle's throughput and a tail shorter by 89 %

The last line has context's throughput of each preset, its smallest fraction of oracle, its change of the tail on the
three presets of Seer (the worst), and its throughput over that of `divided` on early_rl.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megarl.rollout_engine.scheduler import POLICIES
from megarl.simulator import PRESETS, Preset, Summary, make_scheduler, simulate, summarize

SEER = {"moonlight": 1.47, "qwen2_vl_72b": 1.56, "kimi_k2": 1.27}
BASELINE = "group_round_robin"
HEADER = (
    f"{'preset':13} {'policy':18} {'seconds':>8} {'throughput':>10} {'tail':>6} {'of oracle':>9} {'over bound':>10} "
    f"{'idle':>6} {'prefill':>7} {'preempted':>9} {'seer':>5}"
)


def measure(preset: Preset, policy: str, seeds: int) -> list[Summary]:
    model, summaries = preset.engine_model(), []
    for seed in range(seeds):
        work = preset.lengths.draw(seed)
        run = simulate(work, model, preset.engines, make_scheduler(policy), know_lengths=policy == "oracle")
        summaries.append(summarize(policy, run))
    return summaries


def ratio(ours: list[Summary], theirs: list[Summary], name: str) -> float:
    """The median over draws of one number over another's."""
    return statistics.median(getattr(one, name) / getattr(other, name) for one, other in zip(ours, theirs, strict=True))


def median(summaries: list[Summary], name: str) -> float:
    return statistics.median(getattr(one, name) for one in summaries)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one draw of lengths")
    seeds = 1 if parser.parse_args().quick else 5
    print(HEADER)
    headline: dict[str, float] = {}
    of_oracle, tails = [], []
    for name, preset in PRESETS.items():
        results = {policy: measure(preset, policy, seeds) for policy in POLICIES}
        base, oracle, context = results[BASELINE], results["oracle"], results["context"]
        for policy, ours in results.items():
            over_bound = statistics.median(one.makespan / one.bound for one in ours)
            print(
                f"{name:13} {policy:18} {median(ours, 'makespan'):8,.0f} {ratio(ours, base, 'throughput'):10.2f} "
                f"{ratio(ours, base, 'tail') - 1:+6.0%} {ratio(ours, oracle, 'throughput'):9.1%} {over_bound:10.2f} "
                f"{median(ours, 'idle'):6.1%} {median(ours, 'prefill'):7.1%} {median(ours, 'preemptions'):9,.0f} "
                f"{SEER.get(name, ''):>5}",
                flush=True,
            )
        headline[f"{name}_throughput"] = ratio(context, base, "throughput")
        of_oracle.append(ratio(context, oracle, "throughput"))
        if name in SEER:
            tails.append(ratio(context, base, "tail") - 1)
        if name == "early_rl":
            headline["early_rl_over_divided"] = ratio(context, results["divided"], "throughput")
    headline |= {"of_oracle_least": min(of_oracle), "seer_tail_worst": max(tails)}
    print(" ".join(f"{name}={value:.3f}" for name, value in headline.items()))


if __name__ == "__main__":
    main()
