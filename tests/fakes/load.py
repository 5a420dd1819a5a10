"""A random load on a scheduler: whatever happens to a request, it ends with exactly the tokens it yields alone."""

from __future__ import annotations

import random

from specserve.core.plan import StepPlan
from specserve.core.request import Request, Status
from specserve.core.tree import EMPTY_TREE
from specserve.sched.budget import TokenBudget
from specserve.sched.family import beam_blocks
from tests.fakes.sched import Bench, draft_for
from tests.fakes.search import Search
from tests.fakes.worker import expected_tokens, kv_value


class FakeDraftModel:
    """Keeps the KV of a draft model beside the target's, as its drafter does, and proves what it finds there."""

    def __init__(self, bench: Bench, rng: random.Random) -> None:
        self._bench = bench
        self._rng = rng

    def propose(self, request: Request) -> None:
        rng, kv = self._rng, self._bench.kv
        salt = self._bench.salts[request.request_id]
        tree = draft_for(request, rng.randrange(4), rng.randrange(3), salt=salt)
        if kv.draft is None:
            request.draft = tree
            return
        table = request.kv.draft
        lag = request.num_tokens - table.committed
        if lag == 0:
            return
        fresh = lag if rng.random() < 0.8 else rng.randrange(1, lag + 1)
        tree = tree if fresh == lag else EMPTY_TREE
        copies = kv.reserve_draft(request.kv, fresh + max(len(tree) - 1, 0))
        if copies is None:
            return
        self._bench.worker.copy(copies)
        tokens = [*request.token_ids, *tree.tokens]
        self.prove(request)
        self._write(request, tokens, table.committed, table.committed + fresh)
        kv.commit_draft(request.kv, request.token_ids, fresh)
        for i in range(len(tree) - 1):
            self._write(request, tokens, request.num_tokens + i, request.num_tokens + i + 1)
            kv.write_draft(request.kv, 1)
        request.draft = tree

    def prove(self, request: Request) -> None:
        """All that is committed is there."""
        for position in range(request.kv.draft.committed):
            assert self._bench.worker.draft_memory[self._slot(request, position)] == self._value(
                request, request.token_ids, position
            )

    def _write(self, request: Request, tokens: list[int], start: int, end: int) -> None:
        for position in range(start, end):
            slot = self._slot(request, position)
            self._bench.worker.draft_memory[slot] = self._value(request, tokens, position)

    def _slot(self, request: Request, position: int) -> int:
        size = self._bench.kv.block_size
        return int(request.kv.draft.block_ids[position // size] * size + position % size)

    def _value(self, request: Request, tokens: list[int], position: int) -> tuple[str, tuple[int, ...]]:
        return kv_value(request.namespace, tokens, position)


class Load:
    """One run.

    Attributes:
        counts: how often each kind of thing happened.
    """

    def __init__(self, seed: int, num_requests: int) -> None:
        self.rng = rng = random.Random(seed)
        self.num_requests = num_requests
        self.bench = bench = _random_bench(rng)
        self.drafter = FakeDraftModel(bench, rng)
        self.prompts = [[rng.randrange(5) for _ in range(rng.randrange(1, 10))] for _ in range(3)]
        self.alive: dict[str, Request] = {}
        self.done: list[Request] = []
        self.ended: list[Search] = []
        self.untouched: set[Search] = set()  # searches whose beams were not aborted one by one
        self.added = 0
        self.rest = rng.choice([0.5, 0.8, 0.95])
        self.counts: dict[str, int] = {}

    def count(self, name: str, number: int = 1) -> None:
        self.counts[name] = self.counts.get(name, 0) + number

    def run(self) -> None:
        bench = self.bench
        steps = 0
        while self.added < self.num_requests or self.alive or bench.searches:
            steps += 1
            assert steps < 200 * self.num_requests, "requests are left over"
            self.arrive()
            searches = list(bench.searches)
            assert self.step(), "nothing can run, and never will"
            self.ended += [search for search in searches if search.results is not None]
        self.finish()

    def finish(self) -> None:
        bench = self.bench
        for request in self.done:
            prompt = request.token_ids[: request.num_prompt_tokens]
            salt = bench.salts[request.request_id]
            assert request.token_ids == expected_tokens(prompt, request.num_output_tokens, salt=salt)
        for search in self.ended:
            if search in self.untouched:
                assert search.results == search.expected
        assert bench.kv.baseline()
        assert not bench.scheduler.has_work
        self.count("done", len(self.done))
        self.count("searches", len(self.ended))
        self.count("preemptions", bench.scheduler.num_preemptions)
        self.count("swapped", bench.scheduler.num_swapped)

    # What happens in a step.

    def step(self) -> bool:
        """False if there was nothing to plan though requests wait that are ready, and none was found to be too long."""
        rng, bench = self.rng, self.bench
        for request in bench.scheduler.running:
            if request.ready_to_draft and rng.random() < 0.6:
                self.drafter.propose(request)
        if bench.scheduler.running and rng.random() < 0.06:
            bench.scheduler.preempt(rng.choice(bench.scheduler.running))
            bench.scheduler.check()
            self.count("forced")
        if rng.random() < 0.03:
            self.abort()
            bench.choose()
        stalled = bench.scheduler.stalled_steps
        plan = bench.plan()
        if rng.random() < 0.05:
            self.abort()
        for request in list(bench.scheduler.exhausted):
            self.exhaust(request)
            stalled = bench.scheduler.stalled_steps
        if plan is None:
            bench.choose()
            return bench.scheduler.stalled_steps == stalled
        if rng.random() < 0.04:
            self.abandon(plan)
            bench.choose()
            return True
        for request in bench.commit(plan, bench.worker.run(plan)):
            self.done.append(self.alive.pop(request.request_id))
        seconds = rng.uniform(0.001, 0.01)
        bench.scheduler.observe(seconds, rng.uniform(0.0, seconds))
        return True

    def abandon(self, plan: StepPlan) -> None:
        """It failed at any time: after the forward, after its moves, or before anything."""
        when = self.rng.randrange(3)
        if when == 2:
            self.bench.worker.forward(plan)
        elif when == 1:
            self.bench.worker.move(plan)
        self.bench.worker.abandoned = True
        self.bench.scheduler.abandon(plan)
        self.bench.scheduler.check()
        self.count("abandoned")

    def exhaust(self, request: Request) -> None:
        """As the engine does: what it has is its answer."""
        if self.bench.scheduler.finish(request.request_id) is not None:
            self.bench.scheduler.check()
            self.done.append(self.alive.pop(request.request_id))
            self.count("exhausted")

    # Requests come and go.

    def arrive(self) -> None:
        rng, bench = self.rng, self.bench
        for request in list(self.alive.values()):
            if request.status is Status.COMPILING and rng.random() < 0.3:
                for member in request.family.members if request.family is not None else [request]:
                    if member.status is Status.COMPILING:
                        member.move_to(Status.WAITING)
        if self.added == self.num_requests or rng.random() < self.rest:
            return
        name = f"r{self.added}"
        self.added += 1
        prompt = [*rng.choice(self.prompts), *(rng.randrange(5) for _ in range(rng.randrange(6)))]
        prompt = prompt[: bench.kv.max_positions // 2]
        max_tokens = rng.randrange(1, min(bench.kv.max_positions - len(prompt), 25) + 1)
        options = {
            "namespace": rng.choice("ab"),
            "priority": rng.choice([0, 0, 0, 1]),
            "status": rng.choice([Status.WAITING, Status.WAITING, Status.COMPILING]),
        }
        kind = rng.random()
        if kind < 0.35:
            for member in bench.add_choices(name, rng.randrange(2, 6), prompt, max_tokens, **options):
                self.alive[member.request_id] = member
        elif kind < 0.7 and self.arrive_search(name, prompt, max_tokens, options):
            pass
        else:
            unbounded = rng.random() < 0.1
            self.alive[name] = bench.add(
                name, prompt, None if unbounded else max_tokens, salt=rng.randrange(3), **options
            )
        bench.scheduler.check()

    def arrive_search(self, name: str, prompt: list[int], max_tokens: int, options: dict[str, object]) -> bool:
        bench, rng = self.bench, self.rng
        width = min(rng.randrange(2, 6), bench.scheduler.limits.places)
        size, blocks = bench.kv.block_size, bench.kv.target.num_blocks
        while max_tokens and beam_blocks(len(prompt), max_tokens, width, size) > blocks:
            max_tokens -= 1
        if width < 2 or not max_tokens:
            return False
        options["status"] = Status.WAITING
        self.untouched.add(bench.add_search(name, width, prompt, max_tokens, salt=rng.randrange(3), **options))
        return True

    def abort(self) -> None:
        """Somebody, in whatever state: one request, all of a family, a search, or one beam."""
        rng, bench = self.rng, self.bench
        kind = rng.random()
        if bench.searches and kind < 0.4:
            search = rng.choice(bench.searches)
            beams = list(search.beams.values())
            if kind < 0.1 and len(beams) > 1:
                beams = [rng.choice(beams)]
                self.untouched.discard(search)
            for beam in beams:
                self.end(beam)
                search.forget(beam)
            if not search.beams:
                bench.searches.remove(search)
        elif self.alive:
            request = rng.choice(list(self.alive.values()))
            family = request.family
            for member in list(family.members) if family is not None and kind < 0.7 else [request]:
                self.end(member)
                del self.alive[member.request_id]

    def end(self, request: Request) -> None:
        self.count(f"abort {request.status.value}{' parked' if request.parked else ''}")
        assert self.bench.scheduler.finish(request.request_id) is request
        self.bench.scheduler.check()


def _random_bench(rng: random.Random) -> Bench:
    rows = rng.choice([3, 8, 64])
    bench = Bench(
        blocks=rng.choice([7, 10, 16, 24]),
        size=rng.choice([1, 2, 4]),
        draft=rng.choice([0, 6, 20]),
        host=rng.choice([0, 3, 8, 40]),
        draft_host=rng.choice([0, 3, 20]),
        mode=rng.choice(["auto", "swap", "swap", "recompute"]),
        budget=rng.choice([None, TokenBudget(rows, None), TokenBudget(rows, 0.006)]),
        max_batched_tokens=rows,
        max_running=rng.choice([2, 4, 6, 20]),
        prefix_cache=rng.random() < 0.7,
        skip_patience=rng.choice([1, 4]),
    )
    bench.preemption.seconds_per_block = rng.choice([None, 1e-5, 1e-3])
    return bench
