"""Stalls of an engine in a thread, on a clock that moves when told; what a stalled engine still takes."""

from __future__ import annotations

import asyncio
import logging
import threading

import pytest

from specserve.core.messages import StartedEvent
from specserve.core.plan import StepPlan
from specserve.engine.client import AsyncEngineClient
from specserve.engine.thread import EngineThread
from specserve.engine.watchdog import Watchdog
from specserve.sched.policy import WaitingQueue
from tests.fakes.engines import answer, command, make_rig


class Clock:
    """Moves when told."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock():
    return Clock()


class Held:
    """A client over an engine in a thread whose steps run one at a time, as the test allows."""

    def __init__(self, clock: Clock) -> None:
        self.rig = make_rig()
        self.rig.engine.watchdog = Watchdog(clock)
        self.rig.executor.before_forward = self._hold
        self.client = AsyncEngineClient(EngineThread(lambda: self.rig.engine))
        self._entered = threading.Semaphore(0)
        self._allowed = threading.Semaphore(0)
        self._held = True

    def _hold(self, plan: StepPlan) -> None:
        if self._held:
            self._entered.release()
            assert self._allowed.acquire(timeout=60)

    async def in_step(self) -> None:
        """Until the engine is inside its next step."""
        await asyncio.to_thread(self._entered.acquire)

    def step(self) -> None:
        """Let that step end."""
        self._allowed.release()

    def let_go(self) -> None:
        self._held = False
        self._allowed.release()

    async def __aenter__(self) -> Held:
        await self.client.start()
        return self

    async def __aexit__(self, *error: object) -> None:
        self.let_go()
        await self.client.close()
        self.rig.check_baseline()


async def collect(events):
    return [event async for event in events]


async def until(condition):
    while not condition():  # noqa: ASYNC110 (what is waited for happens in another thread)
        await asyncio.sleep(0.001)


def run(test):
    return asyncio.run(asyncio.wait_for(test, 120))


def test_trap_d2_a_thread_that_hangs_in_a_step_is_stalled_and_takes_commands(clock, caplog):
    async def test():
        async with Held(clock) as held:
            client = held.client
            assert (client.ready, client.stalled, client.stall_reason) == (True, False, None)
            first = asyncio.ensure_future(collect(client.submit(command("a", max_tokens=50))))
            await held.in_step()
            clock.now += 29
            assert not client.stalled
            clock.now += 2
            assert client.stall_reason == "1 request waits and one step has run for 31 s"
            assert (client.ready, client.stalled) == (True, True)
            assert client.stats().counters["engine_stalled"] == 1

            second = asyncio.ensure_future(collect(client.submit(command("b", max_tokens=2))))
            await asyncio.sleep(0)
            assert client.stall_reason.startswith("2 requests wait")
            client.abort("a")
            client.abort("unknown")
            assert client.stalled, "the step goes on; the abort did not wait for it"

            held.step()
            await held.in_step()
            assert not client.stalled, "the step has ended"
            assert client.stats().counters["engine_stalled"] == 0
            held.let_go()
            assert answer(await first).reason == "cancelled"
            assert answer(await second).reason == "length"
            clock.now += 3600
            assert not client.stalled

    with caplog.at_level(logging.WARNING):
        run(test())
    assert [r.getMessage() for r in caplog.records] == [
        "the engine is stalled: 1 request waits and one step has run for 31 s",
        "the engine is no longer stalled",
    ]


def test_trap_d2_leaving_a_stream_of_a_thread_that_hangs_does_not_wait(clock):
    async def test():
        async with Held(clock) as held:
            stream = held.client.submit(command("a", max_tokens=50))
            first = asyncio.ensure_future(anext(stream))
            await held.in_step()
            held.step()
            assert isinstance(await first, StartedEvent)
            await held.in_step()
            clock.now += 60
            await stream.aclose()
            assert held.client.stalled
            held.let_go()
            await collect(held.client.submit(command("b", max_tokens=1)))
            counters = held.client.stats().counters
            assert counters['request_success_total{finished_reason="cancelled"}'] == 1

    run(test())


def test_trap_d2_a_loop_that_turns_in_vain_tells_it_though_nobody_asks(clock, caplog, monkeypatch):
    def said(text):
        return any(text in record.getMessage() for record in caplog.records)

    async def test():
        async with Held(clock) as held:
            held.let_go()
            with monkeypatch.context() as patch:
                patch.setattr(WaitingQueue, "admit", lambda queue, attempt: None)
                stream = asyncio.ensure_future(collect(held.client.submit(command("a", max_tokens=2))))
                await until(lambda: held.rig.engine.watchdog.idle)
                clock.now += 40
                await until(lambda: said("is stalled: 1 request waits and no step has run for 40 s"))
                assert held.client.stalled
            assert answer(await stream).reason == "length"

    with caplog.at_level(logging.WARNING):
        run(test())
    assert said("no longer stalled")
