"""Admission: who joins the running requests, and what is kept for those who did."""

import pytest

from specserve.core.request import Status
from specserve.sched.budget import TokenBudget
from tests.fakes.sched import Bench, status_of
from tests.fakes.worker import expected_tokens


class Rows(TokenBudget):
    """So many rows of chunks beside decodes, whatever steps take."""

    def __init__(self, rows):
        super().__init__(512, 0)
        self._rows = rows

    def rows(self, num_decoding, num_waiting=1):
        return self._rows if num_decoding else 512


def entries(plan):
    return {entry.request_id: (entry.start, len(entry.token_ids)) for entry in plan.requests}


def test_chunks_beside_decodes_stay_within_the_token_budget():
    bench = Bench(budget=Rows(4))
    bench.add("a", [1, 2], 20)
    assert entries(bench.step()) == {"a": (0, 2)}
    b = bench.add("b", list(range(10)), 3)
    c = bench.add("c", [7, 8, 9], 3)
    assert entries(bench.step()) == {"a": (2, 1), "b": (0, 4)}
    assert entries(bench.step()) == {"a": (3, 1), "b": (4, 4)}
    assert entries(bench.step()) == {"a": (4, 1), "b": (8, 2), "c": (0, 2)}
    bench.steps()
    assert b.token_ids == expected_tokens(list(range(10)), 3)
    assert c.token_ids == expected_tokens([7, 8, 9], 3)


def test_a_prompt_advances_whatever_the_budget():
    bench = Bench(budget=Rows(0), max_batched_tokens=16)
    bench.add("a", list(range(10)), 6)
    bench.add("b", list(range(50, 60)), 6)
    bench.step()
    assert entries(bench.step()) == {"a": (10, 1), "b": (6, 1)}, "one row is everybody's who runs"
    bench.steps()


def test_a_search_begins_when_all_its_beams_find_room():
    bench = Bench(size=4, prefix_cache=False, mode="recompute")
    search = bench.add_search("s", 3, [1, 2, 3, 4, 5], 9)
    for _ in range(5):
        bench.step()
    bench.scheduler.preempt(next(iter(search.beams.values())))
    first = min(search.beams.values(), key=lambda beam: beam.index)
    # Blocks of 11 tokens: three for the first, two for each of the others beside the prompt's full one.
    assert first.num_tokens + 1 == 11
    for free, starts in ((6, False), (7, True)):
        hog = bench.kv.open([1], "")
        bench.kv.reserve(hog, (bench.kv.target.num_free - free) * 4)
        assert (bench.step() is not None) == starts
        assert (status_of(first) is Status.RUNNING) == starts
        bench.kv.release(hog)
    bench.steps()
    assert search.results == search.expected


def test_the_first_beam_keeps_its_place_before_requests_that_never_ran():
    bench = Bench(mode="recompute")
    search = bench.add_search("s", 2, [1, 2, 3], 5)
    bench.step()
    bench.step()
    bench.scheduler.preempt(next(iter(search.beams.values())))
    bench.add("b", [1], 2)
    waiting = [r.request_id for r in bench.scheduler.waiting]
    assert waiting[-1] == "b"
    bench.steps()
    assert search.results == search.expected


def test_one_request_held_for_another_ones_prefix_starts_on_it():
    bench = Bench(size=4, max_batched_tokens=8)
    bench.add("a", list(range(20)), 4)
    later = bench.add("b", [*range(16), 77], 4)
    behind = bench.add("c", [50, 51], 4)
    assert entries(bench.step()) == {"a": (0, 8)}
    assert entries(bench.step()) == {"a": (8, 8)}
    plan = bench.step()
    assert entries(plan)["b"] == (16, 1)
    assert later.num_cached == 16
    bench.steps()
    assert later.token_ids == expected_tokens([*range(16), 77], 4)
    assert behind.num_output_tokens == 4


def test_without_prefix_cache_nobody_waits_for_anothers_prefix():
    bench = Bench(size=4, max_batched_tokens=64, prefix_cache=False)
    bench.add("a", list(range(20)), 4)
    bench.add("b", list(range(20)), 4)
    assert entries(bench.step()) == {"a": (0, 20), "b": (0, 20)}
    bench.steps()


@pytest.mark.parametrize("namespace", ["", "b"])
def test_only_the_same_namespace_waits_for_a_prefix(namespace):
    bench = Bench(size=4, max_batched_tokens=64)
    bench.add("a", list(range(20)), 4)
    bench.add("b", list(range(20)), 4, namespace=namespace)
    assert ("b" in entries(bench.step())) == (namespace == "b")
    bench.steps()
