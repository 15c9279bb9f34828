"""One thread in each rank that watches children and signals, so that no death goes unnoticed.

The main thread may sit in a collective for minutes, where Python runs no signal handler and nobody looks after the
engines. The guard waits on the children's pidfds and on the C-level signal wake-up, and ends the rank at once; the
launcher then ends the other ranks, and the kernel their children.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import socket
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import NoReturn

from megarl.runtime.children import Child

FAILURE_FILE = "failure.jsonl"
_ENDING = {signal.SIGTERM, signal.SIGINT}


class Guard:
    """Created once, from the main thread. SIGTERM and SIGINT end the rank; SIGUSR1 sets `stop_requested`.

    The end of the process `launcher` ends the rank, too: whoever waits for a rank that is gone might wait for ever.
    """

    def __init__(self, rank: int, launcher: int | None = None) -> None:
        self.stop_requested = False
        self._rank = rank
        self._run_dir: Path | None = None
        self._children: dict[int, Child] = {}
        self._lock = threading.Lock()
        self._selector = selectors.DefaultSelector()
        self._wake_in, wake_out = socket.socketpair()
        wake_out.setblocking(False)
        self._wake_out = wake_out
        self._selector.register(self._wake_in, selectors.EVENT_READ)
        self._launcher = None if launcher is None else os.pidfd_open(launcher)
        if self._launcher is not None:
            self._selector.register(self._launcher, selectors.EVENT_READ)
        for number in (*_ENDING, signal.SIGUSR1):
            signal.signal(number, lambda *_: None)  # the work is done in the thread; a handler is needed to wake it
        signal.set_wakeup_fd(wake_out.fileno(), warn_on_full_buffer=False)
        threading.Thread(target=self._run, name="guard", daemon=True).start()

    def record_failures_in(self, run_dir: Path) -> None:
        """From now on a cause of death is also appended to `run_dir`/failure.jsonl, for the launcher to print last."""
        self._run_dir = run_dir

    def watch(self, child: Child, *, vital: bool = True) -> None:
        """End `child` with this rank and, if it is `vital`, this rank with it."""
        with self._lock:
            fd = os.pidfd_open(child.process.pid)
            self._children[fd] = child
            if vital:
                self._selector.register(fd, selectors.EVENT_READ)
        self._wake_out.send(b"\0")

    def stop(self, child: Child) -> None:
        """End one child, as expected."""
        with self._lock:
            for fd in [fd for fd, one in self._children.items() if one is child]:
                self._forget(fd)
        child.kill()

    def _forget(self, fd: int) -> None:
        del self._children[fd]
        with contextlib.suppress(KeyError):  # it was not vital
            self._selector.unregister(fd)
        os.close(fd)

    def stop_children(self) -> None:
        """End all children, as expected at the end of a job."""
        with self._lock:
            for fd, child in list(self._children.items()):
                self._forget(fd)
                child.kill()

    def die(self, cause: str, code: int = 1) -> NoReturn:
        """Say why, end the children and this process. Callable from any thread; never returns."""
        with contextlib.suppress(OSError):
            print(f"megarl: rank {self._rank}: {cause}", file=sys.stderr, flush=True)
        with contextlib.suppress(OSError):  # also where nobody reads the output any more
            if self._run_dir is not None:
                row = {"time": time.time(), "rank": self._rank, "cause": cause}
                with (self._run_dir / FAILURE_FILE).open("a") as file:
                    file.write(json.dumps(row) + "\n")
        for child in list(self._children.values()):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.process.pid, signal.SIGKILL)
        os._exit(code)

    def _run(self) -> None:
        try:
            while True:
                for key, _ in self._selector.select():
                    self._handle(key.fd)
        except BaseException:  # noqa: BLE001 - a rank without its guard must not go on
            self.die(f"the guard thread failed:\n{traceback.format_exc()}")

    def _handle(self, fd: int) -> None:
        if fd == self._wake_in.fileno():
            for number in self._wake_in.recv(64):
                if number == signal.SIGUSR1:
                    self.stop_requested = True
                elif number in _ENDING:
                    self.die(f"ended by {signal.Signals(number).name}", code=128 + number)
            return
        if fd == self._launcher:
            self.die("the process that started this rank has ended")
        with self._lock:
            child = self._children.get(fd)
        if child is not None:  # else it was stopped on purpose just now
            child.process.wait()
            self.die(child.describe_end())
