#!/usr/bin/env python
"""How fast steps go from lists, as engines answer them, through the transfer queue into the arrays of four ranks.

    .venv/bin/python tools/bench/transfer_queue.py [--quick] [--baseline-python PYTHON]

A step has 32 groups of 8 responses of 1 to 8 thousand tokens, each with a log-probability. One process has the queue
and its server, as the coordinator has; it puts the groups and takes the step. Four processes are told its headers,
divide it as data-parallel ranks do (`plan_microbatches`) and fetch tokens and log-probabilities of their share. A step
begins when the one before is there. Put is the time until the step is offered, take from then until all have theirs.

Beside it, on the same lists, in turn and with as many processes, the package TransferQueue 0.1.11 with its defaults
(Ray's actors around ZeroMQ). It is given each group as it finishes, as ours is, and then once more whole steps at
once. It has an environment of its own, .venv-transfer-queue, made at the first time, or that of --baseline-python. What
it sends is neither encrypted nor authenticated; what ours sends is both.

MB are those of the arrays, 8 bytes a token. Of each the fastest step counts: what else runs on the machine slows the
others. Limits are a copy in memory and a write to disk (fsync) of as many bytes, likewise. The last line has the rates
of put and take together.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megarl.data import plan_microbatches
from megarl.transfer_queue import Delivery, Keys, QueueClient, QueueServer, TransferQueue
from megarl.types import Group, Offer, Prompt, Trajectory, VersionSpan

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = ROOT / ".venv-transfer-queue"
BASELINE = ["torch==2.13.0", "ray==2.60.0", "TransferQueue==0.1.11"]
GROUPS, SAMPLES, PROMPT, SHORTEST, LONGEST, VOCAB = 32, 8, 256, 1024, 8192, 150_000
RANKS, TOKENS_PER_RANK, LINEAR = 4, 32_768, 20_000
DEADLINE_S = 60.0

QUEUES: dict[str, Literal["group", "always"] | None] = {"megarl": None, "megarl_journal": "group"}
"""By name, what the journal has on disk before it counts; None: groups are offered without the queue behind."""

THEIRS = {"group": "TransferQueue_by_group", "step": "TransferQueue_by_step"}

Seconds = dict[str, tuple[float, float, int]]
"""By name, those of putting and taking a step; and the sum of all tokens that arrived."""

Rows = dict[str, list[list[Any]]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="5 steps instead of 24: under a minute")
    parser.add_argument("--baseline-python", type=Path, help="an interpreter that has TransferQueue and Ray")
    parser.add_argument("--scratch", type=Path, help="where to write (default: the system's directory for such files)")
    args = parser.parse_args()
    baseline = args.baseline_python or make_environment()
    steps = make_steps(5 if args.quick else 24)
    arrays_mb = statistics.median(nbytes(step) for step in steps[1:]) / 1e6
    print(f"a step: {GROUPS} groups of {SAMPLES}, {arrays_mb:.1f} MB; {os.cpu_count()} cores", flush=True)
    seconds: dict[str, list[tuple[float, float]]] = {}
    with tempfile.TemporaryDirectory(dir=args.scratch) as scratch, ExitStack() as stack:
        data = Path(scratch) / "steps.msgpack"
        data.write_bytes(msgspec.msgpack.encode(steps))
        sides = []
        if baseline is not None:  # it needs the longest to start
            sides.append(stack.enter_context(theirs(baseline, data, Path(scratch))))
        sides += [stack.enter_context(ours(name, data, Path(scratch))) for name in QUEUES]
        for step in steps:
            expected = sum(map(sum, joined(step)["input_ids"]))
            for side in reversed(sides):
                for name, (put_s, take_s, total) in side().items():
                    assert total == expected, f"{name}: tokens arrived that sum up to {total}, not {expected}"
                    seconds.setdefault(name, []).append((put_s, take_s))
        limits = {"memcpy": copy_s(arrays_mb), "disk": write_s(arrays_mb, Path(scratch))}
    rates = {}
    print(f"{'':24} {'put MB/s':>9} {'take MB/s':>9} {'both MB/s':>9} {'groups/s':>9}")
    for name, times in seconds.items():
        put_s, take_s = min(times, key=sum)
        rates[name] = arrays_mb / (put_s + take_s)
        columns = [arrays_mb / put_s, arrays_mb / take_s, rates[name], GROUPS / (put_s + take_s)]
        print(f"{name:24}", *(f"{column:9.1f}" for column in columns))
    results = {f"{name}_mb_s": rate for name, rate in rates.items()}
    results |= {f"{name}_mb_s": arrays_mb / seconds for name, seconds in limits.items()}
    results |= {f"speedup_by_{kind}": rates["megarl"] / rates[name] for kind, name in THEIRS.items() if name in rates}
    print(*(f"{name}={value:.1f}" for name, value in results.items()))


def make_environment() -> Path | None:
    """The interpreter of the baseline's environment; None, with the cause on the terminal, if it cannot be made."""
    python, stamp = ENVIRONMENT / "bin/python", ENVIRONMENT / "complete"
    if not stamp.exists():
        print(f"making {ENVIRONMENT.name} (a few minutes, once)", flush=True)
        subprocess.run([sys.executable, "-m", "venv", "--clear", ENVIRONMENT], check=True)
        if subprocess.run([python, "-m", "pip", "install", "--quiet", *BASELINE]).returncode:
            print(f"no baseline: pip cannot install {' '.join(BASELINE)} (see above)")
            return None
        stamp.touch()
    return python


def make_steps(count: int) -> list[list[Rows]]:
    """Lists of tokens and log-probabilities of each group; lengths are as often in each doubling."""
    draw = np.random.default_rng(0)

    def group() -> Rows:
        lengths = (SHORTEST * (LONGEST / SHORTEST) ** draw.random(SAMPLES)).astype(int)
        prompt = draw.integers(VOCAB, size=PROMPT).tolist()
        return {
            "input_ids": [prompt + draw.integers(VOCAB, size=length).tolist() for length in lengths],
            "engine_logprob": [(-draw.random(length)).tolist() for length in lengths],
        }

    return [[group() for _ in range(GROUPS)] for _ in range(count)]


def joined(step: list[Rows]) -> Rows:
    return {field: [row for group in step for row in group[field]] for field in step[0]}


def nbytes(step: list[Rows]) -> int:
    return 4 * sum(len(row) for rows in joined(step).values() for row in rows)


@contextmanager
def ours(name: str, data: Path, run_dir: Path) -> Iterator[Callable[[], Seconds]]:
    """What puts and takes the next step."""
    context, keys = multiprocessing.get_context("spawn"), Keys.new()
    server, far = context.Pipe()
    processes = [context.Process(target=serve, args=(far, name, keys.public, data, run_dir))]
    ranks = []
    for rank in range(RANKS):
        near, far = context.Pipe()
        ranks.append(near)
        processes.append(context.Process(target=consume, args=(far, keys, rank)))
    for process in processes:
        process.start()
    for connection in (server, *ranks):
        connection.recv()

    def step() -> Seconds:
        begun = time.perf_counter()
        server.send_bytes(b"go")
        offer = server.recv_bytes()
        put = time.perf_counter()
        for connection in ranks:
            connection.send_bytes(offer)
        for connection in ranks:
            connection.recv()
        taken = time.perf_counter()
        return {name: (put - begun, taken - put, sum(connection.recv() for connection in ranks))}

    try:
        yield step
    finally:
        for connection in (server, *ranks):
            connection.send_bytes(b"")
        for process in processes:
            process.join()


def serve(connection: Connection, name: str, client_key: str, data: Path, run_dir: Path) -> None:
    """The coordinator's part."""
    steps = [
        [as_group(step * GROUPS + place, rows, step) for place, rows in enumerate(groups)]
        for step, groups in enumerate(msgspec.msgpack.decode(data.read_bytes()))
    ]

    async def run() -> None:
        sync = QUEUES[name]
        options: dict[str, Any] = {"max_lag": 0, "ask": GROUPS, "steps": len(steps), "directory": run_dir / name}
        queue = TransferQueue(GROUPS, sync=sync or "never", **options)
        async with QueueServer(queue.counters, host="127.0.0.1", client_key=client_key, run_dir=run_dir) as server:
            connection.send("ready")
            for step, groups in enumerate(steps):
                if not await asyncio.to_thread(connection.recv_bytes):
                    return
                if sync is not None:
                    queue.publish(step)
                    for row, group in zip(queue.admit(), groups, strict=True):
                        await queue.put(row, group)
                    groups = queue.take(step) or groups
                connection.send_bytes(msgspec.msgpack.encode(await server.offer(step, groups)))
            await asyncio.to_thread(connection.recv_bytes)
        await queue.close()

    asyncio.run(run())


def as_group(index: int, rows: Rows, version: int) -> Group:
    prompt = Prompt(index, "", rows["input_ids"][0][:PROMPT], "")
    trajectories = [
        Trajectory(ids[PROMPT:], logprobs, [VersionSpan(version, 0, len(logprobs))], "stop", "", {})
        for ids, logprobs in zip(rows["input_ids"], rows["engine_logprob"], strict=True)
    ]
    return Group(prompt, trajectories)


def consume(connection: Connection, keys: Keys, rank: int) -> None:
    """A rank's part."""
    client = QueueClient(keys, deadline_s=DEADLINE_S)
    connection.send("ready")
    while payload := connection.recv_bytes():
        delivery = Delivery(msgspec.msgpack.decode(payload, type=Offer), client)
        lengths = [group.prompt_length + t.length for group in delivery.groups for t in group.trajectories]
        plan = plan_microbatches(lengths, max_tokens=TOKENS_PER_RANK, ranks=RANKS, cost=lambda n: n * (n + LINEAR))
        mine = sorted(number for batch in plan[rank] for number in batch)
        here = delivery.load({"input_ids": mine, "engine_logprob": mine})
        connection.send("here")
        connection.send(sum(int(ids.sum(dtype=np.int64)) for ids in here["input_ids"]))
    client.close()


@contextmanager
def theirs(python: Path, data: Path, scratch: Path) -> Iterator[Callable[[], Seconds]]:
    """What puts and takes the next step."""
    # -P: else it would import this folder's file of the package's name
    command = [str(python), "-P", str(ROOT / "tools/bench/transfer_queue_baseline.py"), str(data)]
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    log = scratch / "baseline.log"
    with (
        log.open("w") as errors,
        subprocess.Popen(
            command,
            cwd=scratch,
            env=environment,
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
        ) as process,
    ):
        requests, said = process.stdin, process.stdout
        assert requests is not None
        assert said is not None
        answers = filter(lambda line: line.startswith(b"{"), said)

        def step() -> Seconds:
            with suppress(BrokenPipeError):
                requests.write(b"go\n")
            line = next(answers, b"") or sys.exit(f"the baseline failed: {log.read_text()[-3000:]}")
            return {THEIRS[kind]: tuple(seen) for kind, seen in json.loads(line).items()}

        yield step


def copy_s(megabytes: float) -> float:
    source = np.ones(round(megabytes * 1e6), np.uint8)
    target = np.zeros_like(source)
    return timed(lambda: np.copyto(target, source))


def write_s(megabytes: float, directory: Path) -> float:
    payload = bytes(round(megabytes * 1e6))

    def write() -> None:
        with (directory / "written").open("wb") as file:
            file.write(payload)
            file.flush()
            os.fsync(file.fileno())

    return timed(write)


def timed(action: Callable[[], object], repeats: int = 7) -> float:
    times = []
    for _ in range(repeats):
        begun = time.perf_counter()
        action()
        times.append(time.perf_counter() - begun)
    return min(times)


if __name__ == "__main__":
    main()
