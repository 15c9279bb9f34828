"""The inside of an engine process: stock SGLang, its arguments read from stdin. The only file that imports sglang."""

from __future__ import annotations

import json
import os
import sys
import traceback


def main() -> None:
    """Serve until killed. The process was started by `megarl.runtime.child`, so it ends with its rank."""
    arguments = json.loads(sys.stdin.readline())
    from sglang.launch_server import run_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import ServerArgs

    load_plugins()
    try:
        run_server(ServerArgs(**arguments))
    finally:
        traceback.print_exc()
        os._exit(1)  # an orderly exit would wait for the scheduler, which stays
