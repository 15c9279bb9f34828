"""One rank that takes the loss and the gradient norm of one global batch, cut in many ways.

Its argument is a file with a `partition.Plan`; weights stay as they are.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from megarl.algorithms import token_weights
from megarl.config import Layout, Model, Optimizer, read_model_shape
from megarl.model_engine import Metrics, MicroBatch, ModelEngine, TokenSequence
from megarl.runtime import ControlPlane, connect, init_process_groups, rank_info
from tests.distributed import partition

DEADLINE_S = 240.0
STANDING_STILL = 1e-30  # a learning rate that changes no weight


def main(file: str) -> None:
    plan = partition.Plan.read(Path(file))
    control = connect(rank_info(), DEADLINE_S)
    init_process_groups(control, torch.device("cpu"), one_node=True, deadline_s=DEADLINE_S)
    found = {name: run(plan, Layout.model_validate(fields), control) for name, fields in plan.layouts.items()}
    if control.rank == 0:
        partition.write(plan.out, found)
    dist.destroy_process_group()
    control.close()


def run(plan: partition.Plan, layout: Layout, control: ControlPlane) -> list[partition.Seen]:
    model = ModelEngine(
        Model(path=plan.model),
        read_model_shape(plan.model),
        layout,
        device=torch.device("cpu"),
        seed=0,
        max_tokens_per_rank=1,
        optimizer=Optimizer(learning_rate=STANDING_STILL),
        updates=100,
    )
    seen = []
    for max_tokens in partition.MAX_TOKENS:
        model._max_tokens = max_tokens
        for name, normalizer in partition.NORMALIZERS.items():
            batch = [TokenSequence(ids, prompt) for ids, prompt in partition.rows()]
            lengths = torch.tensor([sequence.response_length for sequence in batch])
            for sequence, weight in zip(batch, token_weights(lengths, normalizer), strict=True):
                sequence.columns["weight"] = weight.expand(sequence.response_length)
            update = model.update(batch, loss)
            total = Metrics.merge(control.allgather(update.metrics, Metrics, what="loss"))
            count = len(model._microbatches(batch))
            seen.append(partition.Seen(name, count, total.sums["loss"], update.grad_norm))
    parallel_state.destroy_model_parallel()
    return seen


def loss(batch: MicroBatch, logprobs: Tensor, _: Tensor) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
    total = -(batch.columns["weight"] * logprobs).sum()
    return total, {"loss": total.detach()}, {}
