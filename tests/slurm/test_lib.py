"""The functions of launch/lib.sh and slurm/lib.sh, run by bash with stand-ins for Slurm's commands first on PATH."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
RECIPE = """\
type: sft
steps: 1
model: {path: no_model}
data: {train: no_data.jsonl}
batch: {sequences: 1}
optimizer: {learning_rate: 1e-4}
"""


@pytest.fixture
def commands(tmp_path: Path) -> Path:
    """A directory that is first on PATH."""
    directory = tmp_path / "commands"
    directory.mkdir()
    return directory


def command(directory: Path, name: str, body: str) -> None:
    path = directory / name
    path.write_text(f"#!/usr/bin/env bash\n{body}\n")
    path.chmod(0o755)


def start(commands: Path, call: str, *arguments: object, **env: str) -> subprocess.Popen[str]:
    """A shell that runs `call`, in which "$@" are the arguments."""
    path = f"{commands}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    script = f"source launch/lib.sh; source slurm/lib.sh; cd '{commands.parent}'; {call}"
    return subprocess.Popen(
        ["bash", "-euo", "pipefail", "-c", script, "bash", *map(str, arguments)],
        env={**os.environ, "MEGARL_CONTROL": "", "PATH": path, **env},
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(shell: subprocess.Popen[str], code: int = 0) -> str:
    """Its standard output if it ended with 0, its error output if it was to fail."""
    stdout, stderr = shell.communicate(timeout=30)
    assert shell.returncode == code, stdout + stderr
    return stderr if code else stdout


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], "runs/toy-7"),
        (["name=big"], "runs/big-7"),
        (["name=a", "--resume", "name=b"], "runs/b-7"),
        (["run_dir=my runs/x"], "my runs/x"),
    ],
)
def test_run_dir(commands: Path, tmp_path: Path, words: list[str], expected: str) -> None:
    (tmp_path / "toy.yaml").write_text(RECIPE)
    shell = start(commands, 'recipe::run_dir "$@"', "toy.yaml", *words, SLURM_JOB_ID="7")
    assert finish(shell) == f"{expected}\n"


def test_run_dir_of_the_recipe_itself(commands: Path, tmp_path: Path) -> None:
    (tmp_path / "toy.yaml").write_text(RECIPE + "run_dir: /scratch/x\nname: y\n")
    assert finish(start(commands, 'recipe::run_dir "$@"', "toy.yaml", SLURM_JOB_ID="7")) == "/scratch/x\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "usage: sbatch"),
        (["--resume"], "usage: sbatch"),
        (["missing.yaml"], "missing.yaml: cannot read the recipe"),
        (["toy.yaml", "stepz=1"], "stepz: unknown key"),
    ],
)
def test_run_dir_refuses(commands: Path, tmp_path: Path, words: list[str], message: str) -> None:
    (tmp_path / "toy.yaml").write_text(RECIPE)
    shell = start(commands, 'recipe::run_dir "$@"', *words, SLURM_JOB_ID="7")
    assert message in finish(shell, code=1)


@pytest.mark.parametrize(
    ("plugins", "given", "expected"),
    [
        ("pmix\n\tnone\n\tpmi2", "", "mpi"),
        ("none\n\tpmi2", "", "tcp"),
        ("pmix", "tcp", "tcp"),
        ("none", "mpi", "mpi"),
    ],
)
def test_choice_of_control_plane(commands: Path, plugins: str, given: str, expected: str) -> None:
    command(commands, "srun", f'[[ $* == "--mpi=list" ]]; printf "MPI plugin types are...\\n\\t{plugins}\\n" >&2')
    assert finish(start(commands, "control::choose", MEGARL_CONTROL=given)) == f"{expected}\n"


def test_unknown_control_plane(commands: Path) -> None:
    shell = start(commands, "control::choose", MEGARL_CONTROL="ray")
    assert finish(shell, code=1) == "megarl: MEGARL_CONTROL=ray: expected mpi or tcp\n"


def test_rendezvous_is_the_first_host_and_a_free_port(commands: Path) -> None:
    command(commands, "scontrol", '[[ $* == "show hostnames gpu[07-09]" ]]; printf "gpu07\\ngpu08\\ngpu09\\n"')
    call = "control::export_rendezvous; printenv MASTER_ADDR MASTER_PORT"
    host, port = finish(start(commands, call, SLURM_JOB_NODELIST="gpu[07-09]")).split()
    assert host == "gpu07"
    ephemeral = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert 1024 <= int(port) < ephemeral


def test_rendezvous_without_hosts(commands: Path) -> None:
    command(commands, "scontrol", "exit 1")
    shell = start(commands, "control::export_rendezvous", SLURM_JOB_NODELIST="nowhere")
    assert "no host for the node list nowhere" in finish(shell, code=1)


@pytest.mark.parametrize("code", [0, 3, 137])
def test_step_returns_its_exit_code(commands: Path, code: int) -> None:
    command(commands, "srun", 'exit "$2"')
    finish(start(commands, 'step::run srun "$@"', "a b", code), code=code)


STEP = """\
trap 'echo $((++signals)) >signals' USR1
echo $$ >step
while [[ ! -e go ]]; do sleep 0.02; done
exit 5
"""


def test_step_forwards_each_usr1_and_still_returns_the_exit_code(commands: Path, tmp_path: Path) -> None:
    command(commands, "srun", STEP)
    command(commands, "scancel", '[[ $* == "--signal=USR1 7.0" ]] && kill -USR1 "$(<step)"')
    shell = start(commands, "step::run srun", SLURM_JOB_ID="7")
    appears(tmp_path / "step", "")
    for count in "12":
        shell.send_signal(signal.SIGUSR1)
        appears(tmp_path / "signals", f"{count}\n")
    (tmp_path / "go").touch()
    assert "USR1" in finish(shell, code=5)


def test_step_survives_a_usr1_that_cannot_be_forwarded(commands: Path, tmp_path: Path) -> None:
    command(commands, "srun", STEP)
    command(commands, "scancel", "touch go; exit 1")
    shell = start(commands, "step::run srun", SLURM_JOB_ID="7")
    appears(tmp_path / "step", "")
    shell.send_signal(signal.SIGUSR1)
    assert "cannot be reached" in finish(shell, code=5)


def appears(file: Path, text: str) -> None:
    """Wait until `file` holds `text`, or anything if that is empty."""
    end = time.monotonic() + 10
    while not file.exists() or not file.read_text() or (text and file.read_text() != text):
        assert time.monotonic() < end, f"{file} did not become {text!r}"
        time.sleep(0.02)


def test_cause_is_the_first_of_this_job_that_is_no_consequence(commands: Path, tmp_path: Path) -> None:
    rows = [(90, 0, "of an earlier job"), (120, 0, "ended by SIGTERM"), (123, 2, "later"), (122, 1, 'a "real"\ncause')]
    lines = [json.dumps({"time": time, "rank": rank, "cause": cause}) + "\n" for time, rank, cause in rows]
    (tmp_path / "failure.jsonl").write_text("".join(lines))
    shell = start(commands, 'run::print_cause "$@" 2>&1', tmp_path, 100)
    assert finish(shell) == 'megarl: the run failed: rank 1: a "real"\ncause\n'


@pytest.mark.parametrize("rows", [[], [{"time": 120, "rank": 0, "cause": "ended by SIGTERM"}]])
def test_no_cause(commands: Path, tmp_path: Path, rows: list[dict[str, object]]) -> None:
    (tmp_path / "failure.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert "a rank was killed" in finish(start(commands, 'run::print_cause "$@" 2>&1', tmp_path, 100))


def test_no_file_of_causes(commands: Path, tmp_path: Path) -> None:
    assert "a rank was killed" in finish(start(commands, 'run::print_cause "$@" 2>&1', tmp_path, 100))


def test_activation(commands: Path, tmp_path: Path) -> None:
    (tmp_path / ".venv/bin").mkdir(parents=True)
    (tmp_path / ".venv/bin/activate").write_text("activated=yes")
    call = 'env::activate "$1"; echo "$activated $OMP_NUM_THREADS"'
    assert finish(start(commands, call, tmp_path, OMP_NUM_THREADS="")) == "yes 1\n"
    assert finish(start(commands, call, tmp_path, OMP_NUM_THREADS="4")) == "yes 4\n"
    assert "make it with launch/setup.sh" in finish(start(commands, call, tmp_path / "other"), code=1)
