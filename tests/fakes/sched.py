"""A scheduler with a fake worker, small enough to reason about."""

from __future__ import annotations

from dataclasses import replace

from specserve.core.plan import StepPlan, StepResult
from specserve.core.request import Family, Request, Status
from specserve.core.sampling import SamplingParams
from specserve.core.tree import TokenTree
from specserve.kv.block_pool import BlockPool
from specserve.kv.host import HostPool
from specserve.kv.manager import KVManager
from specserve.sched.budget import TokenBudget
from specserve.sched.preempt import Preemption
from specserve.sched.scheduler import Scheduler, SchedulerLimits
from tests.fakes.search import Search
from tests.fakes.worker import FakeWorker, next_token


class Bench:
    """One scheduler, its pools, one worker. `namespaces` and `salts` map a request id to its own.

    Args:
        blocks, size: of the target's pool.
        draft, host, draft_host: blocks of the other pools.
        mode: of preemption.
        budget: of prompt chunks; None for no limit.
        limits: of the scheduler.
    """

    def __init__(
        self,
        blocks: int = 32,
        size: int = 4,
        prefix_cache: bool = True,
        draft: int = 0,
        *,
        host: int = 0,
        draft_host: int = 0,
        mode: str = "auto",
        budget: TokenBudget | None = None,
        **limits: object,
    ) -> None:
        self.kv = KVManager(
            BlockPool(blocks, size),
            BlockPool(draft, size) if draft else None,
            prefix_cache=prefix_cache,
            host=HostPool(host) if host else None,
            draft_host=HostPool(draft_host) if draft_host else None,
        )
        self.preemption = Preemption(mode)
        self.scheduler = Scheduler(
            SchedulerLimits(**limits),  # type: ignore[arg-type]
            self.kv,
            preemption=self.preemption,
            budget=budget,
        )
        self.namespaces: dict[str, str] = {}
        self.salts: dict[str, int] = {}
        self.worker = FakeWorker(
            blocks,
            size,
            lambda i: self.namespaces.get(i, ""),
            salt=lambda i: self.salts.get(i, 0),
            host_blocks=max(host, draft_host),
            draft_blocks=draft,
        )
        self.searches: list[Search] = []
        self.arrivals = 0

    def request(
        self,
        name: str,
        prompt: list[int],
        max_tokens: int | None = 8,
        *,
        beams: int = 0,
        salt: int = 0,
        arrival: int | None = None,
        **options: object,
    ) -> Request:
        self.namespaces[name] = str(options.get("namespace", ""))
        self.salts[name] = salt
        self.arrivals += arrival is None
        params = SamplingParams(max_tokens=max_tokens, beam_width=beams or None)
        arrival = self.arrivals if arrival is None else arrival
        return Request(name, prompt, params, arrival=arrival, **options)  # type: ignore[arg-type]

    def add(self, name: str, prompt: list[int], max_tokens: int | None = 8, **options: object) -> Request:
        request = self.request(name, prompt, max_tokens, **options)  # type: ignore[arg-type]
        self.scheduler.add(request)
        return request

    def add_choices(
        self, name: str, n: int, prompt: list[int], max_tokens: int = 8, **options: object
    ) -> list[Request]:
        """n choices of one prompt, each with tokens of its own."""
        self.arrivals += 1
        family = Family()
        members = [
            self.request(
                f"{name}.{i}", prompt, max_tokens, salt=i + 1, arrival=self.arrivals, family=family, index=i, **options
            )
            for i in range(n)
        ]
        self.scheduler.add_all(members)
        return members

    def add_search(self, name: str, beams: int, prompt: list[int], max_tokens: int = 8, **options: object) -> Search:
        """A beam search, whose beams are `name`.0, .1, ... `commit` lets it choose."""
        family = Family(in_step=True)
        salt = options.get("salt", 0)
        first = self.request(f"{name}.0", prompt, max_tokens, beams=beams, family=family, **options)
        search = Search(first, beams, salt)
        self.scheduler.add(first)
        self.searches.append(search)
        return search

    def choose(self) -> None:
        """After a commit: searches all of whose beams have their candidates go on, or end."""
        for search in list(self.searches):
            search.resolve()
            options = self.namespaces[next(iter(search.beams))], search.salt
            for beam in search.apply(self.scheduler):
                self.namespaces[beam.request_id], self.salts[beam.request_id] = options
            if search.results is not None:
                self.searches.remove(search)
            self.scheduler.check()

    def plan(self) -> StepPlan | None:
        plan = self.scheduler.schedule()
        self.scheduler.check()
        return plan

    def commit(self, plan: StepPlan, result: StepResult) -> list[Request]:
        """Commit as the engine does: outputs cut at max_tokens, finished requests ended, beams chosen."""
        for entry, output in zip(plan.requests, result.outputs, strict=False):
            for search in self.searches:
                search.collect(entry, output)
        held: dict[str, list[int]] = {}
        for search in self.searches:
            held.update(search.resolve())
        outputs = []
        for output in result.outputs:
            request = self.scheduler.get(output.request_id)
            if output.candidates:
                tokens = tuple(held.get(output.request_id, ()))
                output = output._replace(token_ids=tokens, num_accepted=len(tokens))
            elif request is not None and request.params.max_tokens is not None:
                left = request.params.max_tokens - request.num_output_tokens
                output = output._replace(token_ids=output.token_ids[:left])
            outputs.append(output)
        advanced = self.scheduler.commit(plan, replace(result, outputs=tuple(outputs)))
        self.scheduler.check()
        self.choose()
        done = [r for r in advanced if r.num_output_tokens == r.params.max_tokens and not r.params.beams]
        for request in done:
            self.scheduler.finish(request.request_id)
        self.scheduler.check()
        return done

    def step(self) -> StepPlan | None:
        plan = self.plan()
        if plan is not None:
            self.commit(plan, self.worker.run(plan))
        return plan

    def steps(self, most: int = 1000) -> None:
        """Until nothing is left."""
        for _ in range(most):
            if not self.scheduler.has_work:
                return
            self.step()
        raise AssertionError("requests are left over")


def draft_for(request: Request, good: int, bad: int = 0, vocab: int = 5, salt: int = 0) -> TokenTree:
    """A chain of `good` tokens that the target would choose, then `bad` that it would not."""
    tokens = list(request.token_ids)
    for _ in range(good):
        tokens.append(next_token(tokens, vocab, salt))
    for _ in range(bad):
        tokens.append((next_token(tokens, vocab, salt) + 1) % vocab)
    return TokenTree.chain(tokens[request.num_tokens :], "fake")


def status_of(request: Request) -> Status:
    """Read anew: a type checker narrows attributes too far."""
    return request.status
