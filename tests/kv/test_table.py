"""BlockTable: reserve, commit, rollback, fork with copy-on-write."""

import pytest

from specserve.core.plan import BlockCopy
from specserve.kv.block_pool import BlockPool
from specserve.kv.prefix import PrefixChain
from specserve.kv.table import BlockTable


def table(num_blocks=8, block_size=4, committed=0):
    pool = BlockPool(num_blocks, block_size)
    one = BlockTable(pool)
    assert one.reserve(committed) == ()
    one.commit(committed)
    return pool, one


def test_reserve_takes_whole_blocks_and_rollback_gives_scratch_back():
    pool, one = table(committed=5)
    assert one.reserve(8) == ()
    assert one.capacity == 16
    assert pool.num_used == 4
    one.commit(1)
    one.rollback()
    assert (one.committed, one.capacity, pool.num_used) == (6, 8, 2)
    one.check()


def test_reserve_is_all_or_nothing():
    pool, one = table(num_blocks=2, committed=3)
    assert one.writable() == 5
    assert one.reserve(6) is None
    assert (one.capacity, pool.num_used) == (4, 1)
    assert one.reserve(5) == ()


def test_commit_needs_a_reservation():
    _, one = table(committed=3)
    with pytest.raises(ValueError, match="reserved"):
        one.commit(2)


def test_fork_shares_and_the_first_write_copies():
    pool, one = table(committed=6)
    two = one.fork()
    assert two.block_ids == one.block_ids
    assert pool.num_used == 2
    (copy,) = two.reserve(1)
    assert copy == BlockCopy(one.block_ids[1], two.block_ids[1])
    assert pool.refs(copy.src) == 2, "both ends are held until commit"
    assert two.pending_source == copy.src
    two.commit(1)
    assert pool.refs(copy.src) == 1
    assert one.reserve(1) == (), "the other is alone again and writes in place"
    one.check()
    two.check()


def test_a_fork_at_a_blocks_edge_needs_no_copy():
    _, one = table(committed=8)
    two = one.fork()
    assert two.reserve(1) == ()
    assert two.block_ids[:2] == one.block_ids
    assert one.reserve(1) == ()
    assert two.block_ids[2] != one.block_ids[2]


def test_rollback_undoes_a_copy_that_was_not_committed():
    pool, one = table(committed=6)
    two = one.fork()
    two.reserve(9)
    two.rollback()
    assert two.block_ids == one.block_ids
    assert pool.num_used == 2
    two.check()


def test_the_source_outlives_its_first_owner_until_the_copy_ran():
    pool, one = table(committed=6)
    two = one.fork()
    (copy,) = two.reserve(1)
    one.release()
    assert pool.refs(copy.src) == 1
    two.commit(1)
    assert pool.refs(copy.src) == 0


def test_a_fork_made_while_a_copy_is_pending_takes_the_source():
    _, one = table(committed=6)
    two = one.fork()
    (copy,) = two.reserve(1)
    three = two.fork()
    assert three.block_ids[1] == copy.src
    two.rollback()
    assert three.block_ids == two.block_ids == one.block_ids


@pytest.mark.parametrize("num_tokens", [4, 5, 6])
def test_a_shorter_fork_made_while_a_copy_is_pending(num_tokens):
    pool, one = table(committed=6)
    two = one.fork()
    (copy,) = two.reserve(1)
    three = two.fork(num_tokens)
    assert copy.dst not in three.block_ids
    assert three.block_ids == one.block_ids[: pool.blocks_for(num_tokens)]
    two.commit(1)
    for each in (one, two, three):
        each.check()


def test_a_lone_short_fork_forgets_what_its_block_was_published_as():
    """The block holds more of the parent's text, which is gone: the fork writes over it."""
    pool, one = table(committed=4)
    chain = PrefixChain("", 4)
    one.publish(chain, [1, 2, 3, 4])
    two = one.fork(2)
    one.release()
    assert pool.lookup(chain.digests[0]) == two.block_ids[0]
    assert two.reserve(1) == ()
    assert pool.lookup(chain.digests[0]) is None


def test_a_copy_needs_a_block_of_its_own():
    _, one = table(num_blocks=2, committed=6)
    two = one.fork()
    assert two.writable() == 0
    assert two.reserve(1) is None
    assert one.reserve(1) is None
    two.release()
    assert one.writable() == 2
    assert one.reserve(2) == ()


def test_scratch_is_not_inherited():
    pool, one = table(committed=2)
    one.reserve(8)
    two = one.fork()
    assert two.capacity == 4
    assert pool.num_used == 3


def test_a_published_block_is_forgotten_before_it_is_written():
    """The longer of two forks filled and published the block they share; the shorter one is left alone with it."""
    pool, one = table(committed=2)
    one.reserve(2)
    two = one.fork()
    one.commit(2)
    chain = PrefixChain("", 4)
    one.publish(chain, [1, 2, 3, 4])
    one.release()
    assert pool.lookup(chain.digests[0]) == two.block_ids[0]
    assert two.reserve(1) == ()
    assert pool.lookup(chain.digests[0]) is None


def test_publish_offers_full_committed_blocks_only():
    pool, one = table(committed=6)
    one.reserve(6)
    chain = PrefixChain("", 4)
    one.publish(chain, list(range(12)))
    assert (one.num_hashed, pool.num_published) == (1, 1)
    one.check()


def test_the_deepest_block_of_a_released_chain_is_evicted_first():
    pool, one = table(num_blocks=3, committed=12)
    one.publish(PrefixChain("", 4), list(range(12)))
    ids = list(one.block_ids)
    one.release()
    assert pool.free_order() == ids[::-1]
