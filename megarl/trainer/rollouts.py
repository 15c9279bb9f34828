"""Rollouts as every rank sees them: weights go out, groups come in; engines that fail meanwhile are started anew."""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from megarl.config import RlRecipe
from megarl.observe import EVALUATIONS_FILE
from megarl.rollout_engine import (
    COORDINATOR_SHARE,
    CoordinatorHandle,
    Drain,
    Drained,
    Evaluate,
    Evaluation,
    Look,
    Lost,
    Take,
    Taken,
    Waiting,
)
from megarl.runtime import LOGGER, node_address
from megarl.trainer.coordinator import TARGET
from megarl.trainer.fleet import Fleet
from megarl.trainer.job import Job
from megarl.transfer_queue import Delivery, Keys, QueueClient
from megarl.types import WeightVersion

if TYPE_CHECKING:
    from megarl.model_engine import ModelEngine

_LOOK_S = 0.5  # after engines that are starting
_LOOKS_PER_DEADLINE = 8  # else, so that no rank waits in vain for one that waits for a long rollout


class Rollouts:
    """All calls are collectives of all ranks. Rank 0 has the coordinator, and speaks for it."""

    def __init__(self, job: Job, recipe: RlRecipe, key: str) -> None:
        """Start the engines and the coordinator; they become ready while models are built. `key` is the job's."""
        self._job, self._recipe = job, recipe
        self._fleet = Fleet(job, recipe, key)
        scorers = self._fleet.scorer_addresses()
        keys = job.control.broadcast(Keys.new() if job.control.rank == 0 else None, Keys, what="keys of the queue")
        self._queue = QueueClient(keys, deadline_s=recipe.runtime.deadline_s * COORDINATOR_SHARE)
        self._coordinator: CoordinatorHandle | None = None
        if job.control.rank == 0:
            self._coordinator = CoordinatorHandle(
                TARGET,
                recipe,
                scorers,
                key,
                queue={"host": node_address(job.hosts), "client_key": keys.public, "run_dir": str(job.run.path)},
                max_positions=job.shape.max_positions,
                guard=job.guard,
                log=job.run.logs / "coordinator.log",
                failed_requests=job.run.path / "failed_requests.jsonl",
                journal=journal_directory(job, recipe),
            )

    def wait_healthy(self) -> None:
        """Return when all engines are."""
        self._fleet.wait_healthy()

    def publish(self, model: ModelEngine | None, version: WeightVersion) -> dict[str, float]:
        """From now on the engines answer with the present weights of the model, which ranks that train have.

        Returns what is logged.
        """
        # an engine that fails from now on is started anew with the new weights
        self._model, self._version = model, version
        mode, began = self._recipe.mode, time.monotonic()
        if mode.max_lag and not mode.interrupt:
            self._wait(Drain, what=f"end of the rollouts before version {version}")
        waited_s = time.monotonic() - began
        moved = self._fleet.publish(model, version, self._lost()) | {"publish/wait_s": waited_s}
        self._serve(published=version)
        if self._coordinator is not None and not self._recipe.takes_turns:
            self._coordinator.generate()
        return moved

    def take(self, step: int) -> tuple[Delivery, dict[str, Any]]:
        """Generate and wait for the groups of `step`; and rank 0's counts."""
        if self._coordinator is not None:
            self._coordinator.generate()
        taken = self._wait(lambda wait_s: Take(step, wait_s), what=f"groups of step {step + 1}")
        assert isinstance(taken, Taken)
        counts = {"prompts_asked": taken.asked} if taken.asked > len(taken.offer.groups) else {}
        counts |= {"reward_timeouts": taken.reward_timeouts, "reward_crashes": taken.reward_crashes}
        return Delivery(taken.offer, self._queue), counts | taken.metrics | taken.offer.metrics

    def saved(self, step: int) -> None:
        """A checkpoint has `step` finished steps: their rollouts need not be kept any more."""
        if self._coordinator is not None:
            self._coordinator.saved(step)

    def evaluate(self, step: int) -> None:
        """Accuracy on the held-out problems after `step` steps, written to the run directory by rank 0."""
        if not self._recipe.evaluation.problems:
            return
        found = self._wait(Evaluate, what="evaluation")
        assert isinstance(found, Evaluation)
        if self._coordinator is not None:
            row = {"step": step} | {name: value for name, value in msgspec.to_builtins(found).items() if name != "type"}
            with (self._job.run.path / EVALUATIONS_FILE).open("a") as file:
                file.write(json.dumps(row) + "\n")
            accuracy = (found.accuracy, found.accuracy_greedy)
            LOGGER.info("after step %d: accuracy %.3f at temperature 1, %.3f greedy", step, *accuracy)

    def _wait(self, request: Any, *, what: str) -> Taken | Drained | Evaluation:
        """Ask until the answer is there, and look after the engines meanwhile."""
        deadline_s = self._recipe.runtime.deadline_s
        while True:
            reply = None
            if self._coordinator is not None:
                wait_s = deadline_s / _LOOKS_PER_DEADLINE if self._fleet.complete else _LOOK_S
                reply = self._coordinator.ask(request(wait_s))
            kind: Any = Taken | Drained | Evaluation | Waiting
            reply = self._job.control.broadcast(reply, kind, what=what)
            if not isinstance(reply, Waiting):
                return reply
            if self._fleet.tend(self._model, self._version, reply.lost):
                self._serve(published=None)

    def _lost(self) -> list[Lost]:
        """Engines that were lost since the last wait."""
        lost: list[Lost] = []
        if self._coordinator is not None:
            reply = self._coordinator.ask(Look())
            assert isinstance(reply, Waiting)
            lost = reply.lost
        return self._job.control.broadcast(lost, list[Lost], what="engines that were lost")

    def _serve(self, *, published: WeightVersion | None) -> None:
        if self._coordinator is not None:
            self._coordinator.serve(self._fleet.serving, published=published)


def journal_directory(job: Job, recipe: RlRecipe) -> Path:
    """Where the journal lies. One that is not resumed, or of groups that the recipe would not make, is removed.

    They would be of rows that meant other prompts, lack scores, be sampled otherwise, or be due at other steps.
    """
    batch = recipe.batch.model_dump(mode="json", exclude={"max_tokens_per_rank"})
    made_by = [
        str(recipe.data.train),
        batch,
        recipe.reward.model_dump(mode="json"),
        recipe.algorithm.advantage.type == "remax",
        recipe.rollout.temperature,
        recipe.mode.max_lag,
    ]
    root = job.run.path / "journal"
    path = root / hashlib.sha256(json.dumps(made_by, sort_keys=True).encode()).hexdigest()[:8]
    for old in root.glob("*/"):
        if old != path or not job.resume:
            LOGGER.info("%s is of another start and is removed", old)
            shutil.rmtree(old)
    return path
