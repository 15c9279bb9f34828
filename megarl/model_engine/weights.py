"""Weights between a Hugging Face directory and the shards of the ranks of a Megatron model."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from megarl.config import Layout, ModelShape, PolicyHead
from megarl.model_engine.offload import PartAwayError
from megarl.runtime import LOGGER
from megarl.weights import HfReader, Parameter, model_parameters, split_index

Bucket = list[tuple[Parameter, list[Tensor]]]


class _Home(NamedTuple):
    """Which ranks hold a parameter: those of a pipeline stage, of experts those of an expert-parallel rank."""

    stage: int
    expert_rank: int | None
    dtype: torch.dtype


class _Held(NamedTuple):
    """A parameter of this rank, or an expert's slice of one."""

    tensor: Tensor
    expert: int | None = None

    @property
    def data(self) -> Tensor:
        """Not to be kept: it moves when gradients are added, or to the host and back."""
        return self.tensor.detach() if self.expert is None else self.tensor.detach()[self.expert]


class ModelWeights:
    """The weights of one rank's part of a model, by the names of the whole model."""

    def __init__(self, parts: Sequence[GPTModel], shape: ModelShape, layout: Layout) -> None:
        self.parameters = model_parameters(shape, layout.tensor)
        self._shape, self._layout = shape, layout
        self.dtype = parts[0].config.params_dtype
        self._local = {
            whole: held
            for part in parts
            for name, tensor in [*part.named_parameters(), *part.named_buffers()]
            if name in part.state_dict()
            for whole, held in _whole_model_names(name, tensor, part, _experts_before(shape, layout))
        }

    @torch.no_grad()
    def load(self, directory: Path) -> None:
        """Fill this rank's shards from a Hugging Face directory. Raises RecipeError naming the tensor at fault."""
        reader = HfReader(directory)
        todo = dict(self._local)
        for parameter in self.parameters:
            names = {parameter.megatron}
            if self._shape.tied and parameter.megatron == "embedding.word_embeddings.weight":
                names.add("output_layer.weight")  # the last pipeline stage's copy
            for name in names & todo.keys():
                named = zip(parameter.hf, parameter.hf_shapes, strict=True)
                parts = [torch.zeros(size) if parameter.missing else reader.tensor(hf, size) for hf, size in named]
                whole = parameter.layout.to_megatron(parts)
                todo.pop(name).data.copy_(parameter.layout.shard(whole, *_tensor_place(parameter)))
        assert not todo, f"the weight table does not know {sorted(todo)}"
        if new := [hf for parameter in self.parameters if parameter.missing for hf in parameter.hf]:
            LOGGER.info("%s has no %s: it starts from zero", directory, " and no ".join(new))
        if unused := left_out(reader.specs, self.parameters, self._shape):
            some = ", ".join(unused[:5]) + (" ..." if len(unused) > 5 else "")
            LOGGER.warning("%s: config.json's model has no place for %d tensors: %s", directory, len(unused), some)

    def shard(self, parameter: Parameter) -> Tensor:
        """This rank's part of a parameter that it holds; not to be kept, since it moves when the model is offloaded."""
        held = self._local.get(parameter.megatron)
        if held is None:  # the last stage's copy of a tied embedding
            held = self._local["output_layer.weight"]
        self._check_here([held])
        return held.data

    @torch.no_grad()
    def hf_buckets(self, limit_bytes: int) -> Iterator[Bucket]:
        """Each parameter with its whole Hugging Face tensors, about `limit_bytes` at a time, on every rank.

        A collective of all ranks. A parameter larger than the limit makes a bucket of its own.
        """
        self._check_here(self._local.values())
        bucket: list[Parameter] = []
        size, home = 0, self._home(self.parameters[0])
        for parameter in self.parameters:
            nbytes, its_home = self._nbytes(parameter), self._home(parameter)
            if bucket and (size + nbytes > limit_bytes or its_home != home):
                yield self._gather(bucket, home)
                bucket, size = [], 0
            bucket.append(parameter)
            size, home = size + nbytes, its_home
        yield self._gather(bucket, home)

    @staticmethod
    def _check_here(some: Iterable[_Held]) -> None:
        if not all(held.tensor.untyped_storage().nbytes() for held in some):
            # whoever has kept these weights, and does not ask the engine for them, would read from nowhere
            raise PartAwayError('who reads weights needs what has been offloaded: call onload("parameters") first')

    def _gather(self, bucket: list[Parameter], home: _Home) -> Bucket:
        """An all-gather over the tensor-parallel ranks that hold the bucket, then broadcasts to those that do not."""
        _, ranks = _tensor_place(bucket[0])
        sizes = [self._shard_shape(parameter) for parameter in bucket]
        device = next(iter(self._local.values())).tensor.device
        gathered = torch.empty(ranks, sum(size.numel() for size in sizes), dtype=home.dtype, device=device)
        stage = parallel_state.get_pipeline_model_parallel_rank()
        if stage == home.stage:
            if home.expert_rank in (None, parallel_state.get_expert_model_parallel_rank()):
                flat = torch.cat([self._local[parameter.megatron].data.reshape(-1) for parameter in bucket])
                dist.all_gather(list(gathered.unbind()), flat, group=_tensor_group(bucket[0]))
            if home.expert_rank is not None and self._layout.expert > 1:
                group = parallel_state.get_expert_model_parallel_group()
                dist.broadcast(gathered, src=dist.get_global_rank(group, home.expert_rank), group=group)
        if self._layout.pipeline > 1:
            group = parallel_state.get_pipeline_model_parallel_group()
            dist.broadcast(gathered, src=dist.get_global_rank(group, home.stage), group=group)
        tensors: Bucket = []
        start = 0
        for parameter, size in zip(bucket, sizes, strict=True):
            shards = [row[start : start + size.numel()].view(size) for row in gathered]
            tensors.append((parameter, parameter.layout.to_hf(parameter.layout.unshard(shards))))
            start += size.numel()
        return tensors

    def _home(self, parameter: Parameter) -> _Home:
        stage = (self._layout.pipeline - 1) if parameter.last_stage else 0
        if parameter.layer is not None:
            parts = self._layout.pipeline * self._layout.interleave
            stage = parameter.layer // (self._shape.layers // parts) % self._layout.pipeline
        rank = None
        if parameter.expert is not None:
            assert self._shape.experts is not None
            rank = parameter.expert // (self._shape.experts.count // self._layout.expert)
        return _Home(stage, rank, torch.float32 if parameter.float32 else self.dtype)

    def _shard_shape(self, parameter: Parameter) -> torch.Size:
        parts = [torch.empty(size, device="meta") for size in parameter.hf_shapes]
        return parameter.layout.shard(parameter.layout.to_megatron(parts), 0, _tensor_place(parameter)[1]).shape

    def _nbytes(self, parameter: Parameter) -> int:
        element = 4 if parameter.float32 else self.dtype.itemsize
        return sum(torch.Size(size).numel() for size in parameter.hf_shapes) * element


def _tensor_place(parameter: Parameter) -> tuple[int, int]:
    """This rank's place among those that share the parameter, and their number."""
    if parameter.expert is not None:
        return (
            parallel_state.get_expert_tensor_parallel_rank(),
            parallel_state.get_expert_tensor_parallel_world_size(),
        )
    return parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_tensor_model_parallel_world_size()


def _tensor_group(parameter: Parameter) -> dist.ProcessGroup:
    if parameter.expert is not None:
        return parallel_state.get_expert_tensor_parallel_group()
    return parallel_state.get_tensor_model_parallel_group()


def left_out(stored: Iterable[str], parameters: Sequence[Parameter], shape: ModelShape) -> list[str]:
    """Tensors of a checkpoint that the model does not have, which config.json may be wrong about."""
    known = {split_index(name)[0] for parameter in parameters for name in parameter.hf}
    if shape.tied or not isinstance(shape.head, PolicyHead):
        known.add("lm_head.weight")  # the embedding again, or the head that another one replaces
    return sorted(set(stored) - known)


def _experts_before(shape: ModelShape, layout: Layout) -> int:
    """Experts of a layer that lie on the expert-parallel ranks before this one."""
    if shape.experts is None:
        return 0
    return parallel_state.get_expert_model_parallel_rank() * (shape.experts.count // layout.expert)


def _whole_model_names(name: str, tensor: Tensor, part: GPTModel, experts_before: int) -> Iterator[tuple[str, _Held]]:
    """A stage numbers its layers and a rank its experts from 0; `layer_number` counts from 1 in the whole model."""
    if match := re.match(r"decoder\.layers\.(\d+)\.(.*)", name):
        layer = part.decoder.layers[int(match[1])].layer_number - 1
        name = f"decoder.layers.{layer}.{match[2]}"
    if ".mlp.experts." not in name:
        yield name, _Held(tensor)
        return
    for index in range(len(tensor)):
        yield f"{name}[{experts_before + index}]", _Held(tensor, index)
