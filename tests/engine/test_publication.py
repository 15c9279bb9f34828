"""The real trainer publishes to real engines: what they answer is what it would say itself, version by version."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from megarl.config import Model, Rollout
from megarl.rollout_engine import Engine
from megarl.runtime.network import LOOPBACK
from tests.distributed.launch import run
from tests.engine.publication_plan import KEY, Plan, Seen
from tests.engine.test_engine import Watch
from tests.families import write_model

pytestmark = pytest.mark.engine

UPDATES = 5
MISMATCH_LIMIT = 1e-4  # DESIGN's bound for float32
LAYOUTS: dict[tuple[str, int], list[tuple[int, dict[str, Any], list[int]]]] = {
    ("qwen3", 1): [(2, {}, [1, 2]), (4, {"tensor": 2, "pipeline": 2}, [1, 2])],
    ("qwen3", 2): [(2, {}, [1]), (4, {"tensor": 2, "pipeline": 2}, [2])],
    ("qwen3_moe", 1): [(2, {"expert": 2}, [1, 2])],
    ("qwen3_moe", 2): [(2, {"expert": 2}, [1])],
}
"""By model and an engine's ranks: the trainer's ranks, how they train (what is left over is data-parallel), and the
numbers of engines."""
OTHER_METHODS = {("qwen3", 2): ["full", "disk"]}
"""One kind of engine is enough: they load as they do at their start."""
WIDTHS = {"qwen3": {"intermediate_size": 64}, "qwen3_moe": {"intermediate_size": 64, "moe_intermediate_size": 64}}
"""On a CPU SGLang pads others to a multiple of 32 for each rank."""


@dataclass(frozen=True)
class Running:
    model: Path
    family: str
    tensor: int
    engines: list[Engine]


@pytest.fixture(scope="module", params=LAYOUTS)
def running(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """As many engines as are needed. (On a CPU each rank of one has a slice of every expert.)"""
    family, tensor = request.param
    counts = [count for _, _, some in LAYOUTS[request.param] for count in some]
    path = tmp_path_factory.mktemp(family)
    write_model(family, path / "model", **WIDTHS[family])
    serving = Rollout(tensor_parallel=tensor, max_new_tokens=8)
    with contextlib.ExitStack() as stack:
        engines = []
        for number in range(max(counts)):
            engine = Engine(
                Model(path=path / "model"),
                serving,
                name=f"engine {number}",
                host=LOOPBACK,
                key=KEY,
                device="cpu",
                seed=number,
                log=path / f"engine_{number}.log",
                guard=Watch(),
                answer_timeout_s=60.0,
            )
            stack.callback(engine.child.kill)
            engines.append(engine)
        for engine in engines:
            engine.wait_healthy()
        yield Running(path / "model", family, tensor, engines)


def test_engines_say_what_the_trainer_would(running: Running, tmp_path: Path) -> None:
    """In every layout, with one engine and with two; a bit that is lost on the way is noticed. Other methods too."""
    for world, layout, counts in LAYOUTS[running.family, running.tensor]:
        for count, seen in publish(running, world, layout, counts, "direct", UPDATES, tmp_path / str(world)).items():
            assert max(map(max, seen.errors)) <= MISMATCH_LIMIT
            published = [*range(1, UPDATES + 1), UPDATES + 2]
            assert seen.versions == [[str(version)] * count for version in published]
            assert list(seen.corrupted) == [count - 1]
            assert "has other weights than the trainer in 1 tensors" in seen.corrupted[count - 1]
    for method in OTHER_METHODS.get((running.family, running.tensor), []):
        (seen,) = publish(running, 2, {"pipeline": 2}, [1], method, 2, tmp_path / method).values()
        assert max(map(max, seen.errors)) <= MISMATCH_LIMIT
        assert seen.versions == [["1"], ["2"]]


def publish(
    running: Running, world: int, layout: dict[str, Any], counts: list[int], method: str, updates: int, out: Path
) -> dict[int, Seen]:
    """By the number of engines."""
    out.mkdir()
    size = running.tensor
    # the last ranks, so that the first engine is not on the first rank
    ranks = [list(range(world - (n + 1) * size, world - n * size)) for n in range(max(counts))]
    addresses = [engine.address for engine in running.engines]
    plan = Plan(running.model, layout, addresses, ranks, {"type": method}, counts, updates, out)
    plan.write(out / "plan.json")
    run("mpirun", world, "tests.engine.payload_publication", out / "plan.json", log=out / "log")
    return {count: Seen.read(out / f"seen_{count}.json") for count in counts}
