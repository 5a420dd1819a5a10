"""The kernels' bench: what it times is what the forward runs, and its figures stand against the right ceilings."""

from __future__ import annotations

import pytest
import torch
from gguf import GGMLQuantizationType, quants

from bench.kernel_parts import products as products_module
from bench.kernel_parts.attention import CONTEXT, DIM, HEADS, Paged
from bench.kernel_parts.ceilings import Ceilings, Peak
from bench.kernel_parts.forward import rows_of
from bench.kernel_parts.measure import Bench, Settings, in_turn, joined
from bench.kernel_parts.products import ADDED, GATED, STORED
from specserve.kernels.cpu import ops
from specserve.kernels.cpu.build import BuildError
from specserve.kernels.cpu.isa import runnable
from specserve.kernels.cpu.memory import huge
from specserve.kernels.cpu.native import use_library
from specserve.kernels.cpu.packing import Kind, dequantise_rows, pack_rows, packed_bytes, quantise_rows

KINDS = [Kind.BF16, Kind.Q8, Kind.Q4_0, Kind.Q4_1]
N, K = 70, 96  # the last panel has outputs that are none


@pytest.fixture(scope="module", params=[variant.name for variant in runnable()] or [None])
def bench(request):
    """A bench of each instruction set that this machine runs, on little memory."""
    if request.param is None:
        pytest.skip("this machine has no instruction set that the native kernels are compiled for")
    settings = Settings(threads=[2], repeats=1, streamed=1 << 20, multiplied=1 << 16, forward=False)
    try:
        with use_library(request.param) as library:
            yield Bench(library, request.param, 2, settings, torch.from_numpy(huge(8 << 20)), lambda what: None)
    except BuildError as error:
        pytest.skip(f"cannot be compiled here: {error}")


def whole_numbers(kind: Kind, n: int, k: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of a kind, and the same as float32: whole numbers so small that no product of theirs is ever rounded."""
    random = torch.Generator().manual_seed(seed)
    low, high = {Kind.BF16: (-99, 99), Kind.Q8: (-127, 127), Kind.Q4_0: (-8, 7), Kind.Q4_1: (0, 15)}[kind]
    w = torch.randint(low, high + 1, (n, k), generator=random).float()
    w[:, ::32], w[:, 1::32] = low, high  # so that the scale of each block is 1
    if kind is Kind.BF16:
        return w.bfloat16().view(torch.uint8), w
    if kind is Kind.Q4_0:
        rows = torch.from_numpy(quants.quantize(w.numpy(), GGMLQuantizationType.Q4_0)).contiguous()
    else:
        rows = quantise_rows(kind, w)
    assert torch.equal(dequantise_rows(kind, rows, k), w)
    return rows, w


def inputs(rows: int) -> torch.Tensor:
    x = torch.randint(-127, 128, (rows, K), generator=torch.Generator().manual_seed(rows)).float()
    x[:, 5::16] = 127  # so that quantised inputs have the scale 1
    return x


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [1, 7, 33, 80])
def test_a_product_by_itself(bench, kind, rows):
    data, w = whole_numbers(kind, N, K, 1)
    packed = torch.zeros(packed_bytes(kind, N, K), dtype=torch.uint8)
    pack_rows(kind, K, data, packed.numpy())
    x = inputs(rows)
    given = x.bfloat16()
    out = torch.full((rows, N), float("nan"))
    bench.library.ss_gemm_packed(kind, N, K, packed.data_ptr(), given.data_ptr(), out.data_ptr(), rows, 2)
    assert torch.equal(out, x @ w.T)


@pytest.mark.parametrize("kind", KINDS)
def test_the_timed_product_goes_through_all_copies(bench, kind):
    each = packed_bytes(kind, N, K)
    packed = torch.zeros(3 * each, dtype=torch.uint8)
    for i in range(3):
        data, w = whole_numbers(kind, N, K, i)
        pack_rows(kind, K, data, packed[i * each : (i + 1) * each].numpy())
    x = inputs(9)
    given, out = x.bfloat16(), torch.zeros(9, N)
    pointers = (packed.data_ptr(), 3, given.data_ptr(), out.data_ptr())

    def run(use):
        return bench.library.ss_bench_gemm(kind, N, K, *pointers, 9, use, bench.threads)

    assert run(STORED) > 0
    assert torch.equal(out, x @ w.T)  # of the last copy
    out.zero_()
    assert run(ADDED) > 0
    assert torch.equal(out, x @ sum(whole_numbers(kind, N, K, i)[1] for i in range(3)).T)


def test_the_timed_gate_gives_what_the_next_product_takes(bench):
    data, w = whole_numbers(Kind.Q8, 64, K, 0)
    packed = torch.zeros(packed_bytes(Kind.Q8, 64, K), dtype=torch.uint8)
    pack_rows(Kind.Q8, K, data, packed.numpy())
    x = inputs(9)
    given, out = x.bfloat16(), torch.zeros(9, 64)
    pointers = (packed.data_ptr(), 1, given.data_ptr(), out.data_ptr())
    assert bench.library.ss_bench_gemm(Kind.Q8, 64, K, *pointers, 9, GATED, bench.threads) > 0
    gate, up = (x @ w.T).view(9, 2, 2, 16).unbind(2)
    found = out.flatten()[: 9 * 32].view(9, 2, 16)
    torch.testing.assert_close(found, torch.nn.functional.silu(gate) * up, rtol=1e-5, atol=1e-5)


def test_timed_attention_goes_through_all_layers(bench):
    paged = Paged(bench, 1)
    assert paged.layers > 0
    sequence, positions = torch.zeros(2, dtype=torch.int32), torch.tensor([CONTEXT - 2, CONTEXT - 1])
    q = torch.randn(2, HEADS, DIM, generator=torch.Generator().manual_seed(0)).bfloat16()
    keys = torch.stack((paged.keys[0] * 2, paged.keys[0]))
    values = torch.stack((paged.values[0] * 2, paged.values[0]))
    out = torch.zeros(2, HEADS * DIM, dtype=torch.bfloat16)
    pointers = [t.data_ptr() for t in (q, keys, values, out, paged.tables, sequence, positions)]
    shape = (keys.stride(0), 2, paged.tables.stride(0), HEADS, keys.shape[2], DIM, keys.shape[3])
    assert bench.library.ss_bench_attention(*pointers, 2, *shape, bench.threads) > 0
    want = ops.paged_attention(q, keys[1], values[1], paged.tables, sequence, positions, DIM**-0.5)
    assert torch.equal(out, want.view_as(out))


def test_ceilings_are_those_of_the_instruction_set(bench):
    found = Ceilings(bench)
    vectors = {Peak.FLOAT32, Peak.INT8_VECTORS}
    tiles = {Peak.BF16_TILES, Peak.INT8_TILES, Peak.INT8_TILES_SCALED, Peak.INT8_TILES_STORED}
    pairs = {Peak.BF16_VECTORS}
    assert found.has == {"amx": vectors | pairs | tiles, "avx512_bf16": vectors | pairs}.get(bench.isa, vectors)
    assert found.bf16 in found.has
    assert found.bf16_vectors in found.has
    assert found.tiles == (bench.isa == "amx")
    found.choose_way(bench.arena)
    assert found.read(bench.arena) > 0
    assert bench.library.ss_peak_operations(99, 1, 1) == 0


def test_runs_of_the_pool_are_timed_one_by_one(bench):
    for together in (0, 1):
        seconds = torch.zeros(5, dtype=torch.float64)
        bench.library.ss_peak_fork_join(seconds.data_ptr(), 4, together, bench.threads)
        assert bool((seconds[:4] > 0).all())
        assert seconds[4] == 0


def test_rows_of_products(bench, monkeypatch):
    monkeypatch.setattr(products_module, "SHAPES", {"qkv": (64, 96, 3), "head": (128, 96, 1)})
    monkeypatch.setattr(products_module, "ROWS", (8, 40))
    bench.rows.clear()
    products_module.products(bench, Ceilings(bench))
    goals = {row.name.removeprefix(bench.prefix): row.goal for row in bench.rows}
    assert goals["GEMV bf16 qkv 64x96"] == goals["GEMV q8, all of the model's"] == 0.80
    assert goals["GEMV q4_1 head 128x96"] == goals["GEMV q4_0, all of the model's"] == 0.70
    tiles = bench.isa == "amx"
    bf16 = "bf16 tiles" if tiles else "bf16 on vectors" if bench.isa == "avx512_bf16" else "float32"
    int8 = "int8 tiles" if tiles else "int8 on vectors"
    assert goals[f"GEMM bf16 qkv 64x96, 40 rows, of the peak of {bf16}"] == 0.70
    assert goals[f"GEMM q8 all of a layer's, 40 rows, of the peak of {int8}"] == 0.55
    assert goals[f"GEMM q8 all of a layer's, 8 rows, of the peak of {int8}"] is None
    besides = {
        f"GEMM {kind} qkv 64x96, 40 rows, of the peak of {peak}"
        for kind, peak in (("bf16", "bf16 on vectors"), ("q4_1", "bf16 tiles"), ("q4_1", "int8 on vectors"))
    }
    assert not tiles or besides <= goals.keys()
    assert not tiles or {goals[name] for name in besides} == {None}
    assert ("GEMM q4_1 qkv 64x96, 40 rows, of the peak of bf16 tiles" in goals) == tiles
    assert not [name for name in goals if name.startswith("GEMM") and "head" in name]
    for row in bench.rows:
        assert row.value > 0
        assert row.ratio == row.value / row.baseline


def test_measures_take_turns_and_the_first_round_is_dropped():
    order: list[str] = []

    def measure(name: str):
        return lambda: order.append(name) or float(len(order))

    assert in_turn(2, measure("a"), measure("b")) == [[3.0, 5.0], [4.0, 6.0]]
    assert order == ["a", "b"] * 3


def test_the_rate_of_parts_one_after_the_other():
    assert joined([(6.0, [2.0, 3.0]), (4.0, [4.0, 1.0])]) == [10.0 / (3 + 1), 10.0 / (2 + 4)]


@pytest.mark.parametrize(("sequences", "count", "start"), [(3, 1, 128), (1, 40, 0), (2, 5, 13)])
def test_batches_of_the_forward_are_valid(sequences, count, start):
    batch = rows_of(sequences, count, start)
    blocks = int(batch.block_tables.max()) + 1
    batch.check(blocks, 16)
    assert batch.logit_rows.tolist() == [count * (i + 1) - 1 for i in range(sequences)]
    assert len(set(batch.slots.tolist())) == batch.num_rows
