"""The baseline of transfer_queue.py: the same steps through the package TransferQueue.

    python -P transfer_queue_baseline.py DATA

The package's own defaults: a controller and two storage units, which are actors of Ray. This process puts, and four
others, which connect to them, get. For each line that it reads it goes on with the next step, which it puts twice,
under other keys: by group, as groups finish, and all at once. Prints as a line of JSON, by kind, the seconds of putting
and of getting, and the sum of all tokens that were got.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec
import ray
import torch
import transfer_queue as tq
from tensordict import TensorDict

CONSUMERS, SAMPLES = 4, 8
FIELDS = {"input_ids": torch.int32, "engine_logprob": torch.float32}
PARTITION = "train"


def main() -> None:
    steps: list[list[dict[str, list[list[float]]]]] = msgspec.msgpack.decode(Path(sys.argv[1]).read_bytes())
    ray.init(num_cpus=8, object_store_memory=10**8, include_dashboard=False, log_to_driver=False)
    tq.init()
    context = multiprocessing.get_context("spawn")
    consumers = []
    for _ in range(CONSUMERS):
        ours, theirs = context.Pipe()
        process = context.Process(target=consume, args=(theirs, ray.get_runtime_context().gcs_address))
        process.start()
        consumers.append((process, ours))
    for _, connection in consumers:
        connection.recv()
    for number, groups in enumerate(steps):
        sys.stdin.readline()
        found: dict[str, tuple[float, float, int]] = {}
        for kind, parts in (("group", groups), ("step", [joined(groups)])):
            begun, keys = time.perf_counter(), []
            for place, part in enumerate(parts):
                names = [f"{number}/{kind}/{place}/{row}" for row in range(len(part["input_ids"]))]
                tq.kv_batch_put(names, PARTITION, TensorDict(nested(part), batch_size=len(names)))
                keys += names
            put = time.perf_counter()
            for rank, (_, connection) in enumerate(consumers):
                connection.send(keys[rank::CONSUMERS])
            for _, connection in consumers:
                assert connection.recv() == "here"
            taken = time.perf_counter()
            found[kind] = put - begun, taken - put, sum(connection.recv() for _, connection in consumers)
            tq.kv_clear(keys, PARTITION)
        print(json.dumps(found), flush=True)
    for process, connection in consumers:
        connection.send(None)
        process.join()
    tq.close()
    ray.shutdown()


def joined(groups: list[dict[str, list[list[float]]]]) -> dict[str, list[list[float]]]:
    return {field: [row for group in groups for row in group[field]] for field in FIELDS}


def nested(part: dict[str, list[list[float]]]) -> dict[str, torch.Tensor]:
    return {
        field: torch.nested.as_nested_tensor(
            [torch.tensor(row, dtype=dtype) for row in part[field]], layout=torch.jagged
        )
        for field, dtype in FIELDS.items()
    }


def consume(connection: Connection, address: str) -> None:
    ray.init(address=address, log_to_driver=False)
    tq.init()
    connection.send("ready")
    while keys := connection.recv():
        rows = tq.kv_batch_get(keys, PARTITION)
        here = [rows[field] for field in FIELDS]
        connection.send("here")
        connection.send(int(here[0].values().sum()))


if __name__ == "__main__":
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    main()
