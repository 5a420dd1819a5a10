"""One engine in a process of its own: commands as JSON lines on stdin, answers on stdout.

    {"do": "decode", "prompts": [[1, 2]], "out": 128}      -> {"seconds": 1.2, "tokens": [..]}
    {"do": "serve", "prompts": [..], "out": 64, "width": 8} -> {"seconds": 9.8}

`width` requests are kept in flight, a new one starts when one ends. All engines are driven by this same loop, step by
step, so that none pays for a transport. Imports nothing but what every environment has.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

CLASSES = {"llama.cpp": "llamacpp:LlamaCpp", "openvino": "openvino:OpenVino", "specserve": "specserve:Specserve"}


class Stepped(Protocol):
    """An engine that is driven step by step. Greedy, end tokens ignored."""

    def config(self) -> dict[str, Any]:
        """What it was set to and its versions, for the record."""

    def prepare(self, width: int, tokens: int) -> None:
        """Make room for `width` requests of at most so many tokens each. Not timed."""

    def start(self, request: int, prompt: Sequence[int], out: int) -> None:
        """Take a request in; it is to give exactly `out` tokens."""

    def step(self) -> list[tuple[int, list[int]]]:
        """One step; (request, its new tokens) of those that got any."""


def serve(engine: Stepped, prompts: Sequence[Sequence[int]], out: int, width: int) -> dict[str, Any]:
    """Seconds, by the wall and of this process's CPU, until the last of the prompts has its `out` tokens."""
    missing: dict[int, int] = {}
    first: list[int] = []
    following = 0
    start, start_cpu = time.perf_counter(), time.process_time()
    while missing or following < len(prompts):
        while following < len(prompts) and len(missing) < width:
            engine.start(following, prompts[following], out)
            missing[following] = out
            following += 1
        _take(engine, missing, first)
    return _answer(start, start_cpu, first)


def decode(engine: Stepped, prompt: Sequence[int], out: int) -> dict[str, Any]:
    """Seconds from the first token to the last, of one request."""
    engine.start(0, prompt, out)
    missing, tokens = {0: out}, list[int]()
    while not tokens:
        _take(engine, missing, tokens)
    early = len(tokens)
    start, start_cpu = time.perf_counter(), time.process_time()
    while missing:
        _take(engine, missing, tokens)
    return {**_answer(start, start_cpu, tokens), "early": early}


def _take(engine: Stepped, missing: dict[int, int], first: list[int]) -> None:
    """Step; count the tokens off, keep those of request 0."""
    for request, tokens in engine.step():
        missing[request] -= len(tokens)
        if request == 0:
            first += tokens
        if missing[request] < 0:
            raise RuntimeError(f"request {request} gave more tokens than it was asked for")
        if missing[request] == 0:
            del missing[request]


def _answer(start: float, start_cpu: float, tokens: list[int]) -> dict[str, Any]:
    return {
        "seconds": time.perf_counter() - start,
        "cpu_seconds": time.process_time() - start_cpu,
        "tokens": tokens[:64],
    }


def answer(engine: Stepped, command: dict[str, Any]) -> dict[str, Any]:
    """What a command gives."""
    prompts, out = command["prompts"], command["out"]
    width = command.get("width", 1)
    engine.prepare(width, max(len(prompt) for prompt in prompts) + out)
    if command["do"] == "decode":
        return decode(engine, prompts[0], out)
    return serve(engine, prompts, out, width)


def _end_with_parent() -> None:
    """A stopped process does not notice that its parent is gone; Linux can be told to end it then."""
    if sys.platform == "linux":
        set_parent_death_signal = 1
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("engine", choices=list(CLASSES))
    parser.add_argument("options", help="JSON: model, threads and what else the engine takes")
    arguments = parser.parse_args()
    # Libraries write to stdout as they please: the answers get a descriptor of their own.
    answers = os.fdopen(os.dup(1), "w")
    _end_with_parent()
    os.dup2(2, 1)
    module, name = CLASSES[arguments.engine].split(":")
    start = time.perf_counter()
    engine = getattr(import_module(f"bench.engines.engine_{module}"), name)(**json.loads(arguments.options))
    load = time.perf_counter() - start
    print(json.dumps({"load_seconds": load, **engine.config()}), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(engine, json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    main()
