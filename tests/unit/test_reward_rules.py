"""The rules as pure functions: what is right, what is wrong, and what is refused at the start."""

import pytest

from megarl.rewards import build_rule, exact_match, math_verify_reward

TAG = r"<answer>\s*(.*?)\s*</answer>"


@pytest.mark.parametrize(
    ("response", "answer", "reward"),
    [
        ("<answer>42</answer>", "42", 1.0),
        ("6*7\n<answer> 42 </answer> done", " 42\n", 1.0),
        ("<answer>41</answer> no, <answer>42</answer>", "42", 1.0),
        ("<answer>42</answer> no, <answer>41</answer>", "42", 0.0),
        ("<answer>042</answer>", "42", 0.0),
        ("42", "42", 0.0),
        ("<answer>42", "42", 0.0),
        ("<answer></answer>", "42", 0.0),
        ("", "42", 0.0),
        ("<answer>a+b</answer>", "a+b", 1.0),  # the answer is no pattern
        ("<answer>straße</answer>", "straße", 1.0),
    ],
)
def test_exact_match(response: str, answer: str, reward: float) -> None:
    assert exact_match(response, answer, TAG) == reward


def test_exact_match_of_a_group_that_took_no_part() -> None:
    assert exact_match("none", "x", r"none|=(\d+)") == 0.0


@pytest.mark.parametrize(
    ("response", "answer", "reward"),
    [
        ("so $\\frac12$", "0.5", 1.0),
        ("so \\boxed{0.5}", "\\frac{1}{2}", 1.0),
        ("so \\boxed{\\frac{2}{4}}", "$\\frac{1}{2}$", 1.0),
        ("so $x^2+1$", "1+x^2", 1.0),
        ("First 46, then $47$", "\\boxed{47}", 1.0),
        ("The answer is 1,234", "1234", 1.0),
        ("The answer is 48", "47", 0.0),
        ("\\boxed{\\frac{", "1", 0.0),
        ("no number at all", "47", 0.0),
        ("", "47", 0.0),
    ],
)
def test_math_verify(response: str, answer: str, reward: float) -> None:
    assert math_verify_reward(response, answer) == reward


def test_math_verify_reads_whole_last_lines_of_a_long_response() -> None:
    dollars = "it costs $5 " * 1000  # an odd number of dollars before the window would open it within a formula
    assert math_verify_reward(f"{dollars}\nso \\boxed{{7}}", "7") == 1.0
    assert math_verify_reward("\\boxed{7}" + "\nand so on" * 1000, "7") == 0.0
    assert math_verify_reward("x" * 5000 + " \\boxed{7}", "7") == 1.0


@pytest.mark.parametrize("options", [{"type": "exact_match"}, {"type": "vibes"}, {}, {"type": "own"}])
def test_an_unknown_rule_is_refused(options: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="is no rule; its type is exact_match"):
        build_rule(options)


def test_rules_are_built_from_plain_values() -> None:
    assert build_rule({"type": "exact_match", "pattern": TAG})("<answer>1</answer>", "1") == 1.0
    assert build_rule({"type": "math_verify"})("$1$", "1") == 1.0
