"""Critics and reward models: what of config.json is taken, and files that transformers reads."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor

from megarl.config import CriticHead, Head, HeadName, PolicyHead, RecipeError, RewardHead, read_model_shape
from megarl.config.model.families import ARCHITECTURES
from megarl.config.model.heads import architecture
from megarl.model_engine import RemoteTokens, TokenSequence
from megarl.model_engine.heads import ScoreHead
from megarl.model_engine.microbatch import load
from megarl.weights import model_parameters
from megarl.weights.hf import SINGLE, HfReader
from tests.families import AUTO, FAMILIES, VOCAB, family_config, write_model
from tests.hf_directory import write_hf

BOTH = ("score.weight", "score.bias")
PAIRS = [
    (family, head)
    for family in FAMILIES
    for head in ("critic", "reward")
    if not (family == "glm4_moe" or (head == "critic" and family.startswith(("gemma3", "deepseek_v2"))))
]


def config_of(stored: str, **more: Any) -> dict[str, Any]:
    """A small Llama's file; `stored` is how its architecture's name ends."""
    fields = {"architectures": [f"LlamaFor{stored}"], "num_labels": 1} | more
    return json.loads(family_config("llama", **fields).to_json_string())


def read(directory: Path, config: dict[str, Any], head: HeadName) -> Head:
    (directory / "config.json").write_text(json.dumps(config))
    return read_model_shape(directory, head).head


@pytest.mark.parametrize("policy", ARCHITECTURES)
@pytest.mark.parametrize("head", AUTO)
def test_classes_are_those_of_transformers(policy: str, head: HeadName) -> None:
    decoder = policy.removesuffix("ForCausalLM")
    name = architecture(decoder, head)
    if name is None:
        assert head != "policy"
        assert not hasattr(
            transformers, decoder + {"critic": "ForToken", "reward": "ForSequence"}[head] + "Classification"
        )
    else:
        assert hasattr(transformers, name)


@pytest.mark.parametrize(
    ("stored", "head", "expected"),
    [
        ("CausalLM", "policy", PolicyHead()),
        ("CausalLM", "critic", CriticHead("LlamaForTokenClassification", BOTH)),
        ("CausalLM", "reward", RewardHead("LlamaForSequenceClassification", 7, BOTH[:1])),
        ("SequenceClassification", "critic", CriticHead("LlamaForTokenClassification", BOTH[1:])),
        ("SequenceClassification", "reward", RewardHead("LlamaForSequenceClassification", 7)),
        ("TokenClassification", "critic", CriticHead("LlamaForTokenClassification")),
    ],
)
def test_a_head_is_read_or_begun(stored: str, head: HeadName, expected: Head, tmp_path: Path) -> None:
    assert read(tmp_path, config_of(stored, pad_token_id=7), head) == expected


REFUSED: list[tuple[str, dict[str, Any], HeadName, str]] = [
    (
        "SequenceClassification",
        {},
        "policy",
        "architecture LlamaForSequenceClassification has not the head of a policy model; expected LlamaForCausalLM",
    ),
    ("TokenClassification", {}, "policy", "has not the head of a policy model; expected LlamaForCausalLM"),
    (
        "TokenClassification",
        {"pad_token_id": 7},
        "reward",
        "has not the head of a reward model; expected LlamaForSequenceClassification or LlamaForCausalLM",
    ),
    ("SequenceClassification", {"num_labels": 3}, "critic", "the head has 3 labels"),
    ("TokenClassification", {"num_labels": 2}, "critic", "the head has 2 labels"),
    ("TokenClassification", {"token_classification_bias": False}, "critic", "token_classification_bias is false"),
    ("QuestionAnswering", {}, "critic", "architecture LlamaForQuestionAnswering is not supported; known are"),
    ("SequenceClassification", {}, "reward", "field 'pad_token_id' is missing and the tokenizer has no pad_token"),
    ("SequenceClassification", {"pad_token_id": -1}, "reward", "pad_token_id is -1; expected a token from 0 to 100"),
    ("CausalLM", {"pad_token_id": VOCAB}, "reward", "pad_token_id is 101; expected a token from 0 to 100"),
]


@pytest.mark.parametrize(("stored", "more", "head", "message"), REFUSED)
def test_what_does_not_fit_is_refused(
    stored: str, more: dict[str, Any], head: HeadName, message: str, tmp_path: Path
) -> None:
    with pytest.raises(RecipeError) as caught:
        read(tmp_path, config_of(stored, **more), head)
    assert message in str(caught.value)
    assert str(caught.value).startswith(f"{tmp_path}/config.json: ")


def test_a_class_that_transformers_has_not_is_refused(tmp_path: Path) -> None:
    config = json.loads(family_config("glm4_moe").to_json_string())
    with pytest.raises(RecipeError, match="transformers has no Glm4MoeForTokenClassification"):
        read(tmp_path, config, "critic")


@pytest.mark.parametrize("pad", ["<pad>", {"content": "<pad>", "lstrip": False}])
def test_padding_is_the_tokenizers_where_the_model_names_none(pad: Any, tmp_path: Path) -> None:
    added = [{"id": 3, "content": "<end>"}, {"id": 5, "content": "<pad>"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"pad_token": pad}))
    (tmp_path / "tokenizer.json").write_text(json.dumps({"added_tokens": added}))
    head = read(tmp_path, config_of("CausalLM"), "reward")
    assert isinstance(head, RewardHead)
    assert head.padding == 5


@pytest.mark.parametrize("text", ["", "[]", '{"added_tokens": [1]}', '{"added_tokens": []}', "{}"])
def test_a_tokenizer_that_says_nothing_is_as_good_as_none(text: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text('{"pad_token": "<pad>"}')
    (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(RecipeError, match="'pad_token_id' is missing and the tokenizer has no pad_token"):
        read(tmp_path, config_of("CausalLM"), "reward")


@pytest.mark.parametrize(("family", "head"), PAIRS)
def test_files_come_back_and_transformers_reads_them(family: str, head: HeadName, tmp_path: Path) -> None:
    """All that is on disk has its row in the table, and what is written from a language model's configuration loads."""
    model = write_model(family, tmp_path / "stored", head=head, num_labels=1, pad_token_id=0)
    write_model(family, tmp_path / "plain", pad_token_id=0)
    shape, begun = (read_model_shape(tmp_path / name, head) for name in ("stored", "plain"))
    assert not isinstance(shape.head, PolicyHead)
    table, new = model_parameters(shape, 2), [p.hf[0] for p in model_parameters(begun, 2) if p.missing]
    assert new == list(shape.head.tensors)
    assert not any(p.missing for p in table)
    assert (
        shape.parameters
        == begun.parameters
        == sum(math.prod(size) for p in table if not p.float32 for size in p.hf_shapes)
    )
    reader = HfReader(tmp_path / "stored")
    pairs = [(name, reader.tensor(name, size)) for p in table for name, size in zip(p.hf, p.hf_shapes, strict=True)]
    write_hf([pairs], tmp_path / "plain", tmp_path / "written", head=head)
    assert load_file(tmp_path / "written" / SINGLE).keys() == load_file(tmp_path / "stored" / SINGLE).keys()
    loaded, report = AUTO[head].from_pretrained(tmp_path / "written", output_loading_info=True)
    assert not any(report.values()), report
    assert type(loaded) is type(model)
    assert (loaded.config.num_labels, loaded.config.pad_token_id) == (1, 0)
    assert all(torch.equal(tensor, loaded.state_dict()[name]) for name, tensor in model.state_dict().items())
    assert read_model_shape(tmp_path / "written", head) == shape


SCORED = [
    ([4, 5, 6], [4, 5, 6]),
    ([4, 5, 0, 0], [4, 5]),
    ([4, 0, 5, 0], [4, 0, 5]),  # a response was cut behind padding that the policy wrote
    ([0, 4], [0, 4]),
    ([0, 0, 0], [0]),
]


@pytest.mark.parametrize(("ids", "read"), SCORED)
def test_a_score_stands_behind_the_last_token_that_is_not_padding(ids: list[int], read: list[int]) -> None:
    head, column = RewardHead("LlamaForSequenceClassification", 0), {"weight": torch.ones(1)}
    assert head.scored(ids) == read
    fed = TokenSequence([*read, 0], len(read), column)
    assert ScoreHead(head).fed([TokenSequence(ids, 1, column)]) == [fed]
    remote = ScoreHead(head).fed([TokenSequence(RemoteTokens(Here(ids), 0, len(ids), ending(ids)), 1, column)])
    assert (remote[0].prompt_length, remote[0].response_length) == (len(read), 1)
    (there,) = load(remote, [[0]], VOCAB)
    assert (there.tokens.tolist(), there.prompt_length) == (fed.input_ids, fed.prompt_length)


class Here:
    """The source of one sequence."""

    def __init__(self, ids: list[int]) -> None:
        self._ids = ids

    def load(self, wanted: Mapping[str, Sequence[int]]) -> dict[str, list[Tensor]]:
        assert wanted == {"input_ids": [0]}
        return {"input_ids": [torch.tensor(self._ids, dtype=torch.int32)]}


def ending(ids: list[int]) -> tuple[int, int]:
    others = [place for place, token in enumerate(ids) if token != ids[-1]]
    return ids[-1], len(ids) - (others[-1] + 1 if others else 0)


def test_a_score_is_where_transformers_has_it(tmp_path: Path) -> None:
    model = write_model("llama", tmp_path / "model", head="reward", num_labels=1, pad_token_id=0).eval()
    head = read_model_shape(tmp_path / "model", "reward").head
    assert isinstance(head, RewardHead)
    for ids, _ in SCORED:
        model.config.pad_token_id = 0
        expected = model(torch.tensor([ids])).logits
        model.config.pad_token_id = 1  # there is none: the last token is scored
        torch.testing.assert_close(model(torch.tensor([head.scored(ids)])).logits, expected)
