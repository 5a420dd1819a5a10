"""Stalls of the engine process: real processes, and steps that last until the test lets them end.

They are told after moments here, so that one also shows where only the machine is busy: the tests wait for conditions
that hold in the end.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from specserve.core.config import EngineConfig
from specserve.core.plan import StepPlan
from specserve.engine.client import AsyncEngineClient
from specserve.engine.engine import Engine
from specserve.engine.process import EngineProcess, RestartPolicy
from specserve.sched.policy import WaitingQueue
from tests.fakes.engines import VOCABULARY, answer, command, make_rig

BUILDER = "tests.engine.test_watchdog_process:build_held"
HASTY = RestartPolicy(stall=0.05, backoff=0.01, grace=0.5)


def build_held(config: EngineConfig, progress: Callable[..., None]) -> Engine:
    """A rig's engine: a step with a STOP prompt lasts until the pipe that `model` names has no writer any more.

    With "idle" for a model the scheduler never admits anything.
    """
    rig = make_rig(max_model_len=100_000, blocks=4096)
    stop = VOCABULARY.id("STOP")

    def before_forward(plan: StepPlan) -> None:
        if any(new.token_ids[0] == stop for new in plan.added):
            with Path(config.model).open() as pipe:
                pipe.read()

    if config.model == "idle":
        WaitingQueue.admit = lambda queue, attempt: None
    rig.executor.before_forward = before_forward
    return rig.engine


class Hold:
    """The pipe that keeps a child inside its step."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "hold"
        os.mkfifo(self.path)
        self._end = -1

    async def in_step(self) -> None:
        """Until the child is inside it."""
        while self._end < 0:
            with contextlib.suppress(OSError):  # nobody reads yet
                self._end = os.open(self.path, os.O_WRONLY | os.O_NONBLOCK)
            await asyncio.sleep(0.001)

    def let_go(self) -> None:
        if self._end >= 0:
            os.close(self._end)
            self._end = -1


@contextlib.asynccontextmanager
async def held(folder: Path) -> AsyncIterator[tuple[AsyncEngineClient, Hold]]:
    """A client whose engine process is inside a step for request "a" until `let_go`."""
    hold = Hold(folder)
    client = AsyncEngineClient(EngineProcess(EngineConfig(model=str(hold.path)), BUILDER, policy=HASTY))
    await client.start()
    try:
        yield client, hold
    finally:
        hold.let_go()
        await client.close()


async def collect(events):
    return [event async for event in events]


async def until(condition):
    while not condition():  # noqa: ASYNC110 (what is waited for happens in another thread or process)
        await asyncio.sleep(0.001)


def said(caplog, text):
    return any(text in record.getMessage() for record in caplog.records)


def run(test):
    return asyncio.run(asyncio.wait_for(test, 120))


def test_trap_d2_a_child_that_hangs_in_a_step_is_stalled_and_takes_commands(tmp_path, caplog):
    async def test():
        async with held(tmp_path) as (client, hold):
            pid = client.info["pid"]
            first = asyncio.ensure_future(collect(client.submit(command("a", "STOP", max_tokens=10_000))))
            await hold.in_step()
            await until(lambda: said(caplog, "the engine is stalled: 1 request waits and"))  # though nobody asks
            await until(lambda: client.stalled)
            assert client.ready
            assert "1 request waits and the engine process has said nothing for" in client.stall_reason
            assert client.stats().counters["engine_stalled"] == 1
            second = asyncio.ensure_future(collect(client.submit(command("b", max_tokens=2))))
            await asyncio.sleep(0)
            client.abort("a")
            client.abort("unknown")
            assert client.stalled, "the step goes on; the abort did not wait for it"
            assert not first.done()
            hold.let_go()
            assert answer(await first).reason == "cancelled"
            assert answer(await second).reason == "length"
            await until(lambda: not client.stalled)
            assert client.stats().counters["engine_stalled"] == 0
            await until(lambda: client.stats().counters["engine_no_progress_seconds"] == 0)  # at rest it owes nothing
            assert said(caplog, "the engine is no longer stalled")
            assert client.info["pid"] == pid, "it was left alone"

    with caplog.at_level(logging.WARNING):
        run(test())


def test_a_stalled_child_that_somebody_kills_is_started_again(tmp_path):
    async def test():
        async with held(tmp_path) as (client, hold):
            stream = asyncio.ensure_future(collect(client.submit(command("a", "STOP"))))
            await hold.in_step()
            await until(lambda: client.stalled)
            os.kill(client.info["pid"], signal.SIGKILL)
            assert answer(await stream).end.code == "engine_died"
            assert answer(await collect(client.submit(command("b", max_tokens=2)))).reason == "length"
            await until(lambda: not client.stalled)
            assert client.ready

    run(test())


def test_closing_does_not_wait_for_a_stalled_child(tmp_path, caplog):
    async def test():
        async with held(tmp_path) as (client, hold):
            pid = client.info["pid"]
            stream = asyncio.ensure_future(collect(client.submit(command("a", "STOP"))))
            await hold.in_step()
            await until(lambda: client.stalled)
            await client.close()
            with pytest.raises(ProcessLookupError):
                os.kill(pid, 0)
            assert answer(await stream).end.code == "engine_died"
            assert said(caplog, "the engine is no longer stalled")
            assert not client.stalled
            assert client.stats().counters["engine_no_progress_seconds"] == 0

    with caplog.at_level(logging.WARNING):
        run(test())


def test_trap_d2_a_child_that_plans_nothing_says_so_itself():
    async def test():
        client = AsyncEngineClient(EngineProcess(EngineConfig(model="idle"), BUILDER, policy=HASTY))
        await client.start()
        try:
            stream = asyncio.ensure_future(collect(client.submit(command("a"))))
            await until(lambda: "1 request waits and no step has run for" in (client.stall_reason or ""))
            client.abort("a")
            assert answer(await stream).reason == "cancelled"
            await until(lambda: not client.stalled)
        finally:
            await client.close()

    run(test())
