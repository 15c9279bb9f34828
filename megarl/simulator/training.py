"""A whole run, step after step: engines generate, a trainer takes groups and learns, and new weights go out.

Which prompts are asked and which groups a step takes is decided by the coordinator's own `Admission`. A publication
stops all engines; what is under way loses its cache, is prefilled again, and goes on with the new weights.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from megarl.rollout_engine.scheduler import Scheduler
from megarl.simulator.cluster import Cluster, check_room
from megarl.simulator.engine import Job
from megarl.simulator.speed import EngineModel, Gpu, ServedModel
from megarl.simulator.workload import Workload
from megarl.transfer_queue.admission import Admission

MFU = 0.3
"""Of dense models in bfloat16. Pre-training of Llama 3 405B has 0.38 to 0.43 (arXiv 2407.21783, table 4). Step times
of NeMo RL v0.4, one step off on H100, need at least 0.19 for Llama 3.1 8B and Qwen3-32B, if half of the GPUs train."""
STEP_S = 5.0
"""Assumed for all of a step that does not grow with its tokens: optimizer, rewards of the last group, packing, logs."""
PUBLISH_BYTES_S = 60e9
"""Moonshot's checkpoint-engine broadcasts all weights at 59 to 76 GB/s, on 8 to 256 H800 and H20, 213 to 1,026 GB."""


@dataclass(frozen=True)
class Trainer:
    """What a step costs besides generation, in seconds."""

    token_s: float
    """For each token of prompts and responses that are learned from."""
    step_s: float
    publish_s: float
    takes_turns: bool
    """Trains on the engines' GPUs, while they wait; else on others."""


@dataclass(frozen=True)
class Mode:
    """As in recipes (`mode`): versions that the oldest token may lag behind, and whether responses are interrupted."""

    max_lag: int = 0
    interrupt: bool = False
    ask: int | None = None


@dataclass(frozen=True)
class Steps:
    """What steps after the warm-up did. GPUs are idle when they neither generate nor train, so also in publications."""

    seconds: float
    """Of a step, on average."""
    samples_s: float
    """Trained samples a second."""
    rollout_idle: float
    """Fraction of the engines' time."""
    train_idle: float
    """Fraction of the trainer's; the same as the engines' where these take turns."""
    lag_mean: float
    """Versions by which trained tokens lag behind the step that learns from them, on average over tokens."""
    lag_max: int
    stale: float
    """Fraction of trained tokens that older weights sampled."""
    batch: float
    """Requests that ran in a decode step, on average over the steps of the whole run."""
    again: float
    """Tokens prefilled again for each generated one, in the whole run."""
    rows: list[list[int]] = field(repr=False)
    """The groups that each step took, those of the warm-up included."""


def trainer(model: ServedModel, gpu: Gpu, gpus: int, *, takes_turns: bool, mfu: float = MFU) -> Trainer:
    """6 FLOPs for each token and active parameter (Kaplan et al. 2020), on `gpus` GPUs; attention is left out."""
    return Trainer(
        token_s=6 * model.active / (gpus * gpu.flops_16 * mfu),
        step_s=STEP_S,
        publish_s=model.parameters * model.weight_bytes / PUBLISH_BYTES_S,
        takes_turns=takes_turns,
    )


def simulate_training(
    workload: Workload,
    model: EngineModel,
    engines: int,
    scheduler: Scheduler,
    trains: Trainer,
    mode: Mode,
    *,
    groups_per_step: int,
    warm_up: int,
) -> Steps:
    """The workload's groups are the run's rows; its last `max_lag` steps, with ever less to do, are left out.

    Raises ValueError: no step is left between `warm_up` and those, or a response fits no engine.
    """
    check_room(workload, model)
    steps = len(workload.groups) // groups_per_step
    last = steps - mode.max_lag
    if last <= warm_up:
        raise ValueError(
            f"{len(workload.groups)} groups are {steps} steps, use more: {warm_up} are warm-up, and max_lag "
            f"{mode.max_lag} leaves as many out at the end"
        )
    ask = mode.ask or (mode.max_lag + 1) * groups_per_step
    admission = Admission(groups_per_step, max_lag=mode.max_lag, ask=ask, steps=steps)
    run = _Run(Cluster(model, engines, scheduler, workload.cap, admission.finish), workload, admission, trains, mode)
    run.publish(0)
    for step in range(last):
        if step == warm_up:
            began, generating, training = run.cluster.now, run.generating_s, run.training_s
            run.tokens = run.stale = run.lags = run.lag_max = 0
        run.step(step)
    seconds = run.cluster.now - began
    train_idle = 1 - (run.training_s - training) / seconds
    rollout_idle = 1 - (run.generating_s - generating) / engines / seconds
    if trains.takes_turns:
        rollout_idle = train_idle = rollout_idle + train_idle - 1
    measured = run.rows[warm_up:]
    return Steps(
        seconds=seconds / len(measured),
        samples_s=sum(len(workload.groups[row].lengths) for rows in measured for row in rows) / seconds,
        rollout_idle=rollout_idle,
        train_idle=train_idle,
        lag_mean=run.lags / run.tokens,
        lag_max=run.lag_max,
        stale=run.stale / run.tokens,
        batch=run.generated / sum(engine.steps for engine in run.cluster.engines),
        again=run.prefilled_again / run.generated,
        rows=run.rows,
    )


@dataclass(slots=True)
class _Lag:
    """How old a response's tokens are, told at each publication, when `generated` is what there is of it."""

    job: Job
    stale: int = 0
    sum: int = 0
    most: int = 0

    def published(self) -> None:
        self.stale = self.job.generated
        self.sum += self.stale
        self.most += self.stale > 0


@dataclass
class _Run:
    cluster: Cluster
    workload: Workload
    admission: Admission
    trains: Trainer
    mode: Mode
    training_s: float = 0.0
    tokens: int = 0
    """Trained ones of responses; of these `stale` ones, and the sum and the largest of their lags."""
    stale: int = 0
    lags: int = 0
    lag_max: int = 0
    rows: list[list[int]] = field(default_factory=list)
    _jobs: dict[int, list[_Lag]] = field(default_factory=dict)  # by row

    def step(self, step: int) -> None:
        """As the real loop: take, train, publish."""
        cluster, admission, trains = self.cluster, self.admission, self.trains
        while (rows := admission.take()) is None:
            cluster.next()
        self.rows.append(rows)
        seconds = trains.step_s + trains.token_s * sum(self._learn(row) for row in rows)
        self.training_s += seconds
        if trains.takes_turns:
            cluster.stand_still(seconds + trains.publish_s)
        else:
            cluster.run(cluster.now + seconds)
            while not self.mode.interrupt and len(admission.admitted) > admission.finished:
                cluster.next()
            cluster.stand_still(trains.publish_s)
        self.publish(step + 1)

    def publish(self, version: int) -> None:
        """Engines have the new weights; rows that may be asked now are."""
        for lags in self._jobs.values():
            for lag in lags:
                lag.published()
        self.admission.publish(version)
        for row in self.admission.admit():
            first = len(self.cluster.jobs)
            self.cluster.add(row, self.workload.groups[row])
            self._jobs[row] = [_Lag(job) for job in self.cluster.jobs[first:]]
        self.cluster.dispatch()

    def _learn(self, row: int) -> int:
        """The row's tokens, those of prompts included."""
        lags = self._jobs.pop(row)
        self.tokens += sum(lag.job.length for lag in lags)
        self.stale += sum(lag.stale for lag in lags)
        self.lags += sum(lag.sum for lag in lags)
        self.lag_max = max(self.lag_max, *(lag.most for lag in lags))
        return sum(lag.job.prompt + lag.job.length for lag in lags)

    @property
    def generating_s(self) -> float:
        """Of all engines, up to their last step."""
        return sum(engine.counts.decode_s + engine.counts.prefill_s for engine in self.cluster.engines)

    @property
    def generated(self) -> int:
        return sum(engine.counts.generated for engine in self.cluster.engines)

    @property
    def prefilled_again(self) -> int:
        """All that was prefilled, but each prompt once."""
        prompts = {job.group: job.prompt for job in self.cluster.jobs if job.generated}
        return sum(engine.counts.prefilled for engine in self.cluster.engines) - sum(prompts.values())
