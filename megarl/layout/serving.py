"""Rollout engines as a part of a layout: what fits into their share of a GPU, and how long a step's responses take.

Speeds are `megarl.simulator`'s engine model. A synchronous phase is simulated with the scheduler that runs it, on some
of the engines with their part of the groups, as engines know nothing of each other.
"""

from __future__ import annotations

from dataclasses import dataclass

from megarl.config import ModelShape
from megarl.layout.workload import Rollouts
from megarl.rollout_engine.scheduler import POLICIES, Divided
from megarl.simulator import EngineModel, Gpu, Placement, ServedModel, Workload, make_scheduler, roofline, simulate

NOT_WAITING = 0.7
"""Of the groups that are asked ahead, those that no older one holds up: in simulated runs 0.6 to 0.8."""
SIMULATED_REQUESTS = 512
SIMULATED_ENGINES = 8


@dataclass(frozen=True)
class Serving:
    """`count` engines of `tensor` GPUs each; `fraction` of a GPU's memory is for weights and cache."""

    tensor: int
    count: int
    fraction: float
    expert: int = 1


def served_model(shape: ModelShape, weight_bytes: int = 2, value_bytes: int = 2) -> ServedModel:
    """What the model costs to serve, with so many bytes for each weight, and for each number in the cache."""
    latent, experts = shape.latent, shape.experts
    routed = 0
    if experts is not None:
        routed = len(experts.layers) * experts.count * 3 * shape.hidden * experts.ffn
    if latent is None:
        kv_values, kv_heads = 2 * shape.layers * shape.kv_heads * shape.head_dim, shape.kv_heads
        attention = 4 * shape.layers * shape.heads * shape.head_dim
    else:  # decoded with absorbed weights: all heads read one latent vector
        cached = latent.kv_rank + latent.rope
        kv_values, kv_heads = shape.layers * cached, 1
        attention = 2 * shape.layers * shape.heads * (cached + latent.kv_rank)
    return ServedModel(
        float(shape.parameters),
        float(shape.active_parameters),
        shape.layers,
        shape.hidden,
        kv_values,
        kv_heads,
        float(attention),
        weight_bytes=weight_bytes,
        kv_bytes=value_bytes,
        routed=float(routed),
        experts=experts.count if experts else 1,
        experts_per_token=experts.active if experts else 1,
    )


def engine_model(model: ServedModel, gpu: Gpu, serving: Serving) -> EngineModel:
    """Raises ValueError: its weights leave no room for a cache."""
    place = Placement(serving.tensor, memory_fraction=serving.fraction)
    return roofline("engine", model, gpu, place)


def phase_s(rollouts: Rollouts, engine: EngineModel, engines: int) -> float:
    """Seconds from the first request to the last response of a step. Raises ValueError: one fits no engine."""
    groups = rollouts.groups.groups
    size = max(len(group.lengths) for group in groups)
    some = max(1, min(engines, SIMULATED_ENGINES, round(SIMULATED_REQUESTS * engines / (len(groups) * size))))
    part = groups[: max(1, round(len(groups) * some / engines))]
    chunked = issubclass(POLICIES[rollouts.policy], Divided) and rollouts.chunk_tokens is not None
    options = {"chunk_tokens": rollouts.chunk_tokens} if chunked else {}
    scheduler = make_scheduler(rollouts.policy, **options)
    return simulate(Workload(part, rollouts.groups.cap), engine, some, scheduler).makespan


def steady_s(rollouts: Rollouts, engine: EngineModel, engines: int) -> float:
    """Seconds for a step's responses where engines never wait: new groups begin as old ones end.

    Of the responses that are under way, those run that do not wait for the longest of their group, nor their group for
    its turn. One is at half of its length, on average over its time, and long ones run longer. New weights make engines
    prefill what is running again. No response may take more steps than it may lag.
    """
    groups = rollouts.groups.groups
    requests = rollouts.groups.requests
    lengths = [length for group in groups for length in group.lengths]
    prompt = sum(group.prompt for group in groups) / len(groups)
    context = prompt + sum(length * length for length in lengths) / (2 * sum(lengths))
    longest_of_groups = sum(max(group.lengths) * len(group.lengths) for group in groups)
    running = NOT_WAITING * rollouts.ahead / len(groups) * requests * sum(lengths) / longest_of_groups
    batch = max(1, int(min(running / engines, engine.max_running, engine.kv_tokens / context)))
    token_s = engine.steps_s(1, batch, round(batch * context))
    prefill = len(groups) / engines * prompt * engine.prefill_s
    again = engine.prefill_seconds(round(batch * context), batch * context * context / 2, 0)
    longest = max(lengths) * token_s / (rollouts.max_lag + 1)
    return max(sum(lengths) / engines / batch * token_s + prefill + again, longest)
