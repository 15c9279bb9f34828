"""The search finds what an exhaustive one finds, and says why the rest was left out."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from megarl.config import Layout, ModelShape, layout_problems, read_model_shape
from megarl.layout import GENERATIONS, MEGARL, Machine, Request, Training, decoder, fits, search, step_time
from megarl.simulator import GPUS

ROOT = Path(__file__).parents[2]
QWEN3_8B = {
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": 4096,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 12288,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
}
DEEPSEEK_V3 = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "hidden_size": 7168,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "first_k_dense_replace": 3,
    "vocab_size": 129280,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
}
H100 = Machine(GPUS["H100"], GENERATIONS["H100"])


def shape_of(directory: Path, config: dict[str, Any]) -> ModelShape:
    (directory / "config.json").write_text(json.dumps(config))
    return read_model_shape(directory)


def test_it_finds_the_best_of_all(tmp_path: Path) -> None:
    shape, gpus, sequence, sequences = shape_of(tmp_path, QWEN3_8B), 16, 8192, 64
    found = search(Request(shape, H100, gpus, sequence, sequences))
    model, times = decoder(shape), []
    powers = (1, 2, 4, 8, 16)
    for tensor, pipeline, interleave, context in product(powers[:4], powers, (1, 2, 3, 4, 6), powers[:4]):
        for recompute in ("none", "selective", "full"):
            layout = Layout(
                tensor=tensor,
                pipeline=pipeline,
                interleave=interleave,
                context=context,
                recompute=recompute,  # type: ignore[arg-type]
                overlap=True,
            )
            if layout_problems(layout, shape, gpus):
                continue
            software = replace(MEGARL, data_overlap=True)
            base = Training(model, layout, gpus, sequence, sequences, sequence_parallel=tensor > 1, software=software)
            for size in powers:
                one = replace(base, micro_batch=size)
                if size * one.data <= sequences and fits(one, H100):
                    times.append(step_time(one, H100).seconds)
    assert found.ranked[0].step.seconds == min(times)
    seconds = [choice.step.seconds for choice in found.ranked]
    assert seconds == sorted(seconds)
    assert all(fits(choice.training, H100) for choice in found.ranked)


def test_what_is_fixed_stays(tmp_path: Path) -> None:
    shape = shape_of(tmp_path, QWEN3_8B)
    found = search(Request(shape, H100, 16, 4096, 64, {"tensor": 4, "recompute": "full", "overlap": False}))
    assert {(one.training.layout.tensor, one.training.layout.recompute) for one in found.ranked} == {(4, "full")}
    assert not any(one.training.layout.overlap or one.training.software.data_overlap for one in found.ranked)


def test_every_layout_is_counted_once(tmp_path: Path) -> None:
    found = search(Request(shape_of(tmp_path, QWEN3_8B), H100, 16, 4096, 64))
    assert found.asked == found.too_large + len(found.ranked)
    trained = {
        choice.training.layout.model_copy(update={"recompute": "none"}).model_dump_json() for choice in found.ranked
    }
    assert len(trained) <= found.layouts - found.indivisible
    assert len({(choice.training.layout, choice.training.micro_batch) for choice in found.ranked}) == len(found.ranked)


def test_a_large_mixture_is_searched_with_its_experts(tmp_path: Path) -> None:
    found = search(Request(shape_of(tmp_path, DEEPSEEK_V3), H100, 512, 4096, 2048))
    best = found.ranked[0].training.layout
    assert best.expert > 8, "671e9 parameters do not fit otherwise"
    assert found.asked > 500


def test_the_impossible_is_refused_with_what_would_do(tmp_path: Path) -> None:
    shape = shape_of(tmp_path, QWEN3_8B)
    with pytest.raises(ValueError, match=r"no layout fits: .* 85 GB; 2 GPUs are enough"):
        search(Request(shape, H100, 1, 4096, 64))
    with pytest.raises(ValueError, match="no layout divides the model over 16 GPUs"):
        search(Request(shape, H100, 16, 4096, 64, {"tensor": 5}))


def test_the_tool_prints_a_table_and_json(tmp_path: Path) -> None:
    shape_of(tmp_path, QWEN3_8B)
    arguments = ["--model", tmp_path, "--gpus", "16", "--tokens", "4096", "--sequences", "64", "--fix", "tensor=2"]
    command = [sys.executable, ROOT / "tools/tune_layout.py", *arguments, "--top", "3"]
    text = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout.splitlines()
    assert len(text) == 5
    assert "fit" in text[0]
    printed = subprocess.run([*command, "--json"], check=True, capture_output=True, text=True, timeout=60).stdout
    rows = json.loads(printed)
    assert [f"{row['step_s']:.2f}s" for row in rows] == [line.split()[0] for line in text[2:]]
    assert all(row["layout"]["tensor"] == 2 and 0 < row["mfu"] < 1 for row in rows)
    for row in rows:
        assert sum(row["seconds"].values()) == pytest.approx(row["step_s"])
    wrong = subprocess.run([*command, "--fix", "tensors=2"], capture_output=True, text=True, timeout=60, check=False)
    assert wrong.returncode == 1
    assert "--fix tensors=2: expected NAME=VALUE" in wrong.stderr
