"""Token ids through a real tokenizer and chat template, and the tokenizers that are refused."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from megarl.data import (
    DataError,
    carry_addition,
    load_tokenizer,
    prompt_ids,
    response_ids,
)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    carry_addition.build_tokenizer().save_pretrained(path)
    return path


def test_a_prompt_ends_where_the_answer_begins(directory: Path) -> None:
    tokenizer = load_tokenizer(directory)
    ids = prompt_ids(tokenizer, "12+3=")
    assert tokenizer.decode(ids) == "<|im_start|>user\n12+3=<|im_end|>\n<|im_start|>assistant\n"


def test_a_response_ends_its_turn_and_has_nothing_in_front(directory: Path) -> None:
    tokenizer = load_tokenizer(directory)
    ids = response_ids(tokenizer, "<answer>15</answer>")
    assert ids[-1] == tokenizer.eos_token_id
    assert tokenizer.decode(ids[:-1]) == "<answer>15</answer>"
    assert response_ids(tokenizer, "") == [tokenizer.eos_token_id]


def test_no_tokens_are_added_to_those_of_the_template(directory: Path, tmp_path: Path) -> None:
    """A tokenizer that puts a begin token before everything must not put one before a rendered template."""
    with_begin = json.loads((directory / "tokenizer.json").read_text())
    begin, text = {"SpecialToken": {"id": "<|pad|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}
    with_begin["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [begin, text],
        "pair": [begin, text, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<|pad|>": {"id": "<|pad|>", "ids": [0], "tokens": ["<|pad|>"]}},
    }
    copy(directory, tmp_path)
    (tmp_path / "tokenizer.json").write_text(json.dumps(with_begin))
    plain, eager = load_tokenizer(directory), load_tokenizer(tmp_path)
    assert eager("1").input_ids != plain("1").input_ids
    assert prompt_ids(eager, "1+2=") == prompt_ids(plain, "1+2=")
    assert response_ids(eager, "3") == response_ids(plain, "3")


def copy(source: Path, target: Path) -> None:
    for path in source.iterdir():
        (target / path.name).write_bytes(path.read_bytes())


def without_file(name: str) -> Callable[[Path], None]:
    return lambda path: (path / name).unlink()


def without_eos(path: Path) -> None:
    settings = json.loads((path / "tokenizer_config.json").read_text())
    del settings["eos_token"]
    (path / "tokenizer_config.json").write_text(json.dumps(settings))


def with_damage(path: Path) -> None:
    (path / "tokenizer.json").write_text((path / "tokenizer.json").read_text()[:1000])


@pytest.mark.parametrize(
    ("spoil", "complaint"),
    [
        (without_file("tokenizer.json"), "no tokenizer.json; expected a Hugging Face directory"),
        (without_file("chat_template.jinja"), "no chat template"),
        (without_eos, "no eos token"),
        (with_damage, "tokenizer.json cannot be loaded"),
    ],
)
def test_an_unusable_tokenizer_is_refused(
    directory: Path, tmp_path: Path, spoil: Callable[[Path], None], complaint: str
) -> None:
    copy(directory, tmp_path)
    spoil(tmp_path)
    with pytest.raises(DataError, match=complaint) as caught:
        load_tokenizer(tmp_path)
    assert str(tmp_path) in str(caught.value)


def test_tokenizing_needs_no_torch(directory: Path) -> None:
    """The coordinator tokenizes, and must start in about a second."""
    code = (
        "import sys; from megarl.data import load_tokenizer, prompt_ids;"
        f"print(len(prompt_ids(load_tokenizer({str(directory)!r}), '1+1=')), 'torch' in sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["12", "False"]
