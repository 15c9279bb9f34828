"""The pool over real worker processes: whatever a response does to its worker, it costs that response and no other."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from megarl.config import ExactMatch, MathVerify, OwnRule, Reward
from megarl.rewards import RewardError, RewardPool
from megarl.rewards.worker import SCORE, Setup, message

REAL = [sys.executable, "-c", "from megarl.rewards.worker import main; main()"]
# A worker whose rule does what the response says; everything else about it is real.
OBEDIENT = [
    sys.executable,
    "-c",
    """
import os, time
import megarl.rewards.worker as worker

def obey(response, answer):
    match response:
        case "hang": time.sleep(1000)
        case "die": os._exit(7)
        case "bomb": return float(len(bytearray(64 << 30)))
        case "raise": raise RuntimeError("as told")
        case "print": print("noise on stdout", flush=True); os.system("echo more noise")
    return float(response == answer)

worker.build_rule = lambda options: obey
worker.main()
""",
]
RIGHT, WRONG = ("answer", "yes", "yes"), ("answer", "yes", "no")


def make_pool(command: list[str], *, workers: int = 1, timeout_s: float = 60.0, **rules: Any) -> RewardPool:
    rules = rules or {"answer": ExactMatch(type="exact_match")}
    config = Reward(sources=rules, workers=workers, timeout_s=timeout_s)
    return RewardPool(config, command, dict(os.environ))


def in_pool(pool: RewardPool, steps: Callable[[RewardPool], Awaitable[None]]) -> None:
    """Run `steps` within the pool, and see that it leaves no process behind."""

    async def run() -> list[int]:
        async with pool:
            await steps(pool)
            ends = pids(pool)
        return ends

    for pid in asyncio.run(run()):
        assert not Path(f"/proc/{pid}").exists()


def pids(pool: RewardPool) -> list[int]:
    return [worker._process.pid for worker in pool._workers if worker._process is not None]


def test_rewards_come_in_order_from_several_workers() -> None:
    async def steps(pool: RewardPool) -> None:
        pairs = [("answer", f"<answer>{n}</answer>", str(n if n % 3 else -1)) for n in range(257)]
        assert await pool.score_many(pairs) == [float(n % 3 > 0) for n in range(257)]
        assert await asyncio.gather(*(pool.score_many([pair]) for pair in pairs[:9])) == [[0], [1], [1]] * 3
        assert await pool.score_many([]) == []
        assert await pool.score_many([("answer", "<answer>" + "é" * 1_000_000 + "</answer>", "é" * 1_000_000)]) == [1.0]
        assert len(set(pids(pool))) == 2

    pool = make_pool(REAL, workers=2)
    in_pool(pool, steps)
    assert (pool.timeouts, pool.crashes) == (0, 0)


@pytest.mark.parametrize(
    ("trouble", "timeouts", "crashes"),
    [("hang", 1, 0), ("die", 0, 1), ("raise", 0, 1), ("bomb", 0, 1)],
)
def test_trouble_costs_its_own_response_only(trouble: str, timeouts: int, crashes: int) -> None:
    async def steps(pool: RewardPool) -> None:
        assert await pool.score_many([RIGHT, WRONG, RIGHT, ("answer", trouble, trouble), RIGHT, WRONG]) == [
            1,
            0,
            1,
            0,
            1,
            0,
        ]
        assert await pool.score_many([RIGHT]) == [1.0]

    pool = make_pool(OBEDIENT, timeout_s=1.0 if trouble == "hang" else 60.0)
    in_pool(pool, steps)
    assert (pool.timeouts, pool.crashes) == (timeouts, crashes)


def test_what_a_rule_prints_is_no_reward() -> None:
    async def steps(pool: RewardPool) -> None:
        assert await pool.score_many([RIGHT, ("answer", "print", "print"), RIGHT]) == [1, 1, 1]

    in_pool(make_pool(OBEDIENT), steps)


def test_each_item_has_its_rule(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of megarl's and one of the user's, which fails now and then."""
    (tmp_path / "mine.py").write_text("def length(response, answer, *, scale):\n    return scale / len(response)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    async def steps(pool: RewardPool) -> None:
        items = [("tag", "<answer>1/2</answer>", "0.5"), ("math", "$1/2$", "0.5"), ("own", "four", ""), ("own", "", "")]
        assert await pool.score_many([*items, items[0], items[2]]) == [0, 1, 0.5, 0, 0, 0.5]

    own = OwnRule(type="own", function="mine:length", options={"scale": 2.0})
    tag = ExactMatch(type="exact_match")
    pool = make_pool(REAL, tag=tag, math=MathVerify(type="math_verify"), own=own)
    in_pool(pool, steps)
    assert (pool.timeouts, pool.crashes) == (0, 1)


def test_what_a_rule_starts_is_ended_with_it_and_reads_no_requests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A forked process holds the worker's output open, a started one its input."""
    (tmp_path / "starts.py").write_text(
        "import multiprocessing, os, subprocess, sys, time\n"
        "def rule(response, answer):\n"
        "    if response == 'fork':\n"
        "        process = multiprocessing.get_context('fork').Process(target=time.sleep, args=(1000,))\n"
        "        process.start()\n"
        "        open(answer, 'w').write(str(process.pid))\n"
        "        process.join()\n"
        "    if response == 'read':\n"
        "        return len(subprocess.run(['cat'], stdout=subprocess.PIPE).stdout) + len(sys.stdin.read())\n"
        "    return 1.0\n"
    )
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    note = tmp_path / "pid"

    async def steps(pool: RewardPool) -> None:
        items = [("own", response, str(note)) for response in ("", "read", "fork", "", "read", "")]
        assert await pool.score_many(items) == [1, 0, 0, 1, 0, 1]

    pool = make_pool(REAL, timeout_s=6.0, own=OwnRule(type="own", function="starts:rule"))
    in_pool(pool, steps)
    assert (pool.timeouts, pool.crashes) == (1, 0)
    with contextlib.suppress(psutil.NoSuchProcess):  # nobody may have reaped it yet
        assert psutil.Process(int(note.read_text())).status() in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)


def test_without_rules_there_are_no_workers() -> None:
    async def steps(pool: RewardPool) -> None:
        assert (await pool.score_many([]), pids(pool)) == ([], [])

    model = {"type": "model", "model": {"path": Path("reward")}}
    in_pool(make_pool(["/no/such/program"], preference=model), steps)


def test_an_expression_that_hangs_math_verify() -> None:
    async def steps(pool: RewardPool) -> None:
        started = time.monotonic()
        pairs = [("answer", text, "7") for text in ("\\boxed{7}", "\\boxed{9^{9^{9^{9}}}}", "$14/2$")]
        assert await pool.score_many(pairs) == [1, 0, 1]
        assert time.monotonic() - started > 2.0

    pool = make_pool(REAL, answer=MathVerify(type="math_verify"), timeout_s=2.0)
    in_pool(pool, steps)
    assert (pool.timeouts, pool.crashes) == (1, 0)


def test_a_pattern_that_backtracks_for_ever() -> None:
    async def steps(pool: RewardPool) -> None:
        assert await pool.score_many([("answer", "a" * 60, "a"), ("answer", "aab", "a")]) == [0, 1]

    pool = make_pool(REAL, answer=ExactMatch(type="exact_match", pattern="^(?:a|a)*(a)b"), timeout_s=1.0)
    in_pool(pool, steps)
    assert (pool.timeouts, pool.crashes) == (1, 0)


@pytest.mark.parametrize("busy", [True, False])
def test_a_worker_that_someone_kills(busy: bool) -> None:
    async def steps(pool: RewardPool) -> None:
        (victim,) = pids(pool)
        scoring = asyncio.create_task(pool.score_many([("answer", "hang", "") if busy else RIGHT]))
        await asyncio.sleep(0.2)
        os.kill(victim, signal.SIGKILL)
        assert await scoring == [0.0 if busy else 1.0]
        await asyncio.sleep(0.2)
        assert await pool.score_many([RIGHT]) == [1.0]
        assert pids(pool) != [victim]

    pool = make_pool(OBEDIENT)
    in_pool(pool, steps)
    assert (pool.timeouts, pool.crashes) == (0, int(busy))


def test_a_busy_event_loop_costs_no_reward() -> None:
    async def steps(pool: RewardPool) -> None:
        scoring = asyncio.create_task(pool.score_many([RIGHT]))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        time.sleep(1.5)  # noqa: ASYNC251 (the loop stands still while the worker answers)
        assert await scoring == [1.0]
        assert await pool.score_many([RIGHT]) == [1.0]

    pool = make_pool(OBEDIENT, timeout_s=1.0)
    in_pool(pool, steps)
    assert (pool.timeouts, pool.crashes) == (0, 0)


def test_a_cancelled_call_leaves_a_clean_pool() -> None:
    async def steps(pool: RewardPool) -> None:
        (before,) = pids(pool)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(pool.score_many([RIGHT, ("answer", "hang", ""), WRONG]), 0.3)
        assert await pool.score_many([RIGHT, WRONG]) == [1, 0]
        assert pids(pool) != [before]

    pool = make_pool(OBEDIENT)
    in_pool(pool, steps)
    assert (pool.timeouts, pool.crashes) == (0, 0)


def test_closing_ends_calls_that_wait() -> None:
    async def run() -> None:
        pool = make_pool(OBEDIENT)
        async with pool:
            calls = [asyncio.create_task(pool.score_many([("answer", "hang", "")])) for _ in range(3)]
            await asyncio.sleep(0.2)
        for result in await asyncio.gather(*calls, return_exceptions=True):
            assert isinstance(result, RewardError)
        with pytest.raises(RewardError, match="not open"):
            await pool.score_many([RIGHT])

    asyncio.run(run())


@pytest.mark.parametrize(
    ("command", "complaint"),
    [
        ([sys.executable, "-c", "raise SystemExit(3)"], "ended with exit code 3 before it was ready, 3 times in a row"),
        (["/no/such/program"], "cannot be started: .*No such file"),
    ],
)
def test_workers_that_cannot_start_are_an_error(command: list[str], complaint: str) -> None:
    async def run() -> None:
        async with make_pool(command, workers=2):
            raise AssertionError("opened")

    with pytest.raises(RewardError, match=complaint):
        asyncio.run(run())


@pytest.mark.parametrize("served", [False, True])
def test_a_worker_ends_when_its_input_does(served: bool) -> None:
    setup = Setup({"answer": ExactMatch(type="exact_match").model_dump()})
    requests = message(setup) + message(("answer", "<answer>1</answer>", "1")) if served else b""
    run = subprocess.run(REAL, input=requests, stdout=subprocess.PIPE, timeout=60, check=True)
    assert run.stdout == (SCORE.pack(1.0) * 2 if served else b"")
