"""Checkpoints converted there and back are bitwise what they were: all families, odd vocabularies, FP8, extras."""

from __future__ import annotations

import json
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from megarl.config import RecipeError, read_model_shape
from megarl.weights import checkpoint_key, compare, convert, describe, find_place, model_parameters, open_source
from megarl.weights.dcp import BACKEND, DcpReader
from megarl.weights.hf import INDEX, SINGLE
from tests.families import AUTO, FAMILIES, VOCAB, write_model

SHARD_BYTES = 20_000


def write_bfloat16(family: str, directory: Path, *, shard: bool = False, **more: Any) -> Path:
    """A model as transformers saves it in bfloat16, but for the router's bias, which is float32 in the real ones."""
    model = write_model(family, directory, **more).bfloat16()
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.data = buffer.float()
    (directory / SINGLE).unlink()
    model.save_pretrained(directory, max_shard_size=SHARD_BYTES if shard else "5GB")
    (directory / "tokenizer.json").write_text("{}")
    (directory / "chat_template.jinja").write_text("{{ messages }}")
    return directory


def load(directory: Path) -> dict[str, Tensor]:
    """All tensors, read by safetensors' own code."""
    files = [load_file(path) for path in sorted(directory.glob("*.safetensors"))]
    tensors = {name: tensor for file in files for name, tensor in file.items()}
    assert len(tensors) == sum(map(len, files))
    return tensors


def assert_same(first: dict[str, Tensor], second: dict[str, Tensor]) -> None:
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert tensor.dtype is second[name].dtype, name
        assert torch.equal(tensor, second[name]), name


def there_and_back(source: Path, scratch: Path, **options: Any) -> Path:
    convert(open_source(source), scratch / "megatron", to="megatron", workers=1)
    convert(open_source(scratch / "megatron"), scratch / "back", to="hf", workers=1, **options)
    return scratch / "back"


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_comes_back_bitwise(family: str, tied: bool, tmp_path: Path) -> None:
    source = write_bfloat16(family, tmp_path / "source", shard=tied, tie_word_embeddings=tied)
    assert (source / INDEX).exists() == tied
    back = there_and_back(source, tmp_path, file_bytes=1 << 30 if tied else SHARD_BYTES)
    assert_same(load(source), load(back))
    assert ("lm_head.weight" in load(back)) is not tied
    assert (back / INDEX).exists() is not tied
    for name in ("tokenizer.json", "chat_template.jinja", "generation_config.json"):
        assert (back / name).read_bytes() == (source / name).read_bytes()
    assert json.loads((back / "config.json").read_text()) == json.loads((source / "config.json").read_text())
    assert not compare(open_source(source), open_source(tmp_path / "megatron"), workers=1)


@pytest.mark.parametrize("family", ["qwen3", "gpt_oss", "deepseek_v3"])
def test_what_is_exported_is_what_transformers_loads(family: str, tmp_path: Path) -> None:
    source = write_bfloat16(family, tmp_path / "source", tie_word_embeddings=False)
    back = there_and_back(source, tmp_path)
    models = []
    for directory in (source, back):
        model, report = AutoModelForCausalLM.from_pretrained(directory, output_loading_info=True, dtype="auto")
        assert not any(report.values()), report
        models.append(model)
    ids = torch.arange(20)[None]
    assert torch.equal(*(model(ids).logits for model in models))


@pytest.mark.parametrize("vocab", [1, 151_669, 151_671])
def test_odd_vocabularies_come_back(vocab: int, tmp_path: Path) -> None:
    more = {"vocab_size": vocab, "hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1, "head_dim": 4}
    special = {"pad_token_id": None, "bos_token_id": 0, "eos_token_id": 0}
    source = write_bfloat16("llama", tmp_path / "source", **more, **special)
    assert_same(load(source), load(there_and_back(source, tmp_path)))


def by_key(source: Path) -> dict[str, Tensor]:
    """The tensors of a checkpoint as Megatron has them, made from the files alone."""
    shape, files = read_model_shape(source), load(source)
    tensors: dict[str, Tensor] = {}
    experts: dict[str, list[Tensor]] = {}
    for parameter in model_parameters(shape, 1):
        whole = parameter.layout.to_megatron([files[name] for name in parameter.hf])
        key = checkpoint_key(shape, parameter)
        if parameter.expert is None:
            tensors[key] = whole
        else:
            experts.setdefault(key, []).append(whole)
    return tensors | {key: torch.stack(parts) for key, parts in experts.items()}


def save_by_torch(tensors: dict[str, Tensor], source: Path, directory: Path) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(tensors, checkpoint_id=directory, no_dist=True)
    (directory / "metadata.json").write_text(json.dumps(BACKEND))
    for name in ("config.json", "generation_config.json"):
        (directory / name).write_bytes((source / name).read_bytes())
    return directory


@pytest.mark.parametrize("family", ["llama", "deepseek_v3", "qwen3_moe"])
def test_torch_loads_what_is_imported(family: str, tmp_path: Path) -> None:
    source = write_bfloat16(family, tmp_path / "source", tie_word_embeddings=False)
    convert(open_source(source), tmp_path / "megatron", to="megatron", workers=1)
    expected = by_key(source)
    loaded = {key: torch.zeros_like(tensor) for key, tensor in expected.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(loaded, checkpoint_id=tmp_path / "megatron", no_dist=True)
    assert_same(expected, loaded)
    assert DcpReader(tmp_path / "megatron").tensors.keys() == expected.keys()


@pytest.mark.parametrize("rows", [VOCAB, 128])
def test_padded_vocabularies_of_any_size_are_cut(rows: int, tmp_path: Path) -> None:
    source = write_bfloat16("llama", tmp_path / "source", tie_word_embeddings=False)
    tensors = by_key(source)
    for key in ("embedding.word_embeddings.weight", "output_layer.weight"):
        tensors[key] = torch.cat([tensors[key], torch.ones(rows - VOCAB, 32, dtype=torch.bfloat16)])
    tensors |= {"optimizer.state.exp_avg.output_layer.weight": torch.zeros(3)}
    checkpoint = save_by_torch(tensors, source, tmp_path / "saved")
    convert(open_source(checkpoint), tmp_path / "back", to="hf", workers=1)
    assert_same(load(source), load(tmp_path / "back"))


@pytest.mark.parametrize("family", ["qwen2", "qwen3_moe"])
def test_the_older_form_with_stacked_layers_is_read(family: str, tmp_path: Path) -> None:
    source = write_bfloat16(family, tmp_path / "source", tie_word_embeddings=False)
    layers: dict[str, list[Tensor]] = {}
    others: dict[str, Tensor] = {}
    for key, tensor in by_key(source).items():
        if match := re.fullmatch(r"decoder\.layers\.\d+\.(.*)", key):
            layers.setdefault(f"decoder.layers.{match[1]}", []).append(tensor)
        else:
            others[key] = tensor
    stacked = others | {key: torch.stack(parts) for key, parts in layers.items()}
    checkpoint = save_by_torch(stacked, source, tmp_path / "saved")
    convert(open_source(checkpoint), tmp_path / "back", to="hf", workers=1)
    assert_same(load(source), load(tmp_path / "back"))
    config = json.loads((source / "config.json").read_text())
    fewer = {"num_hidden_layers": config["num_hidden_layers"] - 1, "layer_types": None}
    (checkpoint / "config.json").write_text(json.dumps(config | fewer))
    with pytest.raises(RecipeError, match=r"stacks \(\d+,.*\) layers or experts, but .*config\.json says"):
        open_source(checkpoint)


def quantize(source: Path, block: int = 16) -> dict[str, Tensor]:
    """Make the projections of a bfloat16 directory FP8 as DeepSeek's are, and return what they then mean."""
    tensors, meant = load(source), {}
    for name, tensor in list(tensors.items()):
        meant[name] = tensor
        if tensor.dim() == 2 and "_proj" in name:
            rows, columns = (-(-size // block) for size in tensor.shape)
            scales = torch.rand(rows, columns) * 0.01 + 1e-3
            every = scales.repeat_interleave(block, 0).repeat_interleave(block, 1)
            every = every[: tensor.shape[0], : tensor.shape[1]]
            tensors[name] = (tensor.float() / every).to(torch.float8_e4m3fn)
            tensors[f"{name}_scale_inv"] = scales
            meant[name] = (tensors[name].double() * every.double()).bfloat16()
    save_file(tensors, source / SINGLE, metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    settings = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [block, block]}
    (source / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    return meant


def test_fp8_becomes_the_bfloat16_that_it_means(tmp_path: Path) -> None:
    source = write_bfloat16("deepseek_v3", tmp_path / "source", tie_word_embeddings=False)
    meant = quantize(source)
    back = there_and_back(source, tmp_path)
    assert_same(meant, load(back))
    assert "quantization_config" not in json.loads((back / "config.json").read_text())
    read_model_shape(back)
    convert(open_source(source), tmp_path / "direct", to="hf", workers=1)
    assert_same(meant, load(tmp_path / "direct"))
    assert not compare(open_source(source), open_source(back), workers=1)
    assert "tensors are FP8" in describe(find_place(source))["quantized"]


def add_tensors(source: Path, tensors: dict[str, Tensor]) -> None:
    save_file(load_file(source / SINGLE) | tensors, source / SINGLE, metadata={"format": "pt"})


def test_prediction_layers_are_kept(tmp_path: Path) -> None:
    source = write_bfloat16("deepseek_v3", tmp_path / "source", tie_word_embeddings=False)
    names = ("model.layers.4.eh_proj.weight", "model.layers.4.mlp.experts.0.gate_proj.weight")
    add_tensors(source, {name: torch.randn(6, 5).bfloat16() for name in names})
    assert_same(load(source), load(there_and_back(source, tmp_path)))
    assert describe(find_place(tmp_path / "megatron"))["extras"].startswith("2 tensors")


@pytest.mark.parametrize("shape", [(), (0, 5), (1,)])
def test_prediction_layers_of_any_shape_are_kept(shape: tuple[int, ...], tmp_path: Path) -> None:
    source = write_bfloat16("deepseek_v3", tmp_path / "source", tie_word_embeddings=False)
    add_tensors(source, {"model.layers.4.any": torch.ones(shape)})
    assert_same(load(source), load(there_and_back(source, tmp_path)))


def test_every_bit_is_kept(tmp_path: Path) -> None:
    """All values of bfloat16: payloads of NaNs, infinities, denormals."""
    source = write_bfloat16("llama", tmp_path / "source", vocab_size=2048)
    add_tensors(source, {"model.embed_tokens.weight": torch.arange(65536).short().view(2048, 32).view(torch.bfloat16)})
    back = there_and_back(source, tmp_path)
    first, second = (load(path)["model.embed_tokens.weight"].view(torch.int16) for path in (source, back))
    assert torch.equal(first, second)


def test_a_copy_of_a_tied_embedding_is_kept(tmp_path: Path) -> None:
    source = write_bfloat16("llama", tmp_path / "source", tie_word_embeddings=True)
    add_tensors(source, {"lm_head.weight": load(source)["model.embed_tokens.weight"].clone()})
    assert_same(load(source), load(there_and_back(source, tmp_path)))


def test_rotary_buffers_alone_are_left_out_and_named(tmp_path: Path) -> None:
    source = write_bfloat16("llama", tmp_path / "source", tie_word_embeddings=True)
    before, name = load(source), "model.layers.0.self_attn.rotary_emb.inv_freq"
    add_tensors(source, {name: torch.ones(4)})
    assert open_source(source).ignored == [name]
    assert_same(before, load(there_and_back(source, tmp_path)))


@pytest.mark.parametrize("head", ["critic", "reward"])
def test_scalar_heads_come_back(head: Any, tmp_path: Path) -> None:
    write_model("llama", tmp_path / "source", head=head, num_labels=1, pad_token_id=0)
    assert_same(load(tmp_path / "source"), load(there_and_back(tmp_path / "source", tmp_path)))


def test_several_workers_write_the_same(tmp_path: Path) -> None:
    source = write_bfloat16("gpt_oss", tmp_path / "source")
    options: Any = {"workers": 3, "unit_bytes": 4000}
    convert(open_source(source), tmp_path / "megatron", to="megatron", **options)
    assert len(list((tmp_path / "megatron").glob("*.distcp"))) > 10
    convert(open_source(tmp_path / "megatron"), tmp_path / "back", to="hf", file_bytes=SHARD_BYTES, **options)
    assert_same(load(source), load(tmp_path / "back"))


def test_what_differs_is_told_by_name(tmp_path: Path) -> None:
    first = write_bfloat16("deepseek_v3", tmp_path / "first")
    second = write_bfloat16("deepseek_v3", tmp_path / "second")
    add_tensors(first, {"model.layers.4.a": torch.ones(3), "model.layers.4.b": torch.ones(3)})
    changed = load(first)["model.norm.weight"].clone()
    changed[3] += 1
    bias = "model.layers.1.mlp.gate.e_score_correction_bias"
    add_tensors(second, {"model.norm.weight": changed, bias: load(first)[bias].bfloat16()})
    add_tensors(second, {"model.layers.4.a": torch.ones(4)})
    lines = compare(open_source(first), open_source(second), workers=1)
    assert [line.split(", max")[0] for line in sorted(lines)] == [
        f"{bias}: float32 and bfloat16",
        "model.layers.4.a: shapes ((3,),) and ((4,),)",
        f"model.layers.4.b: only in {first}",
        "model.norm.weight: max difference 1",
    ]


def test_parts_of_stored_tensors_are_read_alone(tmp_path: Path) -> None:
    """Also of one that torch stores with other strides."""
    stacked = torch.arange(4 * 6 * 5.0).view(4, 6, 5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"stacked": stacked, "turned": stacked.transpose(1, 2)}, checkpoint_id=tmp_path, no_dist=True)
    (tmp_path / "metadata.json").write_text(json.dumps(BACKEND))
    reader = DcpReader(tmp_path)
    for index in range(4):
        assert torch.equal(reader.read("stacked", (index,)), stacked[index])
        assert torch.equal(reader.read("turned", (index, 2)), stacked[index, :, 2])
    assert torch.equal(reader.read("turned"), stacked.transpose(1, 2))


@pytest.mark.parametrize("head", ["critic", "reward"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_a_run_says_which_head_its_weights_have(head: Any, tied: bool, tmp_path: Path) -> None:
    """A critic or reward model that started from a policy, whose config.json has another head."""
    run, start, trained = tmp_path / "run", tmp_path / "start", tmp_path / "trained"
    more: dict[str, Any] = {"pad_token_id": 0, "tie_word_embeddings": tied}
    write_bfloat16("llama", start, **more)
    write_model("llama", trained, head=head, num_labels=1, **more)
    step = run / "checkpoints" / "step_000002"
    weights = step / "critic" if head == "critic" else step
    convert(open_source(trained), weights, to="megatron", workers=1)
    for path in weights.glob("*.json"):  # a training's checkpoint has no configuration with it
        if path.name != "metadata.json":
            path.unlink()
    (step / "run_state.json").write_text('{"step": 2}')
    model = {"model": {"path": str(start)}}
    recipe = {"type": "rl", "critic": model} if head == "critic" else {"type": "reward_model"} | model
    layout = {"tensor": 2, "pipeline": 1, "expert": 4, "recompute": "none", "overlap": True}
    (run / "recipe.yaml").write_text(json.dumps(recipe | {"layout": layout}))
    source = weights if head == "critic" else run
    assert describe(find_place(source))["head"] == head
    assert describe(find_place(source))["step"] == "2"
    assert describe(find_place(source))["layout of the run"] == "tensor 2, expert 4"
    convert(open_source(source), tmp_path / "back", to="hf", workers=1)
    assert_same(load(trained), load(tmp_path / "back"))
    _, report = AUTO[head].from_pretrained(tmp_path / "back", output_loading_info=True)
    assert not any(report.values()), report
    convert(open_source(source), tmp_path / "megatron", to="megatron", workers=1)
    assert not compare(open_source(tmp_path / "megatron"), open_source(trained), workers=1)
    (start / "config.json").unlink()
    with pytest.raises(RecipeError, match=f"names the (critic|model) {start}, which is not there; give the"):
        find_place(source)
    (run / "recipe.yaml").unlink()
    with pytest.raises(RecipeError, match=r"recipe\.yaml names no (critic|model), or is not there; give the"):
        find_place(source)
