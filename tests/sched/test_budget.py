"""TokenBudget against simulated machines: a + b * rows + c * rows * context, noise, stalls, changes of speed."""

from __future__ import annotations

import itertools
import random
import statistics
from dataclasses import dataclass, field

import pytest

from specserve.sched.budget import FIRST, FLOOR, DecodeCost, TokenBudget, intercept, middle

DECODING = 8
MOST = 512


@dataclass
class Machine:
    """Seconds of steps, near those of the demo model on two cores."""

    base: float = 0.015
    per_decode: float = 0.0006
    per_row: float = 0.00025
    per_row_and_position: float = 5e-7
    noise: float = 0.03
    stalls: float = 0.002
    slower: float = 1.0
    seed: int = 0
    _random: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)

    def exact(self, decoding: int, rows: int = 0, context: int = 0) -> float:
        row = self.per_row + self.per_row_and_position * (context + rows / 2)
        return self.slower * (self.base + self.per_decode * decoding + row * rows)

    def step(self, decoding: int, rows: int = 0, context: int = 0) -> float:
        seconds = self.exact(decoding, rows, context) * self._random.lognormvariate(0, self.noise)
        return seconds + (self._random.uniform(0.05, 0.3) if self._random.random() < self.stalls else 0.0)


@dataclass
class Chunk:
    rows: int
    seconds: float
    last: bool


def decode(budget: TokenBudget, machine: Machine, steps: int, decoding: int = DECODING) -> None:
    for _ in range(steps):
        budget.observe(decoding, 0, machine.step(decoding))


def prompt(budget: TokenBudget, machine: Machine, tokens: int, decoding: int = DECODING) -> list[Chunk]:
    """The chunks in which a prompt is computed beside decodes."""
    chunks = []
    done = 0
    while done < tokens:
        rows = min(budget.rows(decoding), tokens - done)
        seconds = machine.step(decoding, rows, done)
        budget.observe(decoding, rows, seconds)
        done += rows
        chunks.append(Chunk(rows, seconds, done == tokens))
    return chunks


def quantile(values: list[float], share: float) -> float:
    return sorted(values)[int(share * len(values))]


@pytest.mark.parametrize("target", [None, 0.04, 0.06, 0.1])
@pytest.mark.parametrize(("noise", "most"), [(0.02, 1.0), (0.04, 1.05)])
def test_steps_keep_the_target_and_use_it(target: float | None, noise: float, most: float) -> None:
    machine = Machine(noise=noise)
    budget = TokenBudget(MOST, target)
    chunks: list[Chunk] = []
    for _ in range(10):
        decode(budget, machine, 20)
        chunks += prompt(budget, machine, 4000)
    allowed = target or 2 * machine.exact(DECODING)
    seconds = [c.seconds for c in chunks if not c.last and c.rows > FLOOR]
    assert len(seconds) > 0.9 * len(chunks)
    assert quantile(seconds, 0.99) <= most * allowed
    assert quantile(seconds, 0.95) <= allowed
    assert statistics.mean(seconds) >= 0.8 * allowed


def test_the_first_chunk_is_careful_and_the_next_ones_ramp_up() -> None:
    machine = Machine(noise=0.02, stalls=0.0)
    budget = TokenBudget(MOST, 0.1)
    decode(budget, machine, 4)
    chunks = prompt(budget, machine, 2000)
    assert chunks[0].rows <= FIRST
    assert all(after.rows <= 1.5 * before.rows for before, after in itertools.pairwise(chunks))
    assert max(c.seconds for c in chunks[:6]) >= 0.8 * 0.1


def test_a_first_chunk_goes_by_what_prompts_took_alone() -> None:
    budget = TokenBudget(MOST, 0.1)
    budget.observe(0, 100, 1.0)
    budget.observe(4, 0, 0.02)
    assert budget.rows(4) == 7  # (0.9 * 0.1 - 0.02) / 0.01


def test_a_new_prompt_after_a_deep_one_ramps_up_again() -> None:
    machine = Machine(noise=0.02, stalls=0.0)
    budget = TokenBudget(MOST, 0.06)
    decode(budget, machine, 20)
    deep = prompt(budget, machine, 6000)[-2].rows
    chunks = prompt(budget, machine, 2000)
    assert deep < 20
    assert max(c.rows for c in chunks[:8]) > 4 * deep


@pytest.mark.parametrize("target", [None, 0.08])
def test_a_machine_that_becomes_half_as_fast(target: float | None) -> None:
    machine = Machine(noise=0.02, stalls=0.0)
    budget = TokenBudget(MOST, target)
    decode(budget, machine, 20)
    before = prompt(budget, machine, 1000)
    machine.slower = 2.0
    decode(budget, machine, 20 if target is None else 0)
    after = prompt(budget, machine, 1000)
    allowed = target or 2 * machine.exact(DECODING)
    settled = [c.seconds for c in after[6:] if not c.last]
    assert max(settled) <= allowed * 1.05
    assert statistics.mean(settled) >= 0.8 * allowed
    if target is not None:
        assert len(after) > 2 * len(before)


def test_a_machine_that_becomes_twice_as_fast() -> None:
    """A step with a chunk takes no less than one without, so what those took before is believed no longer."""
    machine = Machine(noise=0.0, stalls=0.0, slower=2.0)
    budget = TokenBudget(MOST, None)
    decode(budget, machine, 20)
    machine.slower = 1.0
    chunks = prompt(budget, machine, 1000)
    assert max(c.seconds for c in chunks) <= 3.0 * machine.exact(DECODING)


def test_chunks_of_another_time_do_not_tell_what_decodes_take() -> None:
    machine = Machine(noise=0.0, stalls=0.0)
    budget = TokenBudget(MOST, None)
    decode(budget, machine, 8)
    for _ in range(20):
        budget.observe(1, 32, machine.exact(1, 32) / 4)
    decode(budget, machine, 1)
    seconds = machine.exact(DECODING, budget.rows(DECODING))
    budget.observe(DECODING, 32, machine.exact(DECODING, 32))
    budget.observe(DECODING, 32, machine.exact(DECODING, 32))
    seconds = machine.exact(DECODING, budget.rows(DECODING))
    assert seconds >= 1.6 * machine.exact(DECODING)


def test_two_slow_steps_are_believed_at_once_and_one_is_not() -> None:
    machine = Machine(noise=0.0, stalls=0.0)
    budget = TokenBudget(MOST, 0.06)
    decode(budget, machine, 8)
    for _ in range(60):
        budget.observe(DECODING, rows := budget.rows(DECODING), machine.exact(DECODING, rows, 1000))
    steady = budget.rows(DECODING)
    budget.observe(DECODING, steady, 1.0)
    assert steady / 2 < budget.rows(DECODING) < steady
    budget.observe(DECODING, rows := budget.rows(DECODING), machine.exact(DECODING, rows, 1000))
    assert abs(budget.rows(DECODING) - steady) <= 1
    for _ in range(2):
        budget.observe(DECODING, steady, machine.exact(DECODING, 10 * steady, 1000))
    assert budget.rows(DECODING) <= steady / 10


def test_the_tail_of_a_prompt_says_little() -> None:
    machine = Machine(noise=0.0, stalls=0.0)
    budget = TokenBudget(MOST, 0.06)
    decode(budget, machine, 8)
    for _ in range(30):
        budget.observe(DECODING, rows := budget.rows(DECODING), machine.exact(DECODING, rows, 500))
    steady = budget.rows(DECODING)
    budget.observe(DECODING, 1, machine.exact(DECODING) * 1.05)
    assert budget.rows(DECODING) >= 0.95 * steady


@pytest.mark.parametrize("target", [None, 0.01, 1e-6])
def test_floor(target: float | None) -> None:
    """Even where decodes alone take more than the target, a prompt advances."""
    machine = Machine(per_row_and_position=1e-5)
    budget = TokenBudget(MOST, target)
    decode(budget, machine, 8)
    chunks = prompt(budget, machine, 2000)
    assert all(c.rows >= FLOOR for c in chunks if not c.last)
    assert chunks[-2].rows == FLOOR


def test_floor_within_a_small_step() -> None:
    budget = TokenBudget(2, 1e-6)
    budget.observe(1, 2, 1.0)
    assert budget.rows(1) == 2


def test_alone_a_prompt_takes_the_whole_step() -> None:
    budget = TokenBudget(MOST, 0.02)
    assert budget.rows(0) == MOST
    budget.observe(DECODING, 32, 1.0)
    assert budget.rows(0) == MOST


def test_zero_sets_no_limit() -> None:
    budget = TokenBudget(MOST, 0)
    budget.observe(DECODING, 0, 0.02)
    budget.observe(DECODING, MOST, 5.0)
    assert budget.rows(DECODING) == MOST


def test_cheap_rows_fill_the_step() -> None:
    machine = Machine(base=0.008, per_row=2e-6, per_row_and_position=0.0)
    budget = TokenBudget(2048, None)
    decode(budget, machine, 8)
    assert prompt(budget, machine, 20_000)[-2].rows == 2048


def test_decodes_that_were_never_without_chunks() -> None:
    """A batch submitted at once: the number of decodes grows while prompts wait, and no step is without a chunk."""
    machine = Machine(noise=0.02, stalls=0.0)
    budget = TokenBudget(MOST, None)
    budget.observe(0, MOST, machine.step(0, MOST))
    ratios = []
    for step in range(160):
        decoding = 4 + step // 4
        rows = budget.rows(decoding)
        seconds = machine.step(decoding, rows, 50)
        budget.observe(decoding, rows, seconds)
        ratios.append(seconds / machine.exact(decoding))
    assert max(ratios) <= 2.2
    assert statistics.mean(ratios[40:]) >= 1.4
    decode(budget, machine, 1, 44)
    assert 1.5 * machine.exact(44) < machine.exact(44, budget.rows(44), 50) < 2 * machine.exact(44)


def test_a_load_that_no_longer_has_steps_without_chunks() -> None:
    """Long after the last step without a chunk, sizes are varied to tell the decodes' part from the chunk's."""
    machine = Machine(noise=0.02, stalls=0.0)
    budget = TokenBudget(MOST, None)
    decode(budget, machine, 8)
    machine.slower = 2.5
    chunks = [c for _ in range(6) for c in prompt(budget, machine, 1000)]
    assert chunks[100].rows == FLOOR  # a step takes more than twice what decodes did
    assert max(c.rows for c in chunks[-100:]) > 8 * FLOOR
    assert quantile([c.seconds for c in chunks[-100:]], 0.95) <= 2.5 * machine.exact(DECODING)


def test_seconds_per_row() -> None:
    machine = Machine(noise=0.0, stalls=0.0)
    budget = TokenBudget(MOST, None)
    assert budget.seconds_per_row is None
    budget.observe(0, 100, 0.05)
    assert budget.seconds_per_row == pytest.approx(0.0005)
    decode(budget, machine, 8)
    assert budget.seconds_per_row == pytest.approx(0.0005)
    for _ in range(60):
        budget.observe(DECODING, rows := budget.rows(DECODING), machine.exact(DECODING, rows, 2000))
    assert budget.seconds_per_row == pytest.approx(0.00125, rel=0.1)


def test_figures_that_cannot_be_are_ignored() -> None:
    budget = TokenBudget(MOST, None)
    for seconds in (0.0, -1.0, float("nan"), float("inf")):
        budget.observe(DECODING, 32, seconds)
        budget.observe(DECODING, 0, seconds)
        budget.observe(0, 32, seconds)
    budget.observe(0, 0, 1.0)
    assert budget.seconds_per_row is None
    assert budget.rows(DECODING) == FIRST


@pytest.mark.parametrize(("most", "target"), [(0, None), (1, -1.0), (1, float("nan")), (1, float("inf"))])
def test_wrong_arguments(most: int, target: float | None) -> None:
    with pytest.raises(ValueError, match="not a budget"):
        TokenBudget(most, target)


def test_decode_cost_by_number_of_decodes() -> None:
    cost = DecodeCost()
    assert cost.seconds(4) is None
    assert not cost.covers(1)
    for seconds in (0.02, 0.02, 5.0, 0.02, 0.02):
        cost.observe(4, seconds)
    cost.observe(16, 0.08)
    assert cost.seconds(4) == pytest.approx(0.02)
    assert cost.seconds(10) == pytest.approx(0.05)
    assert cost.seconds(2) == pytest.approx(0.02)
    assert cost.seconds(64) == pytest.approx(0.08)
    assert cost.covers(32)
    assert not cost.covers(33)


def test_decode_cost_follows() -> None:
    cost = DecodeCost()
    for seconds in [0.02] * 30 + [0.04] * 7:
        cost.observe(4, seconds)
    assert cost.seconds(4) == pytest.approx(0.04)
    for _ in range(300):
        cost.observe(1, 0.01)
    cost.observe(4, 0.03)
    assert cost.seconds(4) == pytest.approx(0.03)  # what it was long ago is forgotten


def test_middle() -> None:
    assert middle([3.0]) == 3.0
    assert middle([1.0, 2.0]) == 1.5
    assert middle([9.0, 1.0, 2.0]) == 2.0
    assert middle([0.0, 1.0, 3.0, 100.0]) == 2.0


def test_intercept() -> None:
    line = [(rows, 0.01 + 0.001 * rows) for rows in (10, 20, 10, 20, 10, 20)]
    assert intercept(line) == pytest.approx(0.01)
    assert intercept([*line, (20, 3.0), (10, 3.0)]) == pytest.approx(0.01)
    assert intercept(line[:5]) is None
    assert intercept([(20, 0.03)] * 9) is None
    assert intercept([]) is None
    assert intercept([(rows, 0.02) for rows in (10, 20, 10, 20, 10, 20)]) == pytest.approx(0.02)


def test_few_are_slowed_down_for_many_that_wait() -> None:
    machine = Machine()
    budget = TokenBudget(MOST, None)
    decode(budget, machine, 20, 4)
    alone = machine.exact(4)
    for _ in range(20):
        budget.observe(4, rows := budget.rows(4), machine.exact(4, rows))
    assert budget.rows(4) == budget.rows(4, 1)
    assert alone < machine.exact(4, budget.rows(4, 1)) < 2 * alone
    assert 3 * alone < machine.exact(4, budget.rows(4, 3)) < 4 * alone


def test_with_a_target_nobody_is_slowed_down_beyond_it() -> None:
    budget = TokenBudget(MOST, 0.05)
    decode(budget, Machine(), 20, 4)
    assert budget.rows(4, 25) == budget.rows(4)


def test_rows_of_drafts_are_no_fault_of_the_chunks() -> None:
    """Drafts grow longer while a prompt is computed, and with them the steps; its chunks do not pay for that."""
    machine = Machine(stalls=0.0)
    budget = TokenBudget(MOST, None)
    for rows in (*[48] * 12, *[8] * 30):
        budget.observe(rows, 0, machine.exact(rows))
    shares = []
    for i in range(300):
        seconds = machine.exact(48, rows := budget.rows(48), 13 * i)
        budget.observe(48, rows, seconds)
        shares.append(seconds / machine.exact(48))
    assert 1.6 < statistics.median(shares[20:]) <= max(shares[20:]) < 2.0


def test_a_step_may_take_what_one_with_all_that_wait_takes():
    machine = Machine(noise=0.0, stalls=0.0, per_row_and_position=0.0)
    budget = TokenBudget(MOST, None)
    decode(budget, machine, 8, decoding=12)
    decode(budget, machine, 8, decoding=8)
    prompt(budget, machine, 400, decoding=8)
    few, everybody = machine.exact(8), machine.exact(12)
    # Beside eight that decode, four that wait: twice the time of twelve, less what decodes take.
    expected = (0.9 * 2 * everybody - few) / (0.9 * 2 * few - few)
    assert budget.rows(8, crowd=0.5) / budget.rows(8) == pytest.approx(expected, rel=0.05)
    assert expected > 1.2
