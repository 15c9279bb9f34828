"""Measures SGLang engines: the table that `tools/simulate_rollout.py --engine-file` takes.

`measure_engines` asks them for responses of known lengths and reads their own clocks (`/v1/loads`): seconds of decode
steps by batch size and context, seconds of prefill by pass and token, and how long a call takes on its way. All engines
are busy at once, as they are in a rollout, since they may share cores with each other and with their client. They must
have nothing else to do meanwhile, and forget their cached prefixes.

Where engines run on this machine, what they waited for a core while others used it is left out.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import numpy as np
import psutil

from megarl.rollout_engine import EngineAddress

TOKEN_IDS = range(50, 250)
"""Of the prompts, which mean nothing; all vocabularies have them."""
LONGEST = 1024
"""Context in tokens, which all models allow."""
ASKS, FLOOD = 12, 48
LEAST_STEPS, STEPS = 16, 64
LEAST_PROMPT = 8


class Cores:
    """The processes of an engine on this machine; without one, nothing is known and nothing was waited for."""

    def __init__(self, process: int | None) -> None:
        tree = [psutil.Process(process), *psutil.Process(process).children(recursive=True)] if process else []
        self._scheduler = [one.pid for one in tree if one.name().startswith("sglang::sched")]
        self._others = [one.pid for one in tree if one.pid not in self._scheduler]

    def scheduler(self) -> tuple[float, float]:
        """Seconds on a core, and of being ready without one."""
        return _core_seconds(self._scheduler)

    def everything(self) -> tuple[float, float]:
        return _core_seconds([*self._scheduler, *self._others])

    def others_waited(self) -> float:
        return _core_seconds(self._others)[1]


def _core_seconds(processes: Sequence[int | str]) -> tuple[float, float]:
    read = [Path(f"/proc/{one}/schedstat").read_text().split() for one in processes]
    return sum(int(row[0]) for row in read) / 1e9, sum(int(row[1]) for row in read) / 1e9


class Clock(NamedTuple):
    """What an engine has counted since its start; seconds are its own. Steps after a prefill are not among `steps`."""

    steps: float
    requests: float
    decode_s: float
    prefill_s: float
    prefilled: float
    core_s: float
    waited_s: float

    def since(self, other: Clock) -> Clock:
        return Clock(*(now - then for now, then in zip(self, other, strict=True)))

    @property
    def share(self) -> float:
        """Of the time in which it had something to do, it had a core."""
        busy = self.core_s + self.waited_s
        return self.core_s / busy if busy else 1.0


class Prefill(NamedTuple):
    """Of one engine: so many passes of so many requests and tokens in all."""

    passes: float
    tokens: float
    requests: float
    seconds: float


async def measure_engines(
    engines: Sequence[EngineAddress], key: str, *, name: str, processes: Sequence[int | None]
) -> dict[str, Any]:
    """The table, as JSON has it. Takes ten seconds for engines whose steps take 5 ms.

    `processes` are the engines' servers, None for those on other machines.
    """
    headers, patient = {"Authorization": f"Bearer {key}"}, aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(headers=headers, timeout=patient, connector=aiohttp.TCPConnector(limit=0)) as http:
        probes = [Probe(http, engine.url, Cores(one)) for engine, one in zip(engines, processes, strict=True)]
        loads = [await probe.load() for probe in probes]
        kv_tokens, max_running = (
            min(load[of] for load in loads) for of in ("max_total_num_tokens", "max_running_requests")
        )
        await _everywhere(probes, lambda probe: probe.generate([prompt(16)], 32))  # the first responses are slower
        prefills, trips = await _prefills(probes, kv_tokens), await _trips(probes)
        decode = await _decodes(probes, kv_tokens, max_running)
        call_s = await _flood(probes)
    return fit(name, kv_tokens, max_running, decode=decode, prefills=prefills, trips=trips) | {"call_s": call_s}


def fit(
    name: str,
    kv_tokens: int,
    max_running: int,
    *,
    decode: list[tuple[int, int, float]],
    prefills: list[Prefill],
    trips: list[float],
) -> dict[str, Any]:
    """`decode` has batches, contexts and seconds; `trips` are seconds of single calls besides the engine's own."""
    counts = np.array([row[:3] for row in prefills])
    seconds = np.array([row.seconds for row in prefills])
    weights = 1 / seconds[:, None]  # relative errors count
    each = _nonnegative(counts * weights, seconds * weights[:, 0])
    return {
        "name": name,
        "kv_tokens": kv_tokens,
        "max_running": max_running,
        "decode": [[batch, context, round(step_s, 6)] for batch, context, step_s in decode],
        "prefill_pass_s": round(each[0], 6),
        "prefill_token_s": round(each[1], 8),
        "prefill_request_s": round(each[2], 6),
        "request_s": round(statistics.median(trips), 6),
    }


def median_table(tables: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Of the same engines, measured several times."""
    whole = dict(tables[0])
    for name in ("prefill_pass_s", "prefill_token_s", "prefill_request_s", "request_s", "call_s"):
        whole[name] = statistics.median(table[name] for table in tables)
    steps: dict[tuple[int, int], list[float]] = {}
    for batch, context, step_s in (row for table in tables for row in table["decode"]):
        steps.setdefault((batch, context), []).append(step_s)
    whole["decode"] = [[*key, statistics.median(seconds)] for key, seconds in sorted(steps.items())]
    return whole


def _nonnegative(design: np.ndarray, wanted: np.ndarray) -> list[float]:
    """Least squares without negative ones: the worst of them are left out, one after the other."""
    columns = list(range(design.shape[1]))
    while True:
        found = np.linalg.lstsq(design[:, columns], wanted, rcond=None)[0]
        if (found >= 0).all():
            break
        del columns[int(np.argmin(found))]
    return [float(found[columns.index(one)]) if one in columns else 0.0 for one in range(design.shape[1])]


class Probe:
    """One engine."""

    def __init__(self, http: aiohttp.ClientSession, url: str, cores: Cores) -> None:
        self._http, self._url, self.cores = http, url, cores

    async def generate(self, prompts: list[list[int]], tokens: int) -> float:
        """Exactly so many tokens after each prompt, all in one call; the seconds that it took."""
        sampling = {"temperature": 1.0, "max_new_tokens": tokens, "ignore_eos": True}
        body = {"input_ids": prompts, "sampling_params": sampling, "return_logprob": True}
        started = time.monotonic()
        async with self._http.post(f"{self._url}/generate", json=body) as response:
            await response.read()
            response.raise_for_status()
        return time.monotonic() - started

    async def load(self) -> dict[str, Any]:
        async with self._http.get(f"{self._url}/v1/loads", params={"include": "core"}) as response:
            return (await response.json())["loads"][0]

    async def clock(self) -> Clock:
        load = await self.load()
        steps, requests, decode_us, *_ = load["decode_moments"] or [0.0] * 6
        return Clock(
            steps,
            requests,
            decode_us / 1e6,
            load["total_prefill_busy_us"] / 1e6,
            load["total_prefill_uncached_tokens"],
            *self.cores.scheduler(),
        )

    async def flush(self) -> None:
        """Forget all prefixes; the engine refuses until it is idle."""
        while True:
            async with self._http.post(f"{self._url}/flush_cache") as response:
                if response.status == 200:
                    return
            await asyncio.sleep(0.02)


def prompt(tokens: int) -> list[int]:
    return random.choices(TOKEN_IDS, k=tokens)


async def _everywhere(probes: list[Probe], what: Any) -> list[Any]:
    return list(await asyncio.gather(*(what(probe) for probe in probes)))


async def _prefills(probes: list[Probe], kv_tokens: int) -> list[Prefill]:
    """One call after the other, of short and long prompts and of several, while another request decodes."""

    async def some(probe: Probe, requests: int, tokens: int) -> Prefill:
        await probe.flush()
        decoding = asyncio.create_task(probe.generate([prompt(8)], LONGEST))
        before = await probe.clock()
        for _ in range(ASKS):
            await probe.generate([prompt(tokens) for _ in range(requests)], 1)
        spent = (await probe.clock()).since(before)
        decoding.cancel()
        await asyncio.gather(decoding, return_exceptions=True)
        return Prefill(ASKS, spent.prefilled, ASKS * requests, spent.prefill_s * spent.share)

    rows = []
    for requests, tokens in ((1, 8), (1, min(kv_tokens // 4, LONGEST)), (8, 16)):
        rows += await _everywhere(probes, lambda probe, r=requests, t=tokens: some(probe, r, t))
    return rows


async def _trips(probes: list[Probe]) -> list[float]:
    """Seconds of single calls of one token in which the engine's scheduler had nothing to do."""

    async def some(probe: Probe) -> float:
        def waited() -> float:
            return probe.cores.others_waited() + _core_seconds(["self"])[1] / len(probes)

        await probe.flush()
        before, waited_before = await probe.clock(), waited()
        seconds = sum([await probe.generate([prompt(8)], 1) for _ in range(ASKS)])
        seconds -= waited() - waited_before
        spent = (await probe.clock()).since(before)
        return max(seconds - (spent.core_s + spent.waited_s or spent.prefill_s), 0.0) / ASKS

    return await _everywhere(probes, some)


async def _decodes(probes: list[Probe], kv_tokens: int, max_running: int) -> list[tuple[int, int, float]]:
    """Batches of 1, 2, 4, ... requests with short and with long contexts: as far as the cache holds them.

    Within a batch contexts differ, as they do in a rollout.
    """
    room = int(0.9 * kv_tokens)

    async def one(probe: Probe, batch: int, begin: int, steps: int) -> tuple[int, int, float] | None:
        await probe.flush()
        before = await probe.clock()
        lengths = np.linspace(LEAST_PROMPT, 2 * begin - LEAST_PROMPT, batch) if batch > 1 else [begin]
        await probe.generate([prompt(round(length)) for length in lengths], steps)
        spent = (await probe.clock()).since(before)
        if spent.steps < steps / 2 or spent.requests / spent.steps < 0.95 * batch:
            return None  # they did not run together
        return batch, begin + steps // 2, spent.decode_s * spent.share / spent.steps

    rows, batch = [], 1
    while batch <= max_running and batch * (LEAST_PROMPT + LEAST_STEPS) <= room:
        steps = min(STEPS, room // batch - LEAST_PROMPT)
        longest = min(room // batch, LONGEST // 2) - steps
        for begin in sorted({min(4 * LEAST_PROMPT, longest), longest}):
            rows += await _everywhere(probes, lambda probe, a=batch, b=begin, c=steps: one(probe, a, b, c))
        batch *= 2
    return [row for row in rows if row is not None]


async def _flood(probes: list[Probe]) -> float:
    """Seconds between calls of one token at an engine, when many come at once everywhere."""

    def processes() -> tuple[float, float]:
        rows = [_core_seconds(["self"]), *(probe.cores.everything() for probe in probes)]
        return sum(row[0] for row in rows), sum(row[1] for row in rows)

    before, started = processes(), time.monotonic()
    await asyncio.gather(*(probe.generate([prompt(8)], 1) for _ in range(FLOOD) for probe in probes))
    seconds = time.monotonic() - started
    core_s, waited_s = (now - then for now, then in zip(processes(), before, strict=True))
    share = core_s / (core_s + waited_s) if waited_s else 1.0
    return round(seconds * share / FLOOD, 6)
