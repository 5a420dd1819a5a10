"""Engine: the loop that joins scheduler, drafter, executor and grammars. Runs in any one thread; knows no sockets.

One step: grammars that are compiled -> drafts -> schedule -> forward, masks beside it -> sample -> judge
-> commit -> events. Whatever fails, every request it touches ends with exactly one terminal event and the loop goes on.
"""

from __future__ import annotations

import logging
import time

from specserve.core.errors import InvalidRequestError, SpecserveError
from specserve.core.messages import (
    AbortCommand,
    Command,
    EngineStats,
    Event,
    GenerateCommand,
)
from specserve.core.plan import StepPlan
from specserve.core.protocols import Drafter, Executor
from specserve.core.request import Request, Status
from specserve.engine.checks import EngineLimits, Vocabulary
from specserve.engine.compile import CompilePool, Compiler
from specserve.engine.drafting import Controller, Drafting
from specserve.engine.faults import log_fault
from specserve.engine.intake import take_in
from specserve.engine.live import LiveRequest
from specserve.engine.masking import MaskFiller
from specserve.engine.metrics import Metrics
from specserve.engine.registry import Registry
from specserve.engine.settle import Settled, settle
from specserve.engine.watchdog import IDLE_POLL, Watchdog
from specserve.kv.manager import KVManager
from specserve.sched.scheduler import Scheduler

logger = logging.getLogger(__name__)
COMPILE_POLL = 0.005  # seconds between looks at compilations where nothing else is to do


class Engine:
    """Commands in, events out.

    Args:
        scheduler, kv: as the scheduler was built with.
        executor: runs plans. Closed by `close`.
        vocabulary: the tokenizer's part that the engine needs (models.tokenizer.Tokenizer has it).
        limits: see EngineLimits.
        drafter, controller: None drafts nothing; without a controller the budget is always the limit.
        compiler: compiles grammars; None refuses guided requests.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        kv: KVManager,
        executor: Executor,
        *,
        vocabulary: Vocabulary,
        limits: EngineLimits,
        drafter: Drafter | None = None,
        controller: Controller | None = None,
        compiler: Compiler | None = None,
    ) -> None:
        self.limits = limits
        self.vocabulary = vocabulary
        self.scheduler = scheduler
        self.kv = kv
        self.metrics = Metrics()
        self.watchdog = Watchdog()
        self.executor = executor
        self._drafting = Drafting(drafter, controller, limits.num_speculative_tokens, vocabulary.vocab_size)
        self._compiling: CompilePool | None = None
        if compiler is not None:
            self._compiling = CompilePool(
                compiler,
                threads=limits.compile_threads,
                limit=limits.compile_limit,
                timeout=limits.compile_timeout,
            )
        self._masks = MaskFiller(limits.logits_size or vocabulary.vocab_size)
        self._live = Registry(self.metrics, vocabulary.token_bytes, limits.numerics, self._drop)
        self._arrivals = 0
        self._closed = False

    @property
    def has_work(self) -> bool:
        """A step has something to do or to wait for."""
        return bool(self._live.events or self._live)

    def pause(self) -> float | None:
        """Seconds that the loop may wait for commands before the next step; None for as long as it likes."""
        if self._live.events or (self.scheduler.has_work and not self.watchdog.idle):
            return 0.0
        if self.scheduler.has_work:
            return IDLE_POLL
        return COMPILE_POLL if self._live else None

    def handle(self, command: Command) -> None:
        """Take a command in; its events come with the next step. Never raises for what a request did wrong."""
        if isinstance(command, AbortCommand):
            self._abort(command.request_id)
        elif self._live.taken(command.request_id):
            logger.error("a request id that is in use was given again; ignored")
        else:
            try:
                self._accept(command)
            except Exception as error:
                self._live.refuse(command, error)

    def step(self) -> list[Event]:
        """One step, if there is anything to do; all events since the last one."""
        self._admit_compiled()
        if self.scheduler.has_work:
            self._run()
        else:
            self.watchdog.rest()
        return self._live.fetch()

    def fail_all(self, error: BaseException) -> list[Event]:
        """End every live request with `error`: what the loop does with a fault that no request explains."""
        for live in list(self._live.values()):
            self._live.fail(live, error)
        return self._live.fetch()

    def stats(self) -> EngineStats:
        usage = self.kv.usage()
        metrics = self.metrics
        for name, value in self.watchdog.gauges().items():
            metrics.set(name, value)
        metrics.set("drafter_faults_total", self._drafting.faults)
        metrics.set("num_preemptions_total", self.scheduler.num_preemptions)
        metrics.set("num_swapped_total", self.scheduler.num_swapped)
        return EngineStats(
            running=len(self.scheduler.running),
            waiting=len(self.scheduler.waiting),
            kv_blocks=usage.blocks,
            kv_blocks_used=usage.blocks_used,
            draft_kv_blocks=usage.draft_blocks,
            draft_kv_blocks_used=usage.draft_blocks_used,
            host_kv_blocks=usage.host_blocks,
            host_kv_blocks_used=usage.host_blocks_used,
            swapped=sum(request.status is Status.SWAPPED for request in self.scheduler.waiting),
            counters=metrics.snapshot(),
        )

    def close(self) -> None:
        """Free everything. Requests still alive get no further event: whoever drives the loop tells their owners."""
        if self._closed:
            return
        self._closed = True
        if self._compiling is not None:
            self._compiling.close()
        for live in list(self._live.values()):
            self._live.remove(live)
        self._masks.close()
        self.executor.close()

    # Requests in and out.

    def _accept(self, command: GenerateCommand) -> None:
        taken = take_in(command, self.limits, self.vocabulary, self.kv, self._arrivals)
        first = taken.first
        guided = first.request.params.guided
        if guided is not None and self._compiling is None:
            raise InvalidRequestError("guided: this engine has no grammar compiler", param="guided")
        # Queued before its grammar is compiled: what can never fit is refused at once, and order is order of arrival.
        self.scheduler.add_all([live.request for live in taken.lives])
        if guided is not None and self._compiling is not None:
            try:
                self._compiling.submit(first.request_id, guided)
            except Exception:
                for live in taken.lives:
                    self.scheduler.finish(live.request_id)
                raise
        self._arrivals += 1
        self._live.add(taken.lives, taken.group)
        if guided is not None:
            self._live.queued(first)

    def _admit_compiled(self) -> None:
        if self._compiling is None:
            return
        for request_id, outcome in self._compiling.ready():
            live = self._live[request_id]
            try:
                if isinstance(outcome, Exception):
                    raise outcome
                # One grammar for all sequences of the request, a state of it for each.
                for each in list(live.group.lives.values()) if live.group is not None else [live]:
                    each.judge.matcher = outcome if each is live else outcome.fork()
                    each.request.move_to(Status.WAITING)
            except Exception as error:
                self._live.fail(live, error)

    def _abort(self, request_id: str) -> None:
        for live in self._live.of(request_id):
            self._live.end_early(live, "cancelled")

    def _drop(self, live: LiveRequest) -> None:
        """A request leaves: free what is kept of it."""
        if self._compiling is not None:
            self._compiling.cancel(live.request_id)
        self.scheduler.finish(live.request_id)
        self._drafting.forget(live.request_id, ended=True)

    # One step.

    def _run(self) -> None:
        began = time.perf_counter()
        for live, error in self._drafting.propose(list(self._live.values())):
            self._live.fail(live, error)
        drafted = time.perf_counter()
        plan = self.scheduler.schedule()
        self._note_scheduled(plan)
        for request in self.scheduler.exhausted:
            self._end_exhausted(request)
        if plan is None:
            return
        try:
            guided = self._live.num_guided > 0
            if guided:
                self._masks.begin(plan, self._live)
            self.executor.forward(plan)
            masks, failed = self._masks.finish(plan, self._live) if guided else ({}, {})
            result = self.executor.sample(plan, masks)
            if [o.request_id for o in result.outputs] != [r.request_id for r in plan.requests]:
                raise SpecserveError("the executor's outputs are not those of its plan")
            settled = settle(plan, result, self._live, failed, self.vocabulary.token_bytes)
            self.scheduler.commit(plan, settled.result)
            self.watchdog.stepped(plan, settled.result)
        except Exception as error:
            self._masks.drop()
            self._fail_plan(plan, error)
            return
        seconds = time.perf_counter() - began
        self.scheduler.observe(time.perf_counter() - drafted, result.timings.get("swap", 0.0))
        self._drafting.observe(plan, settled.result, seconds)
        self.metrics.step({"draft": drafted - began, **result.timings}, seconds)
        self._publish(settled)

    def _publish(self, settled: Settled) -> None:
        """Events of a step whose outputs are committed."""
        for draft, accepted in settled.drafts:
            self.metrics.draft(draft, accepted)
        self._live.publish(settled.events)
        for live, reason in settled.finished:
            self._live.finish(live, reason)
        for live, error in settled.failed:
            self._live.fail(live, error)
        for search in settled.searches:
            if not self._live.taken(search.request_id):
                continue  # one of its beams failed in this step
            if search.done:
                self._live.finish_group(search, search.results())
            else:
                self._live.add(list(search.apply(self.scheduler, self._live.remove)))

    def _fail_plan(self, plan: StepPlan, error: Exception) -> None:
        """The executor failed: every request of the plan ends; nothing of the step is committed."""
        log_fault(logger, f"step {plan.step} with {len(plan.requests)} requests failed", error)
        for scheduled in plan.requests:
            live = self._live.get(scheduled.request_id)
            if live is not None:
                self._live.fail(live, error)
        self.scheduler.abandon(plan)

    def _end_exhausted(self, request: Request) -> None:
        """A request fills the whole pool: what it has is its answer."""
        live = self._live.get(request.request_id)
        if live is not None:
            self._live.end_early(live, "length")

    def _note_scheduled(self, plan: StepPlan | None) -> None:
        """Started and queued events, preemptions, and the watchdog."""
        planned = {r.request_id for r in plan.requests} if plan is not None else set()
        for live in self._live.values():
            request = live.request
            if request.epoch != live.epoch:
                live.epoch = request.epoch
                self._drafting.forget(request.request_id, ended=False)
            if live.started:
                continue
            if request.request_id in planned:
                self._live.started(live)
            else:
                self._live.queued(live)
        self.watchdog.scheduled(plan)
