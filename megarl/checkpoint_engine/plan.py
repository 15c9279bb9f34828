"""The reshard plan: which rank sends which part of each parameter to which rank, so that engines get new weights.

Pure integer arithmetic: every rank makes the same plan from the same layouts, and `check` proves it before it is used.
Transports follow `Plan.transfers` and then `Plan.relays`, bucket by bucket; nothing here knows how bytes travel.

A model of 31,000 parameters on 1,000 ranks has millions of transfers, but few that differ. A `Pattern` says how one
kind of parameter (same layouts, same shapes) is cut on both sides and where the parts overlap. A `Cell` joins it to the
parameters of that kind that have the same ranks on both sides, and says who sends. Transfers are made on demand.

Where many engines would make the trainer the bottleneck, it serves some of them, and these pass on what they have.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, zip_longest
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megarl.checkpoint_engine.sides import (
    Engines,
    Home,
    Ints,
    Kind,
    PlanError,
    Relay,
    Sides,
    Table,
    Training,
    box_table,
    integers,
)
from megarl.config import ModelShape
from megarl.weights import Parameter, matrix, model_parameters

PIECE = integers("pair", "part", "row", "column", "rows", "columns", "from_row", "from_column", "to_row", "to_column")
"""What source shard pair // target_split and target shard pair % target_split have in common: a box, and where it lies
in the one and in the other."""

REQUEST = integers("pair", "target", "first", "count", "turn", "stride")
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
    """The `pieces` (PIECE) of a parameter of one kind, of which each engine rank's shard has `rows` rows."""

    pieces: Table
    rows: int
    item_bytes: int

    @cached_property
    def pairs(self) -> Ints:
        """All that have pieces, ascending."""
        return np.unique(self.pieces["pair"])

    def pair_bytes(self, row: int, rows: int) -> Ints:
        """Of each of `pairs`, in rows [row, row + rows) of the engine's shards."""
        first, stop = self.pieces["to_row"], self.pieces["to_row"] + self.pieces["rows"]
        inside = (np.minimum(stop, row + rows) - np.maximum(first, row)).clip(0)
        sums = np.zeros(len(self.pairs), dtype=np.int64)
        np.add.at(sums, np.searchsorted(self.pairs, self.pieces["pair"]), inside * self.pieces["columns"])
        return sums * self.item_bytes

    @cached_property
    def of_pair(self) -> dict[int, list[tuple[int, int, int, int, int, int]]]:
        """Rows, columns, and where from and where to, of each of a pair's pieces."""
        found: dict[int, list[tuple[int, int, int, int, int, int]]] = {}
        for pair, _, _, _, *place in self.pieces.tolist():
            rows, columns, from_row, from_column, to_row, to_column = place
            found.setdefault(pair, []).append((rows, columns, from_row, from_column, to_row, to_column))
        return found


class Item(NamedTuple):
    """Rows [row, row + rows) of the engine's shards of a parameter, the `k`-th of the cell of that number."""

    cell: int
    k: int
    row: int
    rows: int


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
    def all_bytes(self) -> Ints:
        """Of each request, for a whole parameter."""
        return self.pattern.pair_bytes(0, self.pattern.rows)[self._of_pairs]

    @cached_property
    def _of_pairs(self) -> Ints:
        return np.searchsorted(self.pattern.pairs, self.requests["pair"])

    @cached_property
    def steady(self) -> bool:
        """All parameters have the same sources."""
        return not (self.requests["stride"] % self.requests["count"]).any()

    def flow(self, item: Item, ranks: int) -> tuple[Ints, Ints]:
        """Bytes, and the slots to which to add them.

        The first `ranks` slots are for what each rank sends to others, the next for what its engine needs, the last for
        what of this is on its GPU.
        """
        sources, targets, nbytes = self.sources(item.k), self.requests["target"], self.all_bytes
        if item.rows < self.pattern.rows:
            nbytes = self.pattern.pair_bytes(item.row, item.rows)[self._of_pairs]
        slots = np.concatenate([sources + (sources == targets) * (2 * ranks), targets + ranks])
        return slots, np.tile(nbytes, 2)


Bucket = tuple[Item, ...]  # in the order in which they are sent


@dataclass(frozen=True, eq=False)
class Plan:
    """What `make_plan` was given, and its result.

    The trainer sends each bucket to the engines `served`. Then, in the rounds of `relays`, rank t of one engine passes
    all that it got of the bucket on to rank t of another, from the same buffer, until all engines have it.
    """

    shape: ModelShape
    training: Training
    engines: Engines
    bucket_bytes: int
    item_bytes: int
    rows_together: int
    served: tuple[int, ...]
    cells: tuple[Cell, ...]
    buckets: tuple[Bucket, ...]
    relays: tuple[Relay, ...]

    @cached_property
    def sides(self) -> Sides:
        return Sides(self.shape, self.training, self.engines, self.item_bytes)

    def transfers(self, bucket: int, rank: int | None = None) -> Iterator[Transfer]:
        """From the trainer, in the same order on every rank; with `rank` only those from or to it."""
        for item in self.buckets[bucket]:
            cell, stop = self.cells[item.cell], item.row + item.rows
            parameter, sources = cell.parameters[item.k], cell.sources(item.k)
            asked, targets, slot = cell.requests["pair"], cell.requests["target"], self.sides.slot(parameter)
            mine = np.arange(len(targets)) if rank is None else np.flatnonzero((sources == rank) | (targets == rank))
            for i in mine.tolist():
                ends = parameter, int(sources[i]), int(targets[i]), slot
                for rows, columns, row, column, to_row, to_column in cell.pattern.of_pair[asked[i]]:
                    first, last = max(to_row, item.row), min(to_row + rows, stop)
                    if first < last:
                        place = row + first - to_row, column, parameter.engine_row + first, to_column
                        yield Transfer(*ends, last - first, columns, *place)


def make_plan(
    shape: ModelShape,
    training: Training,
    engines: Engines,
    *,
    ranks_per_node: int,
    bucket_bytes: int,
    item_bytes: int = 2,
    rows_together: int = 1,
) -> Plan:
    """Plan for weights of `item_bytes` an element.

    In a bucket no rank of an engine gets more than `bucket_bytes`, and no rank of the trainer sends more to others; a
    parameter that is too large is cut by rows of an engine's shard, `rows_together` of which stay together. Parts come
    from the same GPU if it has them, otherwise from the same node, otherwise from any rank that has them; those that
    could send take turns.

    Raises PlanError: a size that does not divide, or a parameter of which it is not known where an engine holds it.
    """
    sides = Sides(shape, training, engines, item_bytes)
    patterns: dict[Kind, Pattern] = {}
    members: dict[tuple[Kind, Home], list[Parameter]] = {}
    for parameter in model_parameters(shape, training.layout.tensor):
        kind = sides.kind(parameter)
        if kind not in patterns:
            patterns[kind] = _pattern(kind, sides, parameter)
        members.setdefault((kind, sides.home(parameter)), []).append(parameter)
    largest = {kind: pattern.pair_bytes(0, pattern.rows).max() for kind, pattern in patterns.items()}
    # large parts first, so that small ones even out what these leave
    ordered = sorted(members.items(), key=lambda item: -largest[item[0][0]])

    def serve(served: tuple[int, ...]) -> tuple[tuple[Cell, ...], float]:
        """The cells, and what the busiest rank of the trainer sends over the largest shard of an engine's rank."""
        sent, shards = np.zeros((2, sides.ranks), dtype=np.int64)
        cells = []
        for (kind, home), parameters in ordered:
            cell = _cell(kind, home, tuple(parameters), patterns[kind], sides, served, sent, ranks_per_node)
            np.add.at(shards, cell.requests["target"], cell.all_bytes * len(parameters))
            cells.append(cell)
        return tuple(cells), float(sent.max() / shards.max())

    served = tuple(range(len(engines.ranks)))
    cells, burden = serve(served)
    while burden > _DIRECT and len(served) > 1:
        served = engines.spread(max(1, int(len(served) / burden)))
        cells, burden = serve(served)
    buckets = _buckets(cells, sides.ranks, engines.ranks[served[0]], bucket_bytes, rows_together)
    relays = engines.relays(served)
    return Plan(shape, training, engines, bucket_bytes, item_bytes, rows_together, served, cells, buckets, relays)


_DIRECT = 1.25
"""While no rank of the trainer sends more than so many shards, all engines are served. With relays some rank gets its
whole shard, even what is on its GPU, and ranks of engines send as much, so that a sender below that gains nothing."""


def _pattern(kind: Kind, sides: Sides, parameter: Parameter) -> Pattern:
    held, needed = sides.source_split(kind), sides.target_split(kind)
    try:
        sources = box_table(kind.layout.boxes(kind.shapes, rank, held) for rank in range(held))
        targets = box_table(kind.engine_layout.engine_boxes(kind.shapes, rank, needed) for rank in range(needed))
    except ValueError as error:
        raise PlanError(f"{parameter.engine}: {error}") from None
    rows, _ = matrix(kind.engine_layout.engine_shape(kind.shapes, needed))
    return Pattern(_overlaps(sources, targets, needed), rows, kind.item_bytes)


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
    served: tuple[int, ...],
    sent: Ints,
    ranks_per_node: int,
) -> Cell:
    """Decide who sends. `sent`, the bytes that each rank sends to others, is brought up to date."""
    held, targets = sides.held(kind, home), sides.targets(kind, home)[list(served)]
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
        nbytes = cell.all_bytes[members]
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


_Load = tuple[Item, Ints, Ints]
"""Of an item, slots and the bytes in each: first what the ranks send to others, then what those of an engine need."""


def _buckets(cells: Sequence[Cell], ranks: int, engine: Sequence[int], limit: int, together: int) -> tuple[Bucket, ...]:
    """Homes take turns, so that all senders have work in every bucket, and engine ranks with different experts too.

    The ranks of one `engine` stand for those of all, which need the same.
    """
    by_home: dict[Home, list[Iterator[_Load]]] = {}
    for number, cell in enumerate(cells):
        by_home.setdefault(cell.home, []).append(_items(number, cell, ranks, engine, limit, together))
    turns = zip_longest(*map(chain.from_iterable, by_home.values()))
    buckets: list[list[Item]] = []
    opened: deque[tuple[list[Item], Ints]] = deque(maxlen=_OPEN)
    for item, slots, nbytes in (one for turn in turns for one in turn if one is not None):
        room = next((one for one in opened if (one[1][slots] + nbytes).max(initial=0) <= limit), None)
        if room is None:
            room = [], np.zeros(ranks + len(engine), dtype=np.int64)
            buckets.append(room[0])
            if nbytes.max(initial=0) <= limit:  # otherwise it is a row that must be alone
                opened.append(room)
        bucket, filled = room
        bucket.append(item)
        filled[slots] += nbytes
    return tuple(map(tuple, buckets))


_OPEN = 4  # buckets are open at a time: what one sender has no room for leaves room for others


def _items(number: int, cell: Cell, ranks: int, engine: Sequence[int], limit: int, together: int) -> Iterator[_Load]:
    loads: list[_Load] = []
    for k in range(len(cell.parameters)):
        if not loads or not cell.steady:
            loads = list(_cut(cell, Item(number, k, 0, cell.pattern.rows), ranks, engine, limit, together))
        for item, slots, nbytes in loads:
            yield item._replace(k=k), slots, nbytes


def _cut(cell: Cell, item: Item, ranks: int, engine: Sequence[int], limit: int, together: int) -> Iterator[_Load]:
    """By rows, into parts that fit into a bucket."""
    sent, needed, _ = np.bincount(*cell.flow(item, ranks), 3 * ranks).astype(np.int64).reshape(3, ranks)
    load = np.concatenate([sent, needed[list(engine)]])
    units = -(-item.rows // together)
    parts = min(-(-int(load.max()) // limit), units)
    if parts < 2:
        slots = np.flatnonzero(load)
        yield item, slots, load[slots]
        return
    for part in range(parts):
        start, stop = units * part // parts * together, min(units * (part + 1) // parts * together, item.rows)
        yield from _cut(cell, item._replace(row=item.row + start, rows=stop - start), ranks, engine, limit, together)
