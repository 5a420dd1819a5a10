"""BlockPool: references, the free list's order, publishing."""

import pytest

from specserve.kv.block_pool import BlockPool


def test_allocates_every_block_once_and_then_none():
    pool = BlockPool(4, 16)
    blocks = [pool.allocate() for _ in range(4)]
    assert sorted(blocks) == [0, 1, 2, 3]
    assert (pool.num_free, pool.num_used) == (0, 4)
    with pytest.raises(RuntimeError, match="no free KV block"):
        pool.allocate()
    pool.check()


def test_a_block_is_free_when_its_last_reference_goes():
    pool = BlockPool(2, 16)
    block = pool.allocate()
    pool.share(block)
    pool.free(block)
    assert pool.num_used == 1
    pool.free(block)
    assert pool.num_used == 0
    with pytest.raises(RuntimeError, match="freed twice"):
        pool.free(block)
    pool.check()


def test_an_empty_pool_is_refused():
    for num_blocks, block_size in ((0, 16), (1, 0)):
        with pytest.raises(ValueError, match="holds nothing"):
            BlockPool(num_blocks, block_size)


def test_published_blocks_are_evicted_in_order_of_last_use_after_all_private_ones():
    pool = BlockPool(4, 16)
    a, b, c, d = (pool.allocate() for _ in range(4))
    for block, digest in ((a, b"a"), (b, b"b"), (c, b"c")):
        pool.publish(block, digest)
    for block in (a, b, c, d):
        pool.free(block)
    assert pool.free_order() == [d, a, b, c]
    pool.share(a)  # a hit
    pool.free(a)
    assert pool.free_order() == [d, b, c, a]
    pool.check()
    assert [pool.allocate() for _ in range(3)] == [d, b, c]
    assert pool.lookup(b"b") is None
    assert pool.lookup(b"c") is None
    assert pool.lookup(b"a") == a
    pool.check()


def test_the_first_block_of_a_digest_stays():
    pool = BlockPool(3, 16)
    first, second = pool.allocate(), pool.allocate()
    assert pool.publish(first, b"x")
    assert pool.publish(first, b"x")
    assert not pool.publish(second, b"x")
    assert pool.lookup(b"x") == first
    assert not pool.published(second)
    pool.free(second)
    pool.check()
    assert pool.lookup(b"x") == first


def test_unpublish_forgets_and_is_a_no_op_for_private_blocks():
    pool = BlockPool(2, 16)
    block = pool.allocate()
    pool.unpublish(block)
    pool.publish(block, b"x")
    pool.unpublish(block)
    assert pool.lookup(b"x") is None
    assert pool.num_published == 0
    pool.check()


def test_a_free_block_cannot_be_published():
    pool = BlockPool(2, 16)
    with pytest.raises(RuntimeError, match="while free"):
        pool.publish(0, b"x")


def test_blocks_for_rounds_up():
    pool = BlockPool(2, 16)
    assert [pool.blocks_for(n) for n in (0, 1, 16, 17)] == [0, 1, 1, 2]


def test_check_sees_a_broken_count():
    pool = BlockPool(2, 16)
    pool._refs[0] = 1
    with pytest.raises(AssertionError):
        pool.check()
