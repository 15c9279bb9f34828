"""A rollout on real engines against the same one simulated: seconds of both, and their ratio, for each policy.

    python tools/bench/rollout_simulated.py            some minutes
    python tools/bench/rollout_simulated.py --quick    one round: within two minutes on 2 quiet cores

Two SGLang engines on the CPU answer sums, as in `rollout_live.py`. In each round they are measured first
(`engine_table.py`); then they answer under each policy, and `megarl.simulator` is given the lengths of the responses,
the table of all rounds' measurements, and the same policies. Medians over rounds are printed.

Columns:
  live        seconds until all responses are there;  waited: of them, the busiest engine had work and no core
  simulated   seconds;  ratio: of them to those live that were not waited
  preempted, chunks: live, and simulated
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from engine_table import Cores, measure_engines, median_table
from rollout_live import ENGINES, GROUP_SIZE, LIVE, MAX_DIGITS, Fleet, Phase, phase, running

from megarl.data import carry_addition, prompt_ids
from megarl.simulator import EngineModel, GroupLengths, Summary, Workload, make_scheduler, measured, simulate, summarize


class Round(NamedTuple):
    """One policy's: what was asked (tokens of each prompt), what came of it, and for how long no core was free."""

    policy: str
    prompts: list[int]
    phase: Phase
    waited: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one round")
    parser.add_argument("--model", type=Path, default=Path("runs/carry_addition_sft/hf"), help="a Hugging Face model")
    parser.add_argument("--prompts", type=int, default=32, help="prompts of a round, of 8 samples each (32)")
    parser.add_argument("--rounds", type=int, default=3, help="rounds (3)")
    parser.add_argument("--cache", type=int, default=4096, help="tokens that an engine's cache holds (4096)")
    parser.add_argument("--max-new-tokens", type=int, default=512, help="of a response (512)")
    parser.add_argument("--table", type=Path, metavar="FILE", help="write the measurements, for simulate_rollout.py")
    given = parser.parse_args()
    with running(given.model, given.cache, given.max_new_tokens) as fleet:
        tables, rounds = asyncio.run(live(fleet, given.prompts, 1 if given.quick else given.rounds))
    with tempfile.TemporaryDirectory() as folder:
        file = given.table or Path(folder) / "engine.json"
        file.write_text(json.dumps(median_table(tables), indent=1) + "\n")
        model = measured(file)
    print(
        f"{given.prompts} prompts x {GROUP_SIZE} responses of at most {given.max_new_tokens} tokens, {ENGINES} engines"
        f" with caches of {given.cache}, {len(tables)} rounds; load average {os.getloadavg()[0]:.1f}"
    )
    print(
        f"a step takes {1e3 * model.decode_s[1]:.1f} to {1e3 * model.decode_s[64]:.1f} ms (1 to 64 requests)"
        f" + {1e9 * model.cached_s:.0f} ns a token of context, a prefill {1e3 * model.pass_s:.1f} ms"
        f" + {1e3 * model.admit_s:.1f} ms a request, {1e3 * model.request_s:.1f} ms on its way"
    )
    print(f"{'':18}{'live':>8}{'waited':>8}{'simulated':>10}{'ratio':>7}{'preempted':>14}{'chunks':>14}")
    ratios = {}
    for policy in LIVE:
        own = [one for one in rounds if one.policy == policy]
        summaries = [simulated(one, model, given.max_new_tokens) for one in own]
        ratios[policy] = print_row(policy, own, summaries)
    worst = max(ratios.values(), key=lambda ratio: abs(ratio - 1))
    print(f"simulated_over_live={worst:.3f} " + " ".join(f"{name}={ratio:.3f}" for name, ratio in ratios.items()))


async def live(fleet: Fleet, prompts: int, rounds: int) -> tuple[list[dict[str, Any]], list[Round]]:
    addresses = [engine.address for engine in fleet.engines]
    processes = [engine.child.process.pid for engine in fleet.engines]
    tables, found = [], []
    await phase(fleet, LIVE[0], carry_addition.problems(rounds, prompts, MAX_DIGITS))  # the first is slower
    for number in range(rounds):
        tables.append(await measure_engines(addresses, fleet.key, name="engine on one core", processes=processes))
        problems = carry_addition.problems(number, prompts, MAX_DIGITS)
        for policy in LIVE:
            cores = [Cores(process) for process in processes]
            before = [one.scheduler() for one in cores]
            ended = await phase(fleet, policy, problems)
            spent = [
                [now - then for now, then in zip(one.scheduler(), first, strict=True)]
                for one, first in zip(cores, before, strict=True)
            ]
            lengths = [len(prompt_ids(fleet.tokenizer, problem.prompt)) for problem in problems]
            found.append(Round(policy, lengths, ended, max(spent)[1]))
    return tables, found


def simulated(one: Round, model: EngineModel, cap: int) -> Summary:
    groups = [
        GroupLengths(prompt, tuple(len(completion.output_ids) for completion in group))
        for prompt, group in zip(one.prompts, one.phase.groups, strict=True)
    ]
    run = simulate(Workload(tuple(groups), cap), model, ENGINES, make_scheduler(one.policy))
    return summarize(one.policy, run)


def print_row(policy: str, rounds: list[Round], summaries: list[Summary]) -> float:
    """Returns the ratio."""
    pairs = list(zip(rounds, summaries, strict=True))
    ratio = statistics.median(summary.makespan / (one.phase.seconds - one.waited) for one, summary in pairs)
    seconds, waited = (
        statistics.median(row) for row in zip(*((one.phase.seconds, one.waited) for one in rounds), strict=True)
    )
    counts = [
        f"{statistics.median(one.phase.metrics[f'rollout/{name}'] for one in rounds):,.0f}"
        f" {statistics.median(getattr(summary, name) for summary in summaries):,.0f}"
        for name in ("preemptions", "chunks")
    ]
    makespan = statistics.median(summary.makespan for summary in summaries)
    print(
        f"{policy:18}{seconds:8.2f}{waited:8.2f}{makespan:10.2f}{ratio:7.3f}" + "".join(f"{two:>14}" for two in counts)
    )
    return ratio


if __name__ == "__main__":
    main()
