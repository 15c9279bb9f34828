"""Hugging Face directories: what is written can be read, by transformers too, and what is wrong is named."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from megarl.config import RecipeError, read_model_shape
from megarl.weights import model_parameters
from megarl.weights.hf import INDEX, SINGLE, HfReader
from tests.families import write_model
from tests.hf_directory import write_hf

TENSORS = {"a": torch.arange(6.0).view(2, 3), "b": torch.arange(4.0), "c": -torch.arange(5.0)}


@pytest.fixture
def single(tmp_path: Path) -> Path:
    directory = tmp_path / "single"
    directory.mkdir()
    save_file(TENSORS, directory / SINGLE)
    return directory


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    directory = tmp_path / "sharded"
    directory.mkdir()
    files = {"model-1.safetensors": ["a"], "model-2.safetensors": ["b", "c"]}
    for file, names in files.items():
        save_file({name: TENSORS[name] for name in names}, directory / file)
    weight_map = {name: file for file, names in files.items() for name in names}
    (directory / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return directory


@pytest.fixture(params=["single", "sharded"])
def directory(request: pytest.FixtureRequest) -> Path:
    return request.getfixturevalue(request.param)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A small Llama as transformers saves it, with the files that belong to a tokenizer."""
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=8,
        intermediate_size=12,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=16,
    )
    torch.manual_seed(0)
    directory = tmp_path / "model"
    LlamaForCausalLM(config).save_pretrained(directory)
    (directory / "tokenizer.json").write_text('{"of": "this model"}')
    (directory / "chat_template.jinja").write_text("{{ messages }}")
    (directory / "README.md").write_text("not part of the model")
    return directory


def buckets(tensors: dict[str, Tensor], size: int = 3) -> Iterator[list[tuple[str, Tensor]]]:
    pairs = list(tensors.items())
    for start in range(0, len(pairs), size):
        yield pairs[start : start + size]


def test_tensors_are_read_by_name(directory: Path) -> None:
    reader = HfReader(directory)
    for name, tensor in TENSORS.items():
        assert torch.equal(reader.tensor(name, tuple(tensor.shape)), tensor)


def test_a_missing_tensor_is_named(directory: Path) -> None:
    with pytest.raises(ValueError, match=r"tensor d is missing; does config\.json"):
        HfReader(directory).tensor("d", (1,))


def test_a_wrong_shape_is_named_with_both_shapes(directory: Path) -> None:
    with pytest.raises(ValueError, match=r"a has shape \(2, 3\), but config\.json says \(3, 2\)"):
        HfReader(directory).tensor("a", (3, 2))


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.float8_e4m3fn, torch.bool])
def test_quantized_weights_are_refused(tmp_path: Path, dtype: torch.dtype) -> None:
    save_file({"a": torch.ones(2, 3).to(dtype)}, tmp_path / SINGLE)
    with pytest.raises(ValueError, match=r"a is [a-z0-9_]+, .*; take the original weights"):
        HfReader(tmp_path).tensor("a", (2, 3))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_floats_of_any_width_are_read(tmp_path: Path, dtype: torch.dtype) -> None:
    save_file({"a": torch.ones(2, 3).to(dtype)}, tmp_path / SINGLE)
    assert HfReader(tmp_path).tensor("a", (2, 3)).dtype is dtype


def test_a_file_name_that_is_none_is_named(sharded: Path) -> None:
    (sharded / INDEX).write_text('{"weight_map": {"a": 3}}')
    with pytest.raises(RecipeError, match=f"{INDEX}: cannot read the index"):
        HfReader(sharded)


def test_a_slice_is_read_alone(tmp_path: Path) -> None:
    stacked = torch.arange(24.0).view(4, 3, 2)
    save_file({"stacked": stacked}, tmp_path / SINGLE)
    reader = HfReader(tmp_path)
    for index in range(4):
        assert torch.equal(reader.tensor(f"stacked[{index}]", (3, 2)), stacked[index])
    for name, expected in [("stacked[4]", (3, 2)), ("stacked[0]", (2, 3)), ("stacked[0]", (4, 3, 2))]:
        with pytest.raises(ValueError, match=r"stacked has shape \(4, 3, 2\), but config\.json says slices of \("):
            reader.tensor(name, expected)
    with pytest.raises(ValueError, match=r"tensor other is missing"):
        reader.tensor("other[0]", (3, 2))


def test_a_directory_without_weights_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"{tmp_path}: no weights; expected {SINGLE} or {INDEX}"):
        HfReader(tmp_path)


@pytest.mark.parametrize("keep", [0, 4, 20], ids=["empty", "in the length", "in the header"])
def test_a_torn_file_is_named(single: Path, keep: int) -> None:
    (single / SINGLE).write_bytes((single / SINGLE).read_bytes()[:keep])
    with pytest.raises(ValueError, match=f"{single}/{SINGLE}: "):
        HfReader(single)


def test_a_torn_end_is_named(single: Path) -> None:
    (single / SINGLE).write_bytes((single / SINGLE).read_bytes()[:-1])
    with pytest.raises(ValueError, match=f"{single}/{SINGLE}: "):
        HfReader(single)


@pytest.mark.parametrize("text", ['{"weight_map": {"a"', "{}", "[]", '{"weight_map": 5}'])
def test_a_damaged_index_is_named(sharded: Path, text: str) -> None:
    (sharded / INDEX).write_text(text)
    with pytest.raises(ValueError, match=f"{sharded}/{INDEX}: cannot read the index"):
        HfReader(sharded)


def test_a_missing_or_torn_part_is_named(sharded: Path) -> None:
    part = sharded / "model-2.safetensors"
    part.write_bytes(part.read_bytes()[:-1])
    with pytest.raises(ValueError, match=rf"{part}: has \d+ bytes, but its header says \d+"):
        HfReader(sharded)
    part.unlink()
    with pytest.raises(ValueError, match=f"{sharded}: 1 of 2 weight files are missing: {part.name}"):
        HfReader(sharded)


@pytest.mark.parametrize("file_bytes", [1 << 30, 300], ids=["one file", "many files"])
def test_what_is_written_is_what_transformers_loads(model: Path, tmp_path: Path, file_bytes: int) -> None:
    tensors = {name: tensor + 1 for name, tensor in load_file(model / SINGLE).items()}
    target = tmp_path / "deep" / "written"
    write_hf(buckets(tensors), model, target, file_bytes=file_bytes)
    files = sorted(file.name for file in target.glob("*.safetensors"))
    if file_bytes == 300:
        assert len(files) > 3
        assert files == [f"model-{n:05d}-of-{len(files):05d}.safetensors" for n in range(1, len(files) + 1)]
        index = json.loads((target / INDEX).read_text())
        assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors.values())
    else:
        assert files == [SINGLE]
    reader = HfReader(target)
    assert all(torch.equal(reader.tensor(name, tuple(x.shape)), x) for name, x in tensors.items())
    loaded, report = AutoModelForCausalLM.from_pretrained(target, output_loading_info=True)
    assert not any(report.values()), report
    assert all(torch.equal(loaded.state_dict()[name], x) for name, x in tensors.items())
    assert (target / "tokenizer.json").read_text() == '{"of": "this model"}'
    assert (target / "chat_template.jinja").exists()
    assert not (target / "README.md").exists()


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_the_configuration_says_the_type_that_was_written(model: Path, tmp_path: Path, key: str) -> None:
    config = json.loads((model / "config.json").read_text())
    config.pop("dtype", None)
    (model / "config.json").write_text(json.dumps(config | {key: "float32"}))
    tensors = {name: tensor.bfloat16() for name, tensor in load_file(model / SINGLE).items()}
    write_hf(buckets(tensors), model, tmp_path / "written")
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "written", dtype="auto").dtype is torch.bfloat16
    assert json.loads((tmp_path / "written" / "config.json").read_text())[key] == "bfloat16"


def test_the_written_type_is_the_models_not_that_of_what_stays_float32(tmp_path: Path) -> None:
    write_model("deepseek_v3", tmp_path / "model")
    biases = {name: x for name, x in load_file(tmp_path / "model" / SINGLE).items() if name.endswith("correction_bias")}
    tensors = {name: tensor.bfloat16() for name, tensor in load_file(tmp_path / "model" / SINGLE).items()} | biases
    write_hf(buckets(dict(sorted(tensors.items()))), tmp_path / "model", tmp_path / "written")
    assert json.loads((tmp_path / "written" / "config.json").read_text())["dtype"] == "bfloat16"
    written = load_file(tmp_path / "written" / SINGLE)
    assert {name for name, tensor in written.items() if tensor.dtype is torch.float32} == biases.keys() != set()


def test_what_never_comes_is_named(tmp_path: Path) -> None:
    write_model("gpt_oss", tmp_path / "model")
    table = model_parameters(read_model_shape(tmp_path / "model"), 1)
    pairs = [(name, torch.zeros(size)) for p in table for name, size in zip(p.hf, p.hf_shapes, strict=True)]
    lost = pairs.pop(-3)[0]
    with pytest.raises(AssertionError, match=re.escape(f"these never came: ['{lost}']")):
        write_hf([pairs], tmp_path / "model", tmp_path / "written")
    assert not (tmp_path / "written").exists()


def test_links_to_nothing_in_the_source_do_not_keep_weights_from_being_written(model: Path, tmp_path: Path) -> None:
    (model / "tokenizer.model").symlink_to("gone")
    (model / "directory.json").mkdir()
    write_hf(buckets(load_file(model / SINGLE)), model, tmp_path / "written")
    assert (tmp_path / "written" / SINGLE).exists()


def test_an_older_target_is_replaced_whole(model: Path, tmp_path: Path) -> None:
    target = tmp_path / "written"
    tensors = load_file(model / SINGLE)
    write_hf(buckets(tensors), model, target, file_bytes=300)
    (target / "left over.json").write_text("{}")
    write_hf(buckets(tensors), model, target)
    assert sorted(file.name for file in target.glob("*.safetensors*")) == [SINGLE]
    assert not (target / "left over.json").exists()
    assert not list(tmp_path.glob("*.partial"))


def test_an_index_of_the_source_is_not_taken_over(model: Path, tmp_path: Path) -> None:
    tensors = load_file(model / SINGLE)
    write_hf(buckets(tensors), model, tmp_path / "sharded", file_bytes=300)
    write_hf(buckets(tensors), tmp_path / "sharded", tmp_path / "written")
    assert not (tmp_path / "written" / INDEX).exists()
    assert HfReader(tmp_path / "written").tensor("model.norm.weight", (8,)).shape == (8,)


def test_a_failure_leaves_the_older_target_alone(model: Path, tmp_path: Path) -> None:
    target = tmp_path / "written"
    tensors = load_file(model / SINGLE)
    write_hf(buckets(tensors), model, target)
    before = (target / SINGLE).read_bytes()

    def torn() -> Iterator[list[tuple[str, Tensor]]]:
        yield next(buckets(tensors))
        raise RuntimeError("as told")

    with pytest.raises(RuntimeError, match="as told"):
        write_hf(torn(), model, target)
    assert (target / SINGLE).read_bytes() == before
    write_hf(buckets(tensors), model, target)  # the torn attempt is not in the way
    assert HfReader(target).tensor("model.norm.weight", (8,)).shape == (8,)
