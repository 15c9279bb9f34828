"""Both ends of a publication without Megatron and SGLang: plain tensors train, and engines are dictionaries.

An engine's processes are stood in for by the rank that leads it, which opens the slots of the others as they would.
"""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megarl.checkpoint_engine import Engines, Precision
from megarl.checkpoint_engine.receive import receive
from megarl.checkpoint_engine.slot import Head, Slot
from megarl.config import Layout, ModelShape, read_model_shape, train_place
from megarl.rollout_engine import EngineError
from megarl.weights import EngineLayout, Parameter, is_quantised, model_parameters, quantise
from tests.families import family_config

State = dict[str, Tensor]


def small_shape(family: str, directory: Path, **fields: Any) -> ModelShape:
    family_config(family, **fields).save_pretrained(directory)
    return read_model_shape(directory)


class Source:
    """The Hugging Face tensors of a model, of which a rank holds its part; `seed` makes a version."""

    def __init__(self, shape: ModelShape, layout: Layout, world: int, rank: int, dtype: torch.dtype) -> None:
        self.shape, self._layout, self._dtype = shape, layout, dtype
        self._place = train_place(rank, world, layout) if rank < world else None
        self.table = model_parameters(shape, layout.tensor)
        self.whole: State = {}

    def version(self, seed: int, only: str = "") -> None:
        """New numbers, of those whose name contains `only`."""
        generator = torch.Generator().manual_seed(seed)
        for parameter in self.table:
            for name, size in zip(parameter.hf, parameter.hf_shapes, strict=True):
                dtype = torch.float32 if parameter.float32 else self._dtype
                new = torch.randn(size, generator=generator).to(dtype)
                if only in name:
                    self.whole[name] = new

    def shard(self, parameter: Parameter) -> Tensor:
        assert self._place is not None, "a rank that does not train is asked for weights"
        of_expert = parameter.expert is not None
        rank = self._place.expert_tensor if of_expert else self._place.tensor
        size = self._layout.expert_tensor if of_expert else self._layout.tensor
        return parameter.layout.shard(parameter.layout.to_megatron(self._parts(parameter)), rank, size)

    def hf_buckets(self, limit_bytes: int) -> Iterator[list[tuple[Any, list[Tensor]]]]:
        for start in range(0, len(self.table), 5):
            yield [(parameter, self._parts(parameter)) for parameter in self.table[start : start + 5]]

    def engine_state(self, rank: int, engines: Engines, precision: Precision) -> State:
        """What rank `rank` of an engine should hold."""
        state: State = {}
        rows: dict[str, dict[int, Tensor]] = {}
        for parameter in self.table:
            size, at, of_expert = engines.tensor, rank, parameter.expert is not None
            parts = self._parts(parameter)
            if of_expert:
                assert self.shape.experts is not None
                size, local = engines.expert_tensor, self.shape.experts.count // engines.expert
                group, at = divmod(rank, size)
                if parameter.expert // local != group:  # type: ignore[operator]
                    continue
            layout = parameter.engine_layout
            assert isinstance(layout, EngineLayout)
            shard = layout.engine_shard(parts, at, size)
            name = str(parameter.engine).partition("[")[0]
            held = {name: shard.to(torch.float32 if parameter.float32 else precision.dtype)}
            if precision.fp8 and is_quantised(parameter):
                held = dict(zip((name, f"{name}_scale_inv"), quantise(shard), strict=True))
            key = parameter.expert % local if of_expert else parameter.engine_row  # type: ignore[operator]
            stacked = torch.stack if of_expert else torch.cat
            for one, tensor in held.items():
                rows.setdefault(one, {})[key] = tensor
                state[one] = stacked([rows[one][k] for k in sorted(rows[one])])
        return state

    def _parts(self, parameter: Parameter) -> list[Tensor]:
        return [self.whole[name] for name in parameter.hf]


@contextlib.contextmanager
def flipped_bit() -> Iterator[None]:
    """One bit of each bucket that arrives on this rank is another."""
    original = Slot.write

    def write(slot: Slot, head: Head) -> None:
        if head.pieces:
            slot.payload[head.pieces[-1].offset] ^= 1
        original(slot, head)

    Slot.write = write  # type: ignore[method-assign]
    try:
        yield
    finally:
        Slot.write = original  # type: ignore[method-assign]


class Model:
    """As much of a torch module as an engine's process has for `receive`."""

    def __init__(self, like: State) -> None:
        # padding is zero in an engine, and nothing else
        self.tensors = {name: torch.where(x.float() == 0, 0.0, 7.0).to(x.dtype) for name, x in like.items()}

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        yield from self.tensors.items()


class Target:
    """An engine. Of its `calls` it fails at one that is `fail_at`."""

    def __init__(self, models: list[Model]) -> None:
        self.models, self.calls = models, list[Any]()
        self.fail_at: Any = None

    def begin_update(self) -> None:
        self._call("begin")

    def load_slots(self, handles: list[bytes], *, last: bool) -> None:
        self._call("compare" if last else "load")
        for model, handle in zip(self.models, handles, strict=True):
            receive(model, pickle.loads(handle))  # type: ignore[arg-type]  # noqa: S301 (what SGLang does)

    def load_tensors(self, payload: bytes) -> None:
        self._call("tensors")

    def load_directory(self, path: Path) -> None:
        self._call("directory")

    def end_update(self, version: int) -> None:
        self._call(version)

    def _call(self, what: Any) -> None:
        self.calls.append(what)
        if what == self.fail_at:
            raise EngineError(f"it failed at {what}")
