#!/usr/bin/env python
"""Publishing weights from a Megatron trainer to SGLang engines: seconds and bytes of each method beside `full`.

    python tools/bench/weight_sync.py             100 million parameters, both cases: some minutes
    python tools/bench/weight_sync.py --quick     19 million, the first case: within a minute on 2 quiet cores

A random Qwen3 of 10 layers in float32, on the CPU, is held by two real ranks with their optimizer, and published again
and again to real engines. All methods take turns in each round; the first round is not counted, and of the others the
medians are printed. Before each publication all weights change (their signs), and after it each engine's fingerprints
have been compared with the trainer's. Cases:
  tensor2   two tensor-parallel ranks, one engine of two ranks
  data2     two data-parallel ranks, two engines of one rank

Methods:
  direct    each rank of an engine is sent its own part (`publish: {type: direct}`)
  full      the baseline, what most systems do: each engine is sent all, gathered; each of its ranks cuts out its part
  disk      the model is written, and each engine reads it; the time to write, which ends with an fsync, counts
  changed all, nothing, tenth
            direct with `changed_only`, where all weights, none, and those of 1 layer in 10 have changed
  memcpy    the limit: each rank copies as many bytes as its rank of an engine holds, in memory, both at the same time

Columns:
  seconds    until all ranks know that all engines have the version; least, most: of the rounds
  write      seconds of it in which the model is written
  pause      seconds in which the engine (the slowest of several) is asked to pause and, at the end, to go on
  load       seconds in which it is asked to take weights and compare them; `direct` prepares others meanwhile
  rest       seconds in which it is asked nothing: ranks gather, pack, take fingerprints, and wait for each other
  between    MB (10^6 bytes) that ranks get from each other. `full` and `disk` gather whole tensors on every rank
  taken      MB that the processes of engines take in: through shared memory, over HTTP (before base64 adds a third), or
             from files, of which each rank of an engine reads all
  over full, over memcpy
             seconds, as multiples of theirs

`full` hands tensors over as SGLang takes them over HTTP, in JSON, which is most of its seconds; systems whose trainer
and engine share a GPU pass handles to memory instead. The schedulers of an engine of several ranks are never idle, so
that in tensor2 four busy processes share the cores.

The last line has medians over medians, of several cases the worst (largest); bytes are between and taken together.
"""

from __future__ import annotations

import argparse
import signal
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import msgspec

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.distributed.json_file import JsonFile  # noqa: E402
from tests.distributed.launch import started  # noqa: E402 - it leaves no process behind

LAYERS = 10
CONFIG = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 16384,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
}
QUICK = {
    "hidden_size": 384,
    "intermediate_size": 1152,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "vocab_size": 4096,
}
LIMIT_S = 1200.0
"""For a case, on a busy machine."""
MB = 1e6
COLUMNS = {
    "seconds": 3,
    "least": 3,
    "most": 3,
    "write": 3,
    "pause": 3,
    "load": 3,
    "rest": 3,
    "between": 1,
    "taken": 1,
}
"""And digits after the point."""


@dataclass(frozen=True)
class Case:
    name: str
    layout: dict[str, int]
    engines: list[list[int]]


CASES = [Case("tensor2", {"tensor": 2}, [[0, 1]]), Case("data2", {}, [[0], [1]])]
METHODS = ["direct", "full", "disk", "changed all", "changed nothing", "changed tenth"]


class Plan(JsonFile):
    """What ranks are to do. Engine n is that of the ranks `engines[n]`."""

    model: Path
    layout: dict[str, int]
    engines: list[list[int]]
    rounds: int
    out: Path


class Publication(msgspec.Struct):
    """Seconds, and bytes between ranks and into engines."""

    seconds: float
    write: float
    pause: float
    load: float
    between: int
    taken: int


class Measured(JsonFile):
    """`publications[method]`, in order; `memcpy` seconds."""

    publications: dict[str, list[Publication]]
    memcpy: list[float]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a smaller model, the first case, fewer rounds")
    parser.add_argument("--rounds", type=int, help="that are counted (default 5, with --quick 3)")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, end)
    rounds, cases = arguments.rounds or (3 if arguments.quick else 5), CASES[:1] if arguments.quick else CASES
    figures = []
    with tempfile.TemporaryDirectory() as directory:
        parameters = write_model(Path(directory) / "model", QUICK if arguments.quick else {})
        print(f"Qwen3, {parameters / 1e6:.1f} million parameters in float32; {rounds} rounds", flush=True)
        for case in cases:
            figures.append(report(case, measure(case, Path(directory), rounds)))
    worst = {name: max(one[name] for one in figures) for name in figures[0]}
    print(" ".join(f"{name}={value:.3f}" for name, value in worst.items()))


def end(number: int, _: Any) -> NoReturn:
    """So that what was started is ended on the way out."""
    sys.exit(128 + number)


def write_model(path: Path, change: dict[str, int]) -> int:
    """Write a random model; returns its number of parameters."""
    import torch  # here: they take seconds, and --help needs none of it
    import transformers

    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(0)
    config = transformers.Qwen3Config(**(CONFIG | change))
    model = transformers.Qwen3ForCausalLM(config).float()
    model.save_pretrained(path)
    return sum(parameter.numel() for parameter in model.parameters())


def measure(case: Case, directory: Path, rounds: int) -> Measured:
    out = directory / case.name
    out.mkdir()
    Plan(directory / "model", case.layout, case.engines, rounds, out).write(out / "plan.json")
    ranks, start = "tools.bench.weight_sync_ranks", time.monotonic()
    with started("mpirun", 2, ranks, out / "plan.json", log=out / "log") as launch:
        if launch.wait(LIMIT_S):
            sys.exit(launch.output()[-6000:])
    print(f"{case.name}: {time.monotonic() - start:.0f} s with the start of the engines", file=sys.stderr)
    return Measured.read(out / "measured.json")


def report(case: Case, measured: Measured) -> dict[str, float]:
    """Print a table; returns the headline's figures."""
    rows = {method: medians(some) for method, some in measured.publications.items()}
    memcpy, full = statistics.median(measured.memcpy), rows["full"]["seconds"]
    rows = {"memcpy": {"seconds": memcpy, "least": min(measured.memcpy), "most": max(measured.memcpy)}, **rows}
    print(f"{case.name:16}" + "".join(f"{name:>8}" for name in COLUMNS) + " over full over memcpy")
    for method, row in rows.items():
        numbers = (f"{row[name]:8.{digits}f}" if name in row else " " * 8 for name, digits in COLUMNS.items())
        ratios = f"{row['seconds'] / full:10.3f}{row['seconds'] / memcpy:12.1f}"
        print(f"{method:16}" + "".join(numbers) + ratios, flush=True)
    seconds = {method: row["seconds"] for method, row in rows.items()}
    moved = {method: row["between"] + row["taken"] for method, row in rows.items() if method != "memcpy"}
    return {
        "direct_over_full": seconds["direct"] / full,
        "direct_over_memcpy": seconds["direct"] / memcpy,
        "bytes_direct_over_full": moved["direct"] / moved["full"],
        "disk_over_full": seconds["disk"] / full,
        "nothing_changed_over_direct": seconds["changed nothing"] / seconds["direct"],
        "tenth_changed_over_direct": seconds["changed tenth"] / seconds["direct"],
        "direct_s": seconds["direct"],
        "full_s": full,
    }


def medians(some: list[Publication]) -> dict[str, float]:
    """By column."""
    row = {field: statistics.median(getattr(one, field) for one in some) for field in Publication.__struct_fields__}
    row |= {"least": min(one.seconds for one in some), "most": max(one.seconds for one in some)}
    row["rest"] = statistics.median(one.seconds - one.write - one.pause - one.load for one in some)
    return row | {"between": row["between"] / MB, "taken": row["taken"] / MB}


if __name__ == "__main__":
    main()
