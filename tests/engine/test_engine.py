"""An engine's own life, without a job around it."""

from __future__ import annotations

from pathlib import Path

import pytest

from megarl.config import Model, Rollout
from megarl.rollout_engine import engine as module
from megarl.runtime import Child, Guard, hold_port
from megarl.runtime.network import LOOPBACK, listen
from tests.jobs import START_LIMIT_S

pytestmark = pytest.mark.engine


class _Watch(Guard):
    """Leaves the end of an engine to the test."""

    def __init__(self) -> None:
        self.children: list[Child] = []

    def watch(self, child: Child) -> None:
        self.children.append(child)


def test_an_engine_that_cannot_listen_ends(addition: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang alone would stay, without a server, until its start times out."""
    with listen(LOOPBACK) as taken, hold_port(LOOPBACK) as free:
        ports = iter([taken, free])
        monkeypatch.setattr(module, "hold_port", lambda _: next(ports))
        watch = _Watch()
        module.Engine(
            Model(path=addition / "model"),
            Rollout(max_new_tokens=8),
            index=0,
            host=LOOPBACK,
            key="key",
            device="cpu",
            seed=0,
            log=tmp_path / "engine.log",
            guard=watch,
            answer_timeout_s=10.0,
        )
        (child,) = watch.children
        try:
            assert child.process.wait(START_LIMIT_S) == 1
        finally:
            child.kill()
    assert "address already in use" in (tmp_path / "engine.log").read_text()
