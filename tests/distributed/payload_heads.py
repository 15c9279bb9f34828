"""One rank that runs critics and reward models at layouts and says how far each is from transformers.

Its argument is a file with a `numerics.Plan` whose families are `heads.CASES`.
"""

from __future__ import annotations

import logging
from pathlib import Path

import msgspec
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megarl.config import Layout, read_model_shape
from megarl.model_engine import Metrics, MicroBatch, ModelEngine, TokenSequence
from megarl.runtime import LOGGER, ControlPlane
from tests.distributed import heads, numerics
from tests.distributed.payload_numerics import compare_gradients, engine, run


def main(file: str) -> None:
    LOGGER.setLevel(logging.INFO)
    LOGGER.addHandler(logging.StreamHandler())
    run(file, compare)


def compare(directory: Path, layout: Layout, control: ControlPlane, out: Path) -> heads.Errors:
    reference = msgspec.json.decode((directory / "reference.json").read_bytes(), type=numerics.Reference)
    expected = load_file(directory / "outputs.safetensors")["outputs"]
    head = heads.CASES[directory.name].head
    shape = read_model_shape(directory / "model", head)
    prompt = [len(row) // 2 if head == "reward" else 1 for row in numerics.rows()]
    sequences = [TokenSequence(*row) for row in zip(numerics.rows(), prompt, heads.columns(head), strict=True)]
    model, farthest = engine(directory / "model", shape, layout), [0.0]
    found = outputs(model, sequences)

    def loss(batch: MicroBatch, values: Tensor) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
        assert values.dtype is torch.float32
        if (predicted := batch.mask > 0).any() and not model.update_count:
            difference = (values[predicted] - expected[batch.response_index[predicted]]).abs().max()
            farthest.append(float(difference.detach().nan_to_num(1e9)))
        total = (batch.columns["weight"] * (values - batch.columns["target"]).square()).sum()
        return total, {"loss": total.detach()}, {}

    def step(model: ModelEngine) -> tuple[float, float]:
        update = model.update(sequences, loss)
        metrics = Metrics.merge(control.allgather(update.metrics, Metrics, what="loss"))
        return metrics.sums["loss"], update.grad_norm

    first, grad_norm = step(model)
    gradient, name = compare_gradients(model, directory / "gradients", min(1.0, numerics.CLIP / grad_norm))
    checkpoint, resumes = directory / "checkpoint", directory.name in heads.RESUMED
    if resumes and layout.tensor == layout.model_ranks == 2:
        if control.rank == 0:
            checkpoint.mkdir()
        control.barrier("checkpoint directory")
        model.save(checkpoint)
    second, _ = step(model)
    model.export_hf(out)
    after = outputs(model, sequences)
    if control.rank == 0:
        save_file({"outputs": after}, out / "outputs.safetensors")
    third = None
    if resumes:
        resumed = engine(directory / "model", shape, layout)
        resumed.load(checkpoint, 1)
        third, _ = step(resumed)
    return heads.Errors(
        in_loss=max(control.allgather(max(farthest), float, what="outputs in the loss")),
        outputs=float((found - expected).abs().max().nan_to_num(1e9)),
        gradient=gradient,
        gradient_name=name,
        grad_norm=abs(grad_norm / reference.grad_norm - 1),
        loss=abs(first / reference.loss - 1),
        next_loss=abs(second / reference.next_loss - 1),
        resumed=None if third is None else abs(third / reference.next_loss - 1),
    )


def outputs(model: ModelEngine, sequences: list[TokenSequence]) -> Tensor:
    return model.scores(sequences) if model._shape.head.name == "reward" else model.values(sequences)
