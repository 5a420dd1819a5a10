"""The engine process: builds the engine, runs its loop, ends with its parent.

Started by ChildProcess with the address, the builder and the configuration as one line of JSON on standard input,
which then stays open: its end tells that the parent wants the process to end, or is dead.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import logging
import os
import select
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import zmq

from specserve.core.config import EngineConfig
from specserve.core.errors import SpecserveError
from specserve.core.messages import Command, Event
from specserve.engine import codec, heap
from specserve.engine.engine import Engine
from specserve.engine.faults import describe
from specserve.engine.loop import run_loop
from specserve.engine.thread import engine_info

logger = logging.getLogger(__name__)
STATS_SECONDS = 0.5
GRACE_SECONDS = 5.0  # for a step that runs when the parent goes away
HEARD_SECONDS = 10.0
LINE_LIMIT = 2**20


class Channel:
    """The child's end of the socket. Used by the main thread alone."""

    def __init__(self, address: str, lifeline: int) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.set_hwm(0)
        self._socket.connect(address)
        self._lifeline = lifeline
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(lifeline, zmq.POLLIN)

    def send(self, message: bytes) -> None:
        self._socket.send(message)

    def receive(self, seconds: float | None) -> list[bytes] | None:
        """Messages, after waiting for the first one for so long at most; None when the parent is gone."""
        ready = dict(self._poller.poll(None if seconds is None else int(seconds * 1000)))
        if self._lifeline in ready:
            return None
        messages = []
        while self._socket in ready:
            try:
                messages.append(self._socket.recv(zmq.NOBLOCK))
            except zmq.Again:
                break
        return messages

    def close(self) -> None:
        """Send what is left, for half a second at most."""
        self._socket.close(linger=500)
        self._context.term()


class Server:
    """Joins one engine to the channel."""

    def __init__(self, engine: Engine, channel: Channel) -> None:
        self._engine = engine
        self._channel = channel
        self._next_stats = 0.0

    def receive(self, pause: float | None) -> Sequence[Command] | None:
        now = time.monotonic()
        if pause is None or now >= self._next_stats:
            # Idle figures are always fresh: the last message before a long wait tells them.
            self._channel.send(codec.encode_stats(self._engine.stats()))
            self._next_stats = now + STATS_SECONDS
        messages = self._channel.receive(pause)
        if messages is None:
            return None
        commands: list[Command] = []
        for message in messages:
            tag, body = codec.unpack(message)
            if tag == codec.COMMANDS:
                commands.extend(codec.decode_commands(body))
        return commands

    def deliver(self, events: Sequence[Event]) -> None:
        self._channel.send(codec.encode_events(events))


def load_builder(path: str) -> Callable[..., Engine]:
    """The function named as "package.module:function"."""
    module, _, name = path.partition(":")
    builder: Callable[..., Engine] = getattr(importlib.import_module(module), name)
    return builder


def failure(error: BaseException) -> dict[str, Any]:
    """What the parent raises. At start-up there is no user's text yet that a message could quote."""
    if isinstance(error, SpecserveError):
        values = {"kind": type(error).__name__, "message": error.message, "param": error.param, "code": error.code}
    else:
        message = f"the engine could not start: {type(error).__name__}: {error}"
        values = {"kind": "ModelLoadError", "message": message, "param": None, "code": "model_load_failed"}
    return values


def _read_hello(lifeline: int) -> dict[str, Any]:
    # Not through sys.stdin: its buffer and its lock would be in the way of the lifeline.
    line = bytearray()
    while not line.endswith(b"\n") and len(line) < LINE_LIMIT:
        piece = os.read(lifeline, 4096)
        if not piece:
            os._exit(1)
        line += piece
    hello: dict[str, Any] = json.loads(line)
    return hello


def _watch(lifeline: int, serving: threading.Event, directory: str) -> None:
    """End the process when the parent is gone: at once while it starts, after a grace when it serves."""
    select.select([lifeline], [], [])
    # The parent's to remove; it is here too, for a parent that was killed.
    shutil.rmtree(directory, ignore_errors=True)
    if serving.is_set():
        time.sleep(GRACE_SECONDS)
    os._exit(1)


def run(lifeline: int) -> int:
    """The exit status."""
    hello = _read_hello(lifeline)
    serving = threading.Event()
    threading.Thread(target=_watch, args=(lifeline, serving, hello["directory"]), name="lifeline", daemon=True).start()
    channel = Channel(hello["address"], lifeline)

    def progress(*values: Any) -> None:
        channel.send(codec.pack(codec.PROGRESS, values))

    gc.disable()  # of what is imported and loaded nothing is garbage
    try:
        config = EngineConfig.from_dict(hello["config"])
        engine = load_builder(hello["builder"])(config, progress)
    except Exception as error:
        serving.set()
        if not isinstance(error, SpecserveError):
            logger.error("start-up failed: %s", describe(error))
        channel.send(codec.pack(codec.FAILED, failure(error)))
        # Until the parent has read it: what a dead process said last may be lost.
        channel.receive(HEARD_SECONDS)
        channel.close()
        return 1
    heap.freeze()
    gc.enable()
    serving.set()
    # Beside the first requests: they would wait for it longer than they are slowed down by it.
    threading.Thread(target=settle, args=(engine,), name="memory", daemon=True).start()
    channel.send(codec.pack(codec.READY, {**engine_info(engine), "pid": os.getpid()}))
    server = Server(engine, channel)
    status = 0
    try:
        run_loop(engine, server.receive, server.deliver)
    except Exception as error:
        logger.error("the engine ended: %s", describe(error))
        status = 1
    engine.close()
    channel.close()
    shutil.rmtree(hello["directory"], ignore_errors=True)  # as in _watch, which may come too late
    return status


def settle(engine: Engine) -> None:
    """Move the heap to huge pages; then take the KV caches' memory while the CPUs have nothing else to do.

    A virtual machine may have to be given each page by its host, which the prompts that use new blocks would wait for.
    """
    heap.collapse()
    if hasattr(os, "SCHED_IDLE"):
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))  # 0 is this thread alone
    populate = getattr(engine.executor, "populate", None)  # not every executor has memory of its own here
    if populate is not None:
        populate()


def main() -> None:
    """Entry point. Ctrl-C is the parent's business."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s engine: %(message)s")
    status = run(sys.stdin.fileno())
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # threads of a compiler or of a math library must not delay the end
