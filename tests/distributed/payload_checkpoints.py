"""One rank that saves each family at one layout after an update and goes on with it at another.

Its argument is a file with a JSON list of [directory of a model, layout, other layout]; what was seen is written beside
it.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import msgspec
import torch.distributed as dist
from megatron.core import parallel_state

from megarl.config import HeadName, Layout, RecipeError, read_model_shape
from megarl.model_engine import Metrics, ModelEngine, TokenSequence
from megarl.runtime import ControlPlane, connect, init_process_groups, rank_info
from tests.distributed import numerics
from tests.distributed.payload_numerics import CPU, DEADLINE_S, engine
from tests.distributed.payload_partition import loss

UPDATES = 2  # after the checkpoint
# a model, its head, a model whose checkpoint is not its own, and what is said
OTHERS: list[tuple[str, HeadName, str, str]] = [
    ("fewer_layers", "policy", "glm4_moe", "layers 4 instead of 2"),
    ("smaller_vocabulary", "policy", "qwen2", "vocab 101 instead of 90"),
    ("qwen2", "reward", "qwen2", "head 'policy' instead of 'reward'"),
    ("qwen2", "critic", "qwen2", "head 'policy' instead of 'critic'"),
    ("mixtral", "policy", "gpt_oss", "family 'gpt_oss' instead of 'mixtral'"),
    ("qwen2", "policy", "damaged", "it is damaged: remove it and resume from an older one"),
]


def main(file: str) -> None:
    plan = Path(file)
    control = connect(rank_info(), DEADLINE_S)
    init_process_groups(control, CPU, one_node=True, deadline_s=DEADLINE_S)
    seen = [follow(Path(model), *layouts, control) for model, *layouts in msgspec.json.decode(plan.read_bytes())]
    if control.rank == 0:
        damage(plan.parent / "qwen2/checkpoint", plan.parent / "damaged/checkpoint")
    control.barrier("damaged checkpoint")
    mine = [refusal(plan.parent / name, head, plan.parent / saved / "checkpoint") for name, head, saved, _ in OTHERS]
    refused = control.allgather(mine, list[str], what="refusals")
    if control.rank == 0:
        plan.with_suffix(".seen").write_bytes(msgspec.json.encode((seen, refused)))
    dist.destroy_process_group()
    control.close()


def follow(
    path: Path, saved: dict[str, Any], loaded: dict[str, Any], control: ControlPlane
) -> tuple[list[tuple[float, float]], list[tuple[float, float]]]:
    """(loss, gradient norm) of the updates after the checkpoint, of the run that wrote it and of the one that read."""
    model = build(path, saved)
    update(model, control)
    checkpoint = path / "checkpoint"
    if control.rank == 0:
        checkpoint.mkdir()
    control.barrier("checkpoint directory")
    model.save(checkpoint)
    went_on = [update(model, control) for _ in range(UPDATES)]
    parallel_state.destroy_model_parallel()
    other = build(path, loaded)
    other.load(checkpoint, 1)
    resumed = [update(other, control) for _ in range(UPDATES)]
    parallel_state.destroy_model_parallel()
    return went_on, resumed


def damage(checkpoint: Path, copy: Path) -> None:
    """Files of the same sizes, in which something else is."""
    shutil.copytree(checkpoint, copy)
    for file in copy.glob("*.distcp"):
        file.write_bytes(bytes(file.stat().st_size))


def refusal(path: Path, head: HeadName, checkpoint: Path) -> str:
    """What is said of the checkpoint of another model."""
    model = build(path, {}, head)
    try:
        model.load(checkpoint, 1)
    except RecipeError as error:
        return str(error)
    return ""


def build(path: Path, layout: dict[str, Any], head: HeadName = "policy") -> ModelEngine:
    return engine(path, read_model_shape(path, head), Layout.model_validate(layout))


def update(model: ModelEngine, control: ControlPlane) -> tuple[float, float]:
    batch = [
        TokenSequence(row, 1, {"weight": weights})
        for row, weights in zip(numerics.rows(), numerics.token_weights(), strict=True)
    ]
    done = model.update(batch, loss)
    total = Metrics.merge(control.allgather(done.metrics, Metrics, what="loss"))
    return total.sums["loss"], done.grad_norm
