#!/usr/bin/env python
"""Simulates a rollout phase: how long each scheduling policy takes, and why.

    python tools/simulate_rollout.py reasoning                         all policies, a table
    python tools/simulate_rollout.py moonlight --policy context --png timeline.png
    python tools/simulate_rollout.py --lengths lengths.jsonl --model qwen3-8b --gpus 1 --engines 4
    python tools/simulate_rollout.py --lengths lengths.jsonl --engine-file engine.json --engines 2

A workload is a preset or a file of lengths, one group (the responses to one prompt) a line: [812, 640, 1033], or
{"prompt": 300, "lengths": [812, 640, 1033]}; numbers are tokens. `metrics.jsonl` of a run does not have them; the
simulated lengths of a preset can be had with --write-lengths.

An engine is a model on GPUs, timed by a roofline whose constants are checked against published measurements, or a JSON
file with measurements of a real one:

    {"name": "qwen-0.5b on 1 core", "kv_tokens": 4096, "max_running": 16,
     "decode": [[1, 128, 0.021], [4, 128, 0.030], [4, 512, 0.041]],      batch, context of each, seconds of a step
     "prefill_token_s": 0.0008, "prefill_request_s": 0.0004, "prefill_pass_s": 0.01,
     "request_s": 0.004, "call_s": 0.001}                           on its way; between two of many that come at once

Policies are those of the real system, the very same objects (docs/rollout.md): group_round_robin is what a synchronous
trainer does, oracle knows all lengths.

Columns:
  seconds    of the whole phase; bound: what no schedule can beat, the larger of all work shared evenly over the engines
             (bound_work in --json) and of the longest response alone on an engine (bound_longest); 0 with --enough
  tokens/s   new tokens
  tail       seconds from the finish of 90 % of the requests to the end
  idle       % of the engines' time in which they had nothing to do
  prefill    % of it spent in prefill
  batch      requests in a decode step, on average
  preempted  times that an engine took back a running request, since its cache was full
  again      tokens prefilled again (after a preemption, on another engine, or fallen out of the cache), in thousands
  chunks     calls of engines; moved: those that went on where the one before had not been
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megarl.rollout_engine.scheduler import POLICIES, Divided
from megarl.simulator import (
    GPUS,
    MODELS,
    PRESETS,
    EngineModel,
    Placement,
    Summary,
    Workload,
    as_json,
    draw_timeline,
    make_scheduler,
    measured,
    read_lengths,
    roofline,
    simulate,
    summarize,
)

COLUMNS = (
    f"{'policy':18} {'seconds':>8} {'bound':>7} {'tokens/s':>9} {'tail':>7} {'idle':>5} {'prefill':>7} {'batch':>6} "
    f"{'preempted':>9} {'again':>7} {'chunks':>7} {'moved':>6}"
)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("preset", nargs="?", choices=sorted(PRESETS), help="a workload with its engines")
    parser.add_argument("--lengths", type=Path, metavar="FILE", help="a workload from a file instead")
    parser.add_argument(
        "--cap", type=positive, help="with --lengths: tokens of the longest response allowed; the longest one"
    )
    parser.add_argument("--prompt", type=positive, help="tokens of each prompt (512, or the preset's)")
    parser.add_argument("--mean", type=float, help="another mean length than the preset's")
    parser.add_argument("--between", type=float, help="another spread of the logarithm between groups")
    parser.add_argument("--within", type=float, help="another spread within groups")
    parser.add_argument("--runaway", type=float, help="another fraction of requests that run to the cap")
    parser.add_argument("--groups", type=positive, help="another number of groups")
    parser.add_argument("--seed", type=int, default=0, help="of a preset's lengths (0)")
    parser.add_argument("--write-lengths", type=Path, metavar="FILE", help="write the workload to a file as well")
    parser.add_argument("--policy", action="append", choices=list(POLICIES), help="may be given again; all if not")
    parser.add_argument("--chunk", type=positive, metavar="TOKENS", help="of a chunk, for divided, context and oracle")
    parser.add_argument(
        "--enough", type=positive, metavar="GROUPS", help="stop when so many groups are finished (over-issue)"
    )
    parser.add_argument("--engines", type=positive, help="number of engines")
    parser.add_argument("--engine-file", type=Path, metavar="FILE", help="measurements of a real engine, see above")
    parser.add_argument("--model", choices=sorted(MODELS), help="another model")
    parser.add_argument("--gpu", choices=sorted(GPUS), help="another GPU")
    parser.add_argument("--gpus", type=positive, help="another number of GPUs of one engine")
    parser.add_argument("--kv-tokens", type=positive, help="another size of an engine's cache")
    parser.add_argument("--max-running", type=positive, help="another limit of requests that run on an engine")
    parser.add_argument("--request-s", type=float, help="another delay of a chunk on its way to an engine")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all numbers")
    parser.add_argument("--png", type=Path, metavar="FILE", help="draw the engines over time, a row a policy")
    given = parser.parse_args()
    if (given.preset is None) == (given.lengths is None):
        parser.error(f"expected a preset ({', '.join(PRESETS)}) or --lengths FILE, and not both")
    return given


def workload(given: argparse.Namespace) -> Workload:
    if given.lengths is not None:
        return read_lengths(given.lengths, cap=given.cap, prompt=given.prompt or 512)
    names = ("mean", "between", "within", "runaway", "groups", "prompt")
    changed = {name: value for name in names if (value := getattr(given, name)) is not None}
    return replace(PRESETS[given.preset].lengths, **changed).draw(given.seed)


def positive(text: str) -> int:
    """A whole number above 0."""
    if not text.isascii() or not text.isdigit() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"expected a positive whole number, got {text!r}")
    return int(text)


def engines(given: argparse.Namespace) -> tuple[EngineModel, int]:
    preset = PRESETS[given.preset] if given.preset is not None else None
    count = given.engines or (preset.engines if preset else 1)
    if given.engine_file is not None:
        model = measured(given.engine_file)
    else:
        name = given.model or (preset.model if preset else None)
        if name is None:
            raise ValueError(f"no engine is given: name a --model ({', '.join(MODELS)}) or an --engine-file")
        place = preset.place if preset else Placement(1)
        place = replace(place, gpus=given.gpus or place.gpus, max_running=given.max_running or place.max_running)
        gpu = given.gpu or (preset.gpu if preset else "H100")
        model = roofline(f"{name} on {place.gpus} {gpu}", MODELS[name], GPUS[gpu], place)
    for field in ("kv_tokens", "request_s"):
        if getattr(given, field) is not None:
            model = replace(model, **{field: getattr(given, field)})
    if given.max_running is not None and given.max_running < model.max_running:
        model = replace(model, max_running=given.max_running)
    return model, count


def row(summary: Summary) -> str:
    return (
        f"{summary.policy:18} {summary.makespan:8,.1f} {summary.bound:7,.1f} {summary.throughput:9,.0f} "
        f"{summary.tail:7,.1f} {summary.idle:5.1%} {summary.prefill:7.1%} {summary.batch:6.1f} "
        f"{summary.preemptions:9,} {summary.reprefilled / 1e3:7,.0f} {summary.chunks:7,} {summary.migrations:6,}"
    )


def progress(done: int, seconds: float) -> None:
    if sys.stderr.isatty():
        print(f"\r  {done:,} requests finished after {seconds:,.0f} simulated seconds ", end="", file=sys.stderr)


def main() -> None:
    given = arguments()
    try:
        work, (model, count) = workload(given), engines(given)
        if given.enough is not None and given.enough > len(work.groups):
            raise ValueError(f"--enough: {given.enough} groups, and there are {len(work.groups)}; use that or fewer")
        if given.lengths is None and given.cap is not None:
            raise ValueError("--cap: a preset has its own; it goes with --lengths")
        if given.engine_file is not None and (given.model is not None or given.gpus is not None):
            raise ValueError("--engine-file: this is the whole engine; leave --model and --gpus out")
        print(
            f"{len(work.groups):,} groups, {work.requests:,} requests, {work.tokens:,} tokens (mean "
            f"{work.tokens / work.requests:,.0f}, cap {work.cap:,}); {count} engines: {model.name}, cache of "
            f"{model.kv_tokens:,} tokens"
        )
        if given.write_lengths is not None:
            lines = [json.dumps({"prompt": group.prompt, "lengths": group.lengths}) for group in work.groups]
            given.write_lengths.write_text("\n".join(lines) + "\n")
        print(COLUMNS)
        runs, summaries = {}, []
        for policy in given.policy or POLICIES:
            chunked = given.chunk is not None and issubclass(POLICIES[policy], Divided)
            scheduler = make_scheduler(policy, **({"chunk_tokens": given.chunk} if chunked else {}))
            run = simulate(
                work,
                model,
                count,
                scheduler,
                know_lengths=policy == "oracle",
                enough_groups=given.enough,
                progress=progress,
            )
            if sys.stderr.isatty():
                print("\r\033[K", end="", file=sys.stderr)
            runs[policy] = run
            summaries.append(summarize(policy, run))
            print(row(summaries[-1]), flush=True)
        if given.json is not None:
            given.json.write_text(json.dumps([as_json(summary) for summary in summaries], indent=2) + "\n")
        if given.png is not None:
            draw_timeline(runs, given.png)
    except (ValueError, OSError) as error:
        sys.exit(f"simulate_rollout: {error}")


if __name__ == "__main__":
    main()
