import random

import numpy as np

from specserve.core.plan import ScheduledRequest
from specserve.worker.inputs import BatchBuilder, build_batch


def test_rows_slots_and_logit_rows():
    items = [
        ScheduledRequest("a", 0, (5, 6, 7), 3, [9, 4], 1),
        ScheduledRequest("b", 0, (8,), 0, [2], 0),
        ScheduledRequest("c", 0, (1, 2), 7, [1, 3, 8, 6], 2),
    ]
    batch = build_batch(items, [i.num_logits for i in items], 4)
    assert batch.token_ids.tolist() == [5, 6, 7, 8, 1, 2]
    assert batch.positions.tolist() == [3, 4, 5, 0, 7, 8]
    assert batch.slots.tolist() == [9 * 4 + 3, 16, 17, 8, 3 * 4 + 3, 8 * 4]
    assert batch.row_sequence.tolist() == [0, 0, 0, 1, 2, 2]
    assert batch.block_tables.tolist() == [[9, 4, 0], [2, 0, 0], [1, 3, 8]]
    assert batch.logit_rows.tolist() == [2, 4, 5]
    assert batch.segments == [(0, 3, 0, 3), (3, 1, 1, 0), (4, 2, 2, 7)]
    assert batch.logit_rows.dtype == np.int64
    batch.check(10, 4)


def test_random_plans_hold_the_invariants():
    rng = random.Random(3)
    for _ in range(50):
        size = rng.choice([1, 3, 16])
        items, wanted = [], []
        for n in range(rng.randint(1, 8)):
            start, count = rng.randint(0, 40), rng.randint(1, 20)
            blocks = rng.sample(range(200), -(-(start + count) // size) + rng.randint(0, 2))
            tokens = tuple(rng.choices(range(100), k=count))
            wanted.append(rng.randint(0, count))
            items.append(ScheduledRequest(str(n), 0, tokens, start, blocks, wanted[-1]))
        batch = build_batch(items, wanted, size)
        batch.check(200, size)
        rows = [
            first + count - k + j
            for (first, count, _, _), k in zip(batch.segments, wanted, strict=True)
            for j in range(k)
        ]
        assert batch.logit_rows.tolist() == rows


def test_kept_tables_follow_their_sequences():
    """Over many steps one builder makes what a new one makes: blocks are copied, given back and taken by others."""
    rng = random.Random(5)
    builder = BatchBuilder(4)
    tables = {name: [] for name in "abcdef"}
    for step in range(200):
        present = rng.sample(sorted(tables), rng.randint(1, 6))
        items = []
        for name in present:
            start = rng.randint(0, 30) if step % 3 else rng.randint(0, 120)
            count = 1 if step % 2 else rng.randint(1, 9)
            need = -(-(start + count) // 4)
            table = tables[name]
            if rng.random() < 0.3 and table:
                table[rng.randrange(len(table))] = rng.randrange(500)
            if rng.random() < 0.1:
                table = tables[name] = list(table)
            del table[need + rng.randint(0, 1) :]
            table.extend(rng.randrange(500) for _ in range(need - len(table)))
            items.append(ScheduledRequest(name, 0, tuple(rng.choices(range(100), k=count)), start, table, 1))
        wanted = [1 if step % 2 else rng.randint(0, len(i.token_ids)) for i in items]
        batch, fresh = builder.build(items, wanted), build_batch(items, wanted, 4)
        batch.check(500, 4)
        for name in ("token_ids", "positions", "slots", "row_sequence", "logit_rows"):
            found, expected = getattr(batch, name), getattr(fresh, name)
            assert np.array_equal(found, expected)
            assert (found.dtype, found.flags.c_contiguous) == (expected.dtype, True)
        assert batch.segments == fresh.segments
        assert batch.block_tables.flags.c_contiguous
        width = batch.block_tables.shape[1]
        used = [i.block_ids[: -(-(i.start + len(i.token_ids)) // 4)] for i in items]
        assert batch.block_tables.tolist() == [[*ids, *[0] * (width - len(ids))] for ids in used]
        assert width < max(map(len, used)) + 32


def test_decodes_come_in_the_same_arrays_and_say_so():
    """Until another number of them comes, or a table outgrows its room: a model may keep pointers."""
    builder = BatchBuilder(4)

    def decode(token, start, blocks, count=1):
        items = [ScheduledRequest("a", 0, (token,), start, blocks, 1)] * count
        return builder.build(items, [1] * count)

    batch = decode(5, 3, [9])
    place = batch.token_ids.ctypes.data
    assert batch.kept
    again = decode(6, 4, [9, 7])
    assert again is batch
    assert (again.token_ids.ctypes.data, again.token_ids.tolist(), again.slots.tolist()) == (place, [6], [28])
    assert decode(6, 4, [9, 7], count=2) is not batch
    assert decode(1, 0, [3]) is not decode(1, 64, list(range(17)))
    chunk = [ScheduledRequest("a", 0, (5, 6), 3, [9, 8], 1)]
    assert not builder.build(chunk, [1]).kept
