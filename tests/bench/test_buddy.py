"""Contiguous regions: never overlapping, always merged again; and what each rule reserves."""

import random

import pytest

from bench.policies.buddy import BuddyAllocator, reservation


@pytest.mark.parametrize("total", [1, 64, 100, 15_728])
def test_regions_never_overlap_and_merge_again(total):
    rng = random.Random(total)
    allocator = BuddyAllocator(total)
    whole = sorted((start, size) for size, starts in allocator._free.items() for start in starts)
    for _ in range(400):
        if allocator.held and rng.random() < 0.5:
            allocator.free(rng.choice(sorted(allocator.held)))
        else:
            slots = rng.randint(1, total)
            start = allocator.allocate(slots)
            if start is not None:
                assert allocator.held[start] >= slots
                assert allocator.held[start] < 2 * slots
        allocator.check()
    for start in sorted(allocator.held, key=lambda _: rng.random()):
        allocator.free(start)
    allocator.check()
    assert sorted((start, size) for size, starts in allocator._free.items() for start in starts) == whole


def test_a_region_needs_contiguous_space():
    allocator = BuddyAllocator(64)
    regions = [allocator.allocate(16) for _ in range(4)]
    assert sorted(regions) == [0, 16, 32, 48]
    allocator.free(16)
    allocator.free(32)
    assert allocator.num_held == 32
    assert allocator.allocate(32) is None, "32 slots are free, but no buddies: external fragmentation"
    allocator.free(0)
    assert allocator.allocate(32) == 0


def test_a_total_that_is_no_power_of_two_is_used_whole():
    allocator = BuddyAllocator(15_728)
    count = 0
    while allocator.allocate(2048) is not None:
        count += 1
    assert count == 7, "the batch of the paper's first server under Max"
    assert allocator.allocate(1024) is not None
    allocator.check()


def test_a_region_is_given_back_once():
    allocator = BuddyAllocator(8)
    start = allocator.allocate(3)
    allocator.free(start)
    with pytest.raises(KeyError):
        allocator.free(start)


@pytest.mark.parametrize(
    ("rule", "slots"),
    [
        ("max", [2048, 2048, 2048, 2048]),
        ("pow2", [10 + 32, 10 + 32, 10 + 64, 2048]),  # 25 -> 32, 32 -> 32, 33 -> 64; never past the context
        ("oracle", [35, 42, 43, 10 + 1500]),
    ],
)
def test_what_the_rules_reserve(rule, slots):
    assert [reservation(rule, 10, output, 2048) for output in (25, 32, 33, 1500)] == slots


def test_pow2_reserves_at_most_twice_the_output():
    for output in range(1, 1000):
        assert output <= reservation("pow2", 0, output, 2048) < 2 * output + 1


def test_an_unknown_rule_is_refused():
    with pytest.raises(ValueError, match="max, pow2, oracle"):
        reservation("best", 1, 1, 8)
