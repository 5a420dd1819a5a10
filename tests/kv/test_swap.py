"""Swapping: what goes to host memory and comes back, what is shared, and what a plan holds until it ran."""

import pytest

from specserve.core.plan import BlockSwap
from specserve.kv.block_pool import BlockPool
from specserve.kv.manager import KVManager
from specserve.kv.swap import HostPool

SIZE = 4
TEXT = [1, 2, 3, 4, 5, 6]


def manager(blocks=32, host=32, draft=None, draft_host=None, **options):
    return KVManager(
        BlockPool(blocks, SIZE),
        BlockPool(draft, SIZE) if draft else None,
        host=HostPool(host) if host is not None else None,
        draft_host=HostPool(draft_host) if draft_host is not None else None,
        **options,
    )


def run(kv, tokens, namespace=""):
    """A sequence whose tokens are all computed, in the draft's cache too."""
    seq = kv.open(tokens, namespace)
    left = len(tokens) - seq.target.committed
    assert kv.reserve(seq, left) is not None
    kv.commit(seq, tokens, left)
    if seq.draft is not None and kv.reserve_draft(seq, len(tokens) - seq.draft.committed) is not None:
        kv.commit_draft(seq, tokens, len(tokens) - seq.draft.committed)
    kv.rollback(seq)
    kv.check()
    return seq


def forget_cached(kv):
    """Nothing is found in the prefix cache afterwards, except what is in use."""
    seq = kv.open([99], "")
    assert kv.reserve(seq, kv.writable(seq)) is not None
    kv.release(seq)


def out(kv, *seqs):
    """Swapped out, by a plan that ran."""
    swaps = kv.swap_out(seqs)
    assert swaps is not None
    kv.check()
    kv.swaps_ran()
    kv.check()
    return swaps


def test_out_and_in_again():
    kv = manager()
    seq = run(kv, TEXT)
    blocks = list(seq.target.block_ids)
    swaps = kv.swap_out([seq])
    assert [swap.device for swap in swaps] == blocks
    assert {swap.pool for swap in swaps} == {"target"}
    assert seq.swapped
    assert (seq.target.block_ids, seq.target.committed) == ([], 6)
    assert (kv.usage().blocks_used, kv.usage().host_blocks_used) == (0, 2)
    kv.check()
    kv.swaps_ran()
    forget_cached(kv)
    back = kv.swap_in([seq])
    kv.check()
    assert [swap.host for swap in back] == [swap.host for swap in swaps]
    assert [swap.device for swap in back] == seq.target.block_ids
    assert not seq.swapped
    assert (seq.target.committed, seq.target.num_hashed) == (6, 1)
    assert kv.reserve(seq, 1) == ()
    kv.swaps_ran()
    kv.check()
    kv.release(seq)
    assert kv.baseline()


def test_nothing_is_swapped_without_room_for_all():
    for host in (None, 0, 3):
        kv = manager(host=host)
        seqs = [run(kv, TEXT), run(kv, [9, *TEXT])]
        kv.reserve(seqs[0], 9)
        used, free = kv.usage(), kv.target.free_order()
        assert kv.swap_out(seqs) is None
        assert (kv.usage(), kv.target.free_order()) == (used, free)
        assert seqs[0].target.capacity == 16, "scratch is still there"
        kv.check()


def test_a_shared_block_goes_once_and_comes_back_shared():
    kv = manager(host=4)
    parent = run(kv, TEXT)
    children = [kv.fork(parent), kv.fork(parent, 5)]
    group = [parent, *children]
    kv.reserve(children[0], 1)
    kv.commit(children[0], [*TEXT, 7], 1)
    assert kv.swap_cost(group) == 3
    assert len(out(kv, *group)) == 3
    assert (kv.usage().host_blocks_used, kv.swap_need(group)) == (3, 3)
    assert parent.target.slots == children[1].target.slots
    forget_cached(kv)
    assert len(kv.swap_in(group)) == 3
    assert parent.target.block_ids == children[1].target.block_ids
    assert [s.target.committed for s in group] == [6, 7, 5]
    assert len(kv.reserve(children[1], 1)) == 1, "a block that came back shared is copied before it is written"
    kv.check()
    kv.swaps_ran()
    kv.check()


def test_sharers_that_stay_keep_their_blocks():
    kv = manager()
    parent = run(kv, TEXT)
    child = kv.fork(parent)
    out(kv, child)
    assert kv.usage().blocks_used == 2
    assert kv.reserve(parent, 1) == (), "alone again"


def test_scratch_and_pending_copies_are_dropped():
    kv = manager()
    parent = run(kv, TEXT)
    child = kv.fork(parent)
    (copy,) = kv.reserve(child, 9)
    assert [swap.device for swap in out(kv, child)] == [*parent.target.block_ids]
    assert copy.src in parent.target.block_ids
    assert kv.usage().blocks_used == 2


def test_cached_blocks_are_shared_instead_of_moved_back():
    kv = manager()
    seq = run(kv, TEXT)
    first = seq.target.block_ids[0]
    out(kv, seq)
    back = kv.swap_in([seq])
    assert len(back) == 1, "the partial block alone"
    assert seq.target.block_ids[0] == first
    kv.check()


def test_a_hit_is_not_given_out_again_while_the_rest_is_allocated():
    """Three free blocks, the second to be given out is a hit."""
    kv = manager(blocks=3)
    seq = run(kv, list(range(9)))
    first, second, third = seq.target.block_ids
    out(kv, seq)
    kv.target.unpublish(first)
    assert kv.target.free_order() == [third, second, first]
    assert len(kv.swap_in([seq])) == 2
    assert seq.target.block_ids[1] == second
    kv.check()


def test_in_is_refused_without_room_and_then_nothing_changes():
    kv = manager(blocks=3)
    seq = run(kv, TEXT)
    out(kv, seq)
    other = run(kv, [9] * 6)
    free, used = kv.target.free_order(), kv.usage()
    assert kv.swap_need([seq]) == 2
    assert kv.swap_in([seq]) is None
    assert (free, used) == (kv.target.free_order(), kv.usage())
    assert seq.swapped
    kv.release(other)
    assert kv.swap_in([seq]) is not None


def test_filled_blocks_are_published_when_the_plan_ran():
    kv = manager()
    seq = run(kv, TEXT)
    out(kv, seq)
    forget_cached(kv)
    kv.swap_in([seq])
    assert kv.open([*TEXT], "").target.committed == 0
    kv.swaps_ran()
    assert kv.open([*TEXT], "").target.block_ids == seq.target.block_ids[:1]
    kv.check()


def test_host_slots_are_held_until_the_plan_ran():
    kv = manager(host=2)
    one, two = run(kv, TEXT), run(kv, [9] * 6)
    out(kv, one)
    kv.swap_in([one])
    assert kv.usage().host_blocks_used == 2
    assert kv.swap_out([two]) is None
    kv.swaps_ran()
    assert kv.usage().host_blocks_used == 0
    assert kv.swap_out([two]) is not None
    kv.release(two)
    assert kv.usage().host_blocks_used == 2, "the plan writes them"
    kv.swaps_ran()
    assert kv.usage().host_blocks_used == 0


def test_kv_that_has_not_arrived_cannot_go_out_again():
    kv = manager()
    seq = run(kv, TEXT)
    out(kv, seq)
    forget_cached(kv)
    kv.swap_in([seq])
    child = kv.fork(seq, 3)
    assert kv.unsettled(seq)
    assert kv.unsettled(child)
    assert kv.swap_out([seq]) is None
    assert kv.swap_out([child]) is None
    kv.swaps_ran()
    assert not kv.unsettled(child)
    assert kv.swap_out([seq, child]) is not None


def test_no_block_is_filled_twice_by_one_plan():
    kv = manager(blocks=4)
    one, two = run(kv, TEXT), run(kv, [9] * 6)
    out(kv, one, two)
    forget_cached(kv)
    first = kv.swap_in([one])
    kv.release(one)
    second = kv.swap_in([two])
    assert not {s.device for s in first} & {s.device for s in second}
    kv.check()
    kv.swaps_ran()
    kv.check()
    assert kv.usage().blocks_used == 2


def test_drafts_go_along_where_there_is_room():
    kv = manager(draft=8, draft_host=4)
    seq = run(kv, TEXT)
    assert kv.swap_cost([seq]) == 4
    assert [s.pool for s in out(kv, seq)] == ["target"] * 2 + ["draft"] * 2
    assert (seq.draft.committed, kv.usage().draft_blocks_used, kv.usage().draft_host_blocks_used) == (6, 0, 2)
    forget_cached(kv)
    assert [s.pool for s in kv.swap_in([seq])] == ["target"] * 2 + ["draft"]
    assert seq.draft.committed == 6
    kv.check()
    kv.swaps_ran()
    kv.check()
    kv.release(seq)
    assert kv.baseline()


@pytest.mark.parametrize("draft_host", [None, 0, 1])
def test_drafts_are_dropped_where_the_host_has_no_room(draft_host):
    kv = manager(draft=8, draft_host=draft_host)
    seq = run(kv, TEXT)
    assert kv.swap_cost([seq]) == 2
    assert [s.pool for s in out(kv, seq)] == ["target"] * 2
    assert (seq.draft.committed, kv.usage().draft_blocks_used) == (0, 0)
    assert kv.swap_in([seq]) is not None
    assert kv.reserve_draft(seq, 6) == ()
    kv.commit_draft(seq, TEXT, 6)
    kv.check()


def test_drafts_stay_away_where_their_pool_has_no_room():
    kv = manager(draft=3, draft_host=4)
    seq = run(kv, TEXT)
    out(kv, seq)
    other = kv.open([9] * 9, "")
    assert kv.reserve_draft(other, 9) == ()
    assert {s.pool for s in kv.swap_in([seq])} == {"target"}
    assert (seq.draft.committed, seq.target.committed) == (0, 6)
    assert kv.usage().draft_host_blocks_used == 2
    kv.check()
    kv.swaps_ran()
    assert kv.usage().draft_host_blocks_used == 0


def test_swapped_sequences_take_nothing_but_rollback_and_release():
    kv = manager(draft=8, draft_host=8)
    seq = run(kv, TEXT)
    out(kv, seq)
    for refused in (
        lambda: kv.reserve(seq, 1),
        lambda: kv.reserve_draft(seq, 1),
        lambda: kv.commit(seq, [*TEXT, 7], 1),
        lambda: kv.commit_draft(seq, [*TEXT, 7], 1),
        lambda: kv.write_draft(seq, 1),
        lambda: kv.fork(seq),
        lambda: kv.swap_out([seq]),
    ):
        with pytest.raises(ValueError):
            refused()
    kv.rollback(seq)
    assert (kv.writable(seq), kv.writable_draft(seq)) == (0, 0)
    kv.check()


def test_wrong_sequences_are_refused():
    kv = manager()
    seq = run(kv, TEXT)
    gone = run(kv, TEXT)
    kv.release(gone)
    for wrong in (lambda: kv.swap_in([seq]), lambda: kv.swap_out([seq, seq]), lambda: kv.swap_out([gone])):
        with pytest.raises(ValueError):
            wrong()
    assert kv.swap_out([]) == ()


@pytest.mark.parametrize("settled", [True, False])
def test_trap_d6_a_swapped_sequence_that_is_dropped_leaves_nothing(settled):
    kv = manager(draft=8, draft_host=8)
    seqs = [run(kv, TEXT), run(kv, [9] * 6)]
    seqs.append(kv.fork(seqs[0], 5))
    kv.swap_out(seqs)
    if settled:
        kv.swaps_ran()
    for seq in seqs:
        kv.release(seq)
        kv.check()
    if not settled:
        assert not kv.baseline()
        kv.swaps_ran()
    assert kv.baseline()


@pytest.mark.parametrize("told_first", [True, False])
def test_what_a_failed_plan_brought_in_is_never_found(told_first):
    kv = manager(draft=8, draft_host=8)
    seq, ended = run(kv, TEXT), run(kv, [9] * 6)
    out(kv, seq, ended)
    forget_cached(kv)
    kv.swap_in([seq, ended])
    if told_first:
        kv.swaps_ran(failed=True)
        kv.lost(seq)
        kv.release(ended)
    else:
        kv.lost(seq)
        kv.lost(ended)
        kv.swaps_ran()
    kv.check()
    assert kv.baseline()
    assert kv.open([*TEXT], "").target.committed == 0
    assert kv.open([9] * 6, "").target.committed == 0


def test_what_a_failed_plan_took_out_is_dropped():
    kv = manager()
    seq = run(kv, TEXT)
    kv.swap_out([seq])
    kv.lost(seq)
    kv.swaps_ran(failed=True)
    assert kv.baseline()
    assert kv.open([*TEXT], "").target.committed == 4, "the device block was only read"


def test_a_lost_sequences_chain_serves_its_next_try():
    kv = manager()
    seq = run(kv, TEXT)
    kv.swap_out([seq])
    kv.lost(seq)
    kv.swaps_ran()
    assert kv.open(TEXT, "", seq.chain).target.committed == 4


def test_recompute_rows_spare_what_others_keep():
    kv = manager()
    seq = run(kv, list(range(9)))
    assert kv.recompute_rows(seq) == 9
    kv.open(list(range(6)), "")
    assert kv.recompute_rows(seq) == 5
    kv.open(list(range(9)), "")
    assert kv.recompute_rows(seq) == 1
    private = manager(prefix_cache=False)
    seq = run(private, TEXT)
    private.fork(seq)
    assert private.recompute_rows(seq) == 6


def test_moves_name_both_ends():
    kv = manager()
    seq = run(kv, [1])
    (swap,) = out(kv, seq)
    assert swap == BlockSwap(swap.device, seq.target.slots[0], "target")


def test_a_sequence_without_kv_can_be_swapped():
    kv = manager()
    seq = kv.open([1], "")
    assert kv.swap_out([seq]) == ()
    assert seq.swapped
    assert kv.swap_in([seq]) == ()
    assert kv.reserve(seq, 1) == ()
