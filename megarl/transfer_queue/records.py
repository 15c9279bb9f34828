"""What the journal records. Each is a tagged msgpack map; a new kind, or another field, is another format version.

`row` names a prompt for a whole run: a row of the data in the run's sequence, or below 0 one that replaces another.
"""

from __future__ import annotations

import msgspec

from megarl.types import Completion, Group, WeightVersion


class Admitted(msgspec.Struct, tag=True):
    """The prompt of `row` was admitted when `version` was the newest; what was recorded of the row before is void."""

    row: int
    version: WeightVersion


class Chunk(msgspec.Struct, tag=True):
    """New tokens of one sample of the row's group, from its token `start` on; spans count from the chunk's first."""

    row: int
    sample: int
    start: int
    completion: Completion


class Accepted(msgspec.Struct, tag=True):
    """The whole group, with its scores; the row's chunks are not needed any more."""

    row: int
    group: Group


class Dropped(msgspec.Struct, tag=True):
    """The row is trained by no step."""

    row: int


class Took(msgspec.Struct, tag=True):
    """`step` trains on the groups of `rows`, in this order.

    Other rows than those recorded before for the step begin another history: what later steps took is void then.
    """

    step: int
    rows: list[int]


class Trained(msgspec.Struct, tag=True):
    """A checkpoint holds everything up to where `step` begins."""

    step: int


class Base(msgspec.Struct, tag=True):
    """What all records before it come to, except chunks and groups; each segment begins with one.

    Segments before `first` do not count any more. `took` are the rows of step `floor` and of those after it, `rows` the
    versions at which these and all that no step took yet were admitted. Every row that was ever admitted lies from
    `lowest_row` to `next_row` (exclusive).
    """

    first: int
    floor: int
    trained: int
    took: list[list[int]]
    rows: dict[int, WeightVersion]
    lowest_row: int
    next_row: int


Record = Admitted | Chunk | Accepted | Dropped | Took | Trained
"""What users of the journal append; it writes Base itself."""
