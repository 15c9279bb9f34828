"""The reshard plan: which rank sends which part of each parameter to which rank, so that engines get new weights.

Pure integer arithmetic: every rank makes the same plan from the same layouts, and `check` proves it before it is used.
Transports follow `Plan.transfers`, bucket by bucket; nothing here knows how bytes travel.

A model of 31,000 parameters on 1,000 ranks has millions of transfers, but few that differ. A `Pattern` says how one
kind of parameter (same layouts, same shapes) is cut on both sides and where the parts overlap. A `Cell` joins it to the
parameters of that kind that have the same ranks on both sides, and says who sends. Transfers are made on demand.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import zip_longest
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megarl.checkpoint_engine.sides import Engines, Home, Ints, Kind, PlanError, Sides, Training
from megarl.config import ModelShape
from megarl.weights import Box, Parameter, engine_parameters

Table = NDArray[Any]
"""Of named integer columns."""


def _columns(*names: str) -> np.dtype[Any]:
    return np.dtype([(name, np.int64) for name in names])


BOX = _columns("split", *Box._fields)
"""A box of shard `split`."""

PIECE = _columns("pair", "part", "row", "column", "rows", "columns", "from_row", "from_column", "to_row", "to_column")
"""What source shard pair // target_split and target shard pair % target_split have in common: a box, and where it lies
in the one and in the other."""

REQUEST = _columns("pair", "target", "first", "count", "turn", "stride")
"""That rank `target` needs a pair's pieces. For the cell's k-th parameter they come from the cell's
holders[first + (turn + k * stride) % count]."""


class Transfer(NamedTuple):
    """`rows` x `columns` elements of rank `source`'s shard of a parameter, and where rank `target`'s engine has them.

    There in the tensor `parameter.engine`, in its slice `slot` of a stack of experts. Tensors count as matrices.
    """

    parameter: Parameter
    source: int
    target: int
    slot: int | None
    rows: int
    columns: int
    from_row: int
    from_column: int
    to_row: int
    to_column: int


@dataclass(frozen=True, eq=False)
class Pattern:
    """The `pieces` (PIECE) of a parameter of one kind."""

    pieces: Table
    item_bytes: int

    @cached_property
    def pairs(self) -> Ints:
        """All that have pieces, ascending."""
        return np.unique(self.pieces["pair"])

    @cached_property
    def pair_bytes(self) -> Ints:
        """Of each of `pairs`."""
        sums = np.zeros(len(self.pairs), dtype=np.int64)
        area = self.pieces["rows"] * self.pieces["columns"] * self.item_bytes
        np.add.at(sums, np.searchsorted(self.pairs, self.pieces["pair"]), area)
        return sums

    @cached_property
    def of_pair(self) -> dict[int, list[tuple[int, int, int, int, int, int]]]:
        """Rows, columns, and where from and where to, of each of a pair's pieces."""
        found: dict[int, list[tuple[int, int, int, int, int, int]]] = {}
        for pair, _, _, _, *place in self.pieces.tolist():
            rows, columns, from_row, from_column, to_row, to_column = place
            found.setdefault(pair, []).append((rows, columns, from_row, from_column, to_row, to_column))
        return found


@dataclass(frozen=True, eq=False)
class Cell:
    """Parameters of one kind and one home. `requests` (REQUEST) hold for each of them."""

    home: Home
    pattern: Pattern
    parameters: tuple[Parameter, ...]
    requests: Table
    holders: Ints

    def sources(self, k: int) -> Ints:
        """The rank that answers each request for the `k`-th parameter."""
        asked = self.requests
        return self.holders[asked["first"] + (asked["turn"] + k * asked["stride"]) % asked["count"]]

    @cached_property
    def request_bytes(self) -> Ints:
        return self.pattern.pair_bytes[np.searchsorted(self.pattern.pairs, self.requests["pair"])]


Bucket = tuple[tuple[int, int], ...]
"""Parameters, in the order in which they are sent: the number of the cell, and of the parameter in it."""


@dataclass(frozen=True, eq=False)
class Plan:
    """What `make_plan` was given, and its result."""

    shape: ModelShape
    training: Training
    engines: Engines
    item_bytes: int
    cells: tuple[Cell, ...]
    buckets: tuple[Bucket, ...]

    @cached_property
    def sides(self) -> Sides:
        return Sides(self.shape, self.training, self.engines, self.item_bytes)

    def transfers(self, bucket: int, rank: int | None = None) -> Iterator[Transfer]:
        """Those of a bucket, in the same order on every rank; with `rank` only those from or to it."""
        for number, k in self.buckets[bucket]:
            cell = self.cells[number]
            parameter, sources = cell.parameters[k], cell.sources(k)
            asked, targets, slot = cell.requests["pair"], cell.requests["target"], self.sides.slot(parameter)
            mine = np.arange(len(targets)) if rank is None else np.flatnonzero((sources == rank) | (targets == rank))
            for i in mine.tolist():
                for rows, columns, row, column, to_row, to_column in cell.pattern.of_pair[asked[i]]:
                    to_row += parameter.engine_row
                    yield Transfer(
                        parameter, int(sources[i]), int(targets[i]), slot, rows, columns, row, column, to_row, to_column
                    )


def make_plan(
    shape: ModelShape,
    training: Training,
    engines: Engines,
    *,
    ranks_per_node: int,
    bucket_bytes: int,
    item_bytes: int = 2,
) -> Plan:
    """Plan for weights of `item_bytes` an element; no rank of an engine gets more than `bucket_bytes` in a bucket.

    (But a parameter of which a rank needs more makes a bucket of its own.) Parts come from the same GPU if it has them,
    otherwise from the same node, otherwise from any rank that has them; those that could send take turns.

    Raises PlanError: a size that does not divide, or a parameter of which it is not known where an engine holds it.
    """
    sides = Sides(shape, training, engines, item_bytes)
    patterns: dict[Kind, Pattern] = {}
    members: dict[tuple[Kind, Home], list[Parameter]] = {}
    for parameter in engine_parameters(shape, training.layout.tensor):
        kind = sides.kind(parameter)
        if kind not in patterns:
            patterns[kind] = _pattern(kind, sides, parameter)
        members.setdefault((kind, sides.home(parameter)), []).append(parameter)
    sent = np.zeros(sides.ranks, dtype=np.int64)
    # large parts first, so that small ones even out what these leave
    ordered = sorted(members.items(), key=lambda item: -patterns[item[0][0]].pair_bytes.max())
    cells = tuple(
        _cell(kind, home, tuple(parameters), patterns[kind], sides, sent, ranks_per_node)
        for (kind, home), parameters in ordered
    )
    return Plan(shape, training, engines, item_bytes, cells, _buckets(cells, sides, bucket_bytes))


def box_table(boxes: Iterable[Sequence[Box]]) -> Table:
    """BOX rows of the boxes of each shard."""
    return np.array([(split, *box) for split, some in enumerate(boxes) for box in some], dtype=BOX)


def _pattern(kind: Kind, sides: Sides, parameter: Parameter) -> Pattern:
    held, needed = sides.source_split(kind), sides.target_split(kind)
    try:
        sources = box_table(kind.layout.boxes(kind.shapes, rank, held) for rank in range(held))
        targets = box_table(kind.engine_layout.engine_boxes(kind.shapes, rank, needed) for rank in range(needed))
    except ValueError as error:
        raise PlanError(f"{parameter.engine}: {error}") from None
    return Pattern(_overlaps(sources, targets, needed), kind.item_bytes)


def _overlaps(sources: Table, targets: Table, target_split: int) -> Table:
    a, b = sources[:, None], targets[None, :]
    rows, columns = (
        np.minimum(a[start] + a[size], b[start] + b[size]) - np.maximum(a[start], b[start])
        for start, size in (("row", "rows"), ("column", "columns"))
    )
    i, j = np.nonzero((a["part"] == b["part"]) & (rows > 0) & (columns > 0))
    one, other = sources[i], targets[j]
    pieces = np.empty(len(i), dtype=PIECE)
    pieces["pair"], pieces["part"] = one["split"] * target_split + other["split"], one["part"]
    pieces["rows"], pieces["columns"] = rows[i, j], columns[i, j]
    for axis in ("row", "column"):
        pieces[axis] = np.maximum(one[axis], other[axis])
        pieces[f"from_{axis}"] = pieces[axis] - one[axis] + one[f"at_{axis}"]
        pieces[f"to_{axis}"] = pieces[axis] - other[axis] + other[f"at_{axis}"]
    return pieces[np.argsort(pieces["pair"], kind="stable")]


def _cell(
    kind: Kind,
    home: Home,
    parameters: tuple[Parameter, ...],
    pattern: Pattern,
    sides: Sides,
    sent: Ints,
    ranks_per_node: int,
) -> Cell:
    """Decide who sends. `sent`, the bytes that each rank sends to others, is brought up to date."""
    held, targets = sides.held(kind, home), sides.targets(kind, home)
    shard, split = np.divmod(pattern.pairs, sides.target_split(kind))
    requests = np.zeros((len(pattern.pairs), len(targets)), dtype=REQUEST)
    requests["pair"], requests["target"] = pattern.pairs[:, None], targets.T[split]
    requests = requests.reshape(-1)
    shard = np.repeat(shard, len(targets))
    own = held[requests["target"]] == shard
    # a rank's own shard is a list of one holder; the ranks of the job are the first of all lists
    requests["first"], requests["count"] = requests["target"], 1
    lists, end = [np.arange(sides.ranks)], sides.ranks
    cell = Cell(home, pattern, parameters, requests, lists[0])
    for members, holders in _groups(requests["target"] // ranks_per_node, shard, own, held, ranks_per_node):
        nbytes = cell.request_bytes[members]
        turns = _turns(sent[holders], len(members) * len(parameters), nbytes.mean())
        requests["first"][members], requests["count"][members] = end, len(turns)
        requests["turn"][members], requests["stride"][members] = np.arange(len(members)), len(members)
        for k in range(min(len(parameters), len(turns))):
            # the turns begin anew after this many parameters at the latest
            repeats = len(range(k, len(parameters), len(turns)))
            np.add.at(sent, holders[turns[(np.arange(len(members)) + k * len(members)) % len(turns)]], nbytes * repeats)
        lists.append(holders[turns])
        end += len(turns)
    return Cell(home, pattern, parameters, requests, np.concatenate(lists))


def _turns(sent: Ints, tasks: int, task_bytes: float) -> Ints:
    """Who does each task, as indices of holders that have `sent` so much: those behind catch up, all take turns.

    Where there are many tasks for each, the little that some are behind is left to other parameters.
    """
    order = np.argsort(sent, kind="stable")
    if len(sent) == 1 or tasks > _MANY_TASKS * len(sent):
        return order
    ahead = np.cumsum(sent[order]) + tasks * task_bytes
    levels = ahead / np.arange(1, len(sent) + 1)
    busy = np.flatnonzero(levels > sent[order])[-1] + 1  # those behind the level that all of them can reach
    shares = (levels[busy - 1] - sent[order[:busy]]) / task_bytes
    counts = shares.astype(np.int64)
    rest = tasks - counts.sum()
    counts[np.argsort(counts - shares, kind="stable")[:rest]] += 1
    who = np.repeat(order[:busy], counts)
    when = np.concatenate([(np.arange(count) + 0.5) / count for count in counts.tolist()])
    return who[np.argsort(when, kind="stable")]


_MANY_TASKS = 256


def _groups(
    node: Ints, shard: Ints, own: NDArray[np.bool_], held: Ints, ranks_per_node: int
) -> Iterator[tuple[Ints, Ints]]:
    """Requests that others must answer, with the ranks that may: those of the node, or all if it has none."""
    for wanted in np.unique(shard[~own]):
        holders = np.flatnonzero(held == wanted)
        members = np.flatnonzero(~own & (shard == wanted))
        nodes = np.where(np.isin(node[members], holders // ranks_per_node), node[members], -1)
        for one in np.unique(nodes):
            yield members[nodes == one], holders if one < 0 else holders[holders // ranks_per_node == one]


def _buckets(cells: Sequence[Cell], sides: Sides, limit: int) -> tuple[Bucket, ...]:
    """Homes take turns, so that all senders have work in every bucket, and engine ranks with different experts too."""
    by_home: dict[Home, list[tuple[int, int]]] = {}
    for number, cell in enumerate(cells):
        by_home.setdefault(cell.home, []).extend((number, k) for k in range(len(cell.parameters)))
    needs = [_needs(cell, sides) for cell in cells]
    buckets: list[Bucket] = []
    bucket: list[tuple[int, int]] = []
    filled = np.zeros(sides.engine_ranks.shape[1], dtype=np.int64)
    for one in (item for turn in zip_longest(*by_home.values()) for item in turn if item is not None):
        need = needs[one[0]]
        if bucket and (filled + need).max() > limit:
            buckets.append(tuple(bucket))
            bucket, filled = [], np.zeros_like(filled)
        bucket.append(one)
        filled = filled + need
    return (*buckets, tuple(bucket))


def _needs(cell: Cell, sides: Sides) -> Ints:
    """Bytes of each of the cell's parameters on each rank of an engine."""
    first = sides.engine_ranks[0]
    needs = np.zeros(len(first), dtype=np.int64)
    for column, rank in enumerate(first):
        needs[column] = cell.request_bytes[cell.requests["target"] == rank].sum()
    return needs
