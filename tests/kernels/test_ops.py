"""Every native op against the reference, and each row of both alone against the row among others."""

from __future__ import annotations

import math

import pytest
import torch

from specserve.kernels import reference
from specserve.kernels.cpu import native, ops

pytestmark = pytest.mark.usefixtures("native_variants")
torch.set_num_threads(1)

DTYPES = (torch.float32, torch.bfloat16)
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2**-7}


@pytest.fixture(params=["reference", "native"])
def path(request):
    if request.param == "reference":
        return reference
    if native.library() is None:
        pytest.skip("no C++ compiler on this machine")
    return ops


def close(a: torch.Tensor, b: torch.Tensor) -> None:
    torch.testing.assert_close(a.float(), b.float(), rtol=TOLERANCE[a.dtype], atol=TOLERANCE[a.dtype])


def attention_inputs(dtype, heads, kv_heads, dim, block_size, rows=24, context=150):
    random = torch.Generator().manual_seed(heads * dim)
    blocks = 3 * -(-context // block_size)
    shape = (blocks, kv_heads, block_size, dim)
    key, value = (torch.randn(shape, generator=random).to(dtype) for _ in range(2))
    tables = torch.randperm(blocks, generator=random).view(3, -1).int()
    positions = torch.randint(0, context, (rows,), generator=random)
    positions[:4] = torch.tensor([0, 63, 64, context - 1])
    sequence = torch.randint(0, 3, (rows,), generator=random).int()
    q = torch.randn(rows, heads, dim, generator=random).to(dtype)
    return q, key, value, tables, sequence, positions


def naive_attention(q, key, value, tables, sequence, positions, scale, window):
    rows = []
    for row in range(q.shape[0]):
        at = torch.arange(int(positions[row]) + 1)
        at = at[-window:] if window else at
        block = tables[int(sequence[row])][at // key.shape[2]].long()
        k, v = (c[block, :, at % key.shape[2]].double() for c in (key, value))
        group = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        weights = torch.softmax(torch.einsum("hd,khd->hk", q[row].double(), k) * scale, -1)
        rows.append(torch.einsum("hk,khd->hd", weights, v).flatten())
    return torch.stack(rows).to(q.dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "block_size", "window"),
    [(9, 3, 64, 16, 0), (8, 1, 128, 7, 0), (4, 4, 96, 64, 70), (10, 2, 16, 1, 5), (2, 1, 24, 16, 0)],
)
def test_attention(path, dtype, heads, kv_heads, dim, block_size, window):
    inputs = attention_inputs(dtype, heads, kv_heads, dim, block_size)
    close(path.paged_attention(*inputs, dim**-0.5, window), naive_attention(*inputs, dim**-0.5, window))


@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_row_is_independent_of_the_others(path, dtype):
    q, key, value, tables, sequence, positions = attention_inputs(dtype, 9, 3, 64, 16, rows=70)
    together = path.paged_attention(q, key, value, tables, sequence, positions, 0.125)
    for row in range(0, 70, 3):
        one = slice(row, row + 1)
        alone = path.paged_attention(q[one], key, value, tables, sequence[one], positions[one], 0.125)
        assert torch.equal(alone[0], together[row])


def test_attention_never_reads_past_the_row(path):
    q, key, value, tables, sequence, positions = attention_inputs(torch.float32, 9, 3, 64, 16, rows=4)
    sequence[:] = 0
    positions[:] = 40
    expected = path.paged_attention(q, key, value, tables, sequence, positions, 0.125)
    last = tables[0][40 // 16]
    key[last, :, 40 % 16 + 1 :] = math.nan
    value[last, :, 40 % 16 + 1 :] = math.inf
    key[tables[0][3:]] = math.nan
    assert torch.equal(path.paged_attention(q, key, value, tables, sequence, positions, 0.125), expected)


def test_attention_bits_do_not_depend_on_the_block_size(path):
    q, key, value, tables, sequence, positions = attention_inputs(torch.float32, 9, 3, 64, 16, context=160)
    expected = path.paged_attention(q, key, value, tables, sequence, positions, 0.125)
    order = tables.flatten().long()
    tokens = [c[order].transpose(1, 2).reshape(-1, 5, 3, 64) for c in (key, value)]
    small = [c.transpose(1, 2).contiguous() for c in tokens]  # the same tokens in blocks of 5, laid out in order
    tables = torch.arange(small[0].shape[0], dtype=torch.int32).view(3, -1)
    assert torch.equal(path.paged_attention(q, *small, tables, sequence, positions, 0.125), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [16, 77, 576])
def test_norms(path, dtype, width):
    x, weight, residual = torch.randn(5, width).to(dtype), torch.randn(width).to(dtype), torch.randn(5, width)
    expected = torch.nn.functional.rms_norm(x.double(), (width,), weight.double(), 1e-5).to(dtype)
    close(path.rms_norm(x, weight, 1e-5), expected)
    added = residual + x.float()
    expected = torch.nn.functional.rms_norm(added.double(), (width,), weight.double(), 1e-5).to(dtype)
    close(path.add_rms_norm(x, residual, weight, 1e-5), expected)
    assert torch.equal(residual, added)
    together, alone = path.rms_norm(residual, weight, 1e-5), path.rms_norm(residual[3:4], weight, 1e-5)
    assert together.dtype == dtype
    assert torch.equal(alone[0], together[3])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [32, 77])
def test_silu_mul(path, dtype, width):
    merged = (torch.randn(6, 2 * width) * 8).to(dtype)
    gate, up = merged.double().chunk(2, -1)
    close(path.silu_mul(merged), (torch.nn.functional.silu(gate) * up).to(dtype))
    assert torch.equal(path.silu_mul(merged[2:3])[0], path.silu_mul(merged)[2])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [64, 24])
@pytest.mark.parametrize("normed", [False, True])
def test_rope_store(path, dtype, dim, normed):
    heads, kv_heads, rows = 4, 2, 11
    qkv = torch.randn(rows, (heads + 2 * kv_heads) * dim).to(dtype)
    key, value = (torch.zeros(8, kv_heads, 4, dim, dtype=dtype) for _ in range(2))
    norms = [torch.randn(dim).to(dtype) if normed else None for _ in range(2)]
    angle = torch.arange(100.0)[:, None] * torch.rand(dim // 2)
    cos, sin, positions, slots = angle.cos(), angle.sin(), torch.randint(0, 100, (rows,)), torch.randperm(32)[:rows]
    x = qkv.view(rows, -1, dim)[:, : heads + kv_heads].double()
    if normed:
        scale = torch.cat([norms[0].double().expand(heads, dim), norms[1].double().expand(kv_heads, dim)])
        x = torch.nn.functional.rms_norm(x, (dim,), None, 1e-6) * scale
    c, s = (torch.cat((t[positions], t[positions]), -1)[:, None].double() for t in (cos, sin))
    expected = (x * c + torch.cat((-x[..., dim // 2 :], x[..., : dim // 2]), -1) * s).to(dtype)
    untouched = qkv.view(rows, -1, dim)[:, heads:].clone()
    path.rope_store(qkv, heads, kv_heads, cos, sin, positions, key, value, slots, *norms, 1e-6)
    close(qkv.view(rows, -1, dim)[:, :heads], expected[:, :heads])
    assert torch.equal(qkv.view(rows, -1, dim)[:, heads:], untouched)
    keys, values = (cache.transpose(1, 2).reshape(32, kv_heads, dim) for cache in (key, value))
    close(keys[slots], expected[:, heads:])
    assert torch.equal(values[slots], untouched[:, kv_heads:])
    assert int((keys != 0).flatten(1).any(-1).sum()) == rows


def test_copy_blocks_in_order(path):
    storage = torch.arange(2 * 3 * 4.0).view(2, 3, 4, 1)
    path.copy_blocks(storage, [(0, 2), (2, 3)])
    assert torch.equal(storage[:, :, 3], storage[:, :, 0])
    assert torch.equal(storage[:, :, 2], storage[:, :, 0])
