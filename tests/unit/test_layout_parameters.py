"""The tuner's parameter counts are those of Megatron's modules, of the weight tables, and of ModelShape."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megarl.config import HeadName, Layout, read_model_shape
from megarl.layout import Decoder, Layer, decoder, gated_mlp, held, part_sizes, stages
from megarl.weights import model_parameters
from tests.families import FAMILIES, family_config

WORLD = 8
LAYOUTS: list[dict[str, Any]] = [
    {"tensor": 2, "pipeline": 2},
    {"tensor": 4},
    {"pipeline": 4},
    {"pipeline": 2, "interleave": 2},
]
EXPERT_LAYOUTS: list[dict[str, Any]] = [
    {"tensor": 2, "pipeline": 2, "expert": 2},
    {"tensor": 2, "expert": 4, "expert_tensor": 2},
    {"pipeline": 4, "expert": 2},
]


def written(root: Path, family: str, **more: Any) -> Path:
    directory = root / "-".join([family, *map(str, more.values())])
    family_config(family, **more).save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Path, HeadName, dict[str, Any]]]:
    root, found = tmp_path_factory.mktemp("models"), list[tuple[Path, HeadName, dict[str, Any]]]()
    for family in FAMILIES:
        directory = written(root, family)
        layouts = list(LAYOUTS)
        experts = read_model_shape(directory).experts
        if experts is not None:
            # experts with biases are not split
            layouts += [fields for fields in EXPERT_LAYOUTS if not (experts.bias and "expert_tensor" in fields)]
        found += [(directory, "policy", layout) for layout in layouts]
    tied = written(root, "qwen3", tie_word_embeddings=True)
    found += [(tied, "policy", layout) for layout in ({"tensor": 2}, {"pipeline": 2})]
    scalar = written(root, "qwen2", pad_token_id=0)
    return [*found, (scalar, "critic", {"pipeline": 2}), (scalar, "reward", {"tensor": 2})]


def test_every_rank_holds_what_megatrons_modules_have(
    cases: list[tuple[Path, HeadName, dict[str, Any]]], tmp_path: Path
) -> None:
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps({"world": WORLD, "cases": [(str(path), *rest) for path, *rest in cases]}))
    command = [sys.executable, "-W", "ignore", "-m", "tests.unit.layout_modules", str(plan)]
    found = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, timeout=300).stdout)
    assert len(found) > 2 * len(FAMILIES)
    for directory, head, fields, rank, dense, experts in found:
        layout = Layout.model_validate(fields)
        model = decoder(read_model_shape(Path(directory), head))
        stage = stages(model, layout.pipeline, layout.interleave)[rank * layout.pipeline // WORLD]
        mine = held(model, layout, stage)
        assert (mine.dense, mine.experts) == (dense, experts), f"{directory}, {head}, {fields}, rank {rank}"


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [True, False])
def test_the_whole_model_is_the_weight_tables(family: str, tied: bool, tmp_path: Path) -> None:
    shape = read_model_shape(written(tmp_path, family, tie_word_embeddings=tied))
    table = [p for p in model_parameters(shape, 1) if not p.float32]
    assert decoder(shape).parameters == sum(math.prod(size) for p in table for size in p.hf_shapes)
    assert decoder(shape).parameters == shape.parameters


@pytest.mark.parametrize(
    ("layers", "parts", "sizes"),
    [(4, 2, [2, 2]), (3, 2, [2, 1]), (126, 16, [7, *[8] * 14, 7]), (5, 4, [1, 2, 1, 1]), (2, 4, [0, 1, 1, 0])],
)
def test_layers_that_do_not_divide_are_fewer_at_the_ends(layers: int, parts: int, sizes: list[int]) -> None:
    assert part_sizes(layers, parts) == sizes


@pytest.mark.parametrize(
    ("layers", "pipeline", "layers_of_stages"),
    [(40, 1, [40]), (40, 2, [21, 19]), (40, 4, [10, 11, 11, 8]), (80, 8, [10, 11, 11, 10, 10, 10, 10, 8])],
)
def test_what_is_listed_beside_the_layers_is_divided_with_them(
    layers: int, pipeline: int, layers_of_stages: list[int]
) -> None:
    """An embedding before them, a norm and an output behind: the first stages have the items that are left over."""
    layer = Layer(None, gated_mlp(64, 128), 64, 1)
    model = Decoder("test", 64, 64, (layer,), (0,) * layers)
    found = stages(model, pipeline, listed=(1, 2))
    assert [stage.layers[0] for stage in found] == layers_of_stages
    assert [(stage.first, stage.last) for stage in found] == [(i == 0, i == pipeline - 1) for i in range(pipeline)]
