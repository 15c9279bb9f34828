"""Every bad row, and every file that is none, is named by file and line."""

import subprocess
import sys
from pathlib import Path

import pytest

from megarl.data import (
    Conversation,
    DataError,
    Demonstration,
    Message,
    Preference,
    Problem,
    read_conversations,
    read_demonstrations,
    read_problems,
    whole_directory,
    whole_pairs,
    write_rows,
)
from megarl.data.writing import already_prepared

GOOD = b'{"prompt": "1+1", "answer": "2"}\n'


def test_reads_rows_in_order_and_ignores_other_keys(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(
        GOOD
        + b'{"prompt": "?"}\n{"dataset": "x", "prompt": "!"}\n'
        + b'{"source": ["x"], "answer": "caf\xc3\xa9", "prompt": "\\u00e9?"}\r\n\n  \n'
    )
    assert read_problems(path) == [Problem("1+1", "2"), Problem("?"), Problem("!", "", "x"), Problem("é?", "café")]


def test_reads_demonstrations_and_takes_a_string_path(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    rows = [Demonstration("a", "b\nc"), Demonstration("d", "ü")]
    write_rows(path, rows)
    assert read_demonstrations(str(path)) == rows


def test_accepts_the_byte_order_mark_of_other_systems(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + GOOD)
    assert read_problems(path) == [Problem("1+1", "2")]


@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        (b'{"prompt": "1+1", "answer": "2"', "not JSON: Input data was truncated"),
        (b"prompt: 1+1", "not JSON: "),
        (b'{"answer": "2"}', "no prompt: expected the keys prompt, found answer"),
        (b"{}", "no prompt: expected the keys prompt, found none"),
        (b'{"prompt": "1+1", "dataset": 3}', "'dataset' is a number, expected a string"),
        (b'{"question": "1+1", "Answer": "2"}', "found question, Answer"),
        (b'{"prompt": "1+1", "answer": 2}', "'answer' is a number, expected a string"),
        (b'{"prompt": ["1+1"], "answer": "2"}', "'prompt' is a list, expected a string"),
        (b'{"prompt": "1+1", "answer": null}', "'answer' is null, expected a string"),
        (b'["1+1", "2"]', "expected an object with prompt, found a list"),
        (b'{"prompt": "", "answer": "2"}', "'prompt' is empty"),
        (b'{"prompt": "1+1", "answer": "\xff"}', "not UTF-8: byte 0xff at position 29"),
        (b"", "blank; remove it"),
        (b"[" * 100_000, "not JSON: "),
    ],
)
def test_a_bad_row_is_named_by_file_and_line(tmp_path: Path, row: bytes, complaint: str) -> None:
    path = tmp_path / "train.jsonl"
    path.write_bytes(GOOD + GOOD + row + b"\n" + GOOD)
    with pytest.raises(DataError) as caught:
        read_problems(path)
    assert str(caught.value).startswith(f"{path}: line 3: ")
    assert complaint in str(caught.value)
    assert len(str(caught.value)) < len(str(path)) + 300


def test_a_demonstration_without_response_names_its_keys(tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    path.write_bytes(GOOD)
    with pytest.raises(
        DataError, match="line 1: no response: expected the keys prompt, response, found prompt, answer"
    ):
        read_demonstrations(path)


PAIR = b'{"prompt": "1+1", "response": "2"}\n'


def test_a_file_may_mix_conversations_and_demonstrations(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(
        PAIR
        + b'{"messages": [{"role": "tool", "content": ""}, {"content": "b", "role": "user"}], "source": 1}\n'
        + b'{"messages": null, "prompt": "a", "response": "b"}\n'
        + b'{"messages": [{"role": "user", "content": "a"}], "prompt": null, "response": null}\n'
    )
    assert read_conversations(path) == [
        Conversation([Message("user", "1+1"), Message("assistant", "2")], 1),
        Conversation([Message("tool", ""), Message("user", "b")], 2),
        Conversation([Message("user", "a"), Message("assistant", "b")], 3),
        Conversation([Message("user", "a")], 4),
    ]


def message(content: bytes) -> bytes:
    return b'{"messages": [{"role": "user", "content": "a"}, %s]}' % content


@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        (b'{"messages": []}', "'messages' is empty; expected at least one message"),
        (b'{"messages": "a"}', "'messages' is a string, expected a list"),
        (b'{"messages": {"role": "user", "content": "a"}}', "'messages' is an object, expected a list"),
        (message(b'"a"'), "message 2 is a string, expected an object with role and content"),
        (message(b"{}"), "message 2: expected just the keys role, content, found none"),
        (
            message(b'{"from": "gpt", "value": "b"}'),
            "message 2: expected just the keys role, content, found from, value",
        ),
        (message(b'{"role": "assistant"}'), "expected just the keys role, content, found role"),
        (
            message(b'{"role": "assistant", "content": "", "tool_calls": []}'),
            "message 2: expected just the keys role, content, found role, content, tool_calls",
        ),
        (message(b'{"role": "assistant", "content": null}'), "message 2: 'content' is null, expected a string"),
        (message(b'{"role": "user", "content": [{"type": "text"}]}'), "message 2: 'content' is a list, expected a"),
        (message(b'{"role": 1, "content": "b"}'), "message 2: 'role' is a number, expected a string"),
        (message(b'{"role": " ", "content": "b"}'), "message 2: 'role' is empty"),
        (message(b'{"role": "user", "content": "\xff"}'), "not UTF-8: byte 0xff at position 77"),
        (b'{"messages": [{"role": "user"', "not JSON: Input data was truncated"),
        (b'{"messages": ' + b"[" * 100_000, "not JSON: "),
        (b'{"messages": [], "prompt": "a"}', "has 'messages' and a prompt or response; expected one or the other"),
        (b'{"messages": [], "response": 1}', "has 'messages' and a prompt or response; expected one or the other"),
        (b'{"prompt": "a", "response": 1}', "'response' is a number, expected a string"),
        (b'{"prompt": "a", "response": " "}', "'response' is empty"),
        (b'{"prompt": "a"}', "no response: expected the keys prompt, response, found prompt"),
        (b'{"message": []}', "expected the key messages, or prompt and response, found message"),
        (b"{}", "expected the key messages, or prompt and response, found none"),
        (b'["a"]', "expected an object with messages, or with prompt and response, found a list"),
    ],
)
def test_a_bad_conversation_is_named_by_file_and_line(tmp_path: Path, row: bytes, complaint: str) -> None:
    path = tmp_path / "train.jsonl"
    path.write_bytes(PAIR + PAIR + row + b"\n" + PAIR)
    with pytest.raises(DataError) as caught:
        read_conversations(path)
    assert str(caught.value).startswith(f"{path}: line 3: ")
    assert complaint in str(caught.value)
    assert len(str(caught.value)) < len(str(path)) + 300


def test_both_answers_of_a_preference_keep_its_line() -> None:
    rows = whole_pairs([Preference("a", "b", "c"), Preference("d", "e", "f")])
    assert [(row.line, row.messages[1].content) for row in rows] == [(1, "b"), (1, "c"), (2, "e"), (2, "f")]


@pytest.mark.parametrize("content", [b"", b"\n\n"])
def test_a_file_without_rows_says_what_was_expected(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "train.jsonl"
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"train.jsonl: no rows; expected JSON lines with prompt$"):
        read_problems(path)


def test_a_missing_file_and_a_directory(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"absent\.jsonl: no such file"):
        read_problems(tmp_path / "absent.jsonl")
    with pytest.raises(DataError, match="is a directory; expected a file of JSON lines"):
        read_problems(tmp_path)


def test_the_room_imports_neither_torch_nor_transformers() -> None:
    code = "import sys, megarl.data; print('torch' in sys.modules, 'transformers' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["False", "False"]


def test_a_directory_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    target, made_from = tmp_path / "out", {"seed": 1}

    def fail_half_way() -> None:
        with whole_directory(target, made_from) as partial:
            (partial / "half").write_text("x")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_half_way()
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "out.partial").mkdir()  # what a killed run leaves
    (tmp_path / "out.partial" / "stale").write_text("x")
    for content in ["first", "second"]:
        with whole_directory(target, made_from) as partial:
            (partial / "file").write_text(content)
        assert [path.name for path in tmp_path.iterdir()] == ["out"]
        assert sorted(path.name for path in target.iterdir()) == ["file", "prepared.json"]
        assert (target / "file").read_text() == content


def test_a_finished_directory_is_left_alone_and_a_foreign_one_refused(tmp_path: Path) -> None:
    target = tmp_path / "out"
    assert not already_prepared(target, {"seed": 1}, force=False)
    with whole_directory(target, {"seed": 1}):
        pass
    assert already_prepared(target, {"seed": 1}, force=False)
    assert not already_prepared(target, {"seed": 1}, force=True)
    with pytest.raises(DataError, match=r'was made from \{"seed": 1\}, but this would make \{"seed": 2\}'):
        already_prepared(target, {"seed": 2}, force=False)
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.tex").write_text("x")
    with pytest.raises(DataError, match="was not made by this script"):
        already_prepared(tmp_path / "home", {"seed": 1}, force=True)
