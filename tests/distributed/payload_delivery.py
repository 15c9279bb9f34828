"""One rank that trains on a step twice: with all groups whole, as a list, and with what it fetches from a queue.

Its argument is a file with a `delivery.Plan`.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from megarl.config import Layout, Model, Optimizer, RlRecipe, load_recipe, read_model_shape
from megarl.model_engine import Metrics, ModelEngine, TokenSequence
from megarl.runtime import ControlPlane, connect, init_process_groups, rank_info
from megarl.trainer.rollout_batch import Models, RolloutBatch
from megarl.transfer_queue import Counters, Delivery, Keys, QueueClient, QueueServer
from megarl.types import Offer
from tests.distributed import delivery

DEADLINE_S = 240.0
CPU = torch.device("cpu")


def main(file: str) -> None:
    plan = delivery.Plan.read(Path(file))
    control = connect(rank_info(), DEADLINE_S)
    init_process_groups(control, CPU, one_node=True, deadline_s=DEADLINE_S)
    recipe = load_recipe(plan.recipe, [])
    assert isinstance(recipe, RlRecipe)
    keys = control.broadcast(Keys.new() if control.rank == 0 else None, Keys, what="keys")
    with offered(control, keys, plan.out.parent) as offer:
        found = {
            name: compare(plan, recipe, Layout.model_validate(fields), control, offer, keys)
            for name, fields in plan.layouts.items()
        }
        if control.rank == 0:
            plan.out.write_bytes(msgspec.json.encode(found))
        control.barrier("all have fetched")
    dist.destroy_process_group()
    control.close()


@contextmanager
def offered(control: ControlPlane, keys: Keys, run_dir: Path) -> Iterator[Offer]:
    """The step as rank 0's queue offers it."""
    loop = asyncio.new_event_loop()

    async def start() -> tuple[QueueServer, Offer]:
        server = QueueServer(Counters(), host="127.0.0.1", client_key=keys.public, run_dir=run_dir)
        await server.__aenter__()
        return server, await server.offer(0, delivery.groups())

    if control.rank:
        yield control.broadcast(None, Offer, what="offer")
        return
    server, offer = loop.run_until_complete(start())
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    yield control.broadcast(offer, Offer, what="offer")
    asyncio.run_coroutine_threadsafe(server.__aexit__(), loop).result()
    loop.call_soon_threadsafe(loop.stop)
    thread.join()


class Recorded(Delivery):
    """Knows what it was sent."""

    def sent(self) -> dict[str, list[int]]:
        return {field: sorted(arrays) for field, arrays in self._there.items()}


def compare(
    plan: delivery.Plan, recipe: RlRecipe, layout: Layout, control: ControlPlane, offer: Offer, keys: Keys
) -> delivery.Found:
    client = QueueClient(keys, deadline_s=DEADLINE_S)
    delivered = Recorded(offer, client)
    batch = RolloutBatch(delivered, recipe, 0.1)
    found = train(plan, recipe, layout, control, batch)
    sent = control.allgather(delivered.sent(), dict[str, list[int]], what="what was fetched")
    client.close()
    whole = RolloutBatch(Recorded(offer, client), recipe, 0.1)
    trajectories = [(group.prompt, trajectory) for group in delivery.groups() for trajectory in group.trajectories]
    whole.sequences = [
        TokenSequence(
            prompt.input_ids + trajectory.output_ids,
            len(prompt.input_ids),
            sequence.columns | {"engine_logprob": torch.tensor(trajectory.engine_logprobs)},
        )
        for (prompt, trajectory), sequence in zip(trajectories, whole.sequences, strict=True)
    ]
    return delivery.Found(train(plan, recipe, layout, control, whole), found, sent)


def train(
    plan: delivery.Plan, recipe: RlRecipe, layout: Layout, control: ControlPlane, batch: RolloutBatch
) -> list[list[float]]:
    """Scores, log-probabilities before and after, and metrics of the updates."""

    def engine(path: Path, head: Any, optimizer: Optimizer | None = None) -> ModelEngine:
        shape, options = read_model_shape(path, head), {"device": CPU, "seed": 0, "max_tokens_per_rank": 96}
        return ModelEngine(Model(path=path), shape, layout, optimizer=optimizer, updates=10, **options)

    policy, reward = engine(plan.policy, "policy", Optimizer(learning_rate=1e-2)), engine(plan.reward, "reward")
    gap = Metrics.merge(control.allgather(batch.mismatch(policy), Metrics, what="mismatch"))
    batch.score(Models(policy, reference=policy, rewards={"taste": reward}))
    seen = [[gap.sums["tokens"], gap.sums["mismatch"], gap.maxima["mismatch"]], batch.rewards.tolist()]
    for sequences in batch.minibatches():
        update = policy.update(sequences, batch.loss())
        total = Metrics.merge(control.allgather(update.metrics, Metrics, what="metrics"))
        seen.append([update.grad_norm, *total.sums.values(), *total.maxima.values()])
    after: Tensor = policy.logprobs(batch.sequences)
    parallel_state.destroy_model_parallel()
    old: Sequence[Tensor] = [sequence.columns["old_logprob"] for sequence in batch.sequences]
    return [*seen, torch.cat(list(old)).tolist(), after.tolist()]
