"""Weights between a Hugging Face directory and the shards of the ranks of a Megatron model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from megarl.config import ModelShape
from megarl.model_engine.weights.files import HfReader
from megarl.model_engine.weights.parameter import Parameter
from megarl.model_engine.weights.table import model_parameters

Bucket = list[tuple[Parameter, list[Tensor]]]


class ModelWeights:
    """The weights of one rank's part of a model, by the names of the whole model."""

    def __init__(self, model: GPTModel, shape: ModelShape) -> None:
        self._tensor_rank = parallel_state.get_tensor_model_parallel_rank()
        self._tensor_size = parallel_state.get_tensor_model_parallel_world_size()
        self.parameters = model_parameters(shape, self._tensor_size)
        self._shape = shape
        self._local = {_whole_model_name(name, model): p.data for name, p in model.named_parameters()}

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
                parts = [reader.tensor(hf, size) for hf, size in zip(parameter.hf, parameter.hf_shapes, strict=True)]
                whole = parameter.layout.to_megatron(parts)
                todo.pop(name).copy_(parameter.layout.shard(whole, self._tensor_rank, self._tensor_size))
        assert not todo, f"the weight table does not know {sorted(todo)}"

    @torch.no_grad()
    def hf_buckets(self, limit_bytes: int) -> Iterator[Bucket]:
        """Each parameter with its whole Hugging Face tensors, about `limit_bytes` at a time, on every rank.

        A collective of all ranks. A parameter larger than the limit makes a bucket of its own.
        """
        stages = parallel_state.get_pipeline_model_parallel_world_size()
        bucket: list[Parameter] = []
        size, stage = 0, 0
        for parameter in self.parameters:
            nbytes, its_stage = self._nbytes(parameter), self._stage(parameter, stages)
            if bucket and (size + nbytes > limit_bytes or its_stage != stage):
                yield self._gather(bucket, stage)
                bucket, size = [], 0
            bucket.append(parameter)
            size, stage = size + nbytes, its_stage
        yield self._gather(bucket, stage)

    def _gather(self, bucket: list[Parameter], stage: int) -> Bucket:
        """One all-gather over the stage's tensor-parallel ranks, one broadcast to the other stages."""
        mine = parallel_state.get_pipeline_model_parallel_rank() == stage
        sizes = [self._shard_shape(parameter) for parameter in bucket]
        like = next(iter(self._local.values()))
        gathered = like.new_empty(self._tensor_size, sum(size.numel() for size in sizes))
        if mine:
            flat = torch.cat([self._local[parameter.megatron].reshape(-1) for parameter in bucket])
            group = parallel_state.get_tensor_model_parallel_group()
            dist.all_gather(list(gathered.unbind()), flat, group=group)
        if parallel_state.get_pipeline_model_parallel_world_size() > 1:
            group = parallel_state.get_pipeline_model_parallel_group()
            dist.broadcast(gathered, src=dist.get_global_rank(group, stage), group=group)
        tensors: Bucket = []
        start = 0
        for parameter, size in zip(bucket, sizes, strict=True):
            shards = [row[start : start + size.numel()].view(size) for row in gathered]
            tensors.append((parameter, parameter.layout.to_hf(parameter.layout.unshard(shards))))
            start += size.numel()
        return tensors

    def _stage(self, parameter: Parameter, stages: int) -> int:
        if parameter.layer is not None:
            return parameter.layer // (self._shape.layers // stages)
        return stages - 1 if parameter.last_stage else 0

    def _shard_shape(self, parameter: Parameter) -> torch.Size:
        parts = [torch.empty(size, device="meta") for size in parameter.hf_shapes]
        return parameter.layout.shard(parameter.layout.to_megatron(parts), 0, self._tensor_size).shape

    def _nbytes(self, parameter: Parameter) -> int:
        element = next(iter(self._local.values())).element_size()
        return sum(torch.Size(size).numel() for size in parameter.hf_shapes) * element


def _whole_model_name(name: str, model: GPTModel) -> str:
    """A pipeline stage numbers its layers from 0; `layer_number` counts from 1 in the whole model."""
    prefix = "decoder.layers."
    if not name.startswith(prefix):
        return name
    local, rest = name.removeprefix(prefix).split(".", 1)
    return f"{prefix}{model.decoder.layers[int(local)].layer_number - 1}.{rest}"
