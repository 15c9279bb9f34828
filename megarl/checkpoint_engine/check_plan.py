"""Proof that a reshard plan is right, from the layouts alone: what `make_plan` reckoned on the way is not trusted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from megarl.checkpoint_engine.plan import Cell, Pattern, Plan
from megarl.checkpoint_engine.sides import Ints, Kind, PlanError, Sides, Table, box_table
from megarl.checkpoint_engine.traffic import traffic
from megarl.weights import Parameter, matrix, model_parameters

_AT_ONCE = 1 << 20  # pairs of a piece and a box that are compared at a time, some 10 bytes each


def check(plan: Plan) -> None:
    """Each element of each engine rank's tensors is written exactly once, by a rank that has it; padding never is.

    And no rank sends, or gets, more in a bucket than it may. Raises PlanError naming the parameter, and the range or
    the rank at fault.
    """
    sides = plan.sides
    table = model_parameters(plan.shape, plan.training.layout.tensor)
    _check_rows(plan, table)
    _check_tensors(table)
    _check_relays(plan)
    seen: set[tuple[Pattern, Kind]] = set()
    for cell in plan.cells:
        kind = sides.kind(cell.parameters[0])
        for parameter in cell.parameters:
            if sides.kind(parameter) != kind or sides.home(parameter) != cell.home:
                raise PlanError(f"{parameter.engine}: is planned with {cell.parameters[0].engine}, unlike it")
        if (cell.pattern, kind) not in seen:
            _check_pieces(cell, kind, sides)
            seen.add((cell.pattern, kind))
        _check_requests(cell, kind, sides, plan.served)
    _check_buckets(plan)


def _check_rows(plan: Plan, table: Sequence[Parameter]) -> None:
    """Each row of each parameter of the model is sent in one bucket."""
    sent: dict[Parameter, list[tuple[int, int]]] = {parameter: [] for parameter in table}
    for item in (one for bucket in plan.buckets for one in bucket):
        parameter = plan.cells[item.cell].parameters[item.k]
        if parameter not in sent:
            raise PlanError(f"{parameter.engine}: is sent, but the model does not have it")
        sent[parameter].append((item.row, item.rows))
    heights: dict[Kind, int] = {}
    for parameter, parts in sent.items():
        kind = plan.sides.kind(parameter)
        if kind not in heights:
            heights[kind] = matrix(kind.engine_layout.engine_shape(kind.shapes, plan.sides.target_split(kind)))[0]
        end = 0
        for row, rows in (*sorted(parts), (heights[kind], 1)):
            if row != end or rows < 1:
                times = "more than once" if row < end else "0 times"
                raise PlanError(f"{parameter.engine}: rows {min(row, end)}:{max(row, end)} are sent {times}")
            end = row + rows


def _check_relays(plan: Plan) -> None:
    """Each engine is served, or gets what it needs once, from one that has it; none passes on two things at a time."""
    engines = range(len(plan.engines.ranks))
    has = Counter(plan.served)
    for number, relay in enumerate(plan.relays):
        givers = Counter(giver for giver, _ in relay)
        for giver, times in givers.items():
            if giver not in has or times > 1:
                why = "passes on two at a time" if giver in has else "does not have yet what it passes on"
                raise PlanError(f"engine {giver}: {why}, in round {number}")
        has.update(getter for _, getter in relay)
    for engine in (*engines, *has):
        if has[engine] != (engine in engines):
            raise PlanError(f"engine {engine}: gets each bucket {has[engine]} times, expected {int(engine in engines)}")


def _check_buckets(plan: Plan) -> None:
    """No rank sends more than a bucket may hold, nor gets more; but one row of a parameter may be larger than that."""
    flow, limit = traffic(plan), plan.bucket_bytes
    for what, table in (("sends", flow.sent - flow.relayed), ("gets", flow.received + flow.kept)):
        for bucket in np.flatnonzero(table.max(1) > limit).tolist():
            if len(plan.buckets[bucket]) > 1 or plan.buckets[bucket][0].rows > plan.rows_together:
                rank = int(table[bucket].argmax())
                raise PlanError(f"bucket {bucket}: rank {rank} {what} {table[bucket, rank]} bytes of at most {limit}")


def _check_tensors(table: Sequence[Parameter]) -> None:
    """Parameters that share a tensor of an engine lie one under the other, from its first row on."""
    members: dict[str, list[Parameter]] = {}
    for parameter in table:
        members.setdefault(str(parameter.engine), []).append(parameter)
    for name, some in members.items():
        end = 0
        for parameter in sorted(some, key=lambda one: one.engine_row):
            if parameter.engine_row != end:
                raise PlanError(f"{name}: a parameter begins in row {parameter.engine_row}, expected {end}")
            if len(some) > 1 and not parameter.engine_whole:
                raise PlanError(f"{name}: parameters of one tensor must be whole there")
            end += sum(rows for rows, *_ in parameter.hf_shapes)


def _check_pieces(cell: Cell, kind: Kind, sides: Sides) -> None:
    pieces, name = cell.pattern.pieces, cell.parameters[0].engine
    held, needed = sides.source_split(kind), sides.target_split(kind)
    shard, target = np.divmod(pieces["pair"], needed)
    if len(pieces) and (pieces["pair"].min() < 0 or shard.max() >= held):
        raise PlanError(f"{name}: a piece is of no shard")
    for split in range(held):
        boxes = box_table([kind.layout.boxes(kind.shapes, split, held)])
        _check_inside(f"{name}: the trainer's shard {split}", pieces[shard == split], boxes, "from_")
    shape = matrix(kind.engine_layout.engine_shape(kind.shapes, needed))
    for split in range(needed):
        boxes = box_table([kind.engine_layout.engine_boxes(kind.shapes, split, needed)])
        mine, where = pieces[target == split], f"{name}: the engine's shard {split}"
        _check_inside(where, mine, boxes, "to_")
        _check_cover(where, mine, boxes, shape)


def _check_inside(where: str, pieces: Table, boxes: Table, at: str) -> None:
    """Each piece lies within a box, with the box's elements in the same places."""
    for some in np.array_split(pieces, len(pieces) * len(boxes) // _AT_ONCE + 1):
        fits = some["part"][:, None] == boxes["part"]
        for axis, size in (("row", "rows"), ("column", "columns")):
            offset = some[axis][:, None] - boxes[axis]
            fits &= (offset >= 0) & (offset + some[size][:, None] <= boxes[size])
            fits &= some[f"{at}{axis}"][:, None] - boxes[f"at_{axis}"] == offset
        for piece in some[~fits.any(1)]:
            raise PlanError(f"{where} does not have {_range(piece, at)} where the plan says")


def _check_cover(where: str, pieces: Table, boxes: Table, shape: tuple[int, int]) -> None:
    """Pieces write what boxes cover, once."""
    edges = []
    for axis, length in zip(("row", "column"), shape, strict=True):
        starts = np.concatenate([pieces[f"to_{axis}"], boxes[f"at_{axis}"]])
        sizes = np.concatenate([pieces[f"{axis}s"], boxes[f"{axis}s"]])
        edges.append(np.unique([0, length, *starts, *(starts + sizes)]))
    written, wanted = _times(pieces, "to_", edges), _times(boxes, "at_", edges)
    for i, j in np.argwhere(written != wanted):
        rows, columns = (f"{edge[n]}:{edge[n + 1]}" for edge, n in zip(edges, (i, j), strict=True))
        raise PlanError(
            f"{where}: rows {rows}, columns {columns} are written {written[i, j]} times, expected {wanted[i, j]}"
        )


def _times(boxes: Table, at: str, edges: Sequence[Ints]) -> Ints:
    """How often each cell of the grid of `edges` is covered: sums over both axes of +1 and -1 at the boxes' corners."""
    grid = np.zeros((len(edges[0]), len(edges[1])), dtype=np.int64)
    rows, columns = boxes[f"{at}row"], boxes[f"{at}column"]
    for row, vertical in ((rows, 1), (rows + boxes["rows"], -1)):
        for column, horizontal in ((columns, 1), (columns + boxes["columns"], -1)):
            corners = np.searchsorted(edges[0], row), np.searchsorted(edges[1], column)
            np.add.at(grid, corners, vertical * horizontal)
    return grid.cumsum(0).cumsum(1)[:-1, :-1]


def _range(piece: np.void, at: str) -> str:
    rows, columns = (f"{piece[f'{at}{axis}']}:{piece[f'{at}{axis}'] + piece[f'{axis}s']}" for axis in ("row", "column"))
    return f"rows {rows}, columns {columns}"


def _check_requests(cell: Cell, kind: Kind, sides: Sides, served: Sequence[int]) -> None:
    """Each engine served gets each pair's pieces once, and whoever may send them holds them."""
    name, split, asked = cell.parameters[0].engine, sides.target_split(kind), cell.requests
    targets = sides.targets(kind, cell.home)[list(served)].T[cell.pattern.pairs % split]
    wanted = (cell.pattern.pairs[:, None] * sides.ranks + targets).ravel()
    found = asked["pair"] * sides.ranks + asked["target"]
    if not np.array_equal(np.sort(wanted), np.sort(found)):
        need, have = Counter(wanted.tolist()), Counter(found.tolist())
        wrong = next(key for key in (*need, *have) if need[key] != have[key])
        pair, target = divmod(wrong, sides.ranks)
        raise PlanError(
            f"{name}: rank {target} gets what the trainer's shard {pair // split} has for it"
            f" {have[wrong]} times, expected {need[wrong]}"
        )
    held = sides.held(kind, cell.home)
    # one number for a list of holders and the shard that they must have, to find the few that differ
    length = len(cell.holders) + 1
    for key in np.unique((asked["pair"] // split * length + asked["first"]) * length + asked["count"]).tolist():
        (shard, first), count = divmod(key // length, length), key % length
        for rank in cell.holders[first : first + count].tolist():
            if held[rank] != shard:
                raise PlanError(f"{name}: rank {rank} is to send the trainer's shard {shard}, which it does not hold")
