"""Engines in processes of their own that take turns: whoever is not asked is stopped and takes no time."""

from __future__ import annotations

import json
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from bench.engines.measured import Measured
from bench.engines.work import Texts, Work, command, rate

CHILD = Path(__file__).with_name("child.py")
LOAD_SECONDS, ASK_SECONDS = 600.0, 600.0
WARM = 2  # so many prompts a place are enough to warm up with


class ChildFailed(Exception):
    """The process ended or hung; the message says what is known."""


class Child:
    """One engine's process, stopped (SIGSTOP) except while it loads or answers.

    Args:
        engine: a name that child.py knows.
        python: the interpreter of its environment.
        options: of the engine.
        log: file for what it prints.

    Raises:
        ChildFailed: it cannot be loaded.
    """

    def __init__(self, engine: str, python: Path, options: Mapping[str, Any], log: Path) -> None:
        self.engine, self._log = engine, log
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                [str(python), str(CHILD), engine, json.dumps(dict(options))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                text=True,
            )
        self.config = self._answer(LOAD_SECONDS)
        self._process.send_signal(signal.SIGSTOP)

    def ask(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        """Its answer. Raises ChildFailed."""
        self._process.send_signal(signal.SIGCONT)
        try:
            _pipe(self._process.stdin).write(json.dumps(asked) + "\n")
            _pipe(self._process.stdin).flush()
        except BrokenPipeError:
            pass  # the missing answer says so
        answer = self._answer(ASK_SECONDS)
        self._process.send_signal(signal.SIGSTOP)
        return answer

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            _pipe(pipe).close()

    def _answer(self, seconds: float) -> dict[str, Any]:
        timer = threading.Timer(seconds, self._process.kill)
        timer.start()
        try:
            line = _pipe(self._process.stdout).readline()
        finally:
            timer.cancel()
        if line:
            answer: dict[str, Any] = json.loads(line)
            return answer
        status = self._process.wait()
        self.close()
        said = [text for text in self._log.read_text(errors="replace").splitlines() if text.strip()]
        raise ChildFailed(f"{self.engine} ended with status {status}: {(said or ['it said nothing'])[-1][:200]}")


def _pipe(pipe: IO[str] | None) -> IO[str]:
    assert pipe is not None
    return pipe


@contextmanager
def closing(children: Mapping[str, Child]) -> Iterator[None]:
    try:
        yield
    finally:
        for child in children.values():
            child.close()


def turns(children: dict[str, Child], work: Work, texts: Texts, repeats: int, tick: Callable[[str], None]) -> Measured:
    """Rates, failures and first tokens of a workload.

    The engines take turns, in another order each round, with the same prompts. A child that fails is taken out of
    `children`.
    """
    found = Measured(rates={name: [] for name in children})
    for round_ in range(repeats + 1):
        prompts = texts.prompts(work, round_)
        if not round_:  # the first round warms up
            prompts = prompts[: WARM * work.width]
        for name in rotated(list(children), round_):
            tick(name)
            try:
                answer = children[name].ask(command(work, prompts))
            except ChildFailed as error:
                found.missing[name] = str(error)
                del children[name], found.rates[name]
                continue
            if round_:
                found.rates[name].append(rate(work, prompts, answer))
                found.tokens.setdefault(name, answer["tokens"])
    return found


def rotated(names: Sequence[str], by: int) -> list[str]:
    """The names from another start."""
    if not names:
        return []
    by %= len(names)
    return [*names[by:], *names[:by]]
