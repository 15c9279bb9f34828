"""Dividing a global batch among data-parallel ranks and into packed micro-batches.

Every rank calls `plan_microbatches` with the same arguments and takes its own row of the result. Pure arithmetic on
lengths: it knows neither tokens nor tensors, and pads nothing.

First the ranks: sequences are dealt out by the greedy rule of Graham ("Bounds on multiprocessing timing anomalies",
1969), costliest first, each to the rank that has least to do and a micro-batch with room for it, and exchanges between
ranks even out what is left. Then the rounds: each rank divides its share anew so that its k-th micro-batch costs about
what the others' k-th does.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush, heapreplace

Plan = list[list[list[int]]]
"""[rank][micro-batch] -> indices of sequences."""

TOLERANCE = 1e-4
"""Share of the mean by which the largest rank's cost may exceed it: steps of equal work differ by more."""

EXCHANGES_A_RANK = 20
"""At most, on average: bounds the time of batches whose ranks come near each other slowly."""

WORTH_ONE_MORE = 1.01
"""The factor by which one more micro-batch than needed must lower the largest rank's cost: it is not free either."""

CANDIDATES = 512
NEIGHBOURS = 4
"""An exchange is sought for so many sequences of the fuller rank, each with so many partners on either side of the
right cost: several, as some would overfill a micro-batch; few, as there may be very many sequences."""

NOTHING = -1
"""In place of the index of the sequence that comes back in an exchange."""


@dataclass(frozen=True)
class _Work:
    lengths: Sequence[int]
    costs: list[float]
    max_tokens: int

    def costliest_first(self, indices: Iterable[int]) -> list[int]:
        return sorted(indices, key=lambda i: (-self.costs[i], -self.lengths[i], i))

    def cost(self, batch: list[int]) -> float:
        return sum(self.costs[i] for i in batch)

    def rank_costs(self, plan: Plan) -> list[float]:
        return [sum(map(self.cost, rank)) for rank in plan]

    def tokens(self, batch: list[int]) -> int:
        return sum(self.lengths[i] for i in batch)


def plan_microbatches(lengths: Sequence[int], *, max_tokens: int, ranks: int, cost: Callable[[int], float]) -> Plan:
    """`[rank][micro-batch]` -> indices into `lengths`, every index once.

    `lengths` are in tokens, with any alignment included. All ranks have the same number of micro-batches, and none of
    these has more than `max_tokens` tokens, except for a single sequence that is longer. `cost` estimates the work of a
    sequence of a given length, in any unit; it must not fall as the length grows. In order of importance: few
    micro-batches (one more a rank than needed where it makes ranks clearly more equal), ranks of equal cost, k-th
    micro-batches of like cost (the costliest come first). A micro-batch is empty only where there are fewer sequences
    than micro-batches.
    """
    if max_tokens < 1 or ranks < 1 or min(lengths, default=1) < 1:
        raise ValueError(
            f"lengths, max_tokens and ranks must be at least 1, but max_tokens is {max_tokens}, ranks {ranks}"
            f" and the shortest length {min(lengths, default=1)}"
        )
    work = _Work(lengths, [cost(length) for length in lengths], max_tokens)
    plan = _even(work, _deal(work, ranks, _fewest(work, ranks)))
    largest = max(work.rank_costs(plan))
    count = len(plan[0]) + 1
    unavoidable = max(sum(work.costs) / ranks, max(work.costs, default=0.0))
    if largest > WORTH_ONE_MORE * unavoidable and len(lengths) >= ranks * count:
        other = _even(work, _deal(work, ranks, count))
        if largest > WORTH_ONE_MORE * max(work.rank_costs(other)):
            plan = other
    return [[sorted(batch) for batch in rank] for rank in _align(work, plan)]


def _fewest(work: _Work, ranks: int) -> int:
    """No plan has fewer micro-batches a rank: by tokens, or as no two of more than half the budget share one."""
    over = sum(length > work.max_tokens for length in work.lengths)
    large = sum(2 * length > work.max_tokens for length in work.lengths)
    tokens = sum(length for length in work.lengths if length <= work.max_tokens)
    return max(1, _ceil(max(large, over + _ceil(tokens, work.max_tokens)), ranks))


def _ceil(number: int, divisor: int) -> int:
    return -(-number // divisor)


class _Line:
    """Holders of sequences, least loaded first. Those without room wait aside until a sequence is short enough.

    As sequences come longest first, each holder goes aside at most once for each sequence that it gets.
    """

    def __init__(self, loads: Iterable[float]) -> None:
        self.ready = [(load, holder, 0) for holder, load in enumerate(loads)]
        self.aside: list[tuple[int, int, float]] = []
        heapify(self.ready)

    def take(self, length: int, limit: int) -> tuple[float, int, int] | None:
        """(load, holder, tokens) of the first that is empty or stays within `limit` tokens; None if there is none."""
        while self.aside and self.aside[0][0] + length <= limit:
            tokens, holder, load = heappop(self.aside)
            heappush(self.ready, (load, holder, tokens))
        while self.ready:
            load, holder, tokens = heappop(self.ready)
            if not tokens or tokens + length <= limit:
                return load, holder, tokens
            heappush(self.aside, (tokens, holder, load))
        return None

    def put(self, load: float, holder: int, tokens: int) -> None:
        heappush(self.ready, (load, holder, tokens))


def _deal(work: _Work, ranks: int, count: int) -> Plan:
    """The costliest sequence left goes to the rank that has least to do and room, into its emptiest micro-batch.

    `count` micro-batches a rank, or more if sequences were left over.
    """
    plan: Plan = [[[] for _ in range(count)] for _ in range(ranks)]
    emptiest = [[(0, k) for k in range(count)] for _ in range(ranks)]
    line = _Line([0.0] * ranks)
    empty, left_tokens = ranks * count, 0
    order = work.costliest_first(range(len(work.lengths)))
    for place, i in enumerate(order):
        all_must_open = len(order) - place <= empty
        found = line.take(work.lengths[i], 0 if all_must_open else work.max_tokens)
        if found is None:
            left_tokens += work.lengths[i]
            continue
        load, rank, tokens = found
        empty -= not tokens
        _, k = heapreplace(emptiest[rank], (tokens + work.lengths[i], emptiest[rank][0][1]))
        plan[rank][k].append(i)
        line.put(load + work.costs[i], rank, emptiest[rank][0][0])
    if left_tokens:
        return _deal(work, ranks, count + _ceil(left_tokens, ranks * work.max_tokens))
    return plan


def _even(work: _Work, plan: Plan) -> Plan:
    """Exchanges between the rank with most to do and one with little, until equal or nothing helps."""
    loads = work.rank_costs(plan)
    enough = (1 + TOLERANCE) * sum(loads) / len(loads)
    for _ in range(EXCHANGES_A_RANK * len(plan)):
        *others, high = sorted(range(len(plan)), key=lambda rank: (loads[rank], rank))
        if loads[high] <= enough or not any(_exchange(work, plan, loads, high, low) for low in others):
            break
    return plan


def _exchange(work: _Work, plan: Plan, loads: list[float], high: int, low: int) -> bool:
    """Give a sequence of `high` to `low`, or swap two, so that their costs come as near as one exchange brings them."""
    gap = loads[high] - loads[low]
    room = [work.max_tokens - work.tokens(batch) for batch in plan[high]]
    low_room = [work.max_tokens - work.tokens(batch) for batch in plan[low]]
    emptiest = max(range(len(low_room)), key=low_room.__getitem__)
    mine = sorted((work.costs[x], x, k) for k, batch in enumerate(plan[high]) for x in batch)
    theirs = sorted((work.costs[y], y, j) for j, batch in enumerate(plan[low]) for y in batch)
    found: list[tuple[float, float, int, int, int, int]] = []
    for cost, x, k in mine[:: _ceil(len(mine), CANDIDATES)]:
        if cost < gap and len(plan[high][k]) > 1 and work.lengths[x] <= low_room[emptiest]:
            found.append((abs(cost - gap / 2), cost, k, x, emptiest, NOTHING))
        at = bisect_left(theirs, (cost - gap / 2,))
        for back, y, j in theirs[max(0, at - NEIGHBOURS) : at + NEIGHBOURS]:
            more = work.lengths[x] - work.lengths[y]
            if 0 < cost - back < gap and -room[k] <= more <= low_room[j]:
                found.append((abs(cost - back - gap / 2), cost - back, k, x, j, y))
    if not found:
        return False
    _, change, k, x, j, y = min(found)
    plan[high][k].remove(x)
    plan[low][j].append(x)
    if y != NOTHING:
        plan[low][j].remove(y)
        plan[high][k].append(y)
    loads[high] -= change
    loads[low] += change
    return True


def _align(work: _Work, plan: Plan) -> Plan:
    """Divide each rank's share anew, so that the k-th micro-batches cost the same as far as the budget allows.

    With expert parallelism a round takes as long as its costliest micro-batch. The ranks with the costliest single
    sequences set the rounds' targets, and the others fill up to them. A share that does not fit stays as it was dealt.
    """
    shares = [work.costliest_first(i for batch in rank for i in batch) for rank in plan]
    targets = [0.0] * len(plan[0])
    aligned: Plan = [[] for _ in plan]
    for rank in sorted(range(len(plan)), key=lambda rank: (-work.cost(shares[rank][:1]), rank)):
        batches = _fill(work, shares[rank], targets) or plan[rank]
        rounds = sorted(range(len(targets)), key=lambda k: (-targets[k], k))
        aligned[rank] = [[] for _ in targets]
        for k, batch in zip(rounds, sorted(batches, key=work.cost, reverse=True), strict=True):
            aligned[rank][k] = batch
            targets[k] = max(targets[k], work.cost(batch))
    rounds = sorted(range(len(targets)), key=lambda k: (-targets[k], k))
    return [[rank[k] for k in rounds] for rank in aligned]


def _fill(work: _Work, share: list[int], targets: list[float]) -> list[list[int]] | None:
    """The costliest sequence left goes into the micro-batch with room that is furthest below its target.

    None if one fits nowhere.
    """
    batches: list[list[int]] = [[] for _ in targets]
    line = _Line(-target for target in targets)
    empty = len(targets)
    for place, i in enumerate(share):
        all_must_open = len(share) - place <= empty
        found = line.take(work.lengths[i], 0 if all_must_open else work.max_tokens)
        if found is None:
            return None
        load, k, tokens = found
        empty -= not tokens
        batches[k].append(i)
        line.put(load + work.costs[i], k, tokens + work.lengths[i])
    return batches
