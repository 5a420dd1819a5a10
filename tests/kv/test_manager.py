"""KVManager: prefix hits, drafts beside the target, and what may be cached."""

import pytest

from specserve.kv.block_pool import BlockPool
from specserve.kv.manager import KVManager

SIZE = 4


def manager(blocks=32, draft=None, **options):
    return KVManager(BlockPool(blocks, SIZE), BlockPool(draft, SIZE) if draft else None, **options)


def run(kv, tokens, namespace=""):
    """A sequence whose tokens are all computed."""
    seq = kv.open(tokens, namespace)
    left = len(tokens) - seq.target.committed
    assert kv.reserve(seq, left) is not None
    kv.commit(seq, tokens, left)
    kv.rollback(seq)
    kv.check()
    return seq


def hit(kv, tokens, namespace=""):
    seq = kv.open(tokens, namespace)
    committed = seq.target.committed
    kv.check()
    kv.release(seq)
    return committed


def test_a_finished_prefix_is_hit_in_whole_blocks():
    kv = manager()
    tokens = list(range(11))
    kv.release(run(kv, tokens))
    assert kv.baseline()
    assert hit(kv, [*tokens, 5]) == 8
    assert hit(kv, [0, 1, 2, 3, 9, 9, 9, 9, 9]) == 4
    assert hit(kv, [9, *tokens]) == 0


def test_the_last_prompt_token_is_always_computed():
    kv = manager()
    kv.release(run(kv, list(range(8))))
    assert hit(kv, list(range(8))) == 4
    assert hit(kv, list(range(9))) == 8
    assert hit(kv, [0]) == 0


def test_running_sequences_are_hit_too_and_share_blocks():
    kv = manager()
    one = run(kv, list(range(8)))
    two = kv.open(list(range(9)), "")
    assert two.target.block_ids == one.target.block_ids
    assert kv.usage().blocks_used == 2


def test_trap_d15_namespaces_isolate():
    kv = manager(draft=32)
    tokens = list(range(12))
    seq = run(kv, tokens, "tenant a")
    kv.reserve_draft(seq, 12)
    kv.commit_draft(seq, tokens, 12)
    other = kv.open(tokens, "tenant b")
    assert (other.target.committed, other.draft.committed) == (0, 0)
    same = kv.open(tokens, "tenant a")
    assert (same.target.committed, same.draft.committed) == (8, 8)


def test_without_prefix_cache_nothing_is_published():
    kv = manager(prefix_cache=False)
    kv.release(run(kv, list(range(12))))
    assert hit(kv, list(range(12))) == 0
    assert kv.target.num_published == 0


def test_equal_prompts_at_once_keep_the_first_and_stay_apart():
    kv = manager()
    tokens = list(range(8))
    one, two = kv.open(tokens, ""), kv.open(tokens, "")
    for seq in (one, two):
        kv.reserve(seq, 8)
    for seq in (one, two):
        kv.commit(seq, tokens, 8)
    kv.check()
    assert not set(one.target.block_ids) & set(two.target.block_ids)
    assert kv.target.num_published == 2
    kv.release(two)
    kv.check()
    assert hit(kv, [*tokens, 1]) == 8
    again = kv.open([*tokens, 1], "")
    assert again.target.block_ids == one.target.block_ids


@pytest.mark.parametrize("accepted", range(6))
def test_trap_d11_only_accepted_tokens_are_cached(accepted):
    """A draft over a block's edge is rejected at each place; its text as a prompt hits accepted tokens only."""
    kv = manager(draft=32)
    known, draft = [1, 2, 3], [4, 5, 6, 7, 8]
    seq = kv.open(known, "")
    kv.reserve_draft(seq, len(known) + 4)
    kv.commit_draft(seq, known, len(known))
    kv.write_draft(seq, 4)
    kv.reserve(seq, len(known) + len(draft))
    known = [*known, *draft[:accepted], 99]
    kv.commit(seq, known, 3 + accepted)
    kv.rollback(seq)
    kv.check()
    assert seq.draft.committed == 3 + min(accepted, 4)
    kv.release(seq)
    text = [1, 2, 3, *draft, 9, 9]
    probe = kv.open(text, "")
    assert probe.target.committed == (3 + accepted) // SIZE * SIZE
    assert probe.draft.committed == (3 + min(accepted, 4)) // SIZE * SIZE
    assert kv.target.num_published == probe.target.committed // SIZE


def test_trap_a19_last_candidate_rejected_with_one_draft():
    """K=1 at a block's edge: the rejected candidate would have filled the block; the block is not published."""
    kv = manager()
    seq = run(kv, [1, 2, 3])
    kv.reserve(seq, 2)  # token 4 is computed, candidate 50 behind it
    kv.commit(seq, [1, 2, 3, 4, 60], 1)
    kv.rollback(seq)
    assert seq.target.committed == 4
    kv.reserve(seq, 2)
    kv.commit(seq, [1, 2, 3, 4, 60, 7], 1)
    kv.rollback(seq)
    kv.release(seq)
    assert hit(kv, [1, 2, 3, 4, 50, 7, 7, 7, 7]) == 4
    assert kv.target.num_published == 1


def test_nothing_past_the_known_tokens_can_be_committed():
    kv = manager(draft=8)
    seq = kv.open([1, 2, 3], "")
    kv.reserve(seq, 8)
    kv.reserve_draft(seq, 8)
    with pytest.raises(ValueError, match="3 known"):
        kv.commit(seq, [1, 2, 3], 4)
    with pytest.raises(ValueError, match="3 known"):
        kv.commit_draft(seq, [1, 2, 3], 4)
    with pytest.raises(ValueError, match="reserved"):
        kv.write_draft(seq, 9)


def test_reserve_says_none_and_changes_nothing_when_full():
    kv = manager(blocks=3)
    one = run(kv, list(range(8)))
    two = kv.open([50], "")
    assert kv.writable(two) == 4
    assert kv.reserve(two, 5) is None
    assert kv.usage().blocks_used == 2
    assert kv.reserve(two, 4) == ()
    assert kv.reserve(one, 1) is None


def test_fork_moves_both_tables_and_names_the_pool_of_a_copy():
    kv = manager(draft=8)
    seq = run(kv, [1, 2, 3, 4, 5, 6])
    kv.reserve_draft(seq, 6)
    kv.commit_draft(seq, [1, 2, 3, 4, 5, 6], 6)
    child = kv.fork(seq)
    assert child.target.block_ids == seq.target.block_ids
    assert child.draft.block_ids == seq.draft.block_ids
    assert [c.pool for c in kv.reserve(child, 1)] == ["target"]
    assert [c.pool for c in kv.reserve_draft(child, 1)] == ["draft"]
    kv.check()
    kv.rollback(child)
    assert child.draft.block_ids == seq.draft.block_ids
    kv.release(seq)
    kv.check()
    kv.release(child)
    assert kv.baseline()


@pytest.mark.parametrize("num_tokens", range(10))
def test_a_fork_of_some_tokens(num_tokens):
    kv = manager(draft=8)
    tokens = list(range(9))
    seq = run(kv, tokens)
    kv.reserve_draft(seq, 6)
    kv.commit_draft(seq, tokens, 6)
    child = kv.fork(seq, num_tokens)
    assert (child.target.committed, child.draft.committed) == (num_tokens, min(num_tokens, 6))
    assert child.target.block_ids == seq.target.block_ids[: -(-num_tokens // SIZE)]
    assert child.draft.block_ids == seq.draft.block_ids[: -(-min(num_tokens, 6) // SIZE)]
    assert (child.target.num_hashed, child.draft.num_hashed) == (num_tokens // SIZE, min(num_tokens, 6) // SIZE)
    assert child.chain.digests == seq.chain.digests[: num_tokens // SIZE]
    assert len(kv.reserve(child, 1)) == (num_tokens % SIZE != 0)
    other = [*tokens[:num_tokens], 99]
    kv.commit(child, other, 1)
    kv.check()
    kv.release(child)
    assert hit(kv, [*tokens, 0]) == 8
    assert hit(kv, [*other, 0]) == (num_tokens + 1) // SIZE * SIZE
    assert seq.target.committed == 9


def test_a_fork_copies_before_its_parent_writes_what_it_reserved():
    """The parent reserved in place, in this very step; the child shares the block, reserves and copies it."""
    kv = manager()
    seq = run(kv, [1, 2, 3, 4, 5, 6])
    assert kv.reserve(seq, 1) == ()
    child = kv.fork(seq, 5)
    (copy,) = kv.reserve(child, 1)
    assert copy.src == seq.target.block_ids[1]
    kv.commit(seq, [1, 2, 3, 4, 5, 6, 7], 1)
    kv.commit(child, [1, 2, 3, 4, 5, 9], 1)
    kv.check()
    assert seq.target.block_ids[1] != child.target.block_ids[1]


def test_forks_outside_of_what_is_committed_are_refused():
    kv = manager()
    seq = run(kv, [1, 2, 3])
    kv.reserve(seq, 5)
    for wrong in (-1, 4):
        with pytest.raises(ValueError, match="3 committed"):
            kv.fork(seq, wrong)
    assert kv.num_sequences == 1


def test_forks_publish_their_own_text():
    kv = manager()
    seq = run(kv, [1, 2, 3, 4, 5, 6])
    child = kv.fork(seq)
    for one, tail in ((seq, [7, 8]), (child, [9, 9])):
        kv.reserve(one, 2)
        kv.commit(one, [1, 2, 3, 4, 5, 6, *tail], 2)
    kv.release(seq)
    kv.release(child)
    assert hit(kv, [1, 2, 3, 4, 5, 6, 7, 8, 0]) == 8
    assert hit(kv, [1, 2, 3, 4, 5, 6, 9, 9, 0]) == 8
    assert hit(kv, [1, 2, 3, 4, 5, 6, 0, 0, 0]) == 4


def test_a_second_draft_forgets_the_first():
    kv = manager(draft=8)
    seq = kv.open([1, 2], "")
    kv.reserve_draft(seq, 6)
    kv.commit_draft(seq, [1, 2], 2)
    kv.write_draft(seq, 1)
    kv.write_draft(seq, 1)
    assert seq.written == 2
    kv.reserve_draft(seq, 4)
    assert seq.written == 0
    kv.write_draft(seq, 2)
    kv.commit_draft(seq, [1, 2, 3], 1)
    assert seq.written == 0


def test_draft_pool_may_be_full_while_the_target_goes_on():
    kv = manager(draft=1)
    seq = kv.open(list(range(6)), "")
    assert kv.reserve_draft(seq, 6) is None
    assert kv.writable_draft(seq) == 4
    assert kv.reserve(seq, 6) == ()


def test_a_sequence_without_draft_table():
    kv = manager()
    seq = run(kv, [1, 2])
    assert kv.reserve_draft(seq, 1) is None
    assert kv.writable_draft(seq) == 0
    with pytest.raises(ValueError, match="no draft table"):
        kv.write_draft(seq, 1)


def test_release_twice_is_an_error():
    kv = manager()
    seq = run(kv, [1, 2])
    kv.release(seq)
    with pytest.raises(ValueError, match="released before"):
        kv.release(seq)
    assert kv.baseline()


def test_capacity_alone():
    kv = manager(blocks=3)
    assert kv.max_positions == 12
    assert kv.can_ever_fit(12)
    assert not kv.can_ever_fit(13)


def test_pools_of_different_block_size_are_refused():
    with pytest.raises(ValueError, match="block sizes differ"):
        KVManager(BlockPool(4, 4), BlockPool(4, 8))


def test_check_sees_a_leaked_block():
    kv = manager()
    run(kv, [1, 2])
    kv.target.allocate()
    with pytest.raises(AssertionError, match="counted"):
        kv.check()
