"""tools/convert_checkpoint.py as its users start it: what it prints, and how it ends."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import tokenizers

from megarl.weights import convert, open_source
from tests.families import write_model

pytestmark = pytest.mark.distributed

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("whole")
    write_model("llama", directory / "hf")
    convert(open_source(directory / "hf"), directory / "megatron", to="megatron", workers=1)
    return directory


def tool(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, ROOT / "tools/convert_checkpoint.py", *map(str, arguments)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(command, capture_output=True, text=True, timeout=100, cwd=ROOT, env=environment)


def test_the_tool_converts_compares_and_explains(whole: Path, tmp_path: Path) -> None:
    done = tool("import", whole / "hf", tmp_path / "megatron", "--workers", 2)
    assert (done.returncode, done.stdout) == (0, "")
    assert "warning: no tokenizer in" in done.stderr
    assert f"{tmp_path / 'megatron'} is whole" in done.stderr
    same = tool("verify", whole / "hf", tmp_path / "megatron")
    assert (same.returncode, same.stdout) == (0, "equal: the same names, dtypes and bits\n")
    bad = tool("export", tmp_path / "none", tmp_path / "out")
    assert bad.returncode == 1
    assert bad.stderr.startswith(f"error: {tmp_path / 'none'} is not there; expected a directory")
    assert len(bad.stderr.splitlines()) == 1


def test_logits_are_those_of_the_models_head(tmp_path: Path) -> None:
    """Not of an untied language model's, which a critic lacks, so that transformers makes each time another."""
    policy, critic, text = tmp_path / "policy", tmp_path / "critic", tmp_path / "text"
    write_model("llama", policy, tie_word_embeddings=False)
    write_model("llama", critic, head="critic", num_labels=1, tie_word_embeddings=False)
    text.write_text("word " * 3)
    refused = tool("verify", critic, critic, "--logits", text)
    assert refused.stderr.endswith("--logits: neither checkpoint has a tokenizer with it; put one beside config.json\n")
    for directory in (policy, critic):
        vocabulary = tokenizers.models.WordLevel({"word": 7, "?": 8}, unk_token="?")
        tokenizers.Tokenizer(vocabulary).save(str(directory / "tokenizer.json"))
        (directory / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    same = tool("verify", critic, critic, "--logits", text)
    assert same.returncode == 0, same.stderr
    assert float(same.stdout.rpartition("logits: ")[2]) < 1e-6
    other = tool("verify", policy, critic, "--logits", text)
    assert (other.returncode, other.stderr.count("Traceback")) == (1, 0)
    assert "a policy with 101 tokens and a critic with 101 cannot be compared" in other.stderr
    text.write_text("")
    assert f"--logits: {text} has no tokens" in tool("verify", critic, critic, "--logits", text).stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["inspect", "two\nlines \udcff"], r"error: two\nlines \udcff is not there"),
        (["inspect", "long" * 100], "File name too long; give a path that can be used"),
        (["export", "{hf}", "/"], "error: / has {hf}, which is read, in it; give another directory"),
        (["export", "{hf}", "{tmp}/" + "long" * 100], "File name too long; give another directory"),
        (["export", "{hf}", "{tmp}/target", "--workers", "0"], "'0' is no number of processes; expected 1 or more"),
    ],
)
def test_the_tool_ends_with_one_plain_line(arguments: list[str], message: str, whole: Path, tmp_path: Path) -> None:
    places = {"hf": str(whole / "hf"), "tmp": str(tmp_path)}
    done = tool(*(argument.format(**places) for argument in arguments))
    assert done.returncode in (1, 2)
    assert message.format(**places) in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


def test_the_tool_ends_when_nobody_reads_on(whole: Path) -> None:
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, ROOT / "tools/convert_checkpoint.py", "inspect", whole / "hf"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, timeout=100, env=environment)
    os.close(write)
    assert (done.returncode, done.stderr) == (1, "")
