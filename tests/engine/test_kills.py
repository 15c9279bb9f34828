"""Whatever is killed and whenever, a run that goes on trains each group once and generates nothing twice."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from megarl.config import Model, Rollout
from megarl.rollout_engine import Engine
from megarl.runtime import Guard
from megarl.runtime.network import LOOPBACK
from megarl.transfer_queue.journal import recover
from tests.engine.payload_loop import SYNCED, Plan
from tests.jobs import ROOT, alive, wait_until

pytestmark = pytest.mark.engine

RECIPE = ROOT / "launch/recipes/carry_addition_rl.yaml"
STEPS, PROMPTS, SAMPLES, SAVE_EVERY = 16, 4, 4, 8
KILLS = 6
START_S = 60.0


@pytest.fixture(scope="module")
def engine(addition: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    guard = Guard(0)
    started = Engine(
        Model(path=addition / "model"),
        Rollout(max_new_tokens=96),
        name="engine 0",
        host=LOOPBACK,
        key="key",
        device="cpu",
        seed=0,
        log=tmp_path_factory.mktemp("logs") / "engine.log",
        guard=guard,
        answer_timeout_s=60.0,
    )
    try:
        started.wait_healthy()
        yield started
    finally:
        guard.stop_children()


@pytest.mark.parametrize("victim", ["rank", "coordinator", "power"])
def test_a_run_that_is_killed_again_and_again_loses_nothing(
    engine: Engine, addition: Path, tmp_path: Path, victim: str
) -> None:
    kill_again_and_again(engine, addition, tmp_path, victim, kills=KILLS, seed=1)


def kill_again_and_again(engine: Engine, addition: Path, run: Path, victim: str, *, kills: int, seed: int) -> None:
    draw = random.Random(seed)
    overrides = [
        f"model.path={addition}/model",
        f"data.train={addition}/train.jsonl",
        f"data.test={addition}/test.jsonl",
        f"steps={STEPS}",
        f"batch.prompts={PROMPTS}",
        f"batch.group_size={SAMPLES}",
        "mode={max_lag: 2, interrupt: true}",
        "placement={type: disaggregated, train_ranks: 1}",
        "rollout={max_new_tokens: 96, chunk_tokens: 8}",
        "optimizer.warmup_steps=0",
    ]
    plan = Plan(str(RECIPE), overrides, {0: engine.address}, "key", str(run), SAVE_EVERY)
    begun: dict[tuple[int, int], list[int]] = {}
    for done in range(kills + 1):
        with loop(plan) as process:
            wait_until(lambda p=process: (run / "started").exists() or p.poll() is not None, START_S, lambda: said(run))
            if done < kills:
                if done % 2:  # after a step, which has to be trained again then
                    before = steps_trained(run)
                    wait_until(
                        lambda p=process, n=before: steps_trained(run) > n or p.poll() is not None,
                        START_S,
                        lambda: said(run),
                    )
                time.sleep(draw.uniform(0.0, 2.0 if done % 2 else 4.0))
                target = process.pid
                if victim == "coordinator" and (children := psutil.Process(process.pid).children()):
                    target = children[0].pid
                with contextlib.suppress(ProcessLookupError):
                    os.kill(target, signal.SIGKILL)
            code = process.wait(START_S + 60)
        (run / "started").unlink(missing_ok=True)
        if done == kills:
            assert code == 0, f"it does not end by itself:\n{said(run)}"
        elif victim == "power":
            lose_unsynced(run, draw)
        remember(run, begun)
    check(run, begun, identical=victim != "power")


@contextlib.contextmanager
def loop(plan: Plan) -> Iterator[subprocess.Popen[bytes]]:
    with (Path(plan.run) / "loop.log").open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.engine.payload_loop"],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
        )
    assert process.stdin is not None
    process.stdin.write(msgspec.json.encode(plan))
    process.stdin.close()
    wait_until(lambda: process.poll() is not None or bool(psutil.Process(process.pid).children()), START_S, lambda: "")
    with contextlib.suppress(psutil.Error):
        children = psutil.Process(process.pid).children(recursive=True)
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        wait_until(lambda: not any(map(alive, children)), 10.0, lambda: "its children live on")


def steps_trained(run: Path) -> int:
    path = run / "trained.jsonl"
    return path.read_text().count("\n") if path.exists() else 0


def said(run: Path) -> str:
    return "".join((run / name).read_text()[-1500:] for name in ("loop.log", "coordinator.log"))


def lose_unsynced(run: Path, draw: random.Random) -> None:
    """Of each segment, what was not synced is gone from some byte on; what is left is on disk."""
    synced: dict[str, int] = {}
    for line in (run / SYNCED).read_text().splitlines() if (run / SYNCED).exists() else []:
        name, size = json.loads(line)
        synced[name] = max(size, synced.get(name, 0))
    for path in (run / "journal" / "rows").glob("*.journal"):
        size = path.stat().st_size
        os.truncate(path, left := draw.randint(min(synced.get(path.name, 0), size), size))
        with (run / SYNCED).open("a") as file:
            file.write(json.dumps([path.name, left]) + "\n")


def remember(run: Path, begun: dict[tuple[int, int], list[int]]) -> None:
    """What the journal has of responses that were under way."""
    checkpoint = run / "checkpoint"
    found = recover(run / "journal" / "rows", int(checkpoint.read_text()) if checkpoint.exists() else 0)
    for key, completion in found.chunks.items():
        assert completion.output_ids[: len(begun.get(key, []))] == begun.get(key, []), "a chunk was generated again"
        begun[key] = list(completion.output_ids)


def check(run: Path, begun: dict[tuple[int, int], list[int]], *, identical: bool) -> None:
    steps: dict[int, Any] = {}
    again = 0
    for line in (run / "trained.jsonl").read_text().splitlines():
        with contextlib.suppress(json.JSONDecodeError):  # it was killed while it wrote
            row = json.loads(line)
            again += row["step"] in steps
            assert not identical or steps.get(row["step"], row["rows"]) == row["rows"], "other groups than before"
            steps[row["step"]] = row["rows"]
    assert again, "no step was trained again: the kills came too late or too early"
    trained = [int(row) for rows in steps.values() for row in rows]
    assert sorted(trained) == list(range(STEPS * PROMPTS)), "a group was lost, or trained twice"
    responses = {int(row): samples for rows in steps.values() for row, samples in rows.items()}
    assert begun, "no response was under way at any kill"
    for (row, sample), tokens in begun.items():
        assert responses[row][sample][: len(tokens)] == tokens, "a chunk was generated again"
