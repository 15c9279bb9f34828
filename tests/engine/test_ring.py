"""The whole ring with real engines and real Megatron: train, publish, stop, resume, export."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from tests.jobs import assert_all_gone, local_job

pytestmark = pytest.mark.engine

SFT, RL = "launch/recipes/carry_addition_sft.yaml", "launch/recipes/carry_addition_rl.yaml"
MISMATCH_LIMIT = 1e-4  # DESIGN's bound for float32


@pytest.fixture(scope="module")
def sft_model(addition: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that has begun to add: enough for some of its answers to be right."""
    run = tmp_path_factory.mktemp("sft") / "run"
    data = [f"model.path={addition}/model", f"data.train={addition}/demonstrations.jsonl"]
    with local_job(run, SFT, *data, "layout.tensor=1", "steps=400", "checkpoint.final=false") as job:
        assert job.wait() == 0, job.output()[-3000:]
    assert job.metrics()[-1]["loss"] < 0.7
    return run / "hf"


def check_rows(rows: list[dict[str, Any]], steps: int) -> None:
    assert [row["step"] for row in rows] == list(range(1, steps + 1))
    assert all(row["mismatch/logprob_max"] <= MISMATCH_LIMIT for row in rows)
    assert all(set(row["seconds"]) == {"generate", "score", "update", "publish"} for row in rows)


def check_export(directory: Path) -> None:
    """transformers loads the result and generates from it."""
    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "1+2="}], add_generation_prompt=True, tokenize=False
    )
    ids = tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids
    assert "=" in tokenizer.decode(model.generate(ids, max_new_tokens=16, do_sample=False)[0, ids.shape[1] :])


def test_stop_and_resume(sft_model: Path, addition: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    overrides = [
        f"model.path={sft_model}",
        f"data.train={addition}/train.jsonl",
        f"data.test={addition}/test.jsonl",
        "batch.prompts=16",
        "evaluation.problems=32",
        "steps=6",
        "optimizer.warmup_steps=6",
        "checkpoint={every: 3, export_every: 2}",
    ]
    with local_job(run, RL, *overrides) as job:
        job.wait_for_step(4)
        processes = job.processes()
        os.killpg(job.process.pid, signal.SIGKILL)  # the launcher; its ranks and engines must follow
        job.wait(30)
        assert_all_gone(processes)
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["step_000003"]
    with local_job(run, RL, *overrides, "--resume") as job:
        assert job.wait() == 0, job.output()[-3000:]
    rows = job.metrics()
    check_rows(rows, 6)
    assert all(row["grad_norm"] > 0 for row in rows)
    # the warm-up goes on where it was, so the optimizer's count was restored
    assert [row["learning_rate"] for row in rows] == pytest.approx([1e-4 * (step + 1) / 6 for step in range(6)])
    assert "3 steps are done" in job.output()
    assert sum(row["reward"] for row in rows[3:]) >= sum(row["reward"] for row in rows[:3]) - 0.3
    assert sorted(path.name for path in run.glob("hf_step_*")) == ["hf_step_000002", "hf_step_000004", "hf_step_000006"]
    weights = [(run / name / "model.safetensors").read_bytes() for name in ("hf_step_000006", "hf_step_000004", "hf")]
    assert weights[0] == weights[2] != weights[1]
    check_export(run / "hf_step_000002")
    check_export(run / "hf")
    evaluations = [json.loads(line) for line in (run / "evaluations.jsonl").read_text().splitlines()]
    assert [evaluation["step"] for evaluation in evaluations] == [0, 6]


def test_torchrun_minibatches_and_reference_model(sft_model: Path, addition: Path, tmp_path: Path) -> None:
    """Several updates a step need the old log-probabilities, and the exact divergence a second model in each."""
    run = tmp_path / "run"
    overrides = [
        f"model.path={sft_model}",
        f"data.train={addition}/train.jsonl",
        f"data.test={addition}/test.jsonl",
        "batch.prompts=16",
        "evaluation.problems=0",
        "checkpoint.final=false",
        "steps=3",
        "optimizer.warmup_steps=2",
        "layout.tensor=1",
        "algorithm={minibatches: 2, kl: {coefficient: 0.05, estimator: full}, loss: {clip_low: 0.01, clip_high: 0.01}}",
    ]
    with local_job(run, RL, *overrides, launcher="torchrun") as job:
        assert job.wait() == 0, job.output()[-3000:]
    rows = job.metrics()
    check_rows(rows, 3)
    assert all(row["grad_norm"] > 0 for row in rows)
    assert rows[0]["kl"] < rows[-1]["kl"]
    assert rows[-1]["clip_fraction"] > 0
    # a warm-up of two steps is four updates; logged is a step's last
    assert [row["learning_rate"] for row in rows] == pytest.approx([5e-5, 1e-4, 1e-4])


def test_reward_model_and_ppo_with_everything(sft_model: Path, addition: Path, tmp_path: Path) -> None:
    """A reward model learns; then critic, reference, adaptive divergence and correction, stopped and resumed."""
    reward, run = tmp_path / "reward", tmp_path / "run"
    pairs = [f"data.train={addition}/preferences.jsonl", f"data.test={addition}/preferences_test.jsonl"]
    options = ["steps=30", "batch.pairs=16", "checkpoint.final=false", f"model.path={sft_model}"]
    with local_job(reward, "launch/recipes/carry_addition_reward_model.yaml", *pairs, *options) as job:
        assert job.wait() == 0, job.output()[-3000:]
    rows = job.metrics()
    assert rows[0]["loss"] == pytest.approx(0.6931, abs=1e-3)  # all scores are zero
    assert rows[-1]["accuracy_held_out"] > 0.6
    overrides = [
        f"model.path={sft_model}",
        f"critic.model.path={reward}/hf",
        f"reward.sources.preference.model.path={reward}/hf",
        f"data.train={addition}/train.jsonl",
        f"data.test={addition}/test.jsonl",
        "batch.prompts=16",
        "evaluation.problems=0",
        "critic.warmup_steps=1",
        "reward.sources.answer.weight=0.5",
        f"reward.sources.served={{type: engine, model: {{path: {reward}/hf}}, weight: 0}}",
        "reward.overlong_buffer=40",
        "algorithm.epochs=2",
        "algorithm.skip_truncated=true",
        "algorithm.entropy_coefficient=0.001",
        "algorithm.correction={type: importance}",
    ]
    ppo = "launch/recipes/rlhf_ppo.yaml"
    with local_job(run, ppo, *overrides, "steps=2") as job:
        assert job.wait() == 0, job.output()[-3000:]
    with local_job(run, ppo, *overrides, "steps=4", "--resume") as job:
        assert job.wait() == 0, job.output()[-3000:]
    rows = job.metrics()
    check_rows(rows, 4)
    assert [row["grad_norm"] > 0 for row in rows] == [False, True, True, True]  # at first the critic learns alone
    assert all(row["critic/grad_norm"] > 0 and row["correction/weight"] > 0.99 for row in rows[1:])
    for row in rows:
        answer, preference, served = (row[f"reward/{name}"] for name in ("answer", "preference", "served"))
        assert row["reward"] == pytest.approx(0.5 * answer + preference, abs=1e-5)
        assert served == pytest.approx(preference, abs=MISMATCH_LIMIT)  # SGLang and Megatron score alike
    coefficients = [row["kl_coefficient"] for row in rows if "kl_coefficient" in row]
    assert len(set(coefficients)) == len(coefficients) == 3  # it goes on adapting after the pause
    check_export(run / "hf")


def test_two_stages_an_engine_of_two_ranks_and_own_algorithms(
    rl_overrides: list[str], addition: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights from two stages into one engine whose ranks hold a half of each matrix; a file has the algorithms."""
    model = tmp_path / "model"
    shutil.copytree(addition / "model", model)
    config = AutoConfig.from_pretrained(model)
    config.num_hidden_layers, config.layer_types = 4, ["full_attention"] * 4
    config.intermediate_size = 256  # on a CPU, SGLang pads a rank's part to a multiple of 32
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(model)
    (tmp_path / "mine.py").write_text(
        "def advantage(outcomes, *, scale):\n"
        "    return outcomes.at_tokens(scale + outcomes.totals)\n"
        "def loss(tokens):\n"
        "    return -tokens.advantages * tokens.logprobs * tokens.mask, 0 * tokens.mask\n"
    )
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    run = tmp_path / "run"
    extra = [
        "steps=2",
        "layout={tensor: 1, pipeline: 2}",
        "rollout.tensor_parallel=2",
        f"model.path={model}",
        "algorithm.kl.coefficient=0.1",
        "algorithm.advantage={type: own, function: 'mine:advantage', options: {scale: 0.5}}",
        "algorithm.loss={type: own, function: 'mine:loss'}",
    ]
    with local_job(run, RL, *rl_overrides, *extra) as job:
        assert job.wait() == 0, job.output()[-3000:]
    check_rows(job.metrics(), 2)
    # a model that solves nothing learns all the same: without this advantage and this loss nothing would move it
    assert all(row["grad_norm"] > 0 for row in job.metrics())


def test_sigusr1_saves_and_ends(addition: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    data = [f"model.path={addition}/model", f"data.train={addition}/demonstrations.jsonl"]
    with local_job(run, SFT, *data, "steps=100000") as job:
        job.wait_for_step(3)
        job.processes()["rank 1"].send_signal(signal.SIGUSR1)
        assert job.wait(60) == 0, job.output()[-3000:]
        done = len(job.metrics())
    assert [path.name for path in (run / "checkpoints").iterdir()] == [f"step_{done:06d}"]
    assert "asked to stop" in job.output()
