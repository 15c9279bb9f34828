"""Logging of a rank: rank 0 speaks to the terminal, every rank writes its own file."""

from __future__ import annotations

import faulthandler
import logging
import sys
from pathlib import Path

LOGGER = logging.getLogger("megarl")


def setup_logging(rank: int, directory: Path) -> None:
    """All records and warnings go to `directory`/rank_N.log; megarl's own also to rank 0's standard output."""
    directory.mkdir(parents=True, exist_ok=True)
    file = logging.StreamHandler((directory / f"rank_{rank}.log").open("a"))
    file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[file], force=True)
    logging.captureWarnings(True)
    faulthandler.enable(file.stream)
    if rank == 0:
        terminal = logging.StreamHandler(sys.stdout)
        terminal.setFormatter(logging.Formatter("%(message)s"))
        LOGGER.addHandler(terminal)
