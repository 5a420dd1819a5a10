"""A real server as a user starts it: `specserve serve --port 0` in a process of its own."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from specserve.cli.demo import READY


@dataclass(slots=True)
class Server:
    """Address and process of a running server, and the line that told it."""

    url: str
    process: subprocess.Popen[str]
    line: str

    @property
    def http(self) -> str:
        return self.url.replace("ws://", "http://").removesuffix("/v1/responses")

    def engine_pid(self) -> int:
        """The engine process: the server's one child, started by any of its threads."""
        tasks = Path(f"/proc/{self.process.pid}/task").glob("*/children")
        for child in " ".join(task.read_text() for task in tasks).split():
            command = Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0")
            if not any(b"resource_tracker" in part for part in command):
                return int(child)
        raise AssertionError("the server has no engine process")


@contextlib.contextmanager
def running_server(*arguments: str, env: dict[str, str] | None = None) -> Iterator[Server]:
    """Start it, wait until it says that it is ready, and stop it at the end."""
    process = subprocess.Popen(
        [sys.executable, "-m", "specserve.cli", "serve", "--port", "0", *arguments],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **(env or {})},
    )
    assert process.stdout is not None
    try:
        for line in process.stdout:
            found = READY.search(line)
            if found:
                yield Server(found[1], process, line)
                break
        else:
            raise AssertionError(f"the server ended with status {process.wait()}")
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()
