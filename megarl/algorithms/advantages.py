"""How much better than expected each token was. A step's sequences at once: T response tokens, one after another.

Each estimator takes `Outcomes` and gives advantages [T]; those that need a critic give returns [T], too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor


@dataclass(frozen=True)
class Outcomes:
    """The finished samples of a step: N sequences of P prompts.

    `rewards` are of whole sequences, `group` is the number of a sequence's prompt, `lengths` are in response tokens.
    `penalties` are taken from the reward of single tokens, such as a divergence; `values` are a critic's before each
    token; `greedy_rewards` are those of the greedy answer to the sequence's prompt.
    """

    rewards: Float[Tensor, " N"]
    group: Int[Tensor, " N"]
    lengths: Int[Tensor, " N"]
    penalties: Float[Tensor, " T"] | None = None
    values: Float[Tensor, " T"] | None = None
    greedy_rewards: Float[Tensor, " N"] | None = None

    @property
    def sequence(self) -> Int[Tensor, " T"]:
        """The number of each token's sequence."""
        return torch.arange(len(self.lengths)).repeat_interleave(self.lengths)

    @property
    def totals(self) -> Float[Tensor, " N"]:
        """Rewards of whole sequences less their penalties."""
        if self.penalties is None:
            return self.rewards
        return self.rewards.index_add(0, self.sequence, -self.penalties)

    @property
    def groups(self) -> int:
        return int(self.group.max()) + 1 if len(self.group) else 0

    def group_sum(self, values: Float[Tensor, " N"]) -> Float[Tensor, " N"]:
        """At each sequence, the sum over its group."""
        sums = values.new_zeros(self.groups)
        return sums.index_add(0, self.group, values)[self.group]

    def group_mean(self, values: Float[Tensor, " N"]) -> Float[Tensor, " N"]:
        return self.group_sum(values) / self.group_sum(torch.ones_like(values))

    def differ(self) -> Float[Tensor, " N"]:
        """1 where the rewards of a sequence's group are not all the same.

        Rounding lets a mean of equal rewards differ from them, and a division by their deviation would blow that up.
        """
        own = self.totals
        highest = own.new_full((self.groups,), -math.inf).scatter_reduce(0, self.group, own, "amax")
        lowest = own.new_full((self.groups,), math.inf).scatter_reduce(0, self.group, own, "amin")
        return (highest != lowest).to(own.dtype)[self.group]

    def at_tokens(self, values: Float[Tensor, " N"]) -> Float[Tensor, " T"]:
        return values.repeat_interleave(self.lengths)


def grpo(outcomes: Outcomes, *, epsilon: float = 1e-4) -> Float[Tensor, " T"]:
    """(R - mean) / deviation of the group's rewards; 0 where they are all the same. arXiv 2402.03300, section 4.1.2.

    A group whose rewards differ by less than `epsilon` teaches nothing worth amplifying.
    """
    totals = outcomes.totals
    centred = totals - outcomes.group_mean(totals)
    others = (outcomes.group_sum(torch.ones_like(totals)) - 1).clamp_min(1)
    deviation = (outcomes.group_sum(centred.square()) / others).sqrt()
    return outcomes.at_tokens(centred / (deviation + epsilon) * outcomes.differ())


def dr_grpo(outcomes: Outcomes) -> Float[Tensor, " T"]:
    """R - mean of the group's rewards. arXiv 2503.20783, section 3.2."""
    totals = outcomes.totals
    return outcomes.at_tokens((totals - outcomes.group_mean(totals)) * outcomes.differ())


def rloo(outcomes: Outcomes) -> Float[Tensor, " T"]:
    """R - mean of the rewards of the group's others; 0 in a group of one. arXiv 2402.14740."""
    totals = outcomes.totals
    others = outcomes.group_sum(torch.ones_like(totals)) - 1
    baseline = (outcomes.group_sum(totals) - totals) / others.clamp_min(1)
    return outcomes.at_tokens((totals - baseline) * outcomes.differ())


def opo(outcomes: Outcomes) -> Float[Tensor, " T"]:
    """R - the mean of the group's rewards weighted by length, the baseline of least variance. arXiv 2505.23585."""
    totals, lengths = outcomes.totals, outcomes.lengths.to(outcomes.rewards.dtype)
    baseline = outcomes.group_sum(totals * lengths) / outcomes.group_sum(lengths).clamp_min(1)
    return outcomes.at_tokens((totals - baseline) * outcomes.differ())


def remax(outcomes: Outcomes) -> Float[Tensor, " T"]:
    """R - the reward of the greedy answer to the same prompt. arXiv 2310.10505, algorithm 1."""
    assert outcomes.greedy_rewards is not None, "remax needs the rewards of greedy answers"
    return outcomes.at_tokens(outcomes.totals - outcomes.greedy_rewards)


def pass_at_k(outcomes: Outcomes, *, k: int) -> Float[Tensor, " T"]:
    """The reward of the best of k, averaged over all ways to choose k of the group's n. arXiv 2508.10751.

    A sample is right if its reward is above 0. With m wrong ones, mean = 1 - C(m, k) / C(n, k) and deviation =
    sqrt(mean (1 - mean)); a right one has (1 - mean) / deviation, a wrong one less C(m - 1, k - 1) / C(n - 1, k - 1) /
    deviation.
    """
    right = outcomes.rewards > 0
    advantages = torch.zeros_like(outcomes.rewards)
    for number in outcomes.group.unique().tolist():
        members = outcomes.group == number
        count, wrong = int(members.sum()), int((members & ~right).sum())
        if k > count:
            raise ValueError(f"pass@{k} of a group of {count} samples; expected k of at most the group's size")
        mean = 1 - math.comb(wrong, k) / math.comb(count, k)
        if 0 < mean < 1:
            deviation = math.sqrt(mean * (1 - mean))
            advantages[members & right] = (1 - mean) / deviation
            if wrong:
                missed = math.comb(wrong - 1, k - 1) / math.comb(count - 1, k - 1)
                advantages[members & ~right] = (1 - mean - missed) / deviation
    return outcomes.at_tokens(advantages)


def reinforce_plus_plus(outcomes: Outcomes, *, group_baseline: bool = False) -> Float[Tensor, " T"]:
    """Rewards to go, standardised over all tokens of the batch. arXiv 2501.03262.

    With `group_baseline` the group's mean is taken from the reward first.
    """
    rewards = outcomes.rewards
    if group_baseline:
        rewards = (rewards - outcomes.group_mean(rewards)) * outcomes.differ()
    to_go, _ = _discounted(_token_rewards(outcomes, rewards), outcomes, torch.zeros(0), 1.0, 1.0)
    return whiten(to_go)


def gae(outcomes: Outcomes, *, discount: float, smoothing: float) -> tuple[Float[Tensor, " T"], Float[Tensor, " T"]]:
    """Advantages and returns from a critic's values. arXiv 1506.02438, eq. 16.

    A_t = sum_l (discount smoothing)^l delta_(t+l), delta_t = r_t + discount V_(t+1) - V_t; the return is A_t + V_t.
    """
    assert outcomes.values is not None, "gae needs a critic's values"
    rewards = _token_rewards(outcomes, outcomes.rewards)
    return _discounted(rewards, outcomes, outcomes.values, discount, smoothing)


def whiten(values: Float[Tensor, " T"]) -> Float[Tensor, " T"]:
    """(x - mean) / deviation; zeros where all are the same."""
    if len(values) < 2 or values.max() == values.min():
        return torch.zeros_like(values)
    return (values - values.mean()) / (values.std() + 1e-8)


def _token_rewards(outcomes: Outcomes, rewards: Float[Tensor, " N"]) -> Float[Tensor, " T"]:
    """The sequence's reward at its last token, less the tokens' own penalties."""
    tokens = rewards.new_zeros(int(outcomes.lengths.sum()))
    if outcomes.penalties is not None:
        tokens -= outcomes.penalties
    filled = outcomes.lengths > 0
    tokens[outcomes.lengths.cumsum(0)[filled] - 1] += rewards[filled]
    return tokens


def _discounted(
    rewards: Float[Tensor, " T"], outcomes: Outcomes, values: Float[Tensor, " T"], discount: float, smoothing: float
) -> tuple[Float[Tensor, " T"], Float[Tensor, " T"]]:
    """All sequences side by side, from their last token to their first. Without `values` they are zero."""
    lengths = outcomes.lengths
    count, longest = len(lengths), int(lengths.max()) if len(lengths) else 0
    # aligned at their ends, so that a step back in time is one column for all
    place = longest - lengths.repeat_interleave(lengths) + _position(lengths)
    grid = rewards.new_zeros(2, count, longest + 1)
    grid[0, outcomes.sequence, place] = rewards
    if len(values):
        grid[1, outcomes.sequence, place] = values
    advantages, running = torch.zeros_like(grid[0]), grid.new_zeros(count)
    for column in range(longest - 1, -1, -1):
        delta = grid[0, :, column] + discount * grid[1, :, column + 1] - grid[1, :, column]
        running = delta + discount * smoothing * running
        advantages[:, column] = running
    found = advantages[outcomes.sequence, place]
    return found, found + grid[1, outcomes.sequence, place]


def _position(lengths: Int[Tensor, " N"]) -> Int[Tensor, " T"]:
    """Each token's place in its sequence."""
    starts = lengths.cumsum(0) - lengths
    return torch.arange(int(lengths.sum())) - starts.repeat_interleave(lengths)
