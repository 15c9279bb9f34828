"""The SGLang engines of a job: started, given each version of the weights, and started anew when they fail.

Every rank knows which engines are served and which are starting; what it does about them, all do together.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Collection, Iterable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch

from megarl.checkpoint_engine import Engines, PlanError, Precision, Publisher, Training, clear_score_bias
from megarl.config import DiskPublish, Model, ModelShape, RecipeError, RlRecipe, Serving, engine_leaders, scorer_leaders
from megarl.rollout_engine import ENGINE_SHARE, Engine, EngineAddress, EngineError, Lost, Span
from megarl.runtime import LOGGER, hold_port, node_address
from megarl.trainer.job import Job
from megarl.weights import BLOCK

if TYPE_CHECKING:
    from megarl.model_engine import ModelEngine


class Fleet:
    """On each rank: the engines that it leads, and its part in what concerns all."""

    def __init__(self, job: Job, recipe: RlRecipe, key: str) -> None:
        """Start the engines that this rank leads: one for rollouts, and those of reward models, by source.

        They become healthy while the models are built.
        """
        self._job, self._recipe, self._key = job, recipe, key
        rank, size, sources = job.info.rank, recipe.rollout.tensor_parallel, recipe.reward.engines
        rollout = recipe.rollout_ranks(job.info.world)
        leaders = engine_leaders(rollout, size)
        # negative, and no engine's number, on a rank that has none
        self._number, self._place = divmod(rank - rollout.start, size)
        ranks = tuple(tuple(range(leader, leader + size)) for leader in leaders)
        self._publisher = self._make_publisher(Engines(ranks, recipe.rollout.expert_parallel))
        self._part: Engine | None = None
        self._start_engines(range(len(leaders)))
        self.serving: dict[int, EngineAddress] = {}
        """Engines that hold the present version, by number."""
        self._leaders, self._starting = leaders, set[int]()
        self._restarts = 0
        mine = {name: sources[name] for name, leader in scorer_leaders(rollout, sources).items() if leader == rank}
        self.scorers = {name: self._start(f"reward engine {name}", s.model, s, recipe.seed) for name, s in mine.items()}

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

    @property
    def engine(self) -> Engine | None:
        """The one that this rank leads."""
        return self._part if self._place == 0 else None

    @property
    def complete(self) -> bool:
        """Whether no engine is on its way."""
        return not self._starting

    def publish(self, model: ModelEngine | None, version: int, lost: Iterable[Lost]) -> dict[str, float]:
        """Give the weights of `model`, which ranks that train have, as `version` to all engines that are healthy.

        A collective of all ranks. Returns what is logged. Engines that were `lost` while the model trained, and those
        that fail now, are started anew, and get them later, in `tend`.
        """
        self._restarts = 0
        self._replace_lost(lost)
        self.serving = {}
        self._starting -= self._healthy()
        return self._publish(model, version, set(range(len(self._leaders))) - self._starting)

    def tend(self, model: ModelEngine | None, version: int, lost: Iterable[Lost]) -> bool:
        """Start engines anew that were `lost`, and give `version` to those that have become healthy.

        A collective of all ranks. Returns whether `serving` has changed. Raises EngineError: an engine still fails
        after as many rounds as `rollout.restarts` allows.
        """
        before = dict(self.serving)
        self._replace_lost(lost)
        if healthy := self._healthy():
            self._starting -= healthy
            self._publish(model, version, healthy)
            for number in healthy & self.serving.keys():
                LOGGER.info("engine %d serves again", number)
        return self.serving != before

    def _publish(self, model: ModelEngine | None, version: int, wanted: Collection[int]) -> dict[str, float]:
        if not wanted:
            return {}  # all are starting
        directory = None
        if isinstance(self._recipe.publish, DiskPublish):
            directory = self._job.run.path / f"version_{version}"
            if model is not None:
                model.export_hf(directory)
        weights = None if model is None else model.weights
        try:
            found = self._publisher.publish(version, weights, self.engine, directory=directory, only=sorted(wanted))
        finally:
            if directory is not None and self._job.control.rank == 0:
                shutil.rmtree(directory)
        own = (self._number, self.engine.address) if self.engine and self._number in wanted else (None, None)
        told = self._job.control.allgather(own, tuple[int | None, EngineAddress | None], what="engine addresses")
        self.serving |= {number: address for number, address in told if number is not None and address is not None}
        self._replace(found.failed)
        moved = {"publish/gb": found.nbytes / 1e9, "publish/sent_fraction": found.nbytes / max(found.planned, 1)}
        return moved | {"publish/stall_s": found.stall_s, "publish/engines_failed": float(len(found.failed))}

    def _replace_lost(self, lost: Iterable[Lost]) -> None:
        """But not those that were replaced before."""
        self._replace({one.number: one.cause for one in lost if self.serving.get(one.number) == one.address})

    def _replace(self, failed: Mapping[int, str]) -> None:
        """Start these anew, where they are led; what was wrong is said once."""
        if not failed:
            return
        if self._restarts == self._recipe.rollout.restarts:
            number, error = next(iter(failed.items()))
            log = self._job.run.logs / f"engine_{number}.log"
            raise EngineError(
                f"engine {number} failed, and engines were started anew {self._restarts} times in this step, as often"
                f" as rollout.restarts allows: {error}; see {log}"
            )
        for number, error in failed.items():
            LOGGER.warning("engine %d is started anew: %s", number, error)
        self._restarts += 1
        self._starting |= failed.keys()
        for number in failed:
            self.serving.pop(number, None)
        if self._part is not None and self._number in failed:
            self._job.guard.stop(self._part.child)
        self._start_engines(failed)

    def _healthy(self) -> set[int]:
        """Those of the starting engines that have become healthy; the ones that have failed are started again."""
        if not self._starting:
            return set()
        states = self._job.control.allgather(self._state(), tuple[bool, str], what="start of new engines")
        mine = {number: states[self._leaders[number]] for number in self._starting}
        self._replace({number: error for number, (_, error) in mine.items() if error})
        return {number for number, (done, error) in mine.items() if done and not error}

    def _state(self) -> tuple[bool, str]:
        """Whether the engine of this rank has become healthy, if it is starting, and what went wrong."""
        if self.engine is None or self._number not in self._starting:
            return True, ""
        try:
            return self.engine.is_healthy(), ""
        except EngineError as error:
            return True, str(error)

    def _make_publisher(self, engines: Engines) -> Publisher:
        job, recipe = self._job, self._recipe
        if recipe.rollout.fp8 and job.device.type == "cpu":
            raise RecipeError("rollout.fp8: SGLang computes in FP8 on GPUs only, and this rank has none; leave it out")
        try:
            return Publisher(
                recipe.publish,
                job.shape,
                Training(recipe.layout, recipe.train_ranks(job.info.world)),
                engines,
                job.control,
                job.links,
                precision=Precision(getattr(torch, recipe.engine_dtype), recipe.rollout.fp8),
                device=job.device,
                ranks_per_node=job.info.ranks_per_node,
                timeout_s=recipe.runtime.deadline_s,
            )
        except PlanError as error:
            raise RecipeError(f"layout and rollout: no plan for new weights: {error}") from None

    def _start_engines(self, numbers: Collection[int]) -> None:
        """Start these, each on the first of its ranks and, if it spans nodes, on the first of each node."""
        recipe, info = self._recipe, self._job.info
        nodes, span = -(-recipe.rollout.tensor_parallel // info.ranks_per_node), None
        node, others = divmod(self._place, info.ranks_per_node)
        starts = self._number in numbers and not others
        if nodes > 1:
            self._meeting = hold_port(node_address(self._job.hosts))
            mine = "{}:{}".format(*self._meeting.getsockname())
            places = self._job.control.allgather(mine, str, what="where the nodes of engines meet")
            span = Span(nodes, node, places[info.rank - self._place])
        if starts:
            model = recipe.model.model_copy(update={"dtype": recipe.engine_dtype})
            arguments = _arguments(recipe, self._job.shape, self._job.device.type)
            name = f"engine {self._number}" + (f" node {node}" if node else "")
            seed = recipe.seed + self._number
            self._part = self._start(name, model, recipe.rollout, seed, arguments, span)

    def _start(
        self,
        name: str,
        model: Model,
        serving: Serving,
        seed: int,
        arguments: Mapping[str, Any] = MappingProxyType({}),
        span: Span | None = None,
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
            span=span,
            answer_timeout_s=self._recipe.runtime.deadline_s * ENGINE_SHARE,
        )


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
