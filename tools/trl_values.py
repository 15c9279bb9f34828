#!/usr/bin/env python
"""What TRL makes of fixed random batches, for tests/unit/test_trl.py. Runs in the environment of tools/bench/vs_trl.py:

    .venv-trl/bin/python tools/trl_values.py

Writes tests/unit/trl_values.json: the batches, and TRL's advantages, importance weights and losses, with their
gradients by log-probabilities. Its trainers are built on models of a few weights, but told what these would have
generated, with which log-probabilities; the rest is their own code, run in float64.
"""

from __future__ import annotations

import json
import os
import random
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
import trl
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
)
from trl import GRPOConfig, GRPOTrainer, RewardConfig, RewardTrainer, RLOOConfig, RLOOTrainer
from trl.experimental.gmpo import GMPOConfig, GMPOTrainer
from trl.rewards import get_soft_overlong_punishment
from trl.trainer.utils import split_tensor_dict

OUT = Path(__file__).parents[1] / "tests/unit/trl_values.json"
PAD, END, WORD = range(3)
PROMPTS, GROUP_SIZE, MICRO_BATCHES = 3, 4, 2
SEEDS = range(2)

GRPO: dict[str, dict[str, Any]] = {
    "grpo": {"loss_type": "grpo"},
    "asymmetric-clip": {"loss_type": "grpo", "epsilon_high": 0.28},
    "two-sided-clip": {"loss_type": "grpo", "delta": 1.5},
    "bnpo": {"loss_type": "bnpo", "gradient_accumulation_steps": 1},
    "dapo": {"loss_type": "dapo", "epsilon_high": 0.28},
    "dapo-truncated-masked": {"loss_type": "dapo", "mask_truncated_completions": True},
    "dr_grpo": {"loss_type": "dr_grpo", "max_completion_length": 16},
    "dr_grpo-truncated-masked": {
        "loss_type": "dr_grpo",
        "max_completion_length": 16,
        "mask_truncated_completions": True,
    },
    "gspo": {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 0.05, "epsilon_high": 0.1},
    "luspo": {"loss_type": "luspo", "importance_sampling_level": "sequence", "epsilon": 0.05, "epsilon_high": 0.1},
    "cispo": {"loss_type": "cispo", "epsilon_high": 1.25},
    "sapo": {"loss_type": "sapo", "sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.5},
    "kl-k3": {"loss_type": "grpo", "beta": 0.1, "use_bias_correction_kl": False},
}
"""Options of GRPOConfig. Where there are several micro-batches, their losses are summed."""

IMPORTANCE: dict[str, dict[str, Any]] = {
    mode: {
        "loss_type": "dapo",
        "beta": 0.1,
        "use_bias_correction_kl": False,
        "use_vllm": True,
        "vllm_importance_sampling_mode": mode,
        "vllm_importance_sampling_clip_min": 0.6 if mode.endswith("mask") else None,
        "vllm_importance_sampling_clip_max": 1.4,
    }
    for mode in ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
}

COMMON: dict[str, Any] = {
    "output_dir": "unused",
    "num_generations": GROUP_SIZE,
    "num_iterations": 2,  # otherwise TRL takes old log-probabilities for the new ones
    "gradient_accumulation_steps": MICRO_BATCHES,
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
    "report_to": [],
}


@dataclass(frozen=True)
class Batch:
    """Completions, group by group, of `lengths` tokens; `mask` and what follows have a number for each token."""

    rewards: list[float]
    lengths: list[int]
    truncated: list[bool]
    mask: list[int]
    new: list[float]
    old: list[float]
    sampled: list[float]
    reference: list[float]

    def rows(self, name: str) -> list[list[float]]:
        return [row.tolist() for row in torch.tensor(getattr(self, name)).split(self.lengths)]

    def grid(self, name: str) -> Tensor:
        return pad_sequence([torch.tensor(row) for row in self.rows(name)], batch_first=True)

    def flat(self, grid: Tensor) -> list[float]:
        rows = grid.expand(-1, max(self.lengths)).tolist()
        return [value for row, length in zip(rows, self.lengths, strict=True) for value in row[:length]]


def batch_of(seed: int) -> Batch:
    """Some tokens inside of completions are a tool's, and one group's rewards are all the same."""
    source = random.Random(seed)
    count = PROMPTS * GROUP_SIZE
    lengths = [source.randint(1, 9) for _ in range(count)]
    mask = [int(place in (0, length - 1) or source.random() < 0.8) for length in lengths for place in range(length)]
    old = [round(source.uniform(-4, -0.2), 4) for _ in mask]
    # TRL rounds rewards to float32
    rewards = [0.5 if i < GROUP_SIZE else round(source.gauss(0, 1) * 1024) / 1024 for i in range(count)]
    return Batch(
        rewards=rewards,
        lengths=lengths,
        truncated=[source.random() < 0.25 for _ in range(count)],
        mask=mask,
        new=[round(min(value + source.gauss(0, 0.3), -0.01), 4) for value in old],
        old=old,
        sampled=[round(value + source.gauss(0, 0.25), 4) for value in old],
        reference=[round(value + source.gauss(0, 0.5), 4) for value in old],
    )


class Given:
    """What a trainer would ask its models for. A tensor may stand for a model: it is its log-probabilities."""

    batch: Batch

    def _get_per_token_logps_and_entropies(self, model: Any, *_: Any, **__: Any) -> tuple[Tensor, Tensor, None]:
        logprobs = model if isinstance(model, Tensor) else self.batch.grid("old")
        return logprobs, torch.zeros_like(logprobs), None

    def completions(self) -> list[list[int]]:
        return [
            [WORD] * (length - 1) + [WORD if cut else END]
            for length, cut in zip(self.batch.lengths, self.batch.truncated, strict=True)
        ]


class GivenGrpo(Given, GRPOTrainer):
    def _generate(self, prompts: list[str]) -> tuple[Any, ...]:
        batch, ids = self.batch, self.completions()
        return [[WORD]] * len(ids), ids, batch.rows("mask"), prompts, batch.rows("sampled"), {}, None, None


class GivenGmpo(GivenGrpo, GMPOTrainer):
    pass


class GivenRloo(Given, RLOOTrainer):
    def _generate(self, prompts: list[str]) -> tuple[Any, ...]:
        ids = self.completions()
        return [[WORD]] * len(ids), ids, prompts


def main() -> None:
    torch.set_default_dtype(torch.float64)
    batches = [batch_of(seed) for seed in SEEDS]
    cases = {name: (GivenGrpo, GRPOConfig, options) for name, options in (GRPO | IMPORTANCE).items()}
    cases["gmpo"] = (GivenGmpo, GMPOConfig, {"epsilon": 0.4, "epsilon_high": 0.4})
    trainers = {name: trainer_of(*case) for name, case in cases.items()}
    unscaled = trainer_of(GivenGrpo, GRPOConfig, {"scale_rewards": "none"})
    rloo = trainer_of(GivenRloo, RLOOConfig, {"gradient_accumulation_steps": 1})
    rloo_kl = trainer_of(GivenRloo, RLOOConfig, {"gradient_accumulation_steps": 1, "beta": 0.1})
    fresh = [replace(batch, new=batch.old) for batch in batches]
    values = {
        "trl": trl.__version__,
        "batches": [asdict(batch) for batch in batches],
        "advantages": {
            name: [scored(trainer, batch)["advantages"].tolist() for batch in batches]
            for name, trainer in {
                "grpo": trainers["grpo"],
                "grpo-unscaled": unscaled,
                "rloo": rloo,
                "rloo-kl": rloo_kl,
            }.items()
        },
        "importance": {
            name: [batch.flat(scored(trainers[name], batch)["importance_sampling_ratio"]) for batch in batches]
            for name in IMPORTANCE
        },
        "losses": {name: [loss(trainer, batch) for batch in batches] for name, trainer in trainers.items()},
        "rloo-fresh": [loss(rloo, batch) for batch in fresh],
        "overlong": overlong(),
        "preferences": preferences(),
    }
    OUT.write_text(json.dumps(rounded(values)) + "\n")


def trainer_of(trainer: type, config: type, options: dict[str, Any]) -> Any:
    """Without vLLM's server and a reference model to load, whose answers are given."""
    options = COMMON | options
    later = {name: options.pop(name, default) for name, default in (("beta", 0.0), ("use_vllm", False))}
    size = PROMPTS * GROUP_SIZE // options["gradient_accumulation_steps"]
    made = trainer(
        model=tiny(AutoModelForCausalLM),
        reward_funcs=lambda reward, **_: reward,
        args=config(per_device_train_batch_size=size, beta=0.0, **options),
        train_dataset=Dataset.from_list([{"prompt": "a", "reward": 0.0}]),
        processing_class=tokenizer(),
    )
    for name, value in later.items():
        setattr(made, name, value)
    made.model.train()
    made.current_gradient_accumulation_steps = made.args.gradient_accumulation_steps
    return made


def scored(trainer: Any, batch: Batch) -> dict[str, Any]:
    trainer.batch, trainer.ref_model = batch, batch.grid("reference")
    return trainer._generate_and_score_completions([{"prompt": "a", "reward": reward} for reward in batch.rewards])


def loss(trainer: Any, batch: Batch) -> dict[str, Any]:
    """The loss of a step, and its gradient by the log-probability of each token."""
    new = batch.grid("new").requires_grad_()
    parts = trainer.args.gradient_accumulation_steps
    inputs = split_tensor_dict(scored(trainer, batch), parts)
    total = sum(trainer.compute_loss(own, part) for own, part in zip(new.chunk(parts), inputs, strict=True))
    (gradient,) = torch.autograd.grad(total, new)
    return {"loss": total.item(), "gradient": batch.flat(gradient)}


def overlong() -> dict[str, Any]:
    limit, buffer, lengths = 100, 20, [1, 79, 80, 81, 90, 99, 100, 101, 150]
    punishment = get_soft_overlong_punishment(max_completion_len=limit, soft_punish_cache=buffer)
    return {
        "limit": limit,
        "buffer": buffer,
        "lengths": lengths,
        "penalties": punishment([[WORD] * n for n in lengths]),
    }


def preferences() -> dict[str, Any]:
    source = random.Random(0)
    rewards, margin = [[round(source.gauss(0, 2), 4) for _ in range(8)] for _ in range(2)]
    results = {}
    for centring in (None, 0.01):
        trainer = RewardTrainer(
            model=tiny(AutoModelForSequenceClassification),
            args=RewardConfig(
                output_dir="unused", use_cpu=True, bf16=False, report_to=[], center_rewards_coefficient=centring
            ),
            train_dataset=Dataset.from_list([{"chosen_ids": [WORD], "rejected_ids": [WORD]}]),
            processing_class=tokenizer(),
        )
        for with_margin in (False, True):
            logits = torch.tensor(rewards, requires_grad=True)
            inputs = {"attention_mask": torch.ones(len(rewards), 1)}
            if with_margin:
                inputs["margin"] = torch.tensor(margin[:4])
            total = trainer.compute_loss(answering(logits[:, None]), inputs)
            (gradient,) = torch.autograd.grad(total, logits)
            name = "-".join(["plain", *["margin"] * with_margin, *["centring"] * (centring is not None)])
            results[name] = {"loss": total.item(), "gradient": gradient.tolist()}
    return {"rewards": rewards, "margin": margin[:4], "centring": 0.01, "results": results}


def answering(logits: Tensor) -> Any:
    """A model that says this of any input."""
    return lambda **_: SimpleNamespace(logits=logits)


def tiny(kind: Any) -> PreTrainedModel:
    return kind.from_config(
        Qwen2Config(
            vocab_size=3,
            hidden_size=4,
            intermediate_size=4,
            num_hidden_layers=1,
            num_attention_heads=1,
            num_key_value_heads=1,
            num_labels=1,
            pad_token_id=PAD,
            eos_token_id=END,
        )
    )


def tokenizer() -> PreTrainedTokenizerFast:
    words = Tokenizer(WordLevel({"<pad>": PAD, "<end>": END, "a": WORD}, unk_token="a"))
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<end>")


def rounded(value: Any) -> Any:
    """Twelve digits are more than the test looks at."""
    match value:
        case float():
            return float(f"{value:.12g}")
        case list():
            return [rounded(each) for each in value]
        case dict():
            return {name: rounded(each) for name, each in value.items()}
    return value


if __name__ == "__main__":
    main()
