"""Which request runs next, on which engine, for how many tokens."""

from megarl.rollout_engine.scheduler.base import TRIAL_TOKENS, Assignment, Engine, Group, Request, Scheduler
from megarl.rollout_engine.scheduler.context import Context, Oracle
from megarl.rollout_engine.scheduler.divided import Divided
from megarl.rollout_engine.scheduler.whole import GroupRoundRobin, LeastLoaded

POLICIES: dict[str, type[Scheduler]] = {
    "group_round_robin": GroupRoundRobin,
    "least_loaded": LeastLoaded,
    "divided": Divided,
    "context": Context,
    "oracle": Oracle,
}

__all__ = [
    "POLICIES",
    "TRIAL_TOKENS",
    "Assignment",
    "Context",
    "Divided",
    "Engine",
    "Group",
    "GroupRoundRobin",
    "LeastLoaded",
    "Oracle",
    "Request",
    "Scheduler",
]
