"""The weight tables name what transformers names, in its shapes: nothing missing, nothing more."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from megarl.config import ModelShape, read_model_shape
from megarl.model_engine.weights import model_parameters
from megarl.model_engine.weights.layouts import GateUp, QueryKeyValue

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
FAMILIES = pytest.mark.parametrize("family", ARCHITECTURES)
TIED = pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])


def shape_and_tensors(family: str, tied: bool, directory: Path) -> tuple[ModelShape, dict[str, tuple[int, ...]]]:
    """What config.json says of a small model, and the tensors that transformers makes from it."""
    config = AutoConfig.for_model(
        family,
        vocab_size=101,
        hidden_size=24,
        intermediate_size=40,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=4 if family != "qwen3" else 8,  # only Qwen3's need not be hidden / heads
        max_position_embeddings=64,
        tie_word_embeddings=tied,
        architectures=[ARCHITECTURES[family]],
    )
    config.save_pretrained(directory)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return read_model_shape(directory), {name: tuple(x.shape) for name, x in model.state_dict().items()}


@FAMILIES
@TIED
def test_names_and_shapes_are_those_of_transformers(family: str, tied: bool, tmp_path: Path) -> None:
    shape, tensors = shape_and_tensors(family, tied, tmp_path)
    if tied:
        del tensors["lm_head.weight"]
    table = [pair for p in model_parameters(shape, 4) for pair in zip(p.hf, p.hf_shapes, strict=True)]
    assert len(dict(table)) == len(table), "a tensor has two rows in the table"
    assert dict(table) == tensors


@FAMILIES
@TIED
def test_parameters_are_named_once_and_lie_in_order(family: str, tied: bool, tmp_path: Path) -> None:
    """The order in which stages are sent: embedding, layers from the first, and what the last stage holds."""
    shape, _ = shape_and_tensors(family, tied, tmp_path)
    table = model_parameters(shape, 4)
    for names in ([p.megatron for p in table], [p.engine for p in table]):
        assert len(set(names)) == len(table)
    places = [(1, p.layer) if p.layer is not None else (2 * p.last_stage, 0) for p in table]
    assert places == sorted(places)
    assert {p.layer for p in table} == {None, 0, 1, 2}
    for parameter in table:
        if parameter.layer is not None:
            assert all(f".layers.{parameter.layer}." in name for name in (parameter.megatron, *parameter.hf))


@FAMILIES
def test_the_layouts_fit_the_shapes(family: str, tmp_path: Path) -> None:
    """Each parameter can be made, split over two ranks, and taken apart again into tensors of the stated shapes."""
    shape, _ = shape_and_tensors(family, False, tmp_path)
    for parameter in model_parameters(shape, 2):
        whole = parameter.layout.to_megatron([torch.empty(size, device="meta") for size in parameter.hf_shapes])
        shards = [parameter.layout.shard(whole, rank, 2) for rank in range(2)]
        back = parameter.layout.to_hf(parameter.layout.unshard(shards))
        assert tuple(tuple(part.shape) for part in back) == parameter.hf_shapes


@FAMILIES
def test_fused_parameters_list_their_parts_in_the_layouts_order(family: str, tmp_path: Path) -> None:
    """Keys and values, and gates and ups, have the same shapes: only the order tells them apart."""
    shape, _ = shape_and_tensors(family, False, tmp_path)
    orders = {
        type(p.layout): [name.split(".")[-2] for name in p.hf] for p in model_parameters(shape, 1) if len(p.hf) > 1
    }
    assert orders == {QueryKeyValue: ["q_proj", "k_proj", "v_proj"], GateUp: ["gate_proj", "up_proj"]}
