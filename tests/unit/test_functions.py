"""Functions of the user's own: whatever their module does, the complaint is plain."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from megarl.config import load_function


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("raise SystemExit(3)", "cannot be loaded: SystemExit: 3; is its directory on PYTHONPATH"),
        ("1 / 0", "cannot be loaded: ZeroDivisionError"),
        ("def (", "cannot be loaded: SyntaxError"),
        ("import nothing_of_this_name", "cannot be loaded: ModuleNotFoundError"),
        ("g = 1", "cannot be loaded: AttributeError"),
        ("f = 1", "is not a function"),
        ("def f(response): pass", "cannot be called as it will be: too many positional arguments"),
        ("def f(response, answer): pass", "unexpected keyword argument 'scale'; expected a function of 2 arguments"),
    ],
)
def test_what_is_wrong_with_a_function_is_said(
    text: str, complaint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    with pytest.raises(ValueError, match=r"^'mine:f' ") as caught:
        load_function("mine:f", 2, {"scale": 2.0})
    assert complaint in str(caught.value)
    sys.modules.pop("mine", None)


def test_it_is_given_its_arguments_and_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "fine.py").write_text("def f(response, answer, *, scale):\n    return scale\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert load_function("fine:f", 2, {"scale": 2.0})("", "", scale=2.0) == 2.0
