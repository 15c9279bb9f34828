"""The benchmark of predicted and measured order tells a pair that is the wrong way round, and only a separated one."""

from __future__ import annotations

import pytest

from megarl.layout import Cost, Step
from tools.bench.layout_order import report


def step(seconds: float) -> Step:
    return Step(Cost(gemm=0.75 * seconds), 0.0, 0.0, 0.25 * seconds, 0.0)


def test_the_right_order_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    measured = {"tp2": [1.1, 1.0, 9.0], "dp2": [0.7, 0.6, 0.7], "1 rank": [1.2, 1.3, 1.2]}
    code = report(measured, {"tp2": step(2.0), "dp2": step(0.6), "1 rank": step(1.8)})
    lines = capsys.readouterr().out.splitlines()
    assert code == 0, "tp2 and one rank are too near to each other to tell"
    assert [line.split("  ")[0] for line in lines[1:4]] == ["dp2", "tp2", "1 rank"]
    assert lines[-1] == (
        "layouts=3 separated_pairs=2 right=2 rank_correlation=0.500 error_median=0.500 error_max=1.000"
    )


def test_a_wrong_order_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    code = report({"tp2": [2.0], "dp2": [1.0]}, {"tp2": step(1.0), "dp2": step(1.5)})
    output = capsys.readouterr().out
    assert code == 1
    assert "wrong: dp2 is faster than tp2" in output
    assert "separated_pairs=1 right=0 rank_correlation=-1.000" in output
