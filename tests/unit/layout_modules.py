"""Parameters that Megatron's own modules have on each rank, counted on the meta device: a process for test_layout_*.

The argument is a JSON file, {"directory": ..., "heads": [...], "layouts": [...], "world": ranks}; prints a list of
[head, layout, rank, dense parameters, experts' parameters].
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch.testing._internal.distributed.fake_pg import FakeStore

from megarl.config import ExpertBalance, Layout, read_model_shape
from megarl.model_engine.build import build_model, init_model_parallel, transformer_config
from megarl.model_engine.heads import output_head

CPU = torch.device("cpu")


def count(directory: Path, head: str, layout: Layout, rank: int, world: int) -> tuple[int, int]:
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        init_model_parallel(layout, CPU, 0, 60.0)
        shape = read_model_shape(directory, head)  # type: ignore[arg-type]
        config = transformer_config(shape, layout, torch.float32, CPU)
        with torch.device("meta"):
            parts = build_model(config, shape, layout, ExpertBalance(), output_head(shape, 1.0))
        named = [(name, p.numel()) for part in parts for name, p in part.named_parameters()]
        experts = sum(size for name, size in named if ".experts." in name)
        return sum(size for _, size in named) - experts, experts
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def main(file: str) -> None:
    plan = json.loads(Path(file).read_text())
    world = plan["world"]
    found = [
        (directory, head, fields, rank, *count(Path(directory), head, Layout.model_validate(fields), rank, world))
        for directory, head, fields in plan["cases"]
        for rank in range(0, world, world // fields.get("pipeline", 1))
    ]
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
