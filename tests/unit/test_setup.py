"""launch/setup.sh in a copy of the files it reads, with a Python that only notes what it was asked to do."""

import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

FAKE_PYTHON = """#!/usr/bin/env bash
echo "$*" >>"$CALLS"
case "$*" in
  "-c import sys; "*) echo "$VERSION" ;;
  "-m venv --clear "*) rm -rf "$4"; mkdir -p "$4/bin" "$4/torchvision"; cp "$0" "$4/bin/python" ;;
  "-c import sysconfig; "*) dirname "$(dirname "$0")" ;;
  *"requirements"*) sleep "$SECONDS_OF_INSTALL"; [[ -z "$BROKEN" ]] ;;
esac
"""
FAKE_NVIDIA_SMI = """#!/usr/bin/env bash
if [[ -z "$GPUS" ]]; then echo "no devices were found"; exit 6; fi
for i in $(seq 0 $((GPUS - 1))); do echo "GPU $i: NVIDIA H100 80GB HBM3 (UUID: GPU-$i)"; done
"""


class Tree:
    """A checkout, a PATH with the fakes first, and the calls that the fake Pythons noted."""

    def __init__(self, path: Path) -> None:
        self.root = path / "checkout"
        for name in ("launch/setup.sh", "requirements.txt", "requirements-cpu.txt", "pyproject.toml"):
            (self.root / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, self.root / name)
        shutil.copytree(ROOT / "cpu_development", self.root / "cpu_development")
        programs = path / "bin"
        programs.mkdir()
        for name in ("python3.11", "python3.12", "python3", "nvidia-smi"):
            (programs / name).write_text(FAKE_NVIDIA_SMI if name == "nvidia-smi" else FAKE_PYTHON)
            (programs / name).chmod(0o755)
        self.calls_file = path / "calls"
        self.environment = {
            "PATH": f"{programs}:{os.environ['PATH']}",
            "CALLS": str(self.calls_file),
            "VERSION": "3.11",
            "GPUS": "",
            "BROKEN": "",
            "SECONDS_OF_INSTALL": "0",
        }

    def start(self, *arguments: str, **environment: str) -> subprocess.Popen[str]:
        command = ["bash", str(self.root / "launch/setup.sh"), *arguments]
        pipe = subprocess.PIPE
        return subprocess.Popen(
            command, cwd="/", env=self.environment | environment, text=True, stdout=pipe, stderr=pipe
        )

    def run(self, *arguments: str, **environment: str) -> tuple[int, str, list[str]]:
        """The exit code, all output, and the fake Pythons' calls of this run."""
        self.calls_file.write_text("")
        process = self.start(*arguments, **environment)
        stdout, stderr = process.communicate(timeout=30)
        return process.returncode, stdout + stderr, self.calls()

    def calls(self) -> list[str]:
        return self.calls_file.read_text().splitlines()


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


def made_anew(calls: list[str]) -> bool:
    return any("-m venv --clear" in call for call in calls)


def test_makes_a_cpu_environment_and_then_leaves_it(tree: Tree) -> None:
    code, output, calls = tree.run()
    assert code == 0, output
    assert "done" in output
    assert made_anew(calls)
    installs = [call.split("--disable-pip-version-check ")[1] for call in calls if "pip install" in call]
    root = tree.root
    assert installs == [
        "--upgrade pip>=25",
        "torch==2.13.0",
        f"--no-deps --requirement {root}/requirements-cpu.txt",
        f"--no-deps --no-build-isolation --editable {root}/cpu_development/sglang_kernel_stub",
        f"--no-deps --no-build-isolation --editable {root}",
    ]
    assert (root / ".venv/torchvision/_meta_registrations.py").read_text() == ""

    start = time.monotonic()
    assert tree.run() == (0, "", [])
    assert time.monotonic() - start < 2


@pytest.mark.parametrize("changed", ["requirements-cpu.txt", "pyproject.toml", "launch/setup.sh"])
def test_a_changed_file_updates_in_place(tree: Tree, changed: str) -> None:
    tree.run()
    with (tree.root / changed).open("a") as file:
        file.write("\n# changed\n")
    code, _, calls = tree.run()
    assert code == 0
    assert calls
    assert not made_anew(calls)
    assert tree.run() == (0, "", [])


def test_a_half_made_environment_is_made_anew(tree: Tree) -> None:
    assert tree.run(BROKEN="1")[0] != 0
    code, output, calls = tree.run()
    assert code == 0, output
    assert made_anew(calls)


def test_a_half_updated_environment_is_made_anew(tree: Tree) -> None:
    tree.run()
    (tree.root / "pyproject.toml").write_text("# changed\n")
    assert tree.run(BROKEN="1")[0] != 0
    assert made_anew(tree.run()[2])


def test_a_copied_environment_is_made_anew(tree: Tree, tmp_path: Path) -> None:
    tree.run()
    shutil.copytree(tree.root, tmp_path / "copy")
    tree.root = tmp_path / "copy"
    assert made_anew(tree.run()[2])


def test_the_kind_follows_the_gpus_only_for_a_new_environment(tree: Tree) -> None:
    code, output, calls = tree.run(GPUS="8")
    assert code == 0, output
    assert any("--no-build-isolation --requirement" in call for call in calls)
    assert (tree.root / ".venv/torch.txt").read_text().startswith("torch==")
    assert tree.run() == (0, "", [])  # a login node shows no GPU
    assert tree.run("--gpu") == (0, "", [])
    assert made_anew(tree.run("--cpu")[2])
    assert tree.run(GPUS="8") == (0, "", [])


def test_two_at_once_install_once(tree: Tree) -> None:
    tree.calls_file.write_text("")
    both = [tree.start(SECONDS_OF_INSTALL="1") for _ in range(2)]
    outputs = [process.communicate(timeout=30)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert sum("--requirement" in call for call in tree.calls()) == 1
    assert sum("waiting for another set-up" in output for output in outputs) == 1


def test_a_killed_set_up_is_waited_for_and_made_anew(tree: Tree) -> None:
    """Its pip goes on for a while, and must not write into the environment that the next run makes."""
    tree.calls_file.write_text("")
    killed = tree.start(SECONDS_OF_INSTALL="1")
    deadline = time.monotonic() + 20
    while not any("--requirement" in call for call in tree.calls()):
        assert time.monotonic() < deadline, "the set-up has not come to its install"
        time.sleep(0.02)
    killed.kill()
    killed.wait(timeout=20)
    code, output, calls = tree.run()
    assert code == 0, output
    assert "waiting for another set-up" in output
    assert made_anew(calls)


def test_names_the_python_that_is_too_old(tree: Tree) -> None:
    code, output, calls = tree.run(VERSION="3.9")
    assert code == 1
    assert "no Python 3.11 or later on PATH (python3 is 3.9): install Python 3.11" in output
    assert not made_anew(calls)


def test_refuses_an_unknown_argument(tree: Tree) -> None:
    assert tree.run("--tpu") == (1, "setup: unknown argument '--tpu'; see launch/setup.sh --help\n", [])


def test_help_tells_both_kinds(tree: Tree) -> None:
    code, output, calls = tree.run("--help")
    assert code == 0
    assert not calls
    assert output.startswith("Usage: launch/setup.sh [--cpu | --gpu]")
