"""The model engine of one rank: forward, backward, update, save, load. The trainer's only way to Megatron."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Concatenate

import msgspec
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from megarl.config import ExpertBalance, HeadName, Layout, Model, ModelShape, Optimizer
from megarl.data import plan_microbatches
from megarl.model_engine import checkpoint
from megarl.model_engine.build import (
    add_gradients,
    build_model,
    build_optimizer,
    check_model_parallel,
    init_model_parallel,
    learning_rate,
    transformer_config,
)
from megarl.model_engine.export import HfExport
from megarl.model_engine.flops import training_flops
from megarl.model_engine.heads import LogprobHead, output_head
from megarl.model_engine.microbatch import Alignment, MicroBatch, TokenSequence, check_sequences, collate, inputs, load
from megarl.model_engine.offload import PARTS, Moved, Offloader, Part
from megarl.model_engine.routing import check_choices
from megarl.model_engine.weights import ModelWeights


@dataclass
class Metrics:
    """Sums and maxima over the tokens that a rank has seen; empty on ranks that see no loss."""

    sums: dict[str, float] = field(default_factory=dict)
    maxima: dict[str, float] = field(default_factory=dict)

    def add(self, sums: dict[str, Tensor], maxima: dict[str, Tensor]) -> None:
        for name, value in sums.items():
            self.sums[name] = self.sums.get(name, 0.0) + float(value)
        for name, value in maxima.items():
            before, new = self.maxima.get(name, -math.inf), float(value)
            self.maxima[name] = before if math.isnan(before) or new <= before else new  # NaN stays

    @classmethod
    def merge(cls, parts: list[Metrics]) -> Metrics:
        """The metrics of all ranks as one."""
        total = cls()
        for part in parts:
            total.add(part.sums, part.maxima)  # type: ignore[arg-type]
        return total

    @classmethod
    def gathered(cls, parts: list[Metrics], device: torch.device) -> Metrics:
        """`parts` and those of the other ranks that train, as one; a collective of them."""
        mine = torch.tensor(list(msgspec.msgpack.encode(cls.merge(parts))), dtype=torch.uint8, device=device)
        sizes = [torch.empty((), dtype=torch.int64, device=device) for _ in range(dist.get_world_size())]
        dist.all_gather(sizes, torch.tensor(len(mine), device=device))
        lengths = [int(size) for size in sizes]
        padded = [torch.empty(max(lengths), dtype=torch.uint8, device=device) for _ in lengths]
        dist.all_gather(padded, torch.nn.functional.pad(mine, (0, max(lengths) - len(mine))))
        found = (bytes(one[:length].tolist()) for one, length in zip(padded, lengths, strict=True))
        return cls.merge([msgspec.msgpack.decode(one, type=cls) for one in found])


# (micro-batch, what the model's head gives) -> (loss summed over this rank's tokens, sums, maxima)
# A policy's head gives logprobs [T] and entropies [T], and divergences [T] if there is a reference; a critic's or a
# reward model's values [T].
LossFunction = Callable[Concatenate[MicroBatch, ...], tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]]


@dataclass(frozen=True)
class Update:
    """What an optimizer update did. `metrics` are this rank's own."""

    grad_norm: float
    learning_rate: float
    metrics: Metrics


class ModelEngine:
    """One model on all ranks: a policy, a critic or a reward model, as `shape.head` says.

    With `optimizer=None` its weights are frozen (a reference model).

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
        max_tokens_per_rank: int,
        temperature: float = 1.0,
        optimizer: Optimizer | None = None,
        balance: ExpertBalance = ExpertBalance(),  # noqa: B008 (it is frozen)
        updates: int = 0,
        deadline_s: float = 1800.0,
    ) -> None:
        """Build the model and load its weights. `updates` is the length of the learning rate's schedule."""
        if parallel_state.is_initialized():
            check_model_parallel(layout)
        else:
            init_model_parallel(layout, device, seed, deadline_s)
        self._source, self._shape, self._layout, self._device = model.path, shape, layout, device
        self._max_tokens, self._head = max_tokens_per_rank, output_head(shape, temperature)
        self._alignment = Alignment(
            context=layout.context, context_rank=parallel_state.get_context_parallel_rank(), tensor=layout.tensor
        )
        config = transformer_config(shape, layout, getattr(torch, model.dtype), device)
        parts = [part.to(device) for part in build_model(config, shape, layout, balance, self._head)]
        self._weights = ModelWeights(parts, shape, layout)
        self._weights.load(model.path)
        self._model: list[Any] = parts
        self._optimizer_recipe, self._updates = optimizer, updates
        self.update_count = 0
        if optimizer is None:
            for part in parts:
                part.requires_grad_(False)
            self._offloader = Offloader(parts, [], [], device)
        else:
            self._model = add_gradients(parts, layout)
            self._optimizer = build_optimizer(optimizer, self._model)
            self._offloader = Offloader(parts, self._model, self._optimizer.chained_optimizers, device)
        self._reports = parallel_state.is_pipeline_last_stage() and parallel_state.get_tensor_model_parallel_rank() == 0

    @property
    def weights(self) -> ModelWeights:
        """The weights after the last update, which `layout.overlap` would else leave to the next forward pass."""
        self._offloader.require("weights", "parameters")
        self._gather_parameters()
        return self._weights

    def logprobs(self, sequences: list[TokenSequence]) -> Tensor:
        """Log-probabilities of all response tokens: a flat float32 vector in the order of `sequences`, on all ranks."""
        return self._forward("policy", sequences)

    def divergences(self, sequences: list[TokenSequence], reference: ModelEngine) -> Tensor:
        """A policy's exact divergence (nats) from a `reference` before each response token, in the form of `logprobs`.

        It is KL(policy || reference) over the vocabulary, of both at the policy's temperature.
        """
        return self._forward("policy", sequences, reference)

    def values(self, sequences: list[TokenSequence]) -> Tensor:
        """A critic's values before each response token, in the form of `logprobs`."""
        return self._forward("critic", sequences)

    def scores(self, sequences: list[TokenSequence]) -> Tensor:
        """A reward model's score of each whole sequence, without the padding at its end; float32, on all ranks."""
        return self._forward("reward", sequences)

    def _forward(self, head: HeadName, sequences: list[TokenSequence], reference: ModelEngine | None = None) -> Tensor:
        """What the head gives first, or the divergences, of all response tokens of the sequences that are fed."""
        assert self._shape.head.name == head, f"a {self._shape.head.name} model is asked for what a {head} model gives"
        self._offloader.require("a forward pass", "parameters")
        # columns are for losses, and those of a policy do not fit what a reward model is fed
        sequences = self._head.fed([replace(sequence, columns={}, fetched=()) for sequence in sequences])
        flat = torch.zeros(sum(sequence.response_length for sequence in sequences), device=self._device)

        def collect(batch: MicroBatch, *outputs: Tensor) -> tuple[Tensor, dict[str, Any]]:
            output = outputs[0 if reference is None else -1]
            if self._reports:
                predicted = batch.mask > 0
                flat[batch.response_index[predicted]] = output[predicted]
            return output.sum() * 0, {}

        # forward_only does not switch autograd off
        with torch.no_grad():
            self._run(sequences, collect, reference, forward_only=True)
        dist.all_reduce(flat)
        return flat.cpu()

    def update(
        self, sequences: list[TokenSequence], loss: LossFunction, reference: ModelEngine | None = None
    ) -> Update:
        """One optimizer update on the gradient of the sum of `loss` over all sequences.

        With a `reference` a policy's loss is also given the divergences [T] from it, as those of `divergences`.
        A reward model's sequences count as one response token each: so many values have their columns.

        Raises FloatingPointError: the gradient is not finite.
        """
        assert self._optimizer_recipe is not None, "a frozen model cannot be updated"
        self._offloader.require("update", *PARTS)
        for part in self._model:
            part.zero_grad_buffer()
        self._optimizer.zero_grad()
        metrics = self._measure(sequences, loss, reference, forward_only=False)
        rate = self.learning_rate
        for group in self._optimizer.param_groups:
            group["lr"] = rate
            # wd_mult is 0 for norms and biases; Megatron leaves it to its own scheduler to apply it
            group["weight_decay"] = self._optimizer_recipe.weight_decay * group["wd_mult"]
        _, grad_norm, _ = self._optimizer.step()
        if not math.isfinite(grad_norm):
            raise FloatingPointError(
                f"the gradient norm of update {self.update_count + 1} is {grad_norm}, expected a finite number: weights"
                " or loss have overflowed; resume with a smaller optimizer.learning_rate, without the newest checkpoint"
                " if it fails again; or in the first update, look for what is not finite in the model's weights"
            )
        self.update_count += 1
        return Update(grad_norm=float(grad_norm), learning_rate=rate, metrics=metrics)

    def observe(self, sequences: list[TokenSequence], loss: LossFunction) -> Metrics:
        """This rank's metrics of `loss` over all sequences, without a gradient."""
        self._offloader.require("a forward pass", "parameters")
        with torch.no_grad():
            return self._measure(sequences, loss, None, forward_only=True)

    def _measure(
        self, sequences: list[TokenSequence], loss: LossFunction, reference: ModelEngine | None, *, forward_only: bool
    ) -> Metrics:
        seen: list[tuple[dict[str, Tensor], dict[str, Tensor]]] = []

        def counted(batch: MicroBatch, *outputs: Tensor) -> tuple[Tensor, dict[str, Any]]:
            value, sums, maxima = loss(batch, *outputs)
            if self._reports:
                seen.append((sums, maxima))
            return value, {}

        self._run(self._head.fed(sequences), counted, reference, forward_only=forward_only)
        metrics = Metrics()
        for sums, maxima in seen:  # not before: reading a value waits for the device
            metrics.add(sums, maxima)
        return metrics

    @property
    def learning_rate(self) -> float:
        """That of the next update: `update_count` says where in the schedule it is."""
        assert self._optimizer_recipe is not None, "a frozen model has no learning rate"
        return learning_rate(self._optimizer_recipe, self.update_count, self._updates)

    def save(self, directory: Path) -> None:
        """Write model and optimizer as a distributed checkpoint that any layout can load."""
        self._offloader.require("save", "parameters", "optimizer")
        self._gather_parameters()
        checkpoint.save(directory, self._model, self._optimizer, self._shape)

    def load(self, directory: Path, update_count: int) -> None:
        """Restore what `save` wrote after `update_count` updates. Raises RecipeError: it is of another model."""
        self._offloader.require("load", "parameters", "optimizer")
        checkpoint.load(directory, self._model, self._optimizer, self._shape)
        self.update_count = update_count

    def start_export(self, target: Path) -> HfExport:
        """Begin to write the weights as a Hugging Face directory; returns when they are copied to host memory."""
        return HfExport(self.weights, self._shape, self._source, target)

    def export_hf(self, target: Path) -> None:
        """Write the weights as a Hugging Face directory."""
        self.start_export(target).wait()

    def offload(self, *parts: Part) -> Moved:
        """Free the device memory of `parts`, or of all, until `onload`; they are kept on the host.

        Gradients are not kept: they come back as zeros. Between an update and the publication of its weights only
        gradients and optimizer can be away, since `weights` are read from the parameters on the device.
        """
        return self._offloader.offload(parts or PARTS)

    def onload(self, *parts: Part) -> Moved:
        """Bring back `parts`, or all. What is there already stays as it is."""
        return self._offloader.onload(parts or PARTS)

    def _gather_parameters(self) -> None:
        """With `layout.overlap` a rank has after an update its own part of the new weights, and old ones else."""
        if self._optimizer_recipe is not None and self._layout.overlap:
            for part in self._model:
                part.start_param_sync(force_sync=True)

    def _microbatches(self, sequences: list[TokenSequence]) -> list[MicroBatch]:
        """This data-parallel rank's; as many on every rank."""
        check_sequences(sequences, self._shape.max_positions)
        given = (sequence.experts for sequence in sequences if sequence.experts is not None)
        check_choices(given, self._shape.experts)
        plan = plan_microbatches(
            [self._alignment.padded(inputs(sequence)) for sequence in sequences],
            max_tokens=self._max_tokens * self._layout.context,
            ranks=parallel_state.get_data_parallel_world_size(),
            cost=lambda length: training_flops(self._shape, length),
        )
        mine = plan[parallel_state.get_data_parallel_rank()]
        sequences = load(sequences, mine, self._shape.vocab)
        # interleaved stages take turns in groups of one micro-batch for each stage
        group = self._layout.pipeline if self._layout.interleave > 1 else 1
        mine += [[]] * (-len(mine) % group)
        return collate(sequences, mine, self._alignment, self._device, equal=self._layout.interleave > 1)

    def _run(
        self,
        sequences: list[TokenSequence],
        loss: Callable[..., Any],
        reference: ModelEngine | None = None,
        *,
        forward_only: bool,
    ) -> None:
        """Megatron's schedule over the micro-batches; `loss` gets each with what the head gives."""
        if reference is not None:
            reference._offloader.require("a forward pass", "parameters")
        batches = self._microbatches(sequences)
        one = torch.tensor(1, dtype=torch.int, device=self._device)

        def step(batches: Iterator[MicroBatch], model: Any) -> tuple[Tensor, Callable[[Tensor], Any]]:
            batch = next(batches)

            def finish(output: Tensor) -> tuple[Tensor, Tensor, dict[str, Any]]:
                outputs = self._head.outputs(model, output, batch)
                if reference is not None:
                    outputs = *outputs, self._divergences(model, output, reference, batch)
                value, report = loss(batch, *outputs)
                return value, one, report

            return _output(model, batch), finish

        get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=[iter(batches) for _ in self._model],
            model=self._model,
            num_microbatches=len(batches),
            seq_length=len(batches[0].input_ids) * self._layout.context,
            micro_batch_size=1,
            forward_only=forward_only,
        )

    def _divergences(self, model: Any, output: Tensor, reference: ModelEngine, batch: MicroBatch) -> Tensor:
        """The reference reads the micro-batch here, so that its hidden states need not be kept until then."""
        assert isinstance(self._head, LogprobHead), "only policies have divergences"
        (other,) = reference._model  # whole: with pipeline stages, no rank has both what it reads and what it gives
        with torch.no_grad():
            other_output = _output(other, batch)
        return self._head.divergences(model, output, other, other_output)


def _output(model: Any, batch: MicroBatch) -> Tensor:
    """What the output layer gives, or on earlier pipeline stages the last layer."""
    return model(batch.input_ids[None], batch.packing.positions[None], None, packed_seq_params=batch.packing)
