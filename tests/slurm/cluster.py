"""A test's hold on the throw-away Slurm cluster of `cluster.sh`."""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

SCRIPT = Path(__file__).with_name("cluster.sh")
CANNOT = 3
"""Exit code of cluster.sh on a machine that can have no cluster."""
_RUNNING = {"PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "SUSPENDED", "STOPPED"}
_POLL_S = 0.2


@dataclass(frozen=True)
class Cluster:
    """Client commands run on the login node, which alone reaches the controller; files are the machine's own."""

    directory: Path

    def call(self, verb: str, *arguments: str, env: Mapping[str, str] = {}, cwd: Path | None = None) -> str:
        """Standard output of `cluster.sh verb`; raises with its error output when it fails."""
        done = subprocess.run(
            ["bash", str(SCRIPT), verb, str(self.directory), *arguments],
            env={**os.environ, **env},
            cwd=cwd,
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise RuntimeError(f"{verb} {' '.join(arguments)}: exit {done.returncode}: {done.stdout}{done.stderr}")
        return done.stdout

    def submit(
        self,
        script: Path,
        *arguments: str,
        options: Sequence[str] = (),
        env: Mapping[str, str] = {},
        cwd: Path | None = None,
    ) -> int:
        """Number of the job that `sbatch [options] script [arguments]` makes, submitted from `cwd`."""
        return int(self.call("run", "sbatch", "--parsable", *options, str(script), *arguments, env=env, cwd=cwd))

    def show(self, job: int, key: str) -> str:
        """One of the values that scontrol tells about a job, such as JobState."""
        text = self.call("run", "scontrol", "show", "job", str(job))
        found = re.search(rf"\b{key}=(.*?)(?: \w+=|$)", text, re.MULTILINE)
        assert found, f"job {job} has no {key}:\n{text}"
        return found[1]

    def output(self, job: int) -> str:
        """What the job has written."""
        path = Path(self.show(job, "StdOut"))
        return path.read_text() if path.exists() else ""

    def has_ended(self, job: int) -> bool:
        return self.show(job, "JobState") not in _RUNNING

    def wait(self, job: int, timeout_s: float) -> str:
        """The state in which the job ended."""
        end = time.monotonic() + timeout_s
        while not self.has_ended(job):
            if time.monotonic() > end:
                raise TimeoutError(f"job {job} runs after {timeout_s:.0f} s; its output:\n{self.output(job)}")
            time.sleep(_POLL_S)
        return self.show(job, "JobState")

    def signal(self, job: int) -> None:
        """Send USR1 to the job's batch script, as Slurm does before the time limit."""
        self.call("run", "scancel", "--batch", "--signal=USR1", str(job))

    def cancel(self, job: int) -> None:
        """End a job."""
        self.call("run", "scancel", str(job))

    def processes(self, node: str) -> list[str]:
        """Command lines of what runs on `node` besides Slurm's own daemon."""
        pid = (self.directory / "run" / node).read_text().strip()
        namespace = self.call("run", "readlink", f"/proc/{pid}/ns/pid").strip()
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                words = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
                if (entry / "ns/pid").readlink() == Path(namespace):
                    found.append(" ".join(words).strip())
            except (FileNotFoundError, ProcessLookupError, PermissionError):
                continue  # ended meanwhile, a zombie, or none of ours
        return [line for line in found if not line.startswith(("bash -euc", f"slurmd -D -N {node}"))]
