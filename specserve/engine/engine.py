"""Engine: the loop that joins scheduler, drafter, executor and grammars. Runs in any one thread; knows no sockets.

One step: grammars that are compiled -> drafts -> schedule -> forward -> masks -> sample -> judge
-> commit -> events. Whatever fails, every request it touches ends with exactly one terminal event and the loop goes on.
"""

from __future__ import annotations

import logging
import secrets
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
from specserve.engine.checks import EngineLimits, Vocabulary, check_params, check_prompt, resolve_params
from specserve.engine.compile import CompilePool, Compiler
from specserve.engine.drafting import Controller, Drafting
from specserve.engine.faults import log_fault
from specserve.engine.judge import Judge
from specserve.engine.live import LiveRequest
from specserve.engine.masking import fill_masks
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
        self._executor = executor
        self._drafting = Drafting(drafter, controller, limits.num_speculative_tokens, vocabulary.vocab_size)
        self._compiling: CompilePool | None = None
        if compiler is not None:
            self._compiling = CompilePool(
                compiler,
                threads=limits.compile_threads,
                limit=limits.compile_limit,
                timeout=limits.compile_timeout,
            )
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
        elif command.request_id in self._live:
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
        return EngineStats(
            running=len(self.scheduler.running),
            waiting=len(self.scheduler.waiting),
            kv_blocks=usage.blocks,
            kv_blocks_used=usage.blocks_used,
            draft_kv_blocks=usage.draft_blocks,
            draft_kv_blocks_used=usage.draft_blocks_used,
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
        self._executor.close()

    # Requests in and out.

    def _accept(self, command: GenerateCommand) -> None:
        size = self.vocabulary.vocab_size
        check_prompt(command, size, self.limits.max_model_len)
        check_params(command.params, size)
        seed = secrets.randbits(64) if command.params.seed is None else command.params.seed
        params = resolve_params(command, self.limits.max_model_len, self.kv.max_positions, seed)
        guided = params.guided
        request = Request(
            command.request_id,
            list(command.prompt_token_ids),
            params,
            seed=seed,
            namespace=command.namespace,
            priority=command.priority,
            arrival=self._arrivals,
            status=Status.WAITING if guided is None else Status.COMPILING,
        )
        budget = params.max_tokens or 1
        judge = Judge(params, self.vocabulary.token_bytes, params.end_ids(self.vocabulary.eos_ids), budget)
        live = LiveRequest(request, judge, command.report_speculation)
        if guided is not None and self._compiling is None:
            raise InvalidRequestError("guided: this engine has no grammar compiler", param="guided")
        # Queued before its grammar is compiled: what can never fit is refused at once, and order is order of arrival.
        self.scheduler.add(request)
        if guided is not None and self._compiling is not None:
            try:
                self._compiling.submit(request.request_id, guided)
            except Exception:
                self.scheduler.finish(request.request_id)
                raise
            self._live.queued(live)
        self._arrivals += 1
        self._live.add(live)

    def _admit_compiled(self) -> None:
        if self._compiling is None:
            return
        for request_id, outcome in self._compiling.ready():
            live = self._live[request_id]
            try:
                if isinstance(outcome, Exception):
                    raise outcome
                live.judge.matcher = outcome
                live.request.move_to(Status.WAITING)
            except Exception as error:
                self._live.fail(live, error)

    def _abort(self, request_id: str) -> None:
        live = self._live.get(request_id)
        if live is not None:
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
            self._executor.forward(plan)
            masks, failed = fill_masks(plan, self._live, self.limits.logits_size or self.vocabulary.vocab_size)
            result = self._executor.sample(plan, masks)
            if [o.request_id for o in result.outputs] != [r.request_id for r in plan.requests]:
                raise SpecserveError("the executor's outputs are not those of its plan")
            settled = settle(plan, result, self._live, failed, self.vocabulary.token_bytes)
            self.scheduler.commit(plan, settled.result)
            self.watchdog.stepped(plan, settled.result)
        except Exception as error:
            self._fail_plan(plan, error)
            return
        seconds = time.perf_counter() - began
        self._drafting.observe(plan, settled.result, seconds)
        self.metrics.step({"draft": drafted - began, **result.timings}, seconds)
        self._publish(settled)

    def _publish(self, settled: Settled) -> None:
        """Events of a step whose outputs are committed."""
        for draft, accepted in settled.drafts:
            self.metrics.draft(draft, accepted)
        self._live.events.extend(settled.events)
        for live, reason in settled.finished:
            self._live.finish(live, reason)
        for live, error in settled.failed:
            self._live.fail(live, error)

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
