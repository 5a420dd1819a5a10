"""Whole runs with random load: every request ends with exactly the tokens that it yields alone."""

import random

import pytest

from specserve.core.request import Status
from tests.fakes.sched import Bench, draft_for
from tests.fakes.worker import expected_tokens


def draft_randomly(bench, rng):
    for request in bench.scheduler.running:
        if request.ready_to_draft and rng.random() < 0.7:
            request.draft = draft_for(request, rng.randrange(4), rng.randrange(3))


def new_request(bench, rng, name, prompts):
    prompt = [*rng.choice(prompts), *(rng.randrange(5) for _ in range(rng.randrange(6)))]
    prompt = prompt[: bench.kv.max_positions // 2]
    room = bench.kv.max_positions - len(prompt)
    status = rng.choice([Status.WAITING, Status.WAITING, Status.COMPILING])
    options = {"namespace": rng.choice("ab"), "priority": rng.choice([0, 0, 0, 1]), "status": status}
    return bench.add(name, prompt, rng.randrange(1, min(room, 25) + 1), **options)


def simulate(seed, num_requests):
    rng = random.Random(seed)
    bench = Bench(
        blocks=rng.choice([7, 10, 16]),
        size=rng.choice([2, 4]),
        max_batched_tokens=rng.choice([3, 8, 64]),
        max_running=rng.choice([2, 6, 20]),
        prefix_cache=rng.random() < 0.8,
        skip_patience=rng.choice([1, 4]),
    )
    prompts = [[rng.randrange(5) for _ in range(rng.randrange(1, 10))] for _ in range(3)]
    alive, done, aborted = {}, [], 0
    added = 0
    steps = 0
    while added < num_requests or alive:
        steps += 1
        assert steps < 100 * num_requests, "requests are left over"
        if added < num_requests and rng.random() < 0.5:
            alive[f"r{added}"] = new_request(bench, rng, f"r{added}", prompts)
            added += 1
        for request in alive.values():
            if request.status is Status.COMPILING and rng.random() < 0.3:
                request.move_to(Status.WAITING)
        draft_randomly(bench, rng)
        plan = bench.plan()
        if alive and rng.random() < 0.05:  # in whatever state, with the plan in flight
            name = rng.choice(sorted(alive))
            bench.scheduler.finish(name)
            del alive[name]
            aborted += 1
        if plan is not None and rng.random() < 0.03:
            if rng.random() < 0.5:
                bench.worker.forward(plan)  # it failed after the forward, else before
            bench.worker.abandoned = True
            bench.scheduler.abandon(plan)
            bench.scheduler.check()
            continue
        if plan is not None:
            for request in bench.commit(plan, bench.worker.run(plan)):
                done.append(alive.pop(request.request_id))
    for request in done:
        assert request.token_ids == expected_tokens(
            request.token_ids[: request.num_prompt_tokens], request.params.max_tokens
        )
    assert len(done) + aborted == num_requests
    assert bench.kv.baseline()
    assert bench.scheduler.stalled_steps == 0
    return bench.scheduler.num_preemptions


@pytest.mark.parametrize("group", range(4))
def test_random_load_with_drafts_aborts_and_a_tiny_pool(group):
    preemptions = sum(simulate(seed, 25) for seed in range(group * 10, group * 10 + 10))
    assert preemptions > 0, "the pool is small enough to force preemption"


@pytest.mark.slow
def test_trap_d7_no_block_drifts_over_2000_requests():
    for seed in range(1000, 1010):
        simulate(seed, 200)
