"""One rank that saves and exports each family after an update, and loads what the converter made of its first weights.

Its argument is a file with a JSON list of [directory of a model, layout]; what was seen is written beside it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state

from megarl.model_engine import ModelEngine
from megarl.runtime import ControlPlane, connect, init_process_groups, rank_info
from tests.distributed.payload_checkpoints import build, update
from tests.distributed.payload_numerics import CPU, DEADLINE_S


def main(file: str) -> None:
    plan = Path(file)
    control = connect(rank_info(), DEADLINE_S)
    init_process_groups(control, CPU, one_node=True, deadline_s=DEADLINE_S)
    wrong = [follow(Path(model), layout, control) for model, layout in msgspec.json.decode(plan.read_bytes())]
    if control.rank == 0:
        plan.with_suffix(".seen").write_bytes(msgspec.json.encode(wrong))
    dist.destroy_process_group()
    control.close()


def follow(path: Path, layout: dict[str, Any], control: ControlPlane) -> list[str]:
    """The parameters that the converter's checkpoint `path`/megatron does not restore."""
    model = build(path / "hf", layout)
    wrong = control.allgather(not_restored(model, path / "megatron"), list[str], what="parameters")
    update(model, control)
    checkpoint = path / "checkpoint"
    if control.rank == 0:
        checkpoint.mkdir()
    control.barrier("checkpoint directory")
    model.save(checkpoint)
    model.export_hf(path / "exported")
    parallel_state.destroy_model_parallel()
    return [name for names in wrong for name in names]


def not_restored(model: ModelEngine, checkpoint: Path) -> list[str]:
    metadata = {
        "non_homogeneous_layers": True,
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }
    wrong = []
    for part in model._model:
        state = part.module.sharded_state_dict(metadata=metadata)
        state = {key: value for key, value in state.items() if not key.endswith("_extra_state")}
        before = {name: tensor.clone() for name, tensor in part.module.state_dict().items() if torch.is_tensor(tensor)}
        for tensor in part.module.parameters():
            tensor.data.zero_()
        loaded = dist_checkpointing.load(state, str(checkpoint))
        part.module.load_state_dict(loaded, strict=False)
        after = part.module.state_dict()
        wrong += [name for name, tensor in before.items() if not torch.equal(tensor, after[name])]
    return wrong
