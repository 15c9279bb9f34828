"""Replayed experts and balanced routers: the numbers of transformers with the same experts, whatever the layout."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from tests.distributed import numerics
from tests.distributed.hf_routing import Routing
from tests.distributed.launch import run

pytestmark = pytest.mark.distributed

ROUTINGS = {
    "free": Routing(),
    "chosen": Routing("chosen"),
    "random": Routing("random"),
    "losses": Routing(balance_coefficient=0.3, z_coefficient=0.02),
    "random_losses": Routing("random", balance_coefficient=0.3, z_coefficient=0.02),
    "bias": Routing(bias_update_rate=0.1),
}
FAMILIES = ["qwen3_moe", "deepseek_v3"]
CASES = [(f, name) for f in FAMILIES for name in ROUTINGS if f == "deepseek_v3" or name != "bias"]
RUN = {
    1: ["chosen", "random", "losses", "bias"],
    2: ["chosen", "random", "losses", "bias"],
    4: ["random_losses", "bias"],
}
LAYOUTS: dict[int, dict[str, numerics.Layout]] = {
    1: {"tp1": {}},
    2: {
        "dp2": {},
        "tp2_ep2": {"tensor": 2, "expert": 2},
        "pp2_recompute": {"pipeline": 2, "recompute": "full"},
        "cp2": {"context": 2, "recompute": "selective"},
        "pp2_interleave2": {"pipeline": 2, "interleave": 2},
    },
    4: {
        "pp2_interleave2_ep2_recompute": {"pipeline": 2, "interleave": 2, "expert": 2, "recompute": "full"},
        "tp2_cp2_recompute": {"tensor": 2, "context": 2, "recompute": "full"},
    },
}


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("references")
    for family, name in CASES:
        numerics.write_reference(family, directory / f"{family}.{name}", ROUTINGS[name])
    return directory


@pytest.fixture(scope="module")
def errors(references: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, numerics.Errors]:
    """By layout, family and routing."""
    out = tmp_path_factory.mktemp("errors")
    for ranks, layouts in LAYOUTS.items():
        names = [f"{family}.{name}" for family, name in CASES if name in RUN[ranks]]
        plan = numerics.Plan(references, layouts, dict.fromkeys(layouts, names), out)
        plan.write(out / "plan")
        run("mpirun", ranks, "tests.distributed.payload_numerics", out / "plan", log=out / f"log{ranks}")
    return {file.stem: msgspec.json.decode(file.read_bytes(), type=numerics.Errors) for file in out.glob("*.json")}


@pytest.mark.parametrize(
    "run_name",
    [
        f"{layout}.{family}.{name}"
        for ranks, layouts in LAYOUTS.items()
        for layout in layouts
        for family, name in CASES
        if name in RUN[ranks]
    ],
)
def test_numbers_are_those_of_transformers(run_name: str, errors: dict[str, numerics.Errors]) -> None:
    found = errors[run_name]
    assert found.logits < 1e-5
    assert found.logprobs < 1e-5
    assert found.gradient < 1e-5, found.gradient_name
    assert found.grad_norm < 1e-6
    assert found.loss < 1e-6
    assert found.next_loss < 1e-5


@pytest.mark.parametrize("family", FAMILIES)
def test_the_comparison_is_worth_something(family: str, references: Path) -> None:
    """Other experts, the losses and the bias each change what they should."""
    by_name = {
        name: msgspec.json.decode((references / f"{family}.{name}" / "reference.json").read_bytes())
        for case, name in CASES
        if case == family
    }
    free = by_name["free"]
    assert by_name["chosen"]["loss"] == free["loss"]
    assert by_name["chosen"]["next_loss"] != free["next_loss"], "the step has changed no choice"
    assert abs(by_name["random"]["loss"] / free["loss"] - 1) > 1e-3
    assert abs(by_name["losses"]["grad_norm"] / free["grad_norm"] - 1) > 1e-3
    if family == "deepseek_v3":
        assert abs(by_name["bias"]["next_loss"] / free["next_loss"] - 1) > 1e-3
