from __future__ import annotations

import subprocess
from collections.abc import Iterator

import pytest

from tests.slurm.cluster import CANNOT, SCRIPT, Cluster


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two nodes, for the whole session."""
    cluster = Cluster(tmp_path_factory.mktemp("slurm"))
    try:
        start = subprocess.run(["bash", SCRIPT, "start", cluster.directory], capture_output=True, text=True)
        if start.returncode == CANNOT:
            pytest.skip(f"no Slurm cluster on this machine: {start.stderr.strip().splitlines()[-1]}")
        assert start.returncode == 0, start.stderr
        yield cluster
    finally:
        cluster.call("stop")
