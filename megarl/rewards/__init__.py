"""Verifiable rewards: pure rules, and a pool of processes that apply them under a hard time limit.

Used by the coordinator through `RewardPool`, and by evaluations of text at hand through the rules. What the policy
writes is untrusted: it is judged in a process that can be killed, never in the caller's.
"""

from megarl.rewards.pool import RewardError, RewardPool
from megarl.rewards.rules import build_rule, exact_match, math_verify_reward

__all__ = ["RewardError", "RewardPool", "build_rule", "exact_match", "math_verify_reward"]
