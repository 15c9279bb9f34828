"""The coordinator process, a child of rank 0: joins engines, rewards and the transfer queue to one coordinator."""

from __future__ import annotations

import asyncio
import json
import socket
import sys
import time
import traceback
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from megarl.config import RewardHead, RlRecipe, read_model_shape
from megarl.data import DataError
from megarl.rewards import RewardPool
from megarl.rollout_engine import (
    Coordinator,
    EngineAddress,
    EngineClient,
    EngineError,
    EngineTimeout,
    Failed,
    ScoreClient,
    frame,
)
from megarl.runtime import child_command, child_environment
from megarl.transfer_queue import JournalError, QueueServer, TransferQueue

TARGET = "megarl.trainer.coordinator:main"
# A dying engine takes its connections along before its rank notices. The rank knows the cause, so it may speak first.
_LET_THE_ENGINE_SPEAK_S = 3.0
_LET_RANK_0_READ_S = 3.0


def main() -> None:
    """Serve rank 0 until its end of the channel closes."""
    config = json.loads(sys.stdin.readline())
    connection = socket.socket(fileno=config["channel_fd"])
    try:
        asyncio.run(_serve(config, connection))
    except Exception as error:
        if isinstance(error, EngineError) and not isinstance(error, EngineTimeout):
            time.sleep(_LET_THE_ENGINE_SPEAK_S)
        known = isinstance(error, EngineError | DataError | JournalError)
        cause = str(error) if known else traceback.format_exc()
        connection.setblocking(True)
        connection.sendall(frame(Failed(cause)))
        time.sleep(_LET_RANK_0_READ_S)  # it ends the job with this cause, and us
        raise


async def _serve(config: dict[str, Any], connection: socket.socket) -> None:
    recipe = RlRecipe.model_validate(config["recipe"])
    connection.setblocking(False)
    reader, writer = await asyncio.open_connection(sock=connection)
    async with AsyncExitStack() as stack:
        clients: dict[EngineAddress, EngineClient] = {}
        scorers = {}

        async def connect(address: EngineAddress) -> EngineClient:
            if address not in clients:
                clients[address] = await stack.enter_async_context(EngineClient(address, config["key"]))
            return clients[address]

        for name, given in config["scorers"].items():
            head = read_model_shape(recipe.reward.engines[name].model.path, "reward").head
            assert isinstance(head, RewardHead), "asked for a reward model"
            scorer = ScoreClient(EngineAddress(**given), config["key"], head)
            scorers[name] = await stack.enter_async_context(scorer)
        pool = RewardPool(recipe.reward, child_command("megarl.rewards.worker:main"), child_environment())
        rewards = await stack.enter_async_context(pool)
        queue = TransferQueue(
            recipe.batch.prompts,
            max_lag=recipe.mode.max_lag,
            ask=recipe.most_groups,
            steps=recipe.steps,
            directory=Path(config["journal"]),
            sync=recipe.journal.sync,
        )
        stack.push_async_callback(queue.close)
        options = config["queue"] | {"run_dir": Path(config["queue"]["run_dir"])}
        server = await stack.enter_async_context(QueueServer(queue.counters, **options))
        coordinator = Coordinator(
            recipe,
            connect,
            rewards,
            scorers,
            queue,
            server.offer,
            max_positions=config["max_positions"],
            failed_requests=Path(config["failed_requests"]),
        )
        await coordinator.serve(reader, writer)
