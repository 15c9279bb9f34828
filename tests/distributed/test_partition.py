"""One global batch has one loss and one gradient norm, however it is cut into micro-batches and over ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.distributed import partition
from tests.distributed.launch import run
from tests.families import write_model

pytestmark = pytest.mark.distributed

LAYOUTS = {
    1: {"dp1": {}},
    2: {"dp2": {}, "cp2": {"context": 2}, "pp2": {"pipeline": 2}},
    4: {
        "dp4": {},
        "dp2_cp2": {"context": 2},
        "dp2_pp2": {"pipeline": 2},
        "cp2_pp2": {"context": 2, "pipeline": 2},
        "dp2_pp2_interleave2": {"pipeline": 2, "interleave": 2},
    },
}
normalizers = pytest.mark.parametrize("normalizer", partition.NORMALIZERS)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("partition") / "model"
    write_model("qwen3", path)
    return path


@pytest.fixture(scope="module")
def found(model: Path) -> dict[str, list[partition.Seen]]:
    seen: dict[str, list[partition.Seen]] = {}
    for ranks, layouts in LAYOUTS.items():
        plan = partition.Plan(model=model, layouts=layouts, out=model.parent / f"{ranks}.json")
        file = model.parent / f"{ranks}.plan"
        plan.write(file)
        run("mpirun", ranks, "tests.distributed.payload_partition", file, log=model.parent / f"{ranks}.log")
        seen |= partition.read(plan.out)
    return seen


@pytest.fixture(scope="module")
def reference(model: Path) -> dict[str, tuple[float, float]]:
    """Loss and gradient norm from transformers, one sequence at a time, by the definition of each normalizer."""
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64, attn_implementation="eager")
    sums, counts = [], []
    for ids, prompt in partition.rows():
        log_softmax = torch.log_softmax(network(torch.tensor([ids])).logits[0, prompt - 1 : -1], -1)
        sums.append(-log_softmax.gather(-1, torch.tensor(ids[prompt:], dtype=torch.long)[:, None]).sum())
        counts.append(len(ids) - prompt)
    losses = {
        "token": sum(sums) / sum(counts),
        "sequence": sum(s / n for s, n in zip(sums, counts, strict=True) if n) / sum(n > 0 for n in counts),
        "constant": sum(sums) / (64 * len(counts)),
    }
    wanted = {}
    for name, value in losses.items():
        network.zero_grad()
        value.backward(retain_graph=True)
        norm = torch.stack([p.grad.norm() for p in network.parameters()]).norm()
        wanted[name] = (value.item(), norm.item())
    return wanted


@normalizers
@pytest.mark.parametrize("layout", [name for layouts in LAYOUTS.values() for name in layouts])
def test_loss_and_gradient_norm_do_not_depend_on_the_cut(
    layout: str, normalizer: str, found: dict[str, list[partition.Seen]], reference: dict[str, tuple[float, float]]
) -> None:
    mine = [seen for seen in found[layout] if seen.normalizer == normalizer]
    assert len(mine) == len(partition.MAX_TOKENS)
    for seen in mine:
        assert (seen.loss, seen.grad_norm) == pytest.approx(reference[normalizer], rel=1e-6), seen


def test_the_cuts_are_those_that_were_meant(found: dict[str, list[partition.Seen]]) -> None:
    assert [{s.microbatches for s in found[name]} for name in ("dp1", "dp2", "dp4")] == [
        {1, 2, 4, 8},
        {1, 2, 4},
        {1, 2},
    ]
