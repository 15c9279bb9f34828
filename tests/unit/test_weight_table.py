"""The weight tables name what transformers writes to disk, in its shapes: nothing missing, nothing more."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from megarl.config import ModelShape, read_model_shape
from megarl.model_engine.weights import left_out
from megarl.weights import Parameter, model_parameters
from megarl.weights.hf import SINGLE, HfReader
from megarl.weights.layouts import EngineLayout, GateUp, QueryKeyValue, RopePairs
from tests.families import FAMILIES, family_config, write_model
from tests.hf_directory import write_hf

every_family = pytest.mark.parametrize("family", FAMILIES)
either_tied = pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
Written = Callable[[str, bool], Path]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Written:
    """The directory of a family's small model, written once."""
    root = tmp_path_factory.mktemp("models")

    def directory(family: str, tied: bool) -> Path:
        path = root / f"{family}-{tied}"
        if not path.exists():
            write_model(family, path, tie_word_embeddings=tied)
        return path

    return directory


def table_of(path: Path, tensor: int = 4) -> tuple[ModelShape, list[Parameter]]:
    shape = read_model_shape(path)
    return shape, model_parameters(shape, tensor)


def read_parts(reader: HfReader, parameter: Parameter) -> list[Tensor]:
    return [reader.tensor(name, size) for name, size in zip(parameter.hf, parameter.hf_shapes, strict=True)]


@every_family
@either_tied
def test_names_and_shapes_are_those_on_disk(family: str, tied: bool, written: Written) -> None:
    shape, table = table_of(written(family, tied))
    pairs = [pair for p in table for pair in zip(p.hf, p.hf_shapes, strict=True)]
    assert len(dict(pairs)) == len(pairs), "a tensor has two rows in the table"
    named: dict[str, tuple[int, ...]] = {}
    for name, size in pairs:
        whole, index = re.fullmatch(r"(.*?)(?:\[(\d+)\])?", name).groups()  # type: ignore[union-attr]
        if index is None:
            named[whole] = size
        else:
            assert shape.experts is not None
            assert {f"{whole}[{i}]" for i in range(shape.experts.count)} <= dict(pairs).keys()
            named[whole] = (shape.experts.count, *size)
    assert named == {name: tuple(x.shape) for name, x in load_file(written(family, tied) / SINGLE).items()}


@every_family
@either_tied
def test_parameters_are_named_once_and_lie_in_order(family: str, tied: bool, written: Written) -> None:
    """The order in which stages are sent: embedding, layers from the first, and what the last stage holds."""
    _, table = table_of(written(family, tied))
    assert len({p.megatron for p in table}) == len(table)
    places = [(1, p.layer) if p.layer is not None else (2 * p.last_stage, 0) for p in table]
    assert places == sorted(places)
    assert {p.layer for p in table} == {None, 0, 1, 2, 3}
    for parameter in table:
        if parameter.layer is not None:
            assert all(f".layers.{parameter.layer}." in name for name in (parameter.megatron, *parameter.hf))


@every_family
def test_experts_and_buffers_are_marked(family: str, written: Written) -> None:
    """Each layer with experts has all of them, under the same name in both; only the router's buffer stays float32."""
    shape, table = table_of(written(family, False))
    for parameter in table:
        own = re.search(r"\.experts\..*\[(\d+)\]$", parameter.megatron)
        assert parameter.expert == (int(own[1]) if own else None)
        if own:
            assert all(re.search(rf"experts\.{own[1]}\.|\[{own[1]}\]$", name) for name in parameter.hf)
        assert parameter.float32 == parameter.megatron.endswith(".mlp.router.expert_bias")
        assert parameter.float32 == parameter.hf[0].endswith("e_score_correction_bias")
    for layer in range(shape.layers):
        found = {p.expert for p in table if p.layer == layer} - {None}
        assert found == (set(range(8)) if shape.has_experts(layer) else set())


@every_family
def test_places_in_an_engine_are_known_but_for_experts_with_biases(family: str, written: Written) -> None:
    shape, table = table_of(written(family, False))
    known = [p for p in table if p.engine is not None]
    places = [(p.engine, p.engine_row) for p in known]
    assert len(set(places)) == len(known)
    assert all(isinstance(p.layout, EngineLayout) for p in known)
    unknown = [p.megatron for p in table if p.engine is None]
    assert all(".mlp.experts." in name for name in unknown)
    assert bool(unknown) == (shape.experts is not None and shape.experts.bias)


@every_family
@pytest.mark.parametrize("size", [1, 2, 4])
def test_every_parameter_comes_back_from_its_shards(family: str, size: int, written: Written) -> None:
    """On `size` ranks, tensor-parallel or expert-tensor-parallel: equal shards, and the file's tensors again."""
    reader = HfReader(written(family, False))
    for parameter in table_of(written(family, False), size)[1]:
        parts = read_parts(reader, parameter)
        whole = parameter.layout.to_megatron(parts)
        assert parameter.layout.whole_shape(parameter.hf_shapes) == whole.shape
        shards = [parameter.layout.shard(whole, rank, size) for rank in range(size)]
        assert len({shard.shape for shard in shards}) == 1
        back = parameter.layout.to_hf(parameter.layout.unshard(shards))
        assert all(torch.equal(a, b) for a, b in zip(back, parts, strict=True)), parameter.megatron


@every_family
def test_what_is_written_in_any_order_is_what_was_read(family: str, written: Written, tmp_path: Path) -> None:
    source = written(family, family == "gemma3")
    reader = HfReader(source)
    pairs = []
    for parameter in table_of(source)[1]:
        whole = parameter.layout.to_megatron(read_parts(reader, parameter))
        pairs += zip(parameter.hf, parameter.layout.to_hf(whole), strict=True)
    random.Random(0).shuffle(pairs)
    write_hf((pairs[start : start + 7] for start in range(0, len(pairs), 7)), source, tmp_path / "written")
    files = [load_file(path / SINGLE) for path in (source, tmp_path / "written")]
    assert files[0].keys() == files[1].keys()
    assert all(torch.equal(x, files[1][name]) for name, x in files[0].items())
    _, report = AutoModelForCausalLM.from_pretrained(tmp_path / "written", output_loading_info=True)
    assert not any(report.values()), report


@pytest.mark.parametrize("family", ["qwen2", "qwen3_moe", "mixtral", "glm4_moe"])
def test_fused_parameters_list_their_parts_in_the_layouts_order(family: str, written: Written) -> None:
    """Keys and values, and gates and ups, have the same shapes: only the order tells them apart."""
    _, table = table_of(written(family, False))
    orders = {(type(p.layout), tuple(name.split(".")[-2] for name in p.hf)) for p in table if len(p.hf) > 1}
    gate_up = ("w1", "w3") if family == "mixtral" else ("gate_proj", "up_proj")
    assert orders == {(QueryKeyValue, ("q_proj", "k_proj", "v_proj")), (GateUp, gate_up)}


@pytest.mark.parametrize(
    ("query_rank", "interleaved", "paired"),
    [
        (None, False, {"q_proj": RopePairs(20, 8), "kv_a_proj_with_mqa": RopePairs(32, 8)}),
        (16, False, {"q_b_proj": RopePairs(20, 8), "kv_a_proj_with_mqa": RopePairs(32, 8)}),
        (16, True, {}),
    ],
)
def test_rotated_halves_become_pairs_wherever_they_are_made(
    query_rank: int | None, interleaved: bool, paired: dict[str, RopePairs], tmp_path: Path
) -> None:
    family_config("deepseek_v3", q_lora_rank=query_rank, rope_interleave=interleaved).save_pretrained(tmp_path)
    _, table = table_of(tmp_path)
    layouts = [(p.hf[0].split(".")[-2], p.layout) for p in table if isinstance(p.layout, RopePairs)]
    assert len(layouts) == 4 * len(paired)
    assert dict(layouts) == paired


@every_family
@either_tied
def test_only_what_has_no_place_is_left_out(family: str, tied: bool, written: Written) -> None:
    directory = written(family, tied)
    shape, table = table_of(directory)
    stored = [*HfReader(directory).specs, "model.layers.9.mlp.up_proj.weight", "model.layers.0.self_attn.q_proj.extra"]
    assert left_out(stored, table, shape) == sorted(stored[-2:])
