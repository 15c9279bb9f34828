"""Bootstrap of every child process: `python -m megarl.runtime.child package.module:function`.

A child ends with the process that started it, also when that one is killed, and so do the processes that it spawns
itself: multiprocessing imports this module again in each of them as `__mp_main__`, before anything slow. Started by
`children.py`, which also makes the environment.
"""

from __future__ import annotations

import importlib
import io
import os
import sys

from megarl.runtime.lifeline import die_with_parent

PARENT_VARIABLE = "MEGARL_PARENT_PID"


def _attach() -> None:
    die_with_parent(int(os.environ[PARENT_VARIABLE]))
    os.environ[PARENT_VARIABLE] = str(os.getpid())  # for the processes that this one spawns


def main() -> None:
    """Run the function that the command line names."""
    _attach()
    # launchers may bind each rank to one core, which a child would inherit
    os.sched_setaffinity(0, range(os.cpu_count() or 1))
    assert isinstance(sys.stdout, io.TextIOWrapper), "a child without an output"
    sys.stdout.reconfigure(line_buffering=True)  # one that is killed has said what it said
    module, _, function = sys.argv[1].partition(":")
    getattr(importlib.import_module(module), function)()


if __name__ == "__mp_main__":
    _attach()
if __name__ == "__main__":
    main()
