"""Every family at layouts that together use everything: logits, gradients and losses are those of transformers.

The whole table of layouts and families is tools/bench/layout_numerics.py.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from tests.distributed import numerics
from tests.distributed.launch import run
from tests.families import FAMILIES

pytestmark = pytest.mark.distributed

# ranks, layout, families
RUNS = [
    (2, "tp2", list(FAMILIES)),
    (4, "tp2_pp2_interleave2_selective", ["llama", "qwen2", "gemma3", "deepseek_v3", "gpt_oss"]),
    (4, "tp2_cp2_recompute", ["qwen3", "qwen2_yarn", "deepseek_v2", "gemma3", "gpt_oss"]),
    (4, "cp2_pp2_ep2", ["qwen3_moe", "glm4_moe", "deepseek_v3_direct", "mixtral", "gpt_oss"]),
    (4, "tp2_etp2_ep2", ["qwen3_moe_mixed", "deepseek_v3", "deepseek_v2_lite"]),
    (4, "dp2_pp2_interleave2_overlap", ["llama3", "gemma3", "glm4_moe"]),
]
# what is mended, where it shows: ranks, layout, family, the least error of logits or gradient without it
REPAIRS = [
    ("gradient of the shared rope key", 2, {"tensor": 2}, "deepseek_v3", 1e-2),
    ("experts' gradients are summed", 2, {"tensor": 2}, "qwen3_moe", 1e-1),
    ("expert biases are not summed", 4, {"tensor": 2, "expert": 2}, "gpt_oss", 1e-2),
    ("no batched exchange", 2, {"pipeline": 2, "interleave": 2}, "llama", 1e-2),
]


# a GPU's modules at their places, with its arguments; their own numbers are a GPU's to show
ENGINE, ENGINE_FAMILIES = "Transformer Engine", ["qwen2", "qwen3", "qwen3_moe", "deepseek_v3", "gpt_oss"]


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("references")
    for family in FAMILIES:
        numerics.write_reference(family, directory / family)
    return directory


@pytest.fixture(scope="module")
def errors(references: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], numerics.Errors]:
    """By layout, or what is undone there, and family."""
    found = {}
    for ranks in (2, 4):
        out = tmp_path_factory.mktemp(f"{ranks}_ranks")
        layouts = {name: numerics.LAYOUTS[ranks][name] for count, name, _ in RUNS if count == ranks}
        families = {name: chosen for count, name, chosen in RUNS if count == ranks}
        if ranks == 2:
            layouts[ENGINE], families[ENGINE] = {"tensor": 2}, ENGINE_FAMILIES
        undone = {f"undone {i}": repair for i, repair in enumerate(REPAIRS) if repair[1] == ranks}
        plan = numerics.Plan(
            references=references,
            layouts=layouts | {name: layout for name, (_, _, layout, _, _) in undone.items()},
            families=families | {name: [family] for name, (_, _, _, family, _) in undone.items()},
            out=out,
            changes={name: repair[0] for name, repair in undone.items()} | ({ENGINE: ENGINE} if ranks == 2 else {}),
        )
        plan.write(out / "plan")
        run("mpirun", ranks, "tests.distributed.payload_numerics", out / "plan", log=out / "log")
        for file in out.glob("*.json"):
            layout, family = file.stem.split(".")
            found[layout, family] = msgspec.json.decode(file.read_bytes(), type=numerics.Errors)
    return found


@pytest.mark.parametrize(
    ("layout", "family"),
    [(layout, family) for _, layout, families in [*RUNS, (2, ENGINE, ENGINE_FAMILIES)] for family in families],
)
def test_numbers_are_those_of_transformers(
    layout: str, family: str, errors: dict[tuple[str, str], numerics.Errors]
) -> None:
    assert errors[layout, family].good, errors[layout, family]


@pytest.mark.parametrize("index", range(len(REPAIRS)), ids=[repair[0] for repair in REPAIRS])
def test_without_the_repair_they_are_not(index: int, errors: dict[tuple[str, str], numerics.Errors]) -> None:
    _, _, _, family, least = REPAIRS[index]
    seen = errors[f"undone {index}", family]
    assert max(seen.logits, seen.gradient) > least, seen
