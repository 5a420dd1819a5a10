"""Parts of the native forward: the best token, chosen rows and ids, some layers, hidden states in and out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch

from specserve.core.errors import ModelLoadError
from specserve.kernels.cpu.packing import Kind
from specserve.kernels.cpu.sample import ROW, pack_options, sample_rows
from specserve.models.batch import ForwardBatch
from specserve.models.kv_cache import PagedKVCache
from specserve.models.native import NativeLlama, Partial, PartialResult
from tests.fakes.paging import make_batch, make_cache
from tests.models.native_models import SHAPES, Checkpoint, checkpoint, model, same_bits, tokens

pytestmark = pytest.mark.usefixtures("native_library")

MODELS = [("odd", "bf16"), ("odd", "mixed"), ("dim16", "q8"), ("dim48", "q4_1")]
ROWS, BLOCKS = 49, 6


@pytest.fixture(autouse=True, params=[1, 2], ids=["1-thread", "2-threads"])
def _threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def batch_of(llama: NativeLlama, logit_rows: list[int] | None = None) -> ForwardBatch:
    """Two sequences, of 40 rows and of 9."""
    vocab = llama.info.vocab_size
    batch = make_batch([(tokens(40, vocab, 1), 0, [4, 0, 2]), (tokens(9, vocab, 2), 0, [5])], 16)
    if logit_rows is not None:
        batch.logit_rows = np.array(logit_rows, dtype=np.int64)
    return batch


def whole(llama: NativeLlama, batch: ForwardBatch | None = None) -> tuple[torch.Tensor, PagedKVCache]:
    """Logits of a batch, and the cache after it."""
    cache = make_cache(llama.info, BLOCKS, 16)
    return llama.forward(batch or batch_of(llama), cache), cache


def part(llama: NativeLlama, partial: Partial, cache: PagedKVCache | None = None) -> PartialResult:
    return llama.forward_partial(batch_of(llama), cache or make_cache(llama.info, BLOCKS, 16), partial)


def changed(name: str, row: int, numbers: torch.Tensor | float, kind: str) -> NativeLlama:
    """The model with another row in one matrix, which is bfloat16 then."""
    made = checkpoint("odd", kind)
    weight = made.weights[name].clone()
    weight[row] = numbers
    weights, kinds = {**made.weights, name: weight}, {**made.kinds, name: Kind.BF16}
    return NativeLlama(Checkpoint(weights, kinds).packed(SHAPES["odd"]))


@pytest.mark.parametrize(("shape", "kind"), MODELS)
def test_stopping_after_any_layer_and_going_on_is_the_whole(shape: str, kind: str) -> None:
    llama = model(shape, kind)
    logits, cache = whole(llama)
    end = part(llama, Partial())
    assert same_bits(end.logits, logits)
    for layer in range(llama.info.num_layers + 1):
        mine = make_cache(llama.info, BLOCKS, 16)
        first = part(llama, Partial(last_layer=layer), mine)
        assert first.logits.numel() == (logits.numel() if layer == llama.info.num_layers else 0)
        second = part(llama, Partial(first_layer=layer, hidden=first.hidden), mine)
        assert same_bits(second.logits, logits)
        assert same_bits(second.hidden, end.hidden)
        assert torch.equal(mine.storage, cache.storage)


@pytest.mark.parametrize(("shape", "kind"), MODELS)
def test_kept_states_are_those_where_one_would_stop(shape: str, kind: str) -> None:
    llama = model(shape, kind)
    states = [part(llama, Partial(last_layer=layer + 1)).hidden for layer in range(llama.info.num_layers)]
    rows = torch.tensor([48, 3, 3, 0, 39, 40])
    some = part(llama, Partial(keep_layers=[1, 0, 1], keep_rows=rows))
    assert same_bits(some.kept, torch.stack([states[1], states[0], states[1]])[:, rows])
    assert same_bits(some.logits, whole(llama)[0])
    every = part(llama, Partial(keep_layers=[0], last_layer=1))
    assert same_bits(every.kept, states[0][None])
    assert part(llama, Partial(keep_layers=[0], keep_rows=rows[:0])).kept.shape == (1, 0, llama.info.hidden_size)


def test_without_layers_the_states_are_the_embedding_s() -> None:
    llama = model("odd", "bf16")
    table = checkpoint("odd", "bf16").weights["model.embed_tokens.weight"].bfloat16().float()
    assert same_bits(part(llama, Partial(last_layer=0)).hidden, table[batch_of(llama).token_ids])


@pytest.mark.parametrize(("shape", "kind"), MODELS)
def test_a_part_of_the_vocabulary_is_columns_of_the_whole(shape: str, kind: str) -> None:
    llama = model(shape, kind)
    logits, vocab = whole(llama)[0], llama.info.vocab_size
    for ids in ([vocab - 1], [0, 31, 32, vocab - 1, 0, 33], [33, 32], range(vocab), range(vocab - 1, -1, -2), []):
        chosen = torch.tensor(list(ids), dtype=torch.int64)
        assert same_bits(part(llama, Partial(vocabulary=chosen)).logits, logits[:, chosen])


@pytest.mark.parametrize(("shape", "kind"), MODELS)
def test_logit_rows_choose_rows_and_their_order(shape: str, kind: str) -> None:
    llama = model(shape, kind)
    logits, cache = whole(llama)
    for rows in ([48], [39, 48], [48, 3, 3, 0, 39, 40], list(range(48, -1, -1)), list(range(ROWS)) * 2, []):
        found, mine = whole(llama, batch_of(llama, rows))
        assert same_bits(found, logits[rows])
        assert torch.equal(mine.storage, cache.storage)
        cut = llama.forward_partial(batch_of(llama, rows), make_cache(llama.info, BLOCKS, 16), Partial())
        assert same_bits(cut.logits, logits[rows])


def test_no_rows() -> None:
    llama = model("odd", "q8")
    none, cache = np.empty(0, np.int64), make_cache(llama.info, 1, 16)
    batch = ForwardBatch(none, none, none, none.astype(np.int32), np.empty((0, 0), np.int32), none)
    assert llama.forward(batch, cache).shape == (0, llama.info.vocab_size)
    assert llama.forward_best(batch, cache) == []
    assert llama.forward_draw(batch, cache, 10, b"")[0] == []


@pytest.mark.parametrize(("shape", "kind"), MODELS)
def test_tokens_are_drawn_in_the_forward_as_from_its_logits(shape: str, kind: str) -> None:
    llama = model(shape, kind)
    vocab = llama.info.vocab_size - 3
    rows = [48, 3, 0, 39, 40]
    bias = np.array([vocab - 1]), np.array([50.0], np.float32)
    options = [
        pack_options(7, 0.9, top_p=0.9),
        pack_options(8, 0.0),
        pack_options(9, 1.1, top_k=5),
        pack_options(10, 0.7, bias=bias),
        pack_options(11, 1.0, min_p=0.02),
    ]
    batch, cache = batch_of(llama, rows), make_cache(llama.info, BLOCKS, 16)
    logits = llama.forward(batch, cache)

    def packed(at: int) -> list[bytes]:
        size = logits.stride(0) * logits.element_size()
        return [
            part for i, o in enumerate(options) for part in (ROW.pack(at + i * size * (at > 0), 0, 0, 0, 60 + i), o)
        ]

    expected = sample_rows(packed(logits.data_ptr()), len(rows), vocab)
    tokens, given = llama.forward_draw(batch, cache, vocab, b"".join(packed(0)))
    assert tokens == expected
    assert same_bits(torch.from_numpy(given), logits)
    assert llama.forward_best(batch, cache, vocab) == logits[:, :vocab].argmax(-1).tolist()
    assert same_bits(llama.forward(batch, cache), logits)
    few = batch_of(llama, rows[:2])
    assert llama.forward_draw(few, cache, vocab, b"".join(packed(0)[:4]))[0] == tokens[:2]


def best(llama: NativeLlama, rows: list[int] | None = None, vocab: int | None = None) -> list[int]:
    return llama.forward_best(batch_of(llama, rows), make_cache(llama.info, BLOCKS, 16), vocab)


@pytest.mark.parametrize(("shape", "kind"), MODELS)
def test_the_best_is_the_greatest_logit_s(shape: str, kind: str) -> None:
    llama = model(shape, kind)
    logits, vocab = whole(llama)[0].numpy(), llama.info.vocab_size
    assert best(llama) == logits.argmax(1).tolist()
    for rows in ([48], [48, 0, 7, 7], []):
        assert best(llama, rows) == logits[rows].argmax(1).tolist()
    for count in (1, 2, 31, 32, 33, 63, vocab - 1, vocab):
        assert best(llama, None, count) == logits[:, :count].argmax(1).tolist()


def test_the_lowest_of_equals_is_the_best() -> None:
    made = checkpoint("odd", "bf16")
    head = made.weights["lm_head.weight"][torch.arange(331) % 37]
    equal = replace(made, weights={**made.weights, "lm_head.weight": head})
    llama = NativeLlama(equal.packed(SHAPES["odd"]))
    logits = whole(llama)[0].numpy()
    assert (np.sort(logits, axis=1)[:, -8] == logits.max(1)).all()  # as often as 37 rows repeat at least
    assert logits.argmax(1).max() < 37
    for _ in range(30):  # which of the threads finds which of the equals is chance
        assert best(llama) == logits.argmax(1).tolist()
    zero = replace(made, weights={**made.weights, "lm_head.weight": torch.zeros_like(head)})
    assert best(NativeLlama(zero.packed(SHAPES["odd"]))) == [0] * ROWS


@pytest.mark.parametrize("kind", ["bf16", "q8", "q4_1"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_there_is_no_best_where_a_row_is_not_finite(kind: str, value: float) -> None:
    """One number of one token's embedding spoils that token's row and those that see it, and no other sequence.

    Rows ahead of it may be spoilt where they share its tile of values, for 0 * NaN is NaN; but no token is a wrong one.
    """
    want = best(model("odd", kind))
    token = tokens(40, 331, 1)[25]
    weight = checkpoint("odd", kind).weights["model.embed_tokens.weight"][token].clone()
    plain, weight[17] = weight.clone(), value
    found = best(changed("model.embed_tokens.weight", token, weight, kind))
    if kind != "bf16":
        want = best(changed("model.embed_tokens.weight", token, plain, kind))
    assert token not in tokens(25, 331, 1) + tokens(9, 331, 2)
    assert found[25:40] == [-1] * 15
    assert found[40:] == want[40:]
    assert all(a in (b, -1) for a, b in zip(found[:25], want, strict=False))


@pytest.mark.parametrize("row", [0, 31, 45, 330])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_there_is_no_best_beside_a_logit_that_is_not_finite(row: int, value: float) -> None:
    llama = changed("lm_head.weight", row, value, "bf16")
    assert best(llama) == [-1] * ROWS
    if row:
        assert best(llama, None, row) == best(model("odd", "bf16"), None, row)


@pytest.mark.parametrize(
    ("partial", "match"),
    [
        (Partial(first_layer=2, last_layer=1), "layers 2..1"),
        (Partial(first_layer=-1), "layers -1..2"),
        (Partial(last_layer=3), "layers 0..3"),
        (Partial(keep_layers=[2]), "not among those"),
        (Partial(first_layer=1, keep_layers=[0]), "not among those"),
        (Partial(last_layer=1, keep_layers=[0, 1]), "not among those"),
        (Partial(hidden=torch.zeros(ROWS, 95)), "hidden is not"),
        (Partial(hidden=torch.zeros(ROWS - 1, 96)), "hidden is not"),
        (Partial(hidden=torch.zeros(ROWS, 96, dtype=torch.bfloat16)), "hidden is not"),
        (Partial(hidden=torch.zeros(96, ROWS).T), "hidden is not"),
        (Partial(keep_rows=torch.tensor([ROWS])), "keep_rows: ids"),
        (Partial(keep_rows=torch.tensor([-1])), "keep_rows: ids"),
        (Partial(keep_rows=torch.tensor([1], dtype=torch.int32)), "keep_rows is not int64"),
        (Partial(vocabulary=torch.tensor([0, 331])), "vocabulary: ids"),
        (Partial(vocabulary=torch.tensor([-1])), "vocabulary: ids"),
        (Partial(vocabulary=torch.tensor([1], dtype=torch.int32)), "vocabulary is not int64"),
        (Partial(vocabulary=torch.arange(9)[::2]), "vocabulary is not int64"),
    ],
)
def test_what_is_not_there_is_refused(partial: Partial, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        part(model("odd", "bf16"), partial)


def test_a_cache_of_another_type_is_refused() -> None:
    llama = model("odd", "bf16")
    cache = make_cache(replace(llama.info, dtype="float32"), BLOCKS, 16)
    with pytest.raises(AssertionError):
        llama.forward(batch_of(llama), cache)


def test_weights_in_float32_are_refused() -> None:
    made = checkpoint("dim16", "bf16")
    floats = replace(made, kinds=dict.fromkeys(made.kinds, Kind.F32)).packed(SHAPES["dim16"], "float32")
    with pytest.raises(ModelLoadError, match="float32"):
        NativeLlama(floats)
