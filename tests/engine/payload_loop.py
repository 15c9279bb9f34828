"""A rank without a model: real coordinator, queue and journal over engines that run elsewhere; for tests that kill it.

It "trains" by writing down what a step took, and its checkpoint is a file with the number of finished steps.
"""

from __future__ import annotations

import json
import os
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import msgspec

from megarl.config import RlRecipe, load_recipe
from megarl.rollout_engine import CoordinatorHandle, EngineAddress, Take, Taken
from megarl.runtime import Guard
from megarl.runtime.network import LOOPBACK
from megarl.trainer import coordinator as real
from megarl.transfer_queue import Delivery, Keys, QueueClient

SYNCED = "synced.jsonl"


class Plan(msgspec.Struct):
    recipe: str
    overrides: list[str]
    engines: dict[int, EngineAddress]
    key: str
    run: str
    save_every: int


def coordinator() -> None:
    """The real one, which notes how much of each file of its journal is on disk."""
    fsync = os.fsync

    def noted(fd: int) -> None:
        size = os.fstat(fd).st_size
        fsync(fd)
        path = Path(os.readlink(f"/proc/self/fd/{fd}"))
        if path.suffix == ".journal":
            with (path.parents[2] / SYNCED).open("a") as file:
                file.write(json.dumps([path.name, size]) + "\n")

    os.fsync = noted
    real.main()


def main() -> None:
    plan = msgspec.json.decode(sys.stdin.buffer.read(), type=Plan)
    run, recipe = Path(plan.run), load_recipe(Path(plan.recipe), plan.overrides)
    assert isinstance(recipe, RlRecipe)
    checkpoint, guard, keys = run / "checkpoint", Guard(0), Keys.new()
    handle = CoordinatorHandle(
        "tests.engine.payload_loop:coordinator",
        recipe,
        {},
        plan.key,
        queue={"host": LOOPBACK, "client_key": keys.public, "run_dir": str(run)},
        max_positions=512,
        guard=guard,
        log=run / "coordinator.log",
        failed_requests=run / "failed_requests.jsonl",
        journal=run / "journal" / "rows",
    )
    client = QueueClient(keys, deadline_s=60.0)
    start = int(checkpoint.read_text()) if checkpoint.exists() else 0
    for step in range(start, recipe.steps):
        for engine in plan.engines.values():
            name_version(engine, plan.key, step)
        handle.serve(plan.engines, published=step)
        handle.generate()
        (run / "started").touch()
        take(run, handle, client, step)
        if (step + 1) % plan.save_every == 0:
            aside = checkpoint.with_suffix(".aside")
            aside.write_text(str(step + 1))
            aside.replace(checkpoint)
            handle.saved(step + 1)
    (run / "finished").touch()
    guard.stop_children()


def name_version(engine: EngineAddress, key: str, version: int) -> None:
    """What the engine has is called `version` from now on, also for requests that are under way."""
    body = msgspec.json.encode({"new_version": str(version), "abort_all_requests": False})
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    request = urllib.request.Request(f"{engine.url}/update_weight_version", body, headers)
    urllib.request.urlopen(request, timeout=60.0).close()


def take(run: Path, handle: CoordinatorHandle, client: QueueClient, step: int) -> None:
    while not isinstance(taken := handle.ask(Take(step, 1.0)), Taken):
        pass
    delivery = Delivery(taken.offer, client)
    count = sum(len(group.trajectories) for group in delivery.groups)
    ids = iter(delivery.load({"input_ids": range(count)})["input_ids"])
    rows: dict[int, Any] = {
        group.index: [next(ids)[group.prompt_length :].tolist() for _ in group.trajectories]
        for group in delivery.groups
    }
    with (run / "trained.jsonl").open("a") as file:
        file.write(json.dumps({"step": step, "rows": rows}) + "\n")
    time.sleep(0.2)


if __name__ == "__main__":
    main()
