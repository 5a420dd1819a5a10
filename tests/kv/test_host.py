"""HostPool and SwappedTable: slots with references, and what a swapped table refuses."""

import pytest

from specserve.kv.block_pool import BlockPool
from specserve.kv.host import HostPool, SwappedTable


def test_allocates_every_slot_once_and_then_none():
    host = HostPool(3)
    assert sorted(host.allocate() for _ in range(3)) == [0, 1, 2]
    assert (host.num_free, host.num_used) == (0, 3)
    with pytest.raises(RuntimeError, match="no free host slot"):
        host.allocate()
    host.check()


def test_a_slot_is_free_when_its_last_reference_goes():
    host = HostPool(1)
    slot = host.allocate()
    host.share(slot)
    host.free(slot)
    assert host.num_free == 0
    host.free(slot)
    assert host.num_free == 1
    host.check()
    with pytest.raises(RuntimeError, match="freed twice"):
        host.free(slot)
    with pytest.raises(RuntimeError, match="shared while free"):
        host.share(slot)


def test_a_pool_of_none_is_a_pool_and_a_negative_one_is_not():
    host = HostPool(0)
    assert host.num_free == 0
    host.check()
    with pytest.raises(ValueError, match="-1 blocks"):
        HostPool(-1)


def test_check_sees_a_broken_count():
    host = HostPool(2)
    host._refs[0] = 1
    with pytest.raises(AssertionError):
        host.check()


def test_a_swapped_table_takes_nothing_but_rollback_and_release():
    host = HostPool(2)
    slots = (host.allocate(), host.allocate())
    table = SwappedTable(BlockPool(4, 4), "target", host, slots, committed=6, num_hashed=1)
    for refused in (lambda: table.reserve(1), lambda: table.commit(0), table.fork):
        with pytest.raises(ValueError, match="swapped out"):
            refused()
    table.rollback()
    assert (table.writable(), table.committed, table.slots, table.block_ids) == (0, 6, slots, [])
    table.check()
    table.release()
    assert host.num_used == 0
    assert table.committed == 0
