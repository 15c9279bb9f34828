"""One rank that saves each family at one layout after an update and goes on with it at another.

python payload_checkpoints.py PLAN, where PLAN is a JSON list of [directory of a model, layout, other layout]; what was
seen is written beside it.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import msgspec
import torch.distributed as dist
from megatron.core import parallel_state

from megarl.config import Layout, RecipeError, read_model_shape
from megarl.model_engine import Metrics, ModelEngine, TokenSequence
from megarl.runtime import ControlPlane, connect, init_process_group, rank_info
from tests.distributed import numerics
from tests.distributed.payload_numerics import CPU, DEADLINE_S, engine
from tests.distributed.payload_partition import loss

UPDATES = 2  # after the checkpoint


def main() -> None:
    plan = Path(sys.argv[1])
    control = connect(rank_info(), DEADLINE_S)
    init_process_group(control, CPU, one_node=True, deadline_s=DEADLINE_S)
    seen = [follow(Path(model), *layouts, control) for model, *layouts in msgspec.json.decode(plan.read_bytes())]
    refused = all(
        all(control.allgather(refuses(plan.parent / other, plan.parent / "glm4_moe"), bool, what="refusals"))
        for other in ("fewer_layers", "wider")
    )
    if control.rank == 0:
        plan.with_suffix(".seen").write_bytes(msgspec.json.encode((seen, refused)))
    dist.destroy_process_group()
    control.close()
    sys.stdout.flush()
    os._exit(0)


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


def refuses(path: Path, other: Path) -> bool:
    """Whether `path` refuses the checkpoint of a model with other tensors, or with other shapes of them."""
    model = build(path, {})
    try:
        model.load(other / "checkpoint", 1)
    except RecipeError:
        return True
    finally:
        parallel_state.destroy_model_parallel()
    return False


def build(path: Path, layout: dict[str, Any]) -> ModelEngine:
    return engine(path, read_model_shape(path), Layout.model_validate(layout))


def update(model: ModelEngine, control: ControlPlane) -> tuple[float, float]:
    batch = [
        TokenSequence(row, 1, {"weight": weights})
        for row, weights in zip(numerics.rows(), numerics.token_weights(), strict=True)
    ]
    done = model.update(batch, loss)
    total = Metrics.merge(control.allgather(done.metrics, Metrics, what="loss"))
    return total.sums["loss"], done.grad_norm


if __name__ == "__main__":  # checkpoints are written by spawned processes, which import this file
    main()
