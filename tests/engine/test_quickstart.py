"""The README's first command: it learns, sums up, and ends cleanly when it is interrupted."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.jobs import ROOT, START_LIMIT_S, assert_all_gone, wait_until

pytestmark = pytest.mark.engine

RUN = re.compile(r"runs/quickstart-[\d-]+")
END_LIMIT_S = 20.0  # the launcher has ten seconds to end by itself


@pytest.fixture
def new_runs() -> Iterator[None]:
    """Removes the run directories that a test makes."""
    before = set((ROOT / "runs").glob("quickstart-*"))
    yield
    for path in set((ROOT / "runs").glob("quickstart-*")) - before:
        shutil.rmtree(path)


@pytest.mark.usefixtures("new_runs")
@pytest.mark.timeout(1200)
def test_quickstart_learns_and_sums_up() -> None:
    done = subprocess.run(
        ["bash", "launch/quickstart.sh", "--steps", "8", "--seed", "1"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    last = done.stdout.splitlines()[-1]
    figures = re.fullmatch(
        r"quickstart: accuracy (0\.\d\d) -> (0\.\d\d) \(temperature 1\), (0\.\d\d) -> (0\.\d\d) \(greedy\), \d+ s", last
    )
    assert figures, last
    before, after = float(figures[1]), float(figures[2])
    assert 0.15 < before < after
    run = ROOT / RUN.search(done.stdout)[0]  # type: ignore[index]
    assert (run / "reward.png").read_bytes().startswith(b"\x89PNG")
    assert (run / "rl/hf/model.safetensors").exists()


@pytest.mark.usefixtures("new_runs")
def test_interrupt_ends_everything(tmp_path: Path) -> None:
    with (tmp_path / "log").open("w") as log:
        quickstart = subprocess.Popen(
            ["bash", "launch/quickstart.sh"], cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
    top = psutil.Process(quickstart.pid)
    try:
        output = lambda: (tmp_path / "log").read_text()  # noqa: E731
        wait_until(lambda: "SFT 20/" in output(), START_LIMIT_S, output)
        processes = {f"{p.name()} {p.pid}": p for p in [top, *top.children(recursive=True)]}
        assert len(processes) >= 5
        quickstart.send_signal(signal.SIGINT)
        assert_all_gone(processes, END_LIMIT_S)
        assert quickstart.wait() == 1
        assert "interrupted" in output()
        assert "Traceback" not in output()
    finally:
        for process in [*top.children(recursive=True), top] if quickstart.poll() is None else []:
            process.kill()
