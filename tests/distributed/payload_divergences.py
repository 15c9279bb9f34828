"""One rank that learns from the divergence from a reference model, and says how far it is from transformers.

Its argument is a file with a `numerics.Plan`.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
from safetensors.torch import load_file
from torch import Tensor

from megarl.config import Layout, Model, read_model_shape
from megarl.model_engine import Metrics, MicroBatch, ModelEngine, TokenSequence
from megarl.runtime import ControlPlane
from tests.distributed import divergences, numerics
from tests.distributed.payload_numerics import CPU, compare_gradients, engine, run


def main(file: str) -> None:
    run(file, compare)


def compare(directory: Path, layout: Layout, control: ControlPlane, _: Path) -> divergences.Errors:
    reference = msgspec.json.decode((directory / "reference.json").read_bytes(), type=numerics.Reference)
    expected = load_file(directory / "divergences.safetensors")["divergences"]
    shape = read_model_shape(directory / "model")
    model = engine(directory / "model", shape, layout, temperature=divergences.TEMPERATURE)
    other = ModelEngine(  # whose own temperature is another one
        Model(path=directory / "reference"), shape, layout, device=CPU, seed=0, max_tokens_per_rank=96
    )
    rows = zip(numerics.rows(), numerics.token_weights(), strict=True)
    sequences = [TokenSequence(row, 1, {"weight": weights}) for row, weights in rows]
    found, itself, farthest = model.divergences(sequences, other), model.divergences(sequences, model), [0.0]

    def loss(
        batch: MicroBatch, logprobs: Tensor, _: Tensor, divergences: Tensor
    ) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
        if (predicted := batch.mask > 0).any() and not model.update_count:
            difference = (divergences[predicted] - expected[batch.response_index[predicted]]).abs().max()
            farthest.append(float(difference.detach().nan_to_num(1e9)))
        total = (batch.columns["weight"] * (divergences - logprobs)).sum()
        return total, {"loss": total.detach()}, {}

    def step() -> tuple[float, float]:
        update = model.update(sequences, loss, other)
        metrics = Metrics.merge(control.allgather(update.metrics, Metrics, what="loss"))
        return metrics.sums["loss"], update.grad_norm

    first, grad_norm = step()
    gradient, name = compare_gradients(model, directory / "gradients", min(1.0, numerics.CLIP / grad_norm))
    second, _ = step()
    return divergences.Errors(
        in_loss=max(control.allgather(max(farthest), float, what="divergences in the loss")),
        divergences=float((found - expected).abs().max().nan_to_num(1e9)),
        itself=float(itself.abs().max().nan_to_num(1e9)),
        gradient=gradient,
        gradient_name=name,
        grad_norm=abs(grad_norm / reference.grad_norm - 1),
        loss=abs(first / reference.loss - 1),
        next_loss=abs(second / reference.next_loss - 1),
    )
