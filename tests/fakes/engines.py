"""Whole engines with a fake executor, and builders that a child process finds by path."""

from __future__ import annotations

import gc
import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from specserve.core.config import EngineConfig
from specserve.core.errors import ConfigError
from specserve.core.messages import (
    TERMINAL,
    ChoiceFinishedEvent,
    DeltaEvent,
    Event,
    FailedEvent,
    FinishedEvent,
    GenerateCommand,
    QueuedEvent,
    StartedEvent,
)
from specserve.core.plan import StepPlan
from specserve.core.sampling import SamplingParams
from specserve.engine.checks import EngineLimits
from specserve.engine.engine import Engine
from specserve.kv.block_pool import BlockPool
from specserve.kv.host import HostPool
from specserve.kv.manager import KVManager
from specserve.sched.preempt import Preemption
from specserve.sched.scheduler import Scheduler, SchedulerLimits
from tests.fakes.executor import FakeExecutor, Model, OracleDrafter, hash_model
from tests.fakes.grammar import FakeCompiler
from tests.fakes.vocab import ToyVocabulary

VOCABULARY = ToyVocabulary()
SIZE = VOCABULARY.vocab_size


@dataclass
class Rig:
    """An engine and its parts."""

    engine: Engine
    executor: FakeExecutor
    compiler: FakeCompiler
    drafter: OracleDrafter | None

    def run(self, *commands: Any, steps: int = 2000) -> dict[str, list[Event]]:
        """Handle the commands and step until nothing is left; events by request id."""
        for command in commands:
            self.engine.handle(command)
        events: dict[str, list[Event]] = {}
        for _ in range(steps):
            if not self.engine.has_work:
                break
            for event in self.step():
                events.setdefault(event.request_id, []).append(event)
        assert not self.engine.has_work
        self.check_baseline()
        return events

    def step(self) -> list[Event]:
        if not self.engine.scheduler.has_work:
            time.sleep(0.001)  # only grammars are waited for
        events = self.engine.step()
        self.engine.scheduler.check()
        return events

    def check_baseline(self) -> None:
        assert self.engine.kv.baseline()
        assert not self.engine.scheduler.running
        assert not self.engine.scheduler.waiting


def make_rig(
    model: Model | None = None,
    *,
    drafts: int = 0,
    wrong: int = 0,
    blocks: int = 64,
    block_size: int = 4,
    max_batched_tokens: int = 64,
    max_model_len: int = 128,
    max_waiting: int = 64,
    max_running: int = 32,
    host: int = 0,
    preemption: str = "auto",
    prefix_cache: bool = True,
    **limits: Any,
) -> Rig:
    """An engine over the toy model; `drafts` tokens a step by an oracle that errs at every `wrong`-th token.

    `host` blocks of host memory, used as `preemption` ("swap", "recompute") says.
    """
    model = model or hash_model(SIZE, banned=VOCABULARY.eos_ids)
    kv = KVManager(BlockPool(blocks, block_size), host=HostPool(host) if host else None, prefix_cache=prefix_cache)
    scheduler = Scheduler(
        SchedulerLimits(max_batched_tokens=max_batched_tokens, max_running=max_running, max_waiting=max_waiting),
        kv,
        preemption=Preemption(preemption),
    )
    executor = FakeExecutor(model, SIZE, block_size)
    drafter = OracleDrafter(model, SIZE, wrong=wrong) if drafts else None
    compiler = FakeCompiler(VOCABULARY)
    engine = Engine(
        scheduler,
        kv,
        executor,
        vocabulary=VOCABULARY,
        limits=EngineLimits(max_model_len=max_model_len, num_speculative_tokens=drafts, **limits),
        drafter=drafter,
        compiler=compiler,
    )
    return Rig(engine, executor, compiler, drafter)


def command(request_id: str, prompt: Sequence[int] | str = "hi", **params: Any) -> GenerateCommand:
    ids = VOCABULARY.encode(prompt) if isinstance(prompt, str) else prompt
    report = params.pop("report_speculation", False)
    return GenerateCommand(request_id, tuple(ids), SamplingParams(**params), report_speculation=report)


@dataclass
class Answer:
    """What the events of one request say together."""

    text: str
    token_ids: list[int]
    logprobs: list[Any]
    end: FinishedEvent | FailedEvent
    seed: int | None

    @property
    def reason(self) -> str:
        assert isinstance(self.end, FinishedEvent), self.end
        return self.end.finish_reason


def answer(events: Sequence[Event]) -> Answer:
    """Read one request's events, checking their order."""
    ends = [e for e in events if isinstance(e, TERMINAL)]
    assert len(ends) == 1, "exactly one terminal event"
    assert events[-1] is ends[0], "nothing comes after it"
    deltas = [e for e in events if isinstance(e, DeltaEvent)]
    started = [e for e in events if isinstance(e, StartedEvent)]
    assert len(started) <= 1
    if deltas:
        assert events.index(started[0]) < events.index(deltas[0])
    return Answer(
        text="".join(d.text for d in deltas),
        token_ids=[t for d in deltas for t in d.token_ids],
        logprobs=[p for d in deltas for p in d.logprobs],
        end=ends[0],
        seed=started[0].seed if started else None,
    )


@dataclass
class Choice:
    """What the events of one choice say together; `end` is None where it had not ended."""

    text: str
    token_ids: list[int]
    logprobs: list[Any]
    end: ChoiceFinishedEvent | None

    @property
    def reason(self) -> str | None:
        return self.end.finish_reason if self.end is not None else None


@dataclass
class Several:
    """What the events of a request of several sequences say together."""

    choices: dict[int, Choice]
    end: FinishedEvent | FailedEvent
    started: StartedEvent | None


def several(events: Sequence[Event]) -> Several:
    """Read the events of a request of several sequences, checking their order."""
    assert len({e.request_id for e in events}) == 1
    order = [type(e) for e in events]
    assert [t for t in order if t in TERMINAL] == [order[-1]], "one terminal event, the last one"
    assert order.count(QueuedEvent) <= 1
    assert order.count(StartedEvent) <= 1
    if QueuedEvent in order:
        assert order.index(QueuedEvent) == 0
    if len(order) > 1 + order.count(QueuedEvent):
        assert order.index(StartedEvent) == order.count(QueuedEvent), "nothing but queued comes before started"
    choices: dict[int, Choice] = {}
    for event in events:
        if isinstance(event, DeltaEvent | ChoiceFinishedEvent):
            choice = choices.setdefault(event.index, Choice("", [], [], None))
            assert choice.end is None, "nothing of a choice comes after its end"
            if isinstance(event, ChoiceFinishedEvent):
                choice.end = event
                continue
            choice.text += event.text
            choice.token_ids += event.token_ids
            choice.logprobs += event.logprobs
    started = [e for e in events if isinstance(e, StartedEvent)]
    end = events[-1]
    assert isinstance(end, TERMINAL)
    return Several(dict(sorted(choices.items())), end, started[0] if started else None)


# Builders for child processes. `model` of the configuration says what they do.


def build(config: EngineConfig, progress: Callable[..., None]) -> Engine:
    """A rig's engine. Prompts with the STOP token kill the process in mid-answer; "slow" answers never end early."""
    progress(1, 2, "loading")
    if config.model == "bad":
        raise ConfigError("model: is bad", param="model")
    if config.model == "crash":
        os.kill(os.getpid(), signal.SIGKILL)
    if config.model == "error":
        raise RuntimeError("cannot read weights")
    if config.model == "slow":
        time.sleep(600)
    rig = make_rig(max_model_len=100_000, blocks=4096)
    deadly = VOCABULARY.id("STOP")

    collected_while_loading = gc.isenabled()

    def before_forward(plan: StepPlan) -> None:
        for name, value in (("loading", collected_while_loading), ("now", gc.isenabled())):
            rig.engine.metrics.set("collects", float(value), when=name)
        rig.engine.metrics.set("frozen", gc.get_freeze_count())
        time.sleep(0.002)  # a step takes a while, so that streams are alive when a test acts
        for new in plan.added:
            if new.token_ids[0] == deadly:
                os.kill(os.getpid(), signal.SIGKILL)

    rig.executor.before_forward = before_forward
    progress(2, 2, "loading")
    return rig.engine
