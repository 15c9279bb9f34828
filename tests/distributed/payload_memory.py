"""One rank that counts the bytes of tensors while it trains, for test_layout_memory.py.

Its argument is a file with a `memory_plan.Plan`.
"""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megarl.config import Experts, Layout, Model, ModelShape, read_model_shape
from megarl.model_engine import MicroBatch, ModelEngine, TokenSequence
from megarl.runtime import ControlPlane, connect, init_process_groups, rank_info
from tests.distributed.memory_plan import Bytes, Case, Plan, Report
from tests.distributed.payload_numerics import CPU, OPTIMIZER

DEADLINE_S = 240.0
SETTLING_S = 0.02


def main(file: str) -> None:
    plan = Plan.read(Path(file))
    control = connect(rank_info(), DEADLINE_S)
    init_process_groups(control, CPU, one_node=True, deadline_s=DEADLINE_S)
    found = {name: run(case, plan.models[case.family], control) for name, case in plan.cases.items()}
    if control.rank == 0:
        Report(found).write(plan.out)
    dist.destroy_process_group()
    control.close()


def run(case: Case, directory: Path, control: ControlPlane) -> list[Bytes]:
    before = everything()
    layout, shape = Layout.model_validate(case.layout), read_model_shape(directory, case.head)
    model = MeasuredEngine(
        Model(path=directory, dtype=case.dtype),
        shape,
        layout,
        device=CPU,
        seed=0,
        max_tokens_per_rank=sum(case.lengths) // layout.context,
        optimizer=OPTIMIZER,
        updates=2,
    )
    count = case.micro_batches * dist.get_world_size() // layout.model_ranks
    batch = [sequence(length, shape) for _ in range(count) for length in case.lengths]
    model.update(batch, model.loss)  # makes what stays from step to step
    model.measure = True
    model.update(batch, model.loss)
    assert model.micro_batches == case.micro_batches
    seen = model.bytes()
    seen.everything = everything() - before
    parallel_state.destroy_model_parallel()
    return control.allgather(seen, Bytes, what="bytes")


def sequence(length: int, shape: ModelShape) -> TokenSequence:
    """With so many inputs. All of its tokens but the first are the response; each expert gets equally many of them."""
    tokens = torch.arange(length + 1) % shape.vocab
    return TokenSequence(tokens, 1, experts=even(shape.experts, length) if shape.experts else None)


def even(experts: Experts, tokens: int) -> Tensor:
    """[tokens, layers, active]"""
    one = torch.arange(tokens * experts.active).view(tokens, 1, experts.active) % experts.count
    return one.expand(-1, len(experts.layers), -1).to(torch.int32)


class MeasuredEngine(ModelEngine):
    """Counts what a step makes and still has at the end of a forward pass, where autograd has kept what it will."""

    measure = False
    kept = micro_batches = 0

    def __init__(self, *arguments: Any, **others: Any) -> None:
        super().__init__(*arguments, **others)
        self.live = Live()
        for part in self._model:
            part.register_forward_hook(self.look)

    def _run(self, *arguments: Any, **others: Any) -> None:
        if not self.measure:
            super()._run(*arguments, **others)
            return
        with self.live:
            super()._run(*arguments, **others)

    def _microbatches(self, sequences: list[TokenSequence]) -> list[MicroBatch]:
        batches = super()._microbatches(sequences)
        self.micro_batches = len(batches)
        self.live.forget()  # they are the step's input
        return batches

    def look(self, *_: Any) -> None:
        if self.measure:
            self.kept = max(self.kept, self.live.settled_bytes())

    def loss(self, batch: MicroBatch, first: Tensor, *_: Tensor) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
        total = (first * batch.mask).sum()
        self.look()
        return total, {}, {}

    def bytes(self) -> Bytes:
        parameters = [parameter for part in self._model for parameter in part.parameters()]
        adams = [one.optimizer for one in self._optimizer.chained_optimizers]
        mains = [main for adam in adams for group in adam.param_groups for main in group["params"]]
        moments = [tensor for adam in adams for state in adam.state.values() for tensor in state.values()]
        weights = storages(parameters)
        gradients = storages(parameter.main_grad for parameter in parameters)
        optimizer = storages([*mains, *moments])
        return Bytes(
            stage=parallel_state.get_pipeline_model_parallel_rank(),
            weights=sum(weights.values()),
            gradients=sum(gradients.values()),
            optimizer=sum(size for storage, size in optimizer.items() if storage not in weights),
            activations=self.kept,
            everything=0,
        )


def everything() -> int:
    """Of all tensors that Python knows."""
    gc.collect()
    return sum(storages(thing for thing in gc.get_objects() if issubclass(type(thing), Tensor)).values())


def storages(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Bytes by storage: tensors may share one."""
    return {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors}


class Live(TorchDispatchMode):
    """Bytes of the storages that were made in this mode and are still there, whoever keeps them."""

    def __init__(self) -> None:
        super().__init__()
        self._sizes: dict[int, int] = {}

    def settled_bytes(self) -> int:
        """When gloo's threads have let go of what they sent."""
        before, now = -1, sum(self._sizes.values())
        while now != before:
            time.sleep(SETTLING_S)
            before, now = now, sum(self._sizes.values())
        return now

    def forget(self) -> None:
        """Those made so far."""
        self._sizes.clear()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        given = storages(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.untyped_storage()._cdata not in given:
                self._add(tensor.untyped_storage())
        return result

    def _add(self, storage: Any) -> None:
        if storage._cdata not in self._sizes:
            self._sizes[storage._cdata] = storage.nbytes()
            weakref.finalize(storage, self._sizes.pop, storage._cdata, None)
