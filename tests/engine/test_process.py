"""The engine process: fake builders, real processes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from specserve.core.config import EngineConfig
from specserve.core.errors import ConfigError, EngineDeadError, ModelLoadError
from specserve.core.messages import DeltaEvent, FailedEvent, FinishedEvent
from specserve.engine.client import AsyncEngineClient
from specserve.engine.process import EngineProcess, RestartPolicy
from tests.fakes.engines import answer, command, make_rig

BUILDER = "tests.fakes.engines:build"


@pytest.fixture(autouse=True)
def private_temp(monkeypatch):
    """Sockets go to a folder of the test's own, which must be empty at the end."""
    with tempfile.TemporaryDirectory() as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield Path(folder)
        assert list(Path(folder).glob("specserve-*")) == []


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def process(model: str = "demo", **options) -> EngineProcess:
    return EngineProcess(EngineConfig(model=model), BUILDER, **options)


async def collect(events):
    return [event async for event in events]


async def until(condition):
    while not condition():  # noqa: ASYNC110 (what is waited for happens in another thread or process)
        await asyncio.sleep(0.001)


def run(test):
    return asyncio.run(asyncio.wait_for(test, 120))


def test_serves_reports_and_leaves_nothing_behind(private_temp):
    reports = []
    alone = answer(make_rig(max_model_len=1000).run(command("a", max_tokens=20))["a"])

    async def test():
        client = AsyncEngineClient(process(progress=lambda *values: reports.append(values)))
        await client.start()
        try:
            (folder,) = private_temp.glob("specserve-*")
            assert folder.stat().st_mode & 0o077 == 0
            pid = client.info["pid"]
            assert os.getpgid(pid) != os.getpgid(0), "Ctrl-C in the terminal must not reach it"
            got = answer(await collect(client.submit(command("a", max_tokens=20))))
            assert (got.token_ids, got.text, got.reason) == (alone.token_ids, alone.text, "length")
            guided = answer(await collect(client.submit(command("g", guided={"choice": ["ab"]}))))
            assert guided.text == "ab"
            (refused,) = await collect(client.submit(command("b", [10**6])))
            assert refused.code == "invalid_request"
            (surrogate,) = await collect(client.submit(command("c", stop="\ud800")))
            assert surrogate.status == 400
            await until(lambda: client.stats().counters.get("generation_tokens_total", 0) >= 20)
            await until(lambda: client.stats().kv_blocks_used == 0)
        finally:
            await client.close()
        assert gone(pid)
        assert not client.ready

    run(test())
    assert reports == [(1, 2, "loading"), (2, 2, "loading")]


def test_killed_in_mid_stream_each_request_fails_once_and_the_next_is_served():
    async def test():
        client = AsyncEngineClient(process())
        await client.start()
        try:
            streams = {n: client.submit(command(n, max_tokens=10_000)) for n in "abc"}
            events = {n: [] for n in streams}
            for name, stream in streams.items():
                while not any(isinstance(e, DeltaEvent) for e in events[name]):
                    events[name].append(await anext(stream))
            pid = client.info["pid"]
            os.kill(pid, signal.SIGKILL)
            for name, stream in streams.items():
                events[name] += await collect(stream)
                end = answer(events[name]).end
                assert isinstance(end, FailedEvent)
                assert (end.code, end.status) == ("engine_died", 503)
            # Sent while it is started again: waits, then is served.
            waiting = answer(await collect(client.submit(command("a", max_tokens=5))))
            assert waiting.reason == "length"
            assert client.info["pid"] != pid
            assert gone(pid)
            assert client.ready
        finally:
            await client.close()

    run(test())


def test_a_request_that_waits_for_the_restart_can_be_aborted():
    async def test():
        backend = process()
        client = AsyncEngineClient(backend)
        await client.start()
        try:
            os.kill(client.info["pid"], signal.SIGKILL)
            await until(lambda: not client.ready)
            stream = asyncio.ensure_future(collect(client.submit(command("a", max_tokens=10_000))))
            await asyncio.sleep(0)
            client.abort("a")
            events = await stream
            assert isinstance(events[-1], FinishedEvent)
            assert events[-1].finish_reason == "cancelled"
            assert answer(await collect(client.submit(command("b", max_tokens=3)))).reason == "length"
        finally:
            await client.close()

    run(test())


def test_a_crash_loop_ends():
    async def test():
        policy = RestartPolicy(max_deaths=1, backoff=0.01)
        client = AsyncEngineClient(process(policy=policy))
        await client.start()
        try:
            for name in "ab":  # each kills the process that serves it
                end = answer(await collect(client.submit(command(name, "STOP")))).end
                assert end.code == "engine_died"
            (refused,) = await collect(client.submit(command("c")))
            assert refused.code == "engine_died"
            assert not client.ready
        finally:
            await client.close()

    run(test())


@pytest.mark.parametrize(
    ("model", "kind", "text"),
    [
        ("bad", ConfigError, "model: is bad"),
        ("error", ModelLoadError, "cannot read weights"),
        ("crash", EngineDeadError, "SIGKILL"),
    ],
)
def test_start_up_failures_are_typed_and_not_retried(model, kind, text):
    reports = []
    backend = process(model, progress=lambda *values: reports.append(values))
    with pytest.raises(kind, match=text) as caught:
        backend.start(lambda events: None)
    assert type(caught.value) is kind
    assert len(reports) <= 1  # a killed process may take its last words with it
    with pytest.raises(EngineDeadError):
        backend.send(command("a"))
    backend.close()


def test_a_builder_that_does_not_exist():
    backend = EngineProcess(EngineConfig(), "tests.fakes.engines:missing")
    with pytest.raises(ModelLoadError, match="AttributeError"):
        backend.start(lambda events: None)


def test_close_during_streams_fails_them_and_threads_end():
    before = set(threading.enumerate())

    async def test():
        client = AsyncEngineClient(process())
        await client.start()
        stream = client.submit(command("a", max_tokens=10_000))
        events = [await anext(stream)]
        pid = client.info["pid"]
        await client.close()
        events += await collect(stream)
        assert answer(events).end.code == "engine_died"
        assert gone(pid)

    run(test())
    assert [t for t in threading.enumerate() if t not in before and t.name.startswith("engine")] == []


def test_cancelling_the_start_ends_the_child(private_temp):
    async def test():
        client = AsyncEngineClient(process("slow"))
        start = asyncio.ensure_future(client.start())
        await until(lambda: any(private_temp.glob("specserve-*/engine")))
        start.cancel()
        with pytest.raises(asyncio.CancelledError):
            await start

    run(test())


def test_a_progress_display_that_fails_does_no_harm():
    def progress(*values):
        raise ValueError("no terminal")

    backend = process(progress=progress)
    backend.start(lambda events: None)
    assert backend.ready
    backend.close()


PARENT = """
import sys
from specserve.core.config import EngineConfig
from specserve.engine.process import EngineProcess
backend = EngineProcess(EngineConfig(), "tests.fakes.engines:build")
backend.start(lambda events: None)
try:
    print(backend.info["pid"], flush=True)
    {then}
except KeyboardInterrupt:
    backend.close()
    print("closed", flush=True)
"""


@contextlib.contextmanager
def parent(then: str, folder: Path) -> Iterator[subprocess.Popen]:
    """A process that owns an engine process; gone at the end, whatever the test found."""
    owner = subprocess.Popen(
        [sys.executable, "-c", PARENT.format(then=then)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(folder), "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
        # As a shell starts it in the foreground: tests that run in the background may have it ignored.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    with owner:
        try:
            yield owner
        finally:
            owner.kill()


def wait_gone(pid: int) -> None:
    done = threading.Event()
    for _ in range(1000):
        if gone(pid):
            return
        done.wait(0.02)
    raise AssertionError("the child lives on")


def test_the_child_ends_when_its_parent_is_killed(private_temp):
    with parent("import time; time.sleep(600)", private_temp) as owner:
        pid = int(owner.stdout.readline())
        owner.kill()
        owner.wait()
        wait_gone(pid)
        assert owner.stderr.read() == ""
    assert list(private_temp.glob("specserve-*")) == []


def test_a_parent_that_forgets_to_close_ends_all_the_same(private_temp):
    with parent("pass", private_temp) as owner:
        pid = int(owner.stdout.readline())
        assert owner.wait(60) == 0
        wait_gone(pid)
        assert owner.stderr.read() == ""
    assert list(private_temp.glob("specserve-*")) == []


def test_ctrl_c_ends_both_and_only_the_parent_tells_it(private_temp):
    then = "import time; time.sleep(600)"
    with parent(then, private_temp) as owner:
        pid = int(owner.stdout.readline())
        owner.send_signal(signal.SIGINT)
        assert owner.stdout.readline() == "closed\n"
        owner.wait()
        assert gone(pid)
        assert owner.stderr.read() == ""
    assert list(private_temp.glob("specserve-*")) == []


def test_what_is_loaded_is_not_collected():
    async def test():
        client = AsyncEngineClient(process())
        await client.start()
        try:
            await collect(client.submit(command("a", max_tokens=5)))
            await until(lambda: "frozen" in client.stats().counters)
            counters = client.stats().counters
        finally:
            await client.close()
        assert counters['collects{when="loading"}'] == 0
        assert counters['collects{when="now"}'] == 1
        assert counters["frozen"] > 10_000

    run(test())
