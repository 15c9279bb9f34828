"""One model, many layouts: the same losses, gradients and weights as a plain transformers loop, whatever the layout.

Each layout is started once and does everything for all three families. TP2 runs first: it writes the checkpoints that
PP2 continues, and ends by losing a rank.
"""

from __future__ import annotations

import os
import random
import signal
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from tests.distributed import hf_loop
from tests.distributed.launch import LIMIT_S, Launch, Launcher, run, started
from tests.distributed.sft_plan import TINY_BYTES, Plan, Report

pytestmark = pytest.mark.distributed

# family -> transformers' name, vocabulary, tied. 515 rows divide among no two ranks.
FAMILIES = {
    "qwen3": ("Qwen3ForCausalLM", 256, True),
    "qwen2": ("Qwen2ForCausalLM", 256, False),
    "llama": ("LlamaForCausalLM", 515, False),
}
BATCH_SIZES = [7, 4, 1, 6, 5, 8, 3, 7, 2, 6]  # of one sequence, too: then a data-parallel rank has none
MAX_TOKENS_PER_RANK = 96
CHECKPOINT_AFTER = 6
TEMPERATURE = 0.7


@dataclass(frozen=True)
class Shape:
    ranks: int
    layout: dict[str, int | str | bool]
    launcher: Launcher = "mpirun"
    load: str = ""  # the layout whose checkpoint it continues


LAYOUTS = {
    "tp1": Shape(1, {}),
    "tp2": Shape(2, {"tensor": 2}),
    "pp2": Shape(2, {"pipeline": 2}, load="tp2"),
    "dp2": Shape(2, {}, launcher="torchrun", load="dp2_overlap"),
    "cp2": Shape(2, {"context": 2}),
    "pp2_interleave2": Shape(2, {"pipeline": 2, "interleave": 2}, load="tp2"),
    "dp2_overlap": Shape(2, {"overlap": True, "recompute": "selective"}),
    "tp2_pp2_recompute": Shape(4, {"tensor": 2, "pipeline": 2, "recompute": "full"}),
    "tp2_cp2": Shape(4, {"tensor": 2, "context": 2}),
}


@dataclass(frozen=True)
class Run:
    out: Path
    report: Report


class Runs:
    """Starts each layout when it is first asked for."""

    def __init__(self, directory: Path, models: dict[str, Path], batches: dict[str, list[list[hf_loop.Row]]]) -> None:
        self._directory, self._models, self._batches = directory, models, batches
        self._done: dict[str, Run] = {}
        self.left_behind = "not tried"
        self.helpers = 0

    def __getitem__(self, name: str) -> Run:
        out = self._directory / name
        if name not in self._done:
            assert not out.exists(), f"{name} has failed already; see the first test that asked for it"
            self._start(name, LAYOUTS[name])
            self._done[name] = Run(out, Report.read(out / "report.json"))
        return self._done[name]

    def _start(self, name: str, shape: Shape) -> None:
        plan = Plan(
            models=self._models,
            batches=self._batches,
            max_tokens_per_rank=MAX_TOKENS_PER_RANK,
            temperature=TEMPERATURE,
            layout=shape.layout,
            out=self._directory / name,
            checkpoint_after=CHECKPOINT_AFTER,
            save=name in {shape.load for shape in LAYOUTS.values()},
            load=self[shape.load].out if shape.load else None,
            linger=name == "tp2",
        )
        plan.out.mkdir()
        file, log = plan.out / "plan.json", plan.out / "log"
        plan.write(file)
        if not plan.linger:
            run(shape.launcher, shape.ranks, "tests.distributed.payload_sft", file, log=log)
            return
        with started(shape.launcher, shape.ranks, "tests.distributed.payload_sft", file, log=log) as launch:
            self._lose_a_rank(launch, plan.out / "report.json")

    def _lose_a_rank(self, launch: Launch, report: Path) -> None:
        end = time.monotonic() + LIMIT_S
        while not report.exists():
            assert launch.process.poll() is None, launch.output()[-6000:]
            assert time.monotonic() < end, f"no report after {LIMIT_S:g} s:\n{launch.output()[-6000:]}"
            time.sleep(0.1)
        self.helpers = sum("multiprocessing" in line for line in launch.processes().values())
        os.kill(Report.read(report).pids[1], signal.SIGKILL)
        try:
            launch.wait_until_gone(limit_s=10)
        except AssertionError as error:
            self.left_behind = str(error)
        else:
            self.left_behind = ""


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("layouts")


@pytest.fixture(scope="module")
def models(directory: Path) -> dict[str, Path]:
    """A random model of each family. Norms and biases are random, too, so that none can be lost unseen."""
    paths = {}
    for family, (architecture, vocab, tied) in FAMILIES.items():
        config = AutoConfig.for_model(
            family,
            vocab_size=vocab,
            hidden_size=48,
            intermediate_size=80,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16 if family == "qwen3" else 12,
            max_position_embeddings=128,
            rope_theta=1000.0,
            tie_word_embeddings=tied,
            architectures=[architecture],
            dtype="float32",
        )
        torch.manual_seed(len(paths))
        model = AutoModelForCausalLM.from_config(config)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.normal_(std=0.2, mean=1.0 if "norm" in name else 0.0)
        paths[family] = directory / family
        model.save_pretrained(paths[family])
    return paths


@pytest.fixture(scope="module")
def batches() -> dict[str, list[list[hf_loop.Row]]]:
    """Sequences of 2 to 60 tokens that mostly go round in a circle, on which the vocabulary's last token lies.

    One to three parts of each are learned, as of a conversation.
    """
    made = {}
    for family, (_, vocab, _) in FAMILIES.items():
        source = random.Random(family)
        circle = [*source.sample(range(vocab - 1), 12), vocab - 1]
        made[family] = [[row(source, circle) for _ in range(size)] for size in BATCH_SIZES]
    return made


def row(source: random.Random, circle: list[int]) -> hf_loop.Row:
    length, place, ids = source.choice([2, 3, 5, 9, 20, 60]), source.randrange(len(circle)), []
    for _ in range(length):
        ids.append(circle[place % len(circle)])
        place += 1 if source.random() < 0.9 else source.randrange(len(circle))
    ends = sorted(source.sample(range(1, length + 1), 2 * source.randint(1, min(3, length // 2))))
    return ids, list(zip(ends[::2], ends[1::2], strict=True))


@pytest.fixture(scope="module")
def runs(directory: Path, models: dict[str, Path], batches: dict[str, list[list[hf_loop.Row]]]) -> Runs:
    return Runs(directory, models, batches)


@pytest.fixture(scope="module")
def references(models: dict[str, Path], batches: dict[str, list[list[hf_loop.Row]]]) -> dict[str, hf_loop.Trained]:
    return {family: hf_loop.train(path, batches[family]) for family, path in models.items()}


layouts = pytest.mark.parametrize("layout", LAYOUTS)
families = pytest.mark.parametrize("family", FAMILIES)


@layouts
@families
def test_losses_and_gradient_norms_are_those_of_transformers(
    layout: str, family: str, runs: Runs, references: dict[str, hf_loop.Trained]
) -> None:
    seen, reference = runs[layout].report.families[family], references[family]
    assert seen.losses == pytest.approx(reference.losses, rel=1e-4)
    assert seen.grad_norms == pytest.approx(reference.grad_norms, rel=1e-4)
    assert seen.rates == pytest.approx(reference.rates, rel=1e-12)


@layouts
@families
def test_losses_and_gradient_norms_are_those_of_one_rank(layout: str, family: str, runs: Runs) -> None:
    seen, alone = runs[layout].report.families[family], runs["tp1"].report.families[family]
    assert seen.losses == pytest.approx(alone.losses, rel=1e-4)
    assert seen.grad_norms == pytest.approx(alone.grad_norms, rel=1e-4)


def test_the_comparison_is_worth_something(references: dict[str, hf_loop.Trained]) -> None:
    """The models learn, and the gradient is clipped in some updates and not in others."""
    for reference in references.values():
        assert reference.losses[-1] < 0.9 * reference.losses[0]
        assert min(reference.grad_norms) < hf_loop.CLIP < max(reference.grad_norms)


@layouts
@families
def test_each_gradient_is_that_of_transformers(
    layout: str, family: str, runs: Runs, references: dict[str, hf_loop.Trained]
) -> None:
    seen = load_file(runs[layout].out / family / "gradients.safetensors")
    assert seen.keys() == references[family].gradients.keys()
    for name, expected in references[family].gradients.items():
        assert relative_error(seen[name], expected) < 1e-5, name


@layouts
@families
@pytest.mark.parametrize("temperature", [1.0, TEMPERATURE])
def test_logprobs_are_those_of_transformers(
    layout: str,
    family: str,
    temperature: float,
    runs: Runs,
    models: dict[str, Path],
    batches: dict[str, list[list[hf_loop.Row]]],
) -> None:
    seen = runs[layout].report.families[family]
    found = torch.tensor(seen.logprobs if temperature == 1.0 else seen.tempered)
    expected = hf_loop.logprobs(models[family], batches[family][0], temperature)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


@layouts
@families
def test_weights_come_back_from_their_shards_unchanged(
    layout: str, family: str, runs: Runs, models: dict[str, Path]
) -> None:
    seen = runs[layout].report.families[family]
    assert seen.wrong_tensors == []
    assert seen.tensors == len(load_file(models[family] / "model.safetensors"))
    assert 0 < seen.largest_shared_bucket <= TINY_BYTES


@layouts
@families
def test_the_exported_model_is_the_one_transformers_trained(
    layout: str, family: str, runs: Runs, references: dict[str, hf_loop.Trained]
) -> None:
    exported, report = AutoModelForCausalLM.from_pretrained(runs[layout].out / family / "hf", output_loading_info=True)
    assert not any(report.values()), report
    reference = references[family]
    found = dict(exported.named_parameters())
    assert found.keys() == reference.end.keys()
    for name, expected in reference.end.items():
        moved, wanted = found[name].detach() - reference.start[name], expected - reference.start[name]
        assert relative_error(moved, wanted) < 1e-3, name


@layouts
@families
def test_bfloat16_follows_float32(layout: str, family: str, runs: Runs, references: dict[str, hf_loop.Trained]) -> None:
    """With float32 main weights, rounding shows in the second or third digit and does not add up."""
    assert runs[layout].report.bfloat16_losses[family] == pytest.approx(references[family].losses, rel=0.03)


@layouts
@families
def test_copies_of_a_weight_stay_equal(layout: str, family: str, runs: Runs) -> None:
    """Replicas of data-parallel ranks, and a tied embedding on the first and the last stage: bit by bit."""
    digests = runs[layout].report.families[family].digests
    by_name = dict(digests)
    assert all(by_name[name] == digest for name, digest in digests)


@layouts
def test_a_vocabulary_in_parts_is_as_good_as_a_whole_one(layout: str, runs: Runs) -> None:
    assert runs[layout].report.vocabulary_error < 1e-5


def test_the_cpu_shim_leaves_device_contexts_alone(runs: Runs) -> None:
    """transformers loads models within one; without it their rotary frequencies are whatever lay in memory."""
    assert runs["tp1"].report.device_context == "meta"


@pytest.mark.parametrize("layout", [name for name, shape in LAYOUTS.items() if shape.load])
@families
def test_a_checkpoint_goes_on_at_another_layout(layout: str, family: str, runs: Runs) -> None:
    seen, saved = runs[layout].report.families[family], runs[LAYOUTS[layout].load].report.families[family]
    assert seen.resumed_losses == pytest.approx(saved.losses[CHECKPOINT_AFTER:], rel=1e-5)
    assert seen.resumed_grad_norms == pytest.approx(saved.grad_norms[CHECKPOINT_AFTER:], rel=1e-4)


def test_a_killed_rank_leaves_no_process_behind(runs: Runs) -> None:
    """Not the launcher, the other rank, or the processes that have written its checkpoints."""
    _ = runs["tp2"]
    assert runs.helpers > 0, "saving started no process, so that this test shows nothing"
    assert runs.left_behind == ""


def relative_error(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())
