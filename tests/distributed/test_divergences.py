"""Divergences from a reference model at many layouts: values, losses and gradients are those of transformers."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from tests.distributed import divergences
from tests.distributed.launch import run
from tests.distributed.numerics import Layout, Plan

pytestmark = pytest.mark.distributed

LAYOUTS: dict[int, dict[str, Layout]] = {
    2: {"tp2": {"tensor": 2}, "cp2": {"context": 2}, "dp2": {}},
    4: {"tp4": {"tensor": 4}, "tp2_cp2_recompute": {"tensor": 2, "context": 2, "recompute": "full"}},
}


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where all layouts have been run."""
    directory = tmp_path_factory.mktemp("divergences")
    for family in divergences.FAMILIES:
        divergences.write_reference(family, directory / "references" / family)
    for ranks, same in LAYOUTS.items():
        plan = Plan(directory / "references", same, dict.fromkeys(same, divergences.FAMILIES), directory)
        file, log = directory / f"plan_{ranks}.json", directory / f"log_{ranks}"
        plan.write(file)
        run("mpirun", ranks, "tests.distributed.payload_divergences", file, log=log)
    return directory


@pytest.mark.parametrize("layout", [name for same in LAYOUTS.values() for name in same])
@pytest.mark.parametrize("family", divergences.FAMILIES)
def test_divergences_and_their_gradients_are_those_of_transformers(layout: str, family: str, out: Path) -> None:
    errors = msgspec.json.decode((out / f"{layout}.{family}.json").read_bytes(), type=divergences.Errors)
    assert max(errors.in_loss, errors.divergences) < 1e-5
    assert errors.itself == 0
    assert errors.gradient < 1e-5, errors.gradient_name
    assert max(errors.grad_norm, errors.loss, errors.next_loss) < 1e-5
