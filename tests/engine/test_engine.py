"""An engine's own life, without a job around it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification, LlamaConfig, Qwen2Config

from megarl.checkpoint_engine import clear_score_bias
from megarl.config import Model, RewardEngine, RewardHead, Rollout, Serving, read_model_shape
from megarl.rollout_engine import ScoreClient
from megarl.rollout_engine import engine as module
from megarl.runtime import Child, Guard, hold_port
from megarl.runtime.network import LOOPBACK, listen
from tests.jobs import START_LIMIT_S

pytestmark = pytest.mark.engine


class Watch(Guard):
    """Leaves the end of an engine to the test."""

    def __init__(self) -> None:
        self.children: list[Child] = []

    def watch(self, child: Child, *, vital: bool = True) -> None:
        self.children.append(child)


def start(model: Path, serving: Serving, guard: Guard, log: Path) -> module.Engine:
    return module.Engine(
        Model(path=model),
        serving,
        name="engine",
        host=LOOPBACK,
        key="key",
        device="cpu",
        seed=0,
        log=log,
        guard=guard,
        answer_timeout_s=60.0,
    )


def test_an_engine_that_cannot_listen_ends(addition: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang alone would stay, without a server, until its start times out."""
    with listen(LOOPBACK) as taken, hold_port(LOOPBACK) as free:
        ports = iter([taken, free])
        monkeypatch.setattr(module, "hold_port", lambda _: next(ports))
        watch = Watch()
        start(addition / "model", Rollout(max_new_tokens=8), watch, tmp_path / "engine.log")
        (child,) = watch.children
        try:
            assert child.process.wait(START_LIMIT_S) == 1
        finally:
            child.kill()
    assert "address already in use" in (tmp_path / "engine.log").read_text()


@pytest.mark.parametrize("kind", [LlamaConfig, Qwen2Config])  # with Qwen3, test_ring trains
def test_an_engine_scores_as_transformers_does(kind: Any, tmp_path: Path) -> None:
    """SGLang gives Qwen2's score a bias of random numbers, which transformers' has not."""
    torch.manual_seed(1)
    sizes = {"hidden_size": 96, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = kind(**sizes, num_key_value_heads=2, vocab_size=320, num_labels=1, pad_token_id=0)
    model = AutoModelForSequenceClassification.from_config(config, dtype=torch.float32)
    model.save_pretrained(tmp_path / "model")
    source = RewardEngine(type="engine", model=Model(path=tmp_path / "model"))
    engine = start(source.model.path, source, Watch(), tmp_path / "engine.log")
    head = read_model_shape(source.model.path, "reward").head
    assert isinstance(head, RewardHead)
    sequences = [[5, 6, 7, 8, 9, 2], [11, 12, 13, 2], [*range(3, 160)], [7], [5, 0, 6, 0, 0]]

    async def scores() -> list[float]:
        async with ScoreClient(engine.address, "key", head) as client:
            return await client.score(sequences)

    try:
        engine.wait_healthy()
        clear_score_bias(engine, torch.float32, "cpu")
        found = asyncio.run(scores())
    finally:
        engine.child.kill()
    with torch.no_grad():
        expected = [float(model.double()(torch.tensor([ids])).logits) for ids in sequences]
    assert found == pytest.approx(expected, abs=1e-5)
