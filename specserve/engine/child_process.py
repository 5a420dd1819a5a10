"""ChildProcess: one incarnation of the engine process, seen from its parent."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import zmq

from specserve.core.config import EngineConfig

# -P and the parent's own path: the working directory must not shadow a package, and what the parent imports the
# child finds too.
_BOOT = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from specserve.engine.child import main; main()"


class ChildProcess:
    """A subprocess with a private socket. Its end is seen at once: a thread waits for it.

    Used by one thread, except `wait_dead`'s flag.

    Args:
        config, builder: the engine is builder(config, progress); builder is "package.module:function".
        on_death: called from the waiting thread when the process has ended.
    """

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], config: EngineConfig, builder: str, on_death: Callable[[], None]
    ) -> None:
        self._on_death = on_death
        self.dead = False
        self._directory = Path(tempfile.mkdtemp(prefix="specserve-"))  # for its owner alone (0700)
        self.socket = context.socket(zmq.PAIR)
        try:
            self.socket.set_hwm(0)
            address = f"ipc://{self._directory / 'engine'}"
            self.socket.bind(address)
            self._process = self._spawn()
        except BaseException:
            self.socket.close(linger=0)
            shutil.rmtree(self._directory, ignore_errors=True)
            raise
        self._greet(
            {"address": address, "directory": str(self._directory), "builder": builder, "config": asdict(config)}
        )
        self._waiter = threading.Thread(target=self._wait, name="engine-waiter", daemon=True)
        self._waiter.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, message: bytes) -> None:
        """Only after the child's READY; what a dead child no longer takes is dropped."""
        with contextlib.suppress(zmq.Again):
            self.socket.send(message, zmq.NOBLOCK)

    def receive(self) -> list[bytes]:
        """Messages that have arrived."""
        messages = []
        with contextlib.suppress(zmq.Again):
            while True:
                messages.append(self.socket.recv(zmq.NOBLOCK))
        return messages

    def how_it_ended(self) -> str:
        code = self._process.returncode
        if code is None:
            return "runs"
        if code >= 0:
            return f"ended with status {code}"
        try:
            return f"was ended by {signal.Signals(-code).name}"
        except ValueError:
            return f"was ended by signal {-code}"

    def close(self, grace: float) -> None:
        """End the process, by force after `grace` seconds, and remove what belongs to it."""
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()
        self._waiter.join(grace)
        if self._waiter.is_alive():
            self._process.kill()
            self._waiter.join()
        self.socket.close(linger=0)
        shutil.rmtree(self._directory, ignore_errors=True)

    def _spawn(self) -> subprocess.Popen[bytes]:
        path = [os.path.abspath(entry) for entry in sys.path]  # noqa: PTH100 (an empty entry is the working directory)
        # A session of its own: Ctrl-C in the terminal reaches the parent alone, which then ends the child in order.
        return subprocess.Popen(
            [sys.executable, "-P", "-c", _BOOT, json.dumps(path)], stdin=subprocess.PIPE, start_new_session=True
        )

    def _greet(self, hello: dict[str, object]) -> None:
        stdin = self._process.stdin
        if stdin is not None:
            with contextlib.suppress(OSError):  # it died already: the waiter will tell
                stdin.write(json.dumps(hello).encode() + b"\n")
                stdin.flush()

    def _wait(self) -> None:
        self._process.wait()
        self.dead = True
        self._on_death()
