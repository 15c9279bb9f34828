"""Publication on one rank, to an engine that keeps what it is given, and engines that do it wrong."""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megarl.checkpoint_engine import Engines, PlanError, Precision, Publisher, Training, clear_score_bias, publish
from megarl.config import DirectPublish, DiskPublish, FullPublish, Layout, ModelShape, Publish
from megarl.rollout_engine import EngineError
from tests.publication import Model, Source, Target, small_shape

ENGINES, CPU = Engines(((0,),)), torch.device("cpu")


class Control:
    """A plane of one rank."""

    rank, world = 0, 1

    def allgather(self, value: Any, kind: type, *, what: str) -> list[Any]:
        return [value]


class Case:
    def __init__(self, shape: ModelShape, method: Publish, dtype: torch.dtype = torch.float32) -> None:
        control: Any = Control()
        links: Any = None  # there is nobody to exchange with
        options: dict[str, Any] = {"precision": Precision(dtype), "device": CPU, "ranks_per_node": 1, "timeout_s": 5.0}
        self.publisher = Publisher(method, shape, Training(Layout(), 1), ENGINES, control, links, **options)
        self.source = Source(shape, Layout(), 1, 0, torch.float32)
        self.source.version(1)
        self.dtype = dtype

    def engine(self) -> Target:
        return Target([Model(self.source.engine_state(0, ENGINES, Precision(self.dtype)))])

    def publish(self, engine: Target, **more: Any) -> dict[int, str]:
        return self.publisher.publish(7, self.source, engine, **more).failed


@pytest.fixture
def shape(tmp_path: Path) -> ModelShape:
    return small_shape("qwen3", tmp_path)


def test_all_buckets_arrive_between_begin_and_end(shape: ModelShape, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publish, "_MIB", 100)
    case = Case(shape, DirectPublish())
    engine = case.engine()
    assert case.publish(engine) == {}
    assert engine.calls == ["begin", *["load"] * (len(engine.calls) - 3), "compare", 7]  # the last with a bucket
    assert len(engine.calls) > 5
    for name, tensor in case.source.engine_state(0, ENGINES, Precision(torch.float32)).items():
        assert torch.equal(engine.models[0].tensors[name], tensor)


@pytest.mark.parametrize(
    ("method", "calls"), [(FullPublish(type="full"), ["tensors"]), (DiskPublish(type="disk"), ["directory"])]
)
def test_what_an_engine_loads_itself_is_compared_too(shape: ModelShape, method: Any, calls: list[str]) -> None:
    """The engine here loads nothing, so it holds what it held."""
    case = Case(shape, method)
    loaded, stale = case.engine(), case.engine()
    loaded.models[0].tensors = case.source.engine_state(0, ENGINES, Precision(torch.float32))
    for engine, wrong in ((loaded, False), (stale, True)):
        failed = case.publish(engine, directory=Path("/nowhere"))
        assert ("has other weights than the trainer in 35 tensors" in failed.get(0, "")) == wrong
        assert list(dict.fromkeys(engine.calls)) == ["begin", *calls, "compare", *([] if wrong else [7])]


def change(name: str) -> Callable[[list[Model]], None]:
    def spoil(models: list[Model]) -> None:
        models[0].tensors[name].view(-1)[3] += 1e-6

    return spoil


def lose(models: list[Model]) -> None:
    del models[0].tensors["model.norm.weight"]


def add(models: list[Model]) -> None:
    models[0].tensors["model.extra"] = torch.ones(3)


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (change("model.layers.1.mlp.gate_up_proj.weight"), r"in 1 tensors, first model\.layers\.1\.mlp\.gate_up_proj"),
        (lose, r"KeyError: 'model\.norm\.weight'|does not have 1 tensors, first model\.norm\.weight"),
        (add, r"has, but was never sent, 1 tensors, first model\.extra"),
    ],
)
def test_an_engine_that_holds_something_else_says_what(
    shape: ModelShape, spoil: Callable[[list[Model]], None], said: str
) -> None:
    case = Case(shape, DirectPublish(changed_only=True))
    engine = case.engine()
    assert case.publish(engine) == {}
    engine.calls.clear()
    spoil(engine.models)  # and nothing is sent again
    assert re.search(said, case.publish(engine)[0])
    assert 7 not in engine.calls


def test_an_engine_that_does_not_look_at_its_slot_is_named(shape: ModelShape) -> None:
    case = Case(shape, DirectPublish())
    engine = case.engine()
    engine.load_slots = lambda *_, **__: None  # type: ignore[method-assign]
    assert "its process did not look at what it was sent" in case.publish(engine)[0]


def test_a_second_model_that_looks_at_a_slot_is_not_passed_over(shape: ModelShape) -> None:
    """SGLang calls the loader for a draft model too; the answer of the first must not look like nothing to do."""
    case = Case(shape, DirectPublish())
    engine = case.engine()
    engine.models *= 2
    load = engine.load_slots
    engine.load_slots = lambda handles, **more: load(handles * 2, **more)  # type: ignore[method-assign]
    assert "unknown field" in case.publish(engine)[0]


def test_an_error_in_the_engines_process_comes_back(shape: ModelShape) -> None:
    case = Case(shape, DirectPublish())
    engine = case.engine()
    engine.models[0].tensors["model.norm.weight"] = torch.zeros(2)
    assert "Traceback" in case.publish(engine)[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_engines_hold_in_other_types_is_cast(shape: ModelShape, dtype: torch.dtype) -> None:
    case = Case(shape, DirectPublish(), dtype)
    engine = case.engine()
    assert case.publish(engine) == {}
    for name, tensor in case.source.engine_state(0, ENGINES, Precision(dtype)).items():
        assert torch.equal(engine.models[0].tensors[name], tensor)


def test_a_model_of_which_a_place_is_unknown_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="where an engine holds it is not known"):
        Case(small_shape("gpt_oss", tmp_path), DirectPublish())


class Scorer:
    """A reward model's engine, whose `bias` is what it was made with or sent; None if it has none."""

    def __init__(self, ranks: int, bias: Tensor | None) -> None:
        self.ranks, self.calls = ranks, list[Any]()
        self.tensors = {} if bias is None else {"score.bias": bias}

    def begin_update(self) -> None:
        self.calls.append("begin")

    def load_tensors(self, payload: bytes) -> None:
        self.tensors.update(pickle.loads(payload))  # noqa: S301 (what SGLang does)

    def end_update(self, version: int) -> None:
        self.calls.append(version)

    def checksums(self) -> list[dict[str, str]]:
        # SHA-256 of four zero bytes begins so
        sums = {name: "df3f619804a92fdb" if not tensor.any() else "other" for name, tensor in self.tensors.items()}
        return [sums] * self.ranks


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_bias_of_a_score_that_no_checkpoint_has_is_cleared(ranks: int) -> None:
    engine: Any = Scorer(ranks, torch.ones(1))
    clear_score_bias(engine, torch.float32, "cpu")
    assert (engine.tensors["score.bias"].item(), engine.calls) == (0.0, ["begin", 0])


def test_where_a_score_has_no_bias_nothing_is_sent() -> None:
    engine: Any = Scorer(1, None)
    clear_score_bias(engine, torch.float32, "cpu")
    assert engine.calls == []


def test_a_bias_that_is_not_cleared_is_an_error() -> None:
    engine: Any = Scorer(1, torch.ones(1))
    engine.load_tensors = lambda _: None
    with pytest.raises(EngineError, match="is not 0 in its engine"):
        clear_score_bias(engine, torch.float32, "cpu")
