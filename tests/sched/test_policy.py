"""WaitingQueue: order, skip-ahead, ageing."""

from specserve.core.request import Family, Request, Status
from specserve.core.sampling import SamplingParams
from specserve.sched.policy import MAX_HELD, Verdict, WaitingQueue, running_order


def request(name, arrival, priority=0, status=Status.WAITING, **options):
    return Request(name, [1], SamplingParams(), arrival=arrival, priority=priority, status=status, **options)


def admitted(queue, fits, stop_after=None):
    got = []

    def attempt(one):
        if stop_after is not None and len(got) == stop_after:
            return Verdict.STOP
        if one.request_id not in fits:
            return Verdict.BLOCKED
        got.append(one.request_id)
        return Verdict.ADMITTED

    queue.admit(attempt)
    queue.check()
    return got


def test_order_is_priority_then_preempted_then_arrival():
    queue = WaitingQueue()
    resumed = request("resumed", 9)
    resumed.move_to(Status.RUNNING)
    resumed.move_to(Status.PREEMPTED)
    for one in (request("b", 2), request("a", 1), request("urgent", 5, -1), request("later", 0, 1), resumed):
        queue.push(one)
    assert [r.request_id for r in queue] == ["urgent", "resumed", "a", "b", "later"]
    queue.check()


def test_equal_keys_keep_the_order_of_arrival():
    queue = WaitingQueue()
    for name in "abc":
        queue.push(request(name, 0))
    assert [r.request_id for r in queue] == ["a", "b", "c"]


def test_a_full_step_stops():
    queue = WaitingQueue()
    for i, name in enumerate("abc"):
        queue.push(request(name, i))
    assert admitted(queue, "abc", stop_after=2) == ["a", "b"]
    assert [r.request_id for r in queue] == ["c"]


def test_trap_d3_small_ones_pass_a_large_head_until_it_has_aged():
    queue = WaitingQueue(window=1, patience=3)
    queue.push(request("large", 0))
    for i in range(10):
        queue.push(request(f"s{i}", i + 1))
    small = {f"s{i}" for i in range(10)}
    assert admitted(queue, small) == ["s0", "s1", "s2"]
    assert admitted(queue, small) == [], "nothing overtakes it any more"
    assert admitted(queue, small | {"large"}) == ["large", *(f"s{i}" for i in range(3, 10))]


def test_the_window_bounds_how_many_may_be_passed_at_once():
    queue = WaitingQueue(window=2, patience=100)
    for i, name in enumerate("abcd"):
        queue.push(request(name, i))
    assert admitted(queue, "c") == ["c"]
    assert admitted(queue, "d") == ["d"]
    for i, name in enumerate("cde"):
        queue.push(request(name, 10 + i))
    assert admitted(queue, "e") == []


def test_a_window_of_zero_is_strict_order():
    queue = WaitingQueue(window=0)
    for i, name in enumerate("ab"):
        queue.push(request(name, i))
    assert admitted(queue, "b") == []


def test_compiling_requests_keep_their_place_without_holding_others_up():
    queue = WaitingQueue(window=0, patience=1)
    compiling = request("compiling", 0, status=Status.COMPILING)
    queue.push(compiling)
    assert not queue.has_ready
    for i in range(3):
        queue.push(request(f"r{i}", i + 1))
    assert admitted(queue, {"r0", "r1"}) == ["r0", "r1"]
    compiling.move_to(Status.WAITING)
    assert admitted(queue, {"compiling", "r2"}) == ["compiling", "r2"]


def test_a_request_that_can_never_run_holds_nobody_up():
    queue = WaitingQueue(window=0, patience=1)
    for i, name in enumerate("ab"):
        queue.push(request(name, i))
    queue.admit(lambda r: Verdict.UNABLE if r.request_id == "a" else Verdict.ADMITTED)
    assert [r.request_id for r in queue] == ["a"]


def test_ageing_is_forgotten_when_a_request_leaves():
    queue = WaitingQueue(window=4, patience=1)
    large = request("large", 0)
    queue.push(large)
    queue.push(request("s", 1))
    assert admitted(queue, "s") == ["s"]
    queue.remove(large)
    queue.check()
    assert len(queue) == 0


def offered(queue, verdicts):
    """Names in the order in which they were offered; those that are not named are admitted."""
    got = []

    def attempt(one):
        got.append(one.request_id)
        return verdicts.get(one.request_id, Verdict.ADMITTED)

    queue.admit(attempt)
    queue.check()
    return got


def test_a_held_request_is_passed_without_ageing_and_fills_no_window():
    queue = WaitingQueue(window=0, patience=1)
    for i, name in enumerate(["h0", "h1", "a", "b", "c"]):
        queue.push(request(name, i))
    held = {"h0": Verdict.HELD, "h1": Verdict.HELD}
    assert offered(queue, held) == ["h0", "h1", "a", "b", "c"]
    queue.push(request("d", 9))
    assert offered(queue, {"h1": Verdict.BLOCKED}) == ["h0", "h1"], "its patience begins when it is blocked"
    assert [r.request_id for r in queue] == ["h1", "d"]


def test_one_step_looks_at_so_many_held_requests_at_most():
    queue = WaitingQueue()
    for i in range(MAX_HELD + 1):
        queue.push(request(f"h{i}", i))
    queue.push(request("a", MAX_HELD + 1))
    assert len(offered(queue, {f"h{i}": Verdict.HELD for i in range(MAX_HELD + 1)})) == MAX_HELD


def test_those_that_are_admitted_with_another_leave_the_queue_with_it():
    queue = WaitingQueue(window=8, patience=1)
    beams = [request(f"s{i}", 5, index=i) for i in range(3)]
    for one in (request("large", 0), *beams, request("a", 6)):
        queue.push(one)
    got = []

    def attempt(one):
        got.append(one.request_id)
        if one.request_id == "large":
            return Verdict.BLOCKED
        for beam in beams[1:]:
            queue.remove(beam)
        return Verdict.ADMITTED

    queue.admit(attempt)
    queue.check()
    assert got == ["large", "s0"], "nobody passes the large one any more"
    assert [r.request_id for r in queue] == ["large", "a"]


def test_members_of_a_family_keep_their_order_and_waiting_beams_ran_before():
    queue = WaitingQueue()
    choices, beams = Family(), Family(in_step=True)
    for one in (
        request("c1", 1, family=choices, index=1),
        request("b1", 2, family=beams, index=1),
        request("b0", 2, family=beams, index=0),
        request("c0", 1, family=choices, index=0),
        request("urgent", 3, -1),
    ):
        queue.push(one)
    assert [r.request_id for r in queue] == ["urgent", "b1", "c0", "c1", "b0"]
    assert sorted(queue, key=running_order)[0].request_id == "urgent"
    assert [r.request_id for r in sorted(queue, key=running_order)][1:] == ["c0", "c1", "b0", "b1"]
