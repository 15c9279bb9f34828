"""Critics and reward models at many layouts: values, gradients and files are those of transformers."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file

from tests.distributed import heads
from tests.distributed.launch import run
from tests.distributed.numerics import Layout, Plan, rows

pytestmark = pytest.mark.distributed

# ranks -> their layouts; tp2 comes first and writes the checkpoints that the others resume
LAYOUTS: dict[int, dict[str, Layout]] = {
    2: {"tp2": {"tensor": 2}, "pp2": {"pipeline": 2}, "cp2": {"context": 2}, "tp1_dp2": {}},
    4: {"tp2_pp2": {"tensor": 2, "pipeline": 2}},
}
layouts = pytest.mark.parametrize("layout", [name for same in LAYOUTS.values() for name in same])
cases = pytest.mark.parametrize("case", heads.CASES)


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where all layouts have been run."""
    directory = tmp_path_factory.mktemp("heads")
    for name in heads.CASES:
        heads.write_reference(name, directory / "references" / name)
    for ranks, same in LAYOUTS.items():
        plan = Plan(directory / "references", same, {name: list(heads.CASES) for name in same}, directory)
        file, log = directory / f"plan_{ranks}.json", directory / f"log_{ranks}"
        plan.write(file)
        run("mpirun", ranks, "tests.distributed.payload_heads", file, log=log)
    return directory


def errors_of(out: Path, layout: str, case: str) -> heads.Errors:
    return msgspec.json.decode((out / f"{layout}.{case}.json").read_bytes(), type=heads.Errors)


@layouts
@cases
def test_values_and_gradients_are_those_of_transformers(layout: str, case: str, out: Path) -> None:
    errors = errors_of(out, layout, case)
    assert errors.in_loss < 1e-5
    assert errors.outputs < 1e-5
    assert errors.gradient < 1e-5, errors.gradient_name
    assert max(errors.grad_norm, errors.loss) < 1e-5
    assert errors.next_loss < 1e-4


@layouts
@pytest.mark.parametrize("case", heads.RESUMED)
def test_a_checkpoint_goes_on_at_another_layout(layout: str, case: str, out: Path) -> None:
    resumed = errors_of(out, layout, case).resumed
    assert resumed is not None
    assert resumed < 1e-4


@layouts
@cases
def test_transformers_computes_the_same_with_what_is_exported(layout: str, case: str, out: Path) -> None:
    head, directory = heads.CASES[case].head, out / f"{layout}.{case}"
    model = heads.load(directory, head)
    with torch.no_grad():
        found = torch.cat([heads.outputs(model, head, row) for row in rows()])
    expected = load_file(directory / "outputs.safetensors")["outputs"]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    assert expected.std() > 0.01, "values that are all alike show nothing"


@pytest.mark.parametrize("case", [name for name, case in heads.CASES.items() if case.head == "reward"])
def test_transformers_scores_several_padded_sequences_at_once(case: str, out: Path) -> None:
    directory, longest = out / f"tp2.{case}", max(map(len, rows()))
    padded = torch.tensor([row + [0] * (longest - len(row)) for row in rows()])
    with torch.no_grad():
        found = heads.load(directory, "reward")(padded, attention_mask=(padded != 0).long()).logits[:, 0]
    expected = load_file(directory / "outputs.safetensors")["outputs"]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def test_a_head_that_is_new_is_said_in_the_log(out: Path) -> None:
    said = [line for line in (out / "log_2").read_text().splitlines() if "starts from zero" in line]
    assert any("llama_new_critic" in line and "score.weight and no score.bias" in line for line in said)
    assert any("qwen3_critic" in line and "no score.bias" in line and "score.weight" not in line for line in said)
    assert all("_critic" in line for line in said)
