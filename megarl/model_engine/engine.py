"""The model engine of one rank: forward, backward, update, save, load. The trainer's only way to Megatron."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from megarl.config import Layout, Model, ModelShape, Optimizer
from megarl.model_engine import checkpoint
from megarl.model_engine.build import (
    add_gradients,
    build_model,
    build_optimizer,
    init_model_parallel,
    learning_rate,
    transformer_config,
)
from megarl.model_engine.logprobs import token_logprobs
from megarl.model_engine.microbatch import MicroBatch, TokenSequence, collate, idle_microbatch, partition
from megarl.model_engine.weights import ModelWeights, write_hf

_EXPORT_BUCKET_BYTES = 1 << 30


@dataclass
class Metrics:
    """Sums and maxima over the tokens that a rank has seen; empty on ranks that see no loss."""

    sums: dict[str, float] = field(default_factory=dict)
    maxima: dict[str, float] = field(default_factory=dict)

    def add(self, sums: dict[str, Tensor], maxima: dict[str, Tensor]) -> None:
        for name, value in sums.items():
            self.sums[name] = self.sums.get(name, 0.0) + float(value)
        for name, value in maxima.items():
            self.maxima[name] = max(self.maxima.get(name, -math.inf), float(value))

    @classmethod
    def merge(cls, parts: list[Metrics]) -> Metrics:
        """The metrics of all ranks as one."""
        total = cls()
        for part in parts:
            total.add(part.sums, part.maxima)  # type: ignore[arg-type]
        return total


# (micro-batch, logprobs [B, T], entropies [B, T]) -> (loss summed over tokens, sums, maxima)
LossFunction = Callable[[MicroBatch, Tensor, Tensor], tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]]


@dataclass(frozen=True)
class Update:
    """What an optimizer update did. `metrics` are this rank's own."""

    grad_norm: float
    learning_rate: float
    metrics: Metrics


class ModelEngine:
    """One policy on all ranks. With `optimizer=None` its weights are frozen (a reference model).

    All methods are collectives of all ranks. A batch is the same list of sequences on every rank.
    """

    def __init__(
        self,
        model: Model,
        shape: ModelShape,
        layout: Layout,
        *,
        device: torch.device,
        seed: int,
        micro_sequences: int,
        temperature: float = 1.0,
        optimizer: Optimizer | None = None,
        updates: int = 0,
        deadline_s: float = 1800.0,
    ) -> None:
        """Build the model and load its weights. `updates` is the length of the learning rate's schedule."""
        if not parallel_state.is_initialized():
            init_model_parallel(layout, device, seed, deadline_s)
        self._source, self._shape, self._device = model.path, shape, device
        self._micro_sequences, self._temperature = micro_sequences, temperature
        config = transformer_config(shape, layout, getattr(torch, model.dtype), device)
        network = build_model(config, shape, layout).to(device)
        self.weights = ModelWeights(network, shape)
        self.weights.load(model.path)
        self._model: Any = network
        self._optimizer_recipe, self._updates = optimizer, updates
        self.update_count = 0
        if optimizer is None:
            network.requires_grad_(False)
        else:
            self._model = add_gradients(network)
            self._optimizer = build_optimizer(optimizer, self._model)
        self._reports = parallel_state.is_pipeline_last_stage() and parallel_state.get_tensor_model_parallel_rank() == 0

    def logprobs(self, sequences: list[TokenSequence]) -> Tensor:
        """Log-probabilities of all response tokens: a flat float32 vector in the order of `sequences`, on all ranks."""
        starts = [0]
        for sequence in sequences:
            starts.append(starts[-1] + sequence.response_length)
        flat = torch.zeros(starts[-1], device=self._device)

        def collect(batch: MicroBatch, logprobs: Tensor, _: Tensor) -> Tensor:
            for row, index in enumerate(batch.indices):
                if self._reports and starts[index + 1] > starts[index]:
                    flat[starts[index] : starts[index + 1]] = logprobs[row][batch.mask[row] > 0]
            return logprobs.sum() * 0

        # forward_only does not switch autograd off
        with torch.no_grad():
            self._run(self._batches(sequences), lambda *args: (collect(*args), {}), forward_only=True)
        dist.all_reduce(flat)
        return flat.cpu()

    def update(self, sequences: list[TokenSequence], loss: LossFunction, *, normalizer: float) -> Update:
        """One optimizer update on the gradient of the sum of `loss` over all sequences, divided by `normalizer`.

        Raises FloatingPointError: the gradient is not finite.
        """
        assert self._optimizer_recipe is not None, "a frozen model cannot be updated"
        metrics = Metrics()

        def scaled(batch: MicroBatch, logprobs: Tensor, entropies: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            value, sums, maxima = loss(batch, logprobs, entropies)
            if self._reports:
                metrics.add(sums, maxima)
            return value / normalizer, {}

        self._model.zero_grad_buffer()
        self._optimizer.zero_grad()
        self._run(self._batches(sequences), scaled, forward_only=False)
        rate = self.learning_rate
        for group in self._optimizer.param_groups:
            group["lr"] = rate
            # wd_mult is 0 for norms and biases; Megatron leaves it to its own scheduler to apply it
            group["weight_decay"] = self._optimizer_recipe.weight_decay * group["wd_mult"]
        _, grad_norm, _ = self._optimizer.step()
        if not math.isfinite(grad_norm):
            raise FloatingPointError(f"the gradient norm of update {self.update_count + 1} is {grad_norm}")
        self.update_count += 1
        return Update(grad_norm=float(grad_norm), learning_rate=rate, metrics=metrics)

    @property
    def learning_rate(self) -> float:
        """That of the next update: `update_count` says where in the schedule it is."""
        assert self._optimizer_recipe is not None, "a frozen model has no learning rate"
        return learning_rate(self._optimizer_recipe, self.update_count, self._updates)

    def save(self, directory: Path) -> None:
        """Write model and optimizer as a distributed checkpoint that any layout can load."""
        checkpoint.save(directory, self._model, self._optimizer)

    def load(self, directory: Path, update_count: int) -> None:
        """Restore what `save` wrote after `update_count` updates."""
        checkpoint.load(directory, self._model, self._optimizer)
        self.update_count = update_count

    def export_hf(self, target: Path) -> None:
        """Write the weights as a Hugging Face directory; rank 0 writes."""
        buckets = (
            [pair for parameter, parts in bucket for pair in zip(parameter.hf, parts, strict=True)]
            for bucket in self.weights.hf_buckets(_EXPORT_BUCKET_BYTES)
        )
        if dist.get_rank() == 0:
            write_hf(buckets, self._source, target)
        else:
            for _ in buckets:
                pass
        dist.barrier()

    def _batches(self, sequences: list[TokenSequence]) -> list[MicroBatch]:
        parts = partition(
            [len(sequence.input_ids) for sequence in sequences],
            data_rank=parallel_state.get_data_parallel_rank(),
            data_size=parallel_state.get_data_parallel_world_size(),
            most=self._micro_sequences,
        )
        return [collate(sequences, indices, self._device) for indices in parts]

    def _run(self, batches: list[MicroBatch], loss: Callable[..., Any], *, forward_only: bool) -> None:
        """Megatron's schedule over the micro-batches; `loss` gets (micro-batch, logprobs, entropies)."""
        group = parallel_state.get_tensor_model_parallel_group()
        idle = not batches
        batches = batches or [idle_microbatch(self._device)]

        def step(batches: Iterator[MicroBatch], model: Any) -> tuple[Tensor, Callable[[Tensor], Any]]:
            batch = next(batches)
            positions = torch.arange(batch.input_ids.shape[1], device=self._device).expand_as(batch.input_ids)
            logits = model(batch.input_ids, positions, None)

            def finish(logits: Tensor) -> tuple[Tensor, Tensor, dict[str, Any]]:
                logprobs, entropies = token_logprobs(
                    logits, batch.targets, vocab=self._shape.vocab, temperature=self._temperature, group=group
                )
                value, report = (logprobs.sum() * 0, {}) if idle else loss(batch, logprobs, entropies)
                return value, torch.tensor(1, dtype=torch.int, device=self._device), report

            return logits, finish

        get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=iter(batches),
            model=self._model,
            num_microbatches=len(batches),
            seq_length=max(batch.input_ids.shape[1] for batch in batches),
            micro_batch_size=self._micro_sequences,
            forward_only=forward_only,
        )
