"""The inside of an engine process: stock SGLang, its arguments read from stdin. The only file that imports sglang."""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import traceback

from megarl.runtime import die_with_parent


def main() -> None:
    """Serve until killed. The process was started by `megarl.runtime.child`, so it ends with its rank."""
    arguments = json.loads(sys.stdin.readline())
    from sglang.launch_server import run_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import ServerArgs

    load_plugins()
    if arguments.get("device") == "cpu":
        _fork_processes()
    try:
        run_server(ServerArgs(**arguments))
    finally:
        traceback.print_exc()
        os._exit(1)  # an orderly exit would wait for the scheduler, which stays


def _fork_processes() -> None:
    """SGLang spawns its processes, as CUDA demands; forked ones need not import it again, which takes each 10 s."""
    multiprocessing.set_start_method("fork", force=True)
    multiprocessing.set_start_method = lambda *_, **__: None
    os.register_at_fork(after_in_child=lambda: die_with_parent(os.getppid()))
