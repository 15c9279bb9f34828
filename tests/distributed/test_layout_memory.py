"""What the memory model predicts for each rank is what megarl's ranks have: no constant is fitted to these layouts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megarl.config import Layout, read_model_shape
from megarl.layout import MEGARL_CPU, Memory, Training, decoder, memory
from tests.distributed.launch import run
from tests.distributed.memory_plan import Bytes, Case, Plan, Report
from tests.families import write_model

pytestmark = pytest.mark.distributed

SIZES: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 320,
    "vocab_size": 509,
    "num_attention_heads": 8,
    "max_position_embeddings": 512,
}
EXPERTS = SIZES | {"moe_intermediate_size": 64}
FAMILIES = {
    "llama": SIZES | {"num_key_value_heads": 4},
    "qwen3": SIZES | {"num_key_value_heads": 4},
    "qwen3_moe": EXPERTS | {"num_key_value_heads": 4},
    "deepseek_v3": EXPERTS | {"num_key_value_heads": 8, "n_group": 1},
    "gpt_oss": SIZES | {"num_key_value_heads": 4},
    "gemma3": SIZES | {"num_key_value_heads": 2},
}
CASES: dict[int, dict[str, Case]] = {
    1: {
        "qwen3": Case("qwen3"),
        "llama bf16": Case("llama", dtype="bfloat16"),
        "llama selective": Case("llama", {"recompute": "selective"}),
        "qwen3 selective": Case("qwen3", {"recompute": "selective"}),
        "qwen3 bf16 selective": Case("qwen3", {"recompute": "selective"}, dtype="bfloat16", lengths=(128, 128, 128)),
        "llama bf16 full": Case("llama", {"recompute": "full"}, dtype="bfloat16"),
        "qwen3 critic, long": Case("qwen3", lengths=(512,), head="critic"),
        "mixture bf16": Case("qwen3_moe", dtype="bfloat16"),
        "latent": Case("deepseek_v3"),
        "gpt-oss bf16": Case("gpt_oss", dtype="bfloat16"),
        "gemma3 bf16": Case("gemma3", dtype="bfloat16"),
    },
    2: {
        "qwen3 data 2 bf16": Case("qwen3", dtype="bfloat16"),
        "llama tensor 2": Case("llama", {"tensor": 2}),
        "llama pipeline 2 bf16": Case("llama", {"pipeline": 2}, dtype="bfloat16"),
        "qwen3 pipeline 2 full": Case("qwen3", {"pipeline": 2, "recompute": "full"}),
        "qwen3 pipeline 2, in 2 parts": Case("qwen3", {"pipeline": 2, "interleave": 2}, micro_batches=6),
        "qwen3 context 2, of two lengths": Case("qwen3", {"context": 2}, lengths=(64, 192)),
        "mixture expert 2": Case("qwen3_moe", {"expert": 2}),
        "latent tensor 2, expert 2": Case("deepseek_v3", {"tensor": 2, "expert": 2}),
    },
    4: {
        "gemma3 tensor 4, for 2 keys": Case("gemma3", {"tensor": 4}),
        "llama pipeline 4": Case("llama", {"pipeline": 4}, micro_batches=6),
        "qwen3 tensor 2, pipeline 2 bf16": Case("qwen3", {"tensor": 2, "pipeline": 2}, dtype="bfloat16"),
        "llama tensor 2, context 2, selective": Case("llama", {"tensor": 2, "context": 2, "recompute": "selective"}),
        "mixture tensor 2, expert 2, halves": Case("qwen3_moe", {"tensor": 2, "expert": 2, "expert_tensor": 2}),
        "latent pipeline 2, expert 2, full": Case("deepseek_v3", {"pipeline": 2, "expert": 2, "recompute": "full"}),
    },
}
EACH = {name: (ranks, case) for ranks, cases in CASES.items() for name, case in cases.items()}
QUANTITIES = ("weights", "gradients", "optimizer", "activations")
MOST_OFF = 0.05


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    directory = tmp_path_factory.mktemp("memory")
    for family, sizes in FAMILIES.items():
        write_model(family, directory / family, **sizes)
    return {family: directory / family for family in FAMILIES}


@pytest.fixture(scope="module")
def measured(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Bytes]]:
    """Of each rank, by case."""
    out = tmp_path_factory.mktemp("measured")
    found: dict[str, list[Bytes]] = {}
    for ranks, cases in CASES.items():
        plan = Plan(models, cases, out / f"{ranks}.json")
        plan.write(out / f"{ranks}.plan")
        run("mpirun", ranks, "tests.distributed.payload_memory", out / f"{ranks}.plan", log=out / f"{ranks}.log")
        found |= Report.read(plan.out).found
    return found


def predicted(case: Case, ranks: int, model: Path) -> list[Memory]:
    """Of each pipeline stage."""
    layout = Layout.model_validate(case.layout)
    sequence = sum(length**2 for length in case.lengths) / sum(case.lengths)
    micro_batch = sum(case.lengths) / sequence
    return memory(
        Training(
            decoder(read_model_shape(model, case.head)),
            layout,
            ranks,
            sequence,
            micro_batch * case.micro_batches * (ranks // layout.model_ranks),
            micro_batch=micro_batch,
            precision="fp32" if case.dtype == "float32" else "bf16",
            sequence_parallel=layout.tensor > 1,
            software=MEGARL_CPU,
        )
    )


@pytest.mark.parametrize("name", EACH)
def test_each_rank_has_what_is_predicted(name: str, measured: dict[str, list[Bytes]], models: dict[str, Path]) -> None:
    """With -s it prints each quantity in MB, predicted and measured."""
    ranks, case = EACH[name]
    stages = predicted(case, ranks, models[case.family])
    assert {one.stage for one in measured[name]} == set(range(len(stages)))
    errors = {}
    for rank, one in enumerate(measured[name]):
        pairs = {each: (getattr(stages[one.stage], each), getattr(one, each)) for each in QUANTITIES}
        words = (f"{each} {mine / 1e6:.3f} {real / 1e6:.3f}" for each, (mine, real) in pairs.items())
        print(f"\n{name}, rank {rank} of stage {one.stage}:", ", ".join(words), end="")
        errors |= {(rank, each): mine / real - 1 for each, (mine, real) in pairs.items()}
    assert {where: error for where, error in errors.items() if abs(error) > MOST_OFF} == {}


@pytest.mark.parametrize("name", EACH)
def test_between_steps_there_is_little_else(name: str, measured: dict[str, list[Bytes]]) -> None:
    """Rotary tables, batches, and what gathers along the sequence: no copy of any part."""
    for one in measured[name]:
        assert 0.8 * one.everything < one.weights + one.gradients + one.optimizer <= one.everything
