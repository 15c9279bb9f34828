"""The baseline of vs_trl.py: TRL's GRPOTrainer on the same checkpoint and problems. Runs in TRL's own environment.

Prints one JSON line: seconds of each step, and accuracy on the held-out problems before and after.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import time
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

ANSWER = re.compile(r"<answer>\s*(.*?)\s*</answer>", re.DOTALL)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("checkpoint")
    parser.add_argument("data", type=Path)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--prompts", type=int, required=True)
    parser.add_argument("--group-size", type=int, required=True)
    parser.add_argument("--max-new-tokens", type=int, required=True)
    parser.add_argument("--learning-rate", type=float, required=True)
    parser.add_argument("--warmup-steps", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--problems", type=int, required=True, help="held-out problems; 0: no evaluation")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    tokenizer = AutoTokenizer.from_pretrained(args.checkpoint, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(args.checkpoint, dtype=torch.float32)
    held_out = rows(args.data / "test.jsonl")[: args.problems]
    before = accuracies(model, tokenizer, held_out, args.max_new_tokens)
    clock = Clock()
    config = GRPOConfig(
        output_dir="unused",
        per_device_train_batch_size=args.prompts * args.group_size,
        num_generations=args.group_size,
        max_completion_length=args.max_new_tokens,
        learning_rate=args.learning_rate,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=args.warmup_steps,
        adam_beta2=0.95,
        weight_decay=0.0,
        beta=0.0,
        max_steps=args.steps,
        seed=args.seed,
        shuffle_dataset=False,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        disable_tqdm=True,
    )
    problems = [
        {"prompt": [{"role": "user", "content": row["prompt"]}], "answer": row["answer"]}
        for row in rows(args.data / "train.jsonl")[: args.steps * args.prompts]
    ]
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_list(problems),
        processing_class=tokenizer,
        callbacks=[clock],
    )
    trainer.train()
    after = accuracies(model, tokenizer, held_out, args.max_new_tokens)
    print(json.dumps({"step_seconds": clock.seconds, "before": before, "after": after}))


class Clock(TrainerCallback):
    """Seconds from the beginning of each step to the beginning of the next, generation included."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._start = 0.0

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        if not self.seconds and not self._start:
            self._start = time.perf_counter()

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self._start = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        now = time.perf_counter()
        self.seconds.append(now - self._start)
        self._start = now


def rows(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def correct(text: str, answer: str) -> float:
    found = ANSWER.findall(text)
    return float(bool(found) and found[-1] == answer)


def reward(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
    return [correct(completion[0]["content"], truth) for completion, truth in zip(completions, answer, strict=True)]


@torch.no_grad()
def accuracies(model: Any, tokenizer: Any, problems: list[dict[str, str]], max_new_tokens: int) -> list[float]:
    """At temperature 1 and greedy."""
    if not problems:
        return [0.0, 0.0]
    texts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": row["prompt"]}], add_generation_prompt=True, tokenize=False
        )
        for row in problems
    ]
    inputs = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False, return_token_type_ids=False)
    results = []
    model.eval()
    for sampling in ({"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}, {"do_sample": False}):
        output = model.generate(**inputs, max_new_tokens=max_new_tokens, **sampling)
        answers = tokenizer.batch_decode(output[:, inputs.input_ids.shape[1] :], skip_special_tokens=True)
        scores = [correct(text, row["answer"]) for text, row in zip(answers, problems, strict=True)]
        results.append(sum(scores) / len(scores))
    model.train()
    return results


if __name__ == "__main__":
    main()
