"""One rank: python rank.py MODULE ARGUMENT..., which calls the module's `main` with the arguments.

Checkpoints are written by spawned processes, which first import the file that was started. So that is this one, and not
the module, which takes seconds.
"""

from __future__ import annotations

import importlib
import os
import sys
import traceback


def run(module: str, *arguments: str) -> None:
    try:
        importlib.import_module(module).main(*arguments)
    except BaseException:  # noqa: BLE001  whatever it is: a rank that ended as usual would wait for the others
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    run(*sys.argv[1:])
