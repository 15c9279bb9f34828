"""One conformance suite for both control planes, each with three real ranks: what they promise, they promise alike."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megarl.runtime import hold_port
from tests.distributed.launch import Launcher, run
from tests.distributed.payload_control import DEADLINE_S, LARGE_BYTES, LATE_S

pytestmark = pytest.mark.distributed

RANKS = 3
Reports = list[dict[str, Any]]


@pytest.fixture(scope="module", params=[("mpirun", "mpi"), ("torchrun", "tcp")], ids=["mpi", "tcp"])
def reports(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Reports:
    """What each rank has seen."""
    launcher, plane = request.param
    directory = tmp_path_factory.mktemp(plane)
    start(launcher, directory)
    assert not list(directory.glob("executed-*")), "a payload was unpickled"
    found = [json.loads((directory / f"rank_{rank}.json").read_text()) for rank in range(RANKS)]
    assert {report["control"] for report in found} == {plane}
    return found


def start(launcher: Launcher, directory: Path) -> None:
    with hold_port("127.0.0.1") as held:
        port = held.getsockname()[1]
        run(launcher, RANKS, "tests.distributed.payload_control", directory, str(port), log=directory / "log")


def test_ranks_know_their_place(reports: Reports) -> None:
    assert [(report["rank"], report["world"]) for report in reports] == [(rank, RANKS) for rank in range(RANKS)]


def test_broadcast_gives_rank_0s_value_to_all(reports: Reports) -> None:
    for report in reports:
        assert report["broadcast"] == {"from": 0}
        assert report["others' value is ignored"] == "of rank 0"


def test_allgather_gives_all_values_in_rank_order(reports: Reports) -> None:
    for report in reports:
        expected = [{"rank": r, "name": "r" * r, "values": [r / 3] * r} for r in range(RANKS)]
        assert report["allgather"] == expected
        assert report["none"] == [None] * RANKS


def test_a_large_payload_arrives_whole(reports: Reports) -> None:
    for report in reports:
        assert report["large"] == [LARGE_BYTES] * RANKS
        assert report["large is the same"]


def test_nothing_is_unpickled(reports: Reports) -> None:
    """That no trap has gone off is looked at where the ranks ran."""
    assert all(report["traps arrive as bytes"] for report in reports)


def test_a_value_of_another_type_is_refused(reports: Reports) -> None:
    assert {report["wrong type"] for report in reports} == {"Expected `int`, got `str`"}


def test_no_rank_leaves_a_barrier_before_the_last_has_come(reports: Reports) -> None:
    assert all(report["barrier"] for report in reports)


def test_a_torch_process_group_meets_through_the_plane(reports: Reports) -> None:
    assert {report["sum"] for report in reports} == {1.0 + 2.0 + 3.0}


def test_rounds_leave_no_keys_behind(reports: Reports) -> None:
    """Those of the last two rounds may be there still, and the next round's already."""
    assert all(report["keys left"] <= 3 * RANKS for report in reports)


@pytest.mark.parametrize("late", [0, 2])
def test_a_deadline_names_the_missing_rank(reports: Reports, late: int) -> None:
    told = [report["late"][str(late)] for report in reports]
    assert told[late] == {}, "for the late one, everybody is there"
    for rank in set(range(RANKS)) - {late}:
        assert DEADLINE_S <= told[rank]["seconds"] < LATE_S - 0.5
        start = f"the missing rank: waited {DEADLINE_S:.0f} s for "
        if reports[0]["control"] == "tcp" or rank == 0:
            assert told[rank]["error"] == f"{start}ranks [{late}]"
        else:  # MPI: rank 0 takes the roll call
            assert told[rank]["error"] == f"{start}other ranks; rank 0 names them, unless it is missing itself"
