"""The asyncio client, the thread backend and the mailboxes, over an engine with a fake executor."""

from __future__ import annotations

import asyncio
import threading

import pytest

from specserve.core.errors import ConfigError, EngineDeadError, InvalidRequestError
from specserve.core.messages import (
    TERMINAL,
    AbortCommand,
    DeltaEvent,
    FailedEvent,
    FinishedEvent,
    ProgressEvent,
    QueuedEvent,
    StartedEvent,
)
from specserve.engine.client import AsyncEngineClient
from specserve.engine.ledger import Ledger
from specserve.engine.mailbox import Mailboxes
from specserve.engine.thread import EngineThread
from tests.fakes.engines import answer, command, make_rig


class Threaded:
    """A client over a rig in a thread; steps are held while `gate` is clear."""

    def __init__(self, **options):
        self.rig = make_rig(**options)
        self.gate = threading.Event()
        self.gate.set()
        self.rig.executor.before_forward = lambda plan: self.gate.wait(30)
        self.client = AsyncEngineClient(EngineThread(lambda: self.rig.engine))

    async def __aenter__(self):
        await self.client.start()
        return self

    async def __aexit__(self, *error):
        self.gate.set()
        await self.client.close()
        self.rig.check_baseline()
        assert self.rig.executor.closed


async def collect(events):
    return [event async for event in events]


async def until(condition):
    while not condition():  # noqa: ASYNC110 (what is waited for happens in another thread or process)
        await asyncio.sleep(0.001)


def run(test):
    return asyncio.run(asyncio.wait_for(test, 60))


def test_streams_interleave_and_equal_those_alone():
    alone = {n: answer(make_rig().run(command(n, f"hi{n}", max_tokens=20))[n]).token_ids for n in "abcdef"}

    async def test():
        async with Threaded(drafts=3, wrong=4) as t:
            assert t.client.ready
            assert t.client.info["max_model_len"] == 128
            all_events = await asyncio.gather(
                *(collect(t.client.submit(command(n, f"hi{n}", max_tokens=20))) for n in alone)
            )
            assert {e[0].request_id: answer(e).token_ids for e in all_events} == alone
            assert t.client.stats().counters['request_success_total{finished_reason="length"}'] == 6

    run(test())


def test_abort_ends_the_stream_with_cancelled():
    async def test():
        async with Threaded(max_model_len=5000, blocks=2000) as t:
            events = []
            async for event in t.client.submit(command("a", max_tokens=4000)):
                events.append(event)
                if isinstance(event, DeltaEvent):
                    t.client.abort("a")
            assert answer(events).reason == "cancelled"
            t.client.abort("unknown")

    run(test())


@pytest.mark.parametrize("how", ["close", "cancel"])
def test_trap_d8_leaving_the_stream_aborts_the_request(how):
    async def test():
        async with Threaded(max_model_len=5000, blocks=2000) as t:
            stream = t.client.submit(command("a", max_tokens=4000))
            async for event in stream:
                if isinstance(event, DeltaEvent):
                    break
            if how == "close":
                await stream.aclose()
            else:
                task = asyncio.ensure_future(collect(stream))
                await asyncio.sleep(0)
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
            # The next request's terminal event comes after the abort was handled.
            await collect(t.client.submit(command("b", max_tokens=1)))
            counters = t.client.stats().counters
            assert counters['request_success_total{finished_reason="cancelled"}'] == 1

    run(test())


def test_an_id_in_use_and_a_refused_command_are_failed_events():
    async def test():
        async with Threaded() as t:
            t.gate.clear()
            first = asyncio.ensure_future(collect(t.client.submit(command("a", max_tokens=3))))
            await asyncio.sleep(0)
            (second,) = await collect(t.client.submit(command("a")))
            assert isinstance(second, FailedEvent)
            assert second.status == 400
            t.gate.set()
            assert answer(await first).reason == "length"
            (refused,) = await collect(t.client.submit(command("b", [10**6])))
            assert refused.code == "invalid_request"

    run(test())


def test_trap_e5_a_slow_consumer_finds_one_merged_delta():
    whole = answer(make_rig().run(command("a", max_tokens=40, logprobs=1))["a"])

    async def test():
        async with Threaded() as t:
            stream = t.client.submit(command("a", max_tokens=40, logprobs=1))
            events = [await anext(stream)]
            await collect(t.client.submit(command("b", max_tokens=60)))  # ends after "a" did
            events += await collect(stream)
            assert sum(isinstance(e, DeltaEvent) for e in events) == 1
            got = answer(events)
            assert (got.text, got.token_ids, got.logprobs) == (whole.text, whole.token_ids, whole.logprobs)

    run(test())


def test_trap_e11_closing_fails_what_is_open_and_refuses_the_rest():
    async def test():
        t = Threaded(max_model_len=5000, blocks=2000)
        async with t:
            stream = t.client.submit(command("a", max_tokens=4000))
            events = [await anext(stream)]
        events += await collect(stream)
        end = answer(events).end
        assert isinstance(end, FailedEvent)
        assert (end.code, end.status) == ("engine_died", 503)
        assert not t.client.ready
        (refused,) = await collect(t.client.submit(command("b")))
        assert refused.code == "engine_died"
        await t.client.close()

    run(test())


def test_a_start_up_failure_is_raised():
    def build():
        raise ConfigError("model: is bad", param="model")

    client = AsyncEngineClient(EngineThread(build))
    with pytest.raises(ConfigError, match="is bad"):
        run(client.start())
    assert not client.ready
    run(client.close())


def test_faults_of_the_loop_end_requests_once_and_three_in_a_row_end_the_engine(monkeypatch):
    async def test():
        async with Threaded() as t:
            real = t.rig.engine.scheduler.__class__.schedule
            faults = iter([True, False, True, True, True])

            def schedule(scheduler):
                if next(faults, False):
                    raise RuntimeError("broken")
                return real(scheduler)

            monkeypatch.setattr(t.rig.engine.scheduler.__class__, "schedule", schedule)
            (failed,) = await collect(t.client.submit(command("a", max_tokens=1)))
            assert (failed.code, failed.status) == ("server_error", 500)
            assert answer(await collect(t.client.submit(command("b", max_tokens=1)))).reason == "length"
            for name in "cde":
                assert isinstance((await collect(t.client.submit(command(name))))[-1], FailedEvent)
            await until(lambda: not t.client.ready)
            assert (await collect(t.client.submit(command("f"))))[0].code == "engine_died"

    run(test())


def test_send_refuses_before_the_start():
    backend = EngineThread(lambda: make_rig().engine)
    with pytest.raises(EngineDeadError):
        backend.send(AbortCommand("a"))
    assert backend.info == {}
    assert backend.stats().running == 0
    backend.close()


def test_ledger_gives_exactly_one_end():
    ledger = Ledger()
    assert ledger.open("a")
    assert not ledger.open("a")
    assert ledger.open("b")
    events = [QueuedEvent("a"), QueuedEvent("c"), FailedEvent("a", "x", "y"), FailedEvent("a", "x", "y")]
    assert ledger.pass_on(events) == [events[0], events[2]]
    assert [type(e) for e in ledger.fail(InvalidRequestError("no"), keep={"b"})] == []
    (failed,) = ledger.fail(InvalidRequestError("no"))
    assert (failed.request_id, failed.status) == ("b", 400)
    assert len(ledger) == 0


def test_mailbox_keeps_the_order_and_only_the_latest_progress():
    boxes = Mailboxes()
    notified = []
    box = boxes.open("a", lambda: notified.append(1))
    assert boxes.open("a", print) is None
    end = FinishedEvent("a", "stop", None, 0)
    boxes.deliver(
        [
            StartedEvent("a", 0, 1, 0),
            ProgressEvent("a", 1, 3),
            ProgressEvent("a", 2, 3),
            DeltaEvent("a", (1,), "x"),
            DeltaEvent("b", (9,), "other"),
            DeltaEvent("a", (2, 3), "y"),
            end,
        ]
    )
    taken = []
    while (event := box.take()) is not None:
        taken.append(event)
    assert taken == [StartedEvent("a", 0, 1, 0), ProgressEvent("a", 2, 3), DeltaEvent("a", (1, 2, 3), "xy"), end]
    assert isinstance(taken[-1], TERMINAL)
    assert len(notified) == 6
    boxes.close("a")
    boxes.close("a")
    assert len(boxes) == 0
