"""Make the carry-addition task: a tiny model with random weights, demonstrations, and problems to learn and to test on.

    python launch/prepare_carry_addition.py data/carry_addition

OUT/model                  Hugging Face directory: Qwen3, 0.4 million parameters, with its tokenizer
OUT/demonstrations.jsonl   for supervised fine-tuning, in the order of the curriculum: worked solutions, then a mixture
OUT/train.jsonl            problems for reinforcement learning
OUT/preferences.jsonl      pairs of answers for a reward model; OUT/preferences_test.jsonl: held out, for its accuracy
OUT/test.jsonl             problems for evaluations; a fixed fifth of all problems is kept for them, chosen by a hash of
                           the problem's text, so no problem here is in the other two files

The same seed gives the same files. A finished OUT is left alone.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from pathlib import Path

from megarl.data import (
    DataError,
    already_prepared,
    carry_addition,
    read_demonstrations,
    read_problems,
    whole_directory,
    write_rows,
)

# Steps of 32 demonstrations. The mixture teaches the model to guess the answer about as often as it works it out; that
# reinforcement learning has to unlearn.
ROWS_IN_STEP = 32
WORKED_STEPS = 450
MIXED_STEPS = 70
DIRECT_FRACTION = 0.4
TRAIN_PROBLEMS = 20_000
TEST_PROBLEMS = 1_000
PREFERENCES, TEST_PREFERENCES = 20_000, 500


def main(command_line: list[str] | None = None) -> None:
    arguments = parse_arguments(command_line)
    made_from = {
        "task": "carry_addition",
        "seed": arguments.seed,
        "max_digits": arguments.max_digits,
        "steps": {"worked": WORKED_STEPS, "mixed": MIXED_STEPS, "direct": DIRECT_FRACTION},
        "preferences": PREFERENCES,
    }
    try:
        if already_prepared(arguments.out, made_from, force=arguments.force):
            print(f"{arguments.out} is complete; left as it is (--force makes it anew)")
            return
        with whole_directory(arguments.out, made_from) as directory:
            write_problems(directory, arguments.seed, arguments.max_digits)
            write_model(directory / "model", arguments.seed)
    except DataError as error:
        sys.exit(str(error))
    print(f"done: {arguments.out}")


def parse_arguments(command_line: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="OUT", help="directory to make")
    parser.add_argument("--seed", type=int, default=0, help="seed of problems and initial weights (default 0)")
    parser.add_argument("--max-digits", type=int, default=8, help="digits of the longest numbers (default 8)")
    parser.add_argument("--force", action="store_true", help="replace an OUT that this script made before")
    return parser.parse_args(command_line)


def write_problems(directory: Path, seed: int, max_digits: int) -> None:
    """Write the three files and check that no test problem is in the others."""
    demonstrations = carry_addition.demonstrations(
        3 * seed,
        worked=WORKED_STEPS * ROWS_IN_STEP,
        mixed=MIXED_STEPS * ROWS_IN_STEP,
        direct=DIRECT_FRACTION,
        max_digits=max_digits,
    )
    train = carry_addition.problems(3 * seed + 1, TRAIN_PROBLEMS, max_digits)
    test = carry_addition.problems(3 * seed + 2, TEST_PROBLEMS, max_digits, held_out=True)
    write_rows(directory / "demonstrations.jsonl", demonstrations)
    write_rows(directory / "train.jsonl", train)
    write_rows(directory / "test.jsonl", test)
    preferences = carry_addition.preferences(3 * seed + 1, PREFERENCES, max_digits)
    preferred = carry_addition.preferences(3 * seed + 2, TEST_PREFERENCES, max_digits, held_out=True)
    write_rows(directory / "preferences.jsonl", preferences)
    write_rows(directory / "preferences_test.jsonl", preferred)
    shown = {row.prompt for row in read_demonstrations(directory / "demonstrations.jsonl")}
    trained = {row.prompt for row in read_problems(directory / "train.jsonl")}
    held_out = {row.prompt for row in read_problems(directory / "test.jsonl")}
    assert not held_out & (shown | trained)
    print(
        f"problems: {len(demonstrations)} demonstrations, {len(train)} for training, {len(test)} for tests"
        f" ({len(held_out)} different ones, none of them in the other files)"
    )


def write_model(directory: Path, seed: int) -> None:
    """Write the tokenizer and a Qwen3 with random weights."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    tokenizer = carry_addition.build_tokenizer()
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(Qwen3Config(**carry_addition.model_config(tokenizer)))
    model.save_pretrained(directory)
    shutil.copymode(directory / "config.json", directory / "model.safetensors")  # which is written for the owner alone
    tokenizer.save_pretrained(directory)
    print(
        f"model: {model.num_parameters():,} parameters, {len(tokenizer)} tokens in a vocabulary of {model.vocab_size}"
    )


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    main()
