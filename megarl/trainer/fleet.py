"""The SGLang engines of a job: started, given each version of the weights, replaced if one fails to take it."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch

from megarl.checkpoint_engine import Engines, PlanError, Precision, Publisher, Training, clear_score_bias
from megarl.config import DiskPublish, Model, ModelShape, RecipeError, RlRecipe, Serving, engine_leaders, scorer_leaders
from megarl.rollout_engine import ENGINE_SHARE, Engine, EngineAddress, EngineError
from megarl.runtime import LOGGER, node_address
from megarl.trainer.job import Job
from megarl.weights import BLOCK

if TYPE_CHECKING:
    from megarl.model_engine import ModelEngine


_POLL_S = 0.5


class Fleet:
    """On each rank: the engines that it leads, and its part in what concerns all."""

    def __init__(self, job: Job, recipe: RlRecipe, key: str) -> None:
        """Start the engines that this rank leads: one for rollouts, and those of reward models, by source.

        They become healthy while the models are built.
        """
        self._job, self._recipe, self._key = job, recipe, key
        rank, world, size = job.info.rank, job.info.world, recipe.rollout.tensor_parallel
        leaders, sources = engine_leaders(world, size), recipe.reward.engines
        self._number = leaders.index(rank) if rank in leaders else None
        ranks = tuple(tuple(range(leader, leader + size)) for leader in leaders)
        self._publisher = self._make_publisher(Engines(ranks, recipe.rollout.expert_parallel))
        self.engine = self._start_mine()
        mine = {name: sources[name] for name, leader in scorer_leaders(world, sources).items() if leader == rank}
        self.scorers = {name: self._start(f"reward engine {name}", s.model, s, recipe.seed) for name, s in mine.items()}

    def addresses(self) -> list[EngineAddress]:
        """Those of the rollout engines, on every rank."""
        mine = [self.engine.address] if self.engine else []
        parts = self._job.control.allgather(mine, list[EngineAddress], what="engine addresses")
        return [address for part in parts for address in part]

    def scorer_addresses(self) -> dict[str, EngineAddress]:
        """Those of the reward models' engines, by source, on every rank."""
        mine = {name: scorer.address for name, scorer in self.scorers.items()}
        parts = self._job.control.allgather(mine, dict[str, EngineAddress], what="addresses of reward engines")
        return {name: address for part in parts for name, address in part.items()}

    def wait_healthy(self) -> None:
        """Return when all engines are."""
        waited = [one.wait_healthy() for one in ([self.engine] if self.engine else []) + list(self.scorers.values())]
        for name, scorer in self.scorers.items():
            dtype = getattr(torch, self._recipe.reward.engines[name].model.dtype)
            clear_score_bias(scorer, dtype, self._job.device.type)
        parts = self._job.control.allgather(waited, list[float], what="start of the engines")
        started = [seconds for part in parts for seconds in part]
        LOGGER.info("%d engines are healthy, the last after %.0f s", len(started), max(started))

    def publish(self, model: ModelEngine, version: int) -> dict[str, float]:
        """Give all engines the model's weights as `version`; a collective of all ranks. Returns what is logged.

        An engine that fails is replaced by a new one, which gets that version before it serves. Raises EngineError:
        one still fails after as many rounds as `rollout.restarts` allows.
        """
        directory = None
        if isinstance(self._recipe.publish, DiskPublish):
            directory = self._job.run.path / f"version_{version}"
            model.export_hf(directory)
        mine = nullcontext() if self._number is None else self._job.guard.tolerating(f"engine {self._number}")
        try:
            with mine:
                return self._publish(model, version, directory)
        finally:
            if directory is not None and self._job.control.rank == 0:
                shutil.rmtree(directory)

    def _publish(self, model: ModelEngine, version: int, directory: Path | None) -> dict[str, float]:
        nbytes = planned = restarts = replaced = 0
        wanted = None
        while True:
            found = self._publisher.publish(version, model.weights, self.engine, directory=directory, only=wanted)
            nbytes, planned = nbytes + found.nbytes, planned + found.planned
            if not found.failed:
                sent = {"publish/gb": nbytes / 1e9, "publish/sent_fraction": nbytes / planned}
                return sent | {"publish/engines_replaced": float(replaced)}
            wanted, failed = list(found.failed), found.failed
            while failed:
                self._report(failed, restarts)
                restarts, replaced = restarts + 1, replaced + len(failed)
                failed = self._replace(failed)

    def _report(self, failed: Mapping[int, str], restarts: int) -> None:
        for number, error in failed.items():
            LOGGER.warning("engine %d did not take new weights, and is started anew: %s", number, error)
        if restarts == self._recipe.rollout.restarts:
            number, error = next(iter(failed.items()))
            raise EngineError(
                f"engine {number} fails after {restarts} rounds of new engines (rollout.restarts): {error}"
            )

    def _replace(self, failed: Mapping[int, str]) -> dict[int, str]:
        """New engines for those that failed; returns which of the new ones did not start, and why."""
        starting = None
        if self.engine is not None and self._number in failed:
            self._job.guard.stop(self.engine.child)
            self.engine = starting = self._start_mine()
        while True:
            # asked again and again, since a start may take longer than a rank waits for another
            states = self._job.control.allgather(_state(starting), tuple[bool, str], what="start of new engines")
            if all(done for done, _ in states):
                size = self._recipe.rollout.tensor_parallel
                return {rank // size: error for rank, (_, error) in enumerate(states) if error}
            time.sleep(_POLL_S)

    def _make_publisher(self, engines: Engines) -> Publisher:
        job, recipe = self._job, self._recipe
        if recipe.rollout.fp8 and job.device.type == "cpu":
            raise RecipeError("rollout.fp8: SGLang computes in FP8 on GPUs only, and this rank has none; leave it out")
        try:
            return Publisher(
                recipe.publish,
                job.shape,
                Training(recipe.layout, job.info.world),
                engines,
                job.control,
                precision=Precision(getattr(torch, recipe.engine_dtype), recipe.rollout.fp8),
                device=job.device,
                ranks_per_node=job.info.ranks_per_node,
                timeout_s=recipe.runtime.deadline_s,
            )
        except PlanError as error:
            raise RecipeError(f"layout and rollout: no plan for new weights: {error}") from None

    def _start_mine(self) -> Engine | None:
        recipe = self._recipe
        if self._number is None:
            return None
        model = recipe.model.model_copy(update={"dtype": recipe.engine_dtype})
        arguments = _arguments(recipe, self._job.shape, self._job.device.type)
        return self._start(f"engine {self._number}", model, recipe.rollout, recipe.seed + self._number, arguments)

    def _start(
        self, name: str, model: Model, serving: Serving, seed: int, arguments: Mapping[str, Any] = MappingProxyType({})
    ) -> Engine:
        job = self._job
        return Engine(
            model,
            serving,
            name=name,
            host=node_address(job.hosts),
            key=self._key,
            device=job.device.type,
            seed=seed,
            log=job.run.logs / f"{name.replace(' ', '_')}.log",
            guard=job.guard,
            arguments=arguments,
            answer_timeout_s=self._recipe.runtime.deadline_s * ENGINE_SHARE,
        )


def _state(starting: Engine | None) -> tuple[bool, str]:
    """Whether there is nothing more to wait for, and what went wrong."""
    try:
        return starting is None or starting.is_healthy(), ""
    except EngineError as error:
        return True, str(error)


def _arguments(recipe: RlRecipe, shape: ModelShape, device: str) -> dict[str, Any]:
    """Those of SGLang with which engines keep weights where the weight table says."""
    arguments: dict[str, Any] = {}
    if shape.experts is not None:
        arguments["disable_shared_experts_fusion"] = True
        if device != "cpu":
            arguments["moe_runner_backend"] = "triton"
    if recipe.rollout.fp8:
        # its weights on disk are not FP8, and the first version is sent before anything is asked
        arguments["load_format"] = "dummy"
        arguments["json_model_override_args"] = json.dumps({"quantization_config": _FP8})
        arguments["fp8_gemm_runner_backend"] = "triton"  # others may keep scales in an order of their own
    return arguments


_FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]}
