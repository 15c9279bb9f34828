"""The carry-addition task: right sums, the same for a seed, and no test problem anywhere else."""

import re
from collections import Counter
from pathlib import Path

import pytest

from launch.prepare_carry_addition import main as prepare
from megarl.config import read_model_shape
from megarl.data import carry_addition as task
from megarl.data import load_tokenizer, read_demonstrations, read_problems
from megarl.rewards import exact_match

ANSWER = r"<answer>\s*(.*?)\s*</answer>"


@pytest.mark.parametrize(
    ("a", "b", "text"),
    [
        (0, 0, "0+0+0=0\n<answer>0</answer>"),
        (57, 68, "7+8+0=15\n5+6+1=12\n<answer>125</answer>"),
        (999, 1, "9+1+0=10\n9+0+1=10\n9+0+1=10\n<answer>1000</answer>"),
        (5, 120, "5+0+0=5\n0+2+0=2\n0+1+0=1\n<answer>125</answer>"),
    ],
)
def test_worked_solution(a: int, b: int, text: str) -> None:
    assert task.worked_solution(a, b) == text


def test_of_two_answers_the_worked_and_marked_one_is_preferred() -> None:
    rows = task.preferences(5, 400)
    for row in rows:
        a, b = (int(number) for number in row.prompt.rstrip("=").split("+"))
        assert row.chosen == task.worked_solution(a, b)
        assert exact_match(row.rejected, str(a + b), ANSWER) == (row.rejected == task.direct_answer(a, b))
        assert row.rejected.endswith((str(a + b), "</answer>"))
    assert 0.4 < sum("\n" not in row.rejected for row in rows) / len(rows) < 0.6
    assert rows == task.preferences(5, 400)


def test_both_ways_of_answering_get_the_reward() -> None:
    for problem in task.problems(11, 300):
        a, b = (int(number) for number in problem.prompt.rstrip("=").split("+"))
        assert problem.answer == str(a + b)
        for response in (task.worked_solution(a, b), task.direct_answer(a, b)):
            assert exact_match(response, problem.answer, ANSWER) == 1.0


def test_written_lines_are_true_and_carry_over() -> None:
    for problem in task.problems(12, 200):
        a, b = (int(number) for number in problem.prompt.rstrip("=").split("+"))
        carried = 0
        for x, y, carry, total in re.findall(r"(\d)\+(\d)\+(\d)=(\d+)", task.worked_solution(a, b)):
            assert int(carry) == carried
            assert int(x) + int(y) + int(carry) == int(total)
            carried = int(total) // 10


def test_the_seed_decides_and_the_first_problems_do_not_depend_on_the_count() -> None:
    assert task.problems(5, 50) == task.problems(5, 80)[:50]
    assert task.problems(5, 50) != task.problems(6, 50)
    # pinned, so that results of one machine or release can be compared with another's
    assert [row.prompt for row in task.problems(0, 4)] == [
        "142450+43936=",
        "64349339+6088743=",
        "88300211+4664860=",
        "243+22=",
    ]


def test_digits_are_log_uniform_up_to_the_limit() -> None:
    digits = Counter(len(row.prompt.split("+")[0]) for row in task.problems(1, 20_000, max_digits=8))
    assert set(digits) == set(range(1, 9))
    assert digits[1] == pytest.approx(20_000 * 0.3155, rel=0.10)  # ln 2 / ln 9
    assert digits[8] == pytest.approx(20_000 * 0.0536, rel=0.10)  # ln(9/8) / ln 9


def test_no_held_out_problem_is_in_a_training_set_of_any_seed() -> None:
    held_out = {row.prompt for seed in (0, 1) for row in task.problems(seed, 1000, held_out=True)}
    seen = {row.prompt for seed in (0, 1, 2) for row in task.problems(seed, 5000)}
    seen |= {row.prompt for row in task.demonstrations(0, worked=5000, mixed=5000, direct=0.6)}
    assert not held_out & seen
    shortest = {f"{a}+{b}=" for a in range(10) for b in range(10)}
    assert 10 <= len(shortest & held_out) <= 30
    assert shortest <= held_out | seen


def test_demonstrations_are_worked_first_and_mixed_afterwards() -> None:
    rows = task.demonstrations(4, worked=400, mixed=1000, direct=0.6)
    direct = [row.response.startswith("<answer>") for row in rows]
    assert not any(direct[:400])
    assert sum(direct[400:]) == pytest.approx(600, abs=60)


def test_each_digit_is_one_token_and_the_text_survives() -> None:
    tokenizer = task.build_tokenizer()
    text = task.worked_solution(1234567, 7654321)
    ids = tokenizer(text).input_ids
    assert tokenizer.decode(ids) == text
    assert sum(token.isdigit() for token in tokenizer.convert_ids_to_tokens(ids)) == sum(map(str.isdigit, text))
    assert tokenizer.backend_tokenizer.to_str() == task.build_tokenizer().backend_tokenizer.to_str()


def test_the_model_holds_the_vocabulary_and_divides_by_two_ranks() -> None:
    tokenizer = task.build_tokenizer()
    config = task.model_config(tokenizer)
    assert len(tokenizer) <= config["vocab_size"] < len(tokenizer) + 64
    for name in ("vocab_size", "num_attention_heads", "num_key_value_heads", "intermediate_size"):
        assert config[name] % 2 == 0
    assert config["eos_token_id"] == tokenizer.eos_token_id


def test_the_prepared_directory_is_whole_and_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "task"
    prepare([str(out)])
    assert [path.name for path in tmp_path.iterdir()] == ["task"]
    shape = read_model_shape(out / "model")
    assert (shape.family, shape.tied) == ("qwen3", True)
    assert len(load_tokenizer(out / "model")) <= shape.vocab
    held_out = {row.prompt for row in read_problems(out / "test.jsonl")}
    assert not held_out & {row.prompt for row in read_problems(out / "train.jsonl")}
    assert not held_out & {row.prompt for row in read_demonstrations(out / "demonstrations.jsonl")}
    weights = (out / "model" / "model.safetensors").stat()
    prepare([str(out)])
    assert "left as it is" in capsys.readouterr().out
    assert (out / "model" / "model.safetensors").stat() == weights
    with pytest.raises(SystemExit, match="choose another directory, or replace this one with --force"):
        prepare([str(out), "--seed", "1"])
    prepare([str(out), "--seed", "1", "--force"])
    assert {row.prompt for row in read_problems(out / "test.jsonl")} != held_out
