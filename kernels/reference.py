"""Every op in plain torch: the oracle of the native ones, and what runs where those cannot be built.

Also independent of the batch, by construction: only elementwise operations, whose results depend on their own operands
alone, and sums in a fixed tree. Activations are float32 or bfloat16, arithmetic is float32.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from specserve.kernels import kv_layout

if TYPE_CHECKING:
    import torch
else:
    from specserve.kernels.lazy import torch

if __name__.partition(".")[0] == "kernels":
    raise ImportError("these modules are specserve.kernels; the name `kernels` belongs to another package")

TILE = 64  # keys an attention step, counted from position 0
ROWS = 64  # rows an attention step, to bound memory


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor | None = None) -> torch.Tensor:
    """RMSNorm (Zhang and Sennrich 2019) of x [n, h], float32 or weight's dtype -> weight's dtype."""
    x = x.float()
    mean = _tree_sum(x * x) / x.shape[-1]
    return _write(x * (1.0 / torch.sqrt(mean + eps)) * weight.float(), weight.dtype, out)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor | None = None
) -> torch.Tensor:
    """residual += x in place (float32 [n, h]); returns the RMSNorm of the new residual in weight's dtype."""
    residual += x.float()
    return rms_norm(residual, weight, eps, out)


def rope_store(
    qkv: torch.Tensor,
    num_heads: int,
    num_kv_heads: int,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slots: torch.Tensor,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 1e-6,
) -> None:
    """Rotate q of merged rows in place and store the rotated k, and v, into the paged cache, rounded once.

    Args:
        qkv: [n, (num_heads + 2 * num_kv_heads) * dim], q then k then v; k and v stay as they are.
        cos, sin: float32 [max_position, dim / 2].
        positions, slots: int64 [n].
        key_cache, value_cache: [num_blocks, num_kv_heads, block_size, dim], or int8 as `kv_layout` describes.
        q_norm, k_norm: RMSNorm weights [dim] applied to each head before the rotation (Qwen3), or None.
    """
    heads = qkv.view(qkv.shape[0], num_heads + 2 * num_kv_heads, -1)
    q, k, v = heads[:, :num_heads], heads[:, num_heads:-num_kv_heads], heads[:, -num_kv_heads:]
    c, s = cos[positions].unsqueeze(1), sin[positions].unsqueeze(1)

    def turn(part: torch.Tensor, norm: torch.Tensor | None) -> torch.Tensor:
        x = part.float() if norm is None else rms_norm(part, norm.float(), eps)
        low, high = x.chunk(2, dim=-1)
        return torch.cat((low * c - high * s, high * c + low * s), dim=-1)

    q.copy_(turn(q, q_norm))
    kv_layout.store_rows(key_cache, slots, turn(k, k_norm))
    kv_layout.store_rows(value_cache, slots, v)


def paged_attention(
    q: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    row_sequence: torch.Tensor,
    positions: torch.Tensor,
    scale: float,
    window: int = 0,
    out: torch.Tensor | None = None,
    tree: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    """Causal attention of each row over its sequence's cache, by online softmax in tiles of 64 keys.

    Rows of one sequence may be a draft tree: such a row attends to the leading positions of its sequence and to its
    ancestors and itself, as if these followed. Its bits are those that it would have as the end of a chain of them.

    Args:
        q: [n, num_heads, dim]; rows may be strided.
        key_cache, value_cache: [num_blocks, num_kv_heads, block_size, dim], or int8 as `kv_layout` describes.
        block_tables: int32 [num_seqs, max_blocks]; row_sequence: int32 [n]; positions: int64 [n].
        window: positions a row sees, itself included; 0 for all.
        tree: (context int32 [n], masks int64 [n, words] read as bits); or None where no row is of a tree. A row with
            some bit set sees the first `context` positions of its table and then those at context + i for each bit i,
            where the rows of its tree are stored; its position is context plus the number of its bits, minus one. A row
            without a bit sees its table up to its position.

    Returns:
        [n, num_heads * dim] of q's dtype.
    """
    n, num_heads, dim = q.shape
    result = q.new_empty(n, num_heads * dim) if out is None else out
    for first in range(0, n, ROWS):
        rows = slice(first, min(first + ROWS, n))
        tables = block_tables[row_sequence[rows].long()].long()
        stored = None if tree is None else _stored_positions(tree[0][rows], tree[1][rows], positions[rows])
        result[rows] = _attend(q[rows], key_cache, value_cache, tables, positions[rows], scale, window, stored)
    return result


def _stored_positions(context: torch.Tensor, masks: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """int64 [n, greatest position + 1]: where in its table a row finds each of the positions that it sees."""
    found = torch.arange(int(positions.max()) + 1).repeat(len(positions), 1)
    bits = ((masks[:, :, None] >> torch.arange(64)) & 1).flatten(1)
    for row in bits.any(1).nonzero().flatten().tolist():
        first, drafted = int(context[row]), bits[row].nonzero().flatten()
        found[row, first : first + len(drafted)] = first + drafted
    return found


def _attend(
    q: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    tables: torch.Tensor,
    positions: torch.Tensor,
    scale: float,
    window: int,
    stored: torch.Tensor | None,
) -> torch.Tensor:
    n, num_heads, dim = q.shape
    num_kv_heads, block_size = key_cache.shape[1], kv_layout.block_size_of(key_cache, dim)
    query = (q.float() * scale).reshape(n, num_kv_heads, -1, 1, dim)
    top = query.new_full((*query.shape[:3], 1), -math.inf)
    total, acc = torch.zeros_like(top), query.new_zeros((*query.shape[:3], dim))
    begin = (positions - window + 1).clamp(min=0) if window else torch.zeros_like(positions)
    for tile in range(int(begin.min()) // TILE * TILE, int(positions.max()) + 1, TILE):
        keys_at = torch.arange(tile, tile + TILE)
        seen = (keys_at <= positions[:, None]) & (keys_at >= begin[:, None])  # [n, TILE]
        at = keys_at.expand(n, -1) if stored is None else stored[:, keys_at.clamp(max=stored.shape[1] - 1)]
        blocks = tables.gather(1, (at // block_size).clamp(max=tables.shape[1] - 1))
        keys, values = (
            kv_layout.load_rows(cache, blocks, at % block_size, dim).transpose(1, 2)
            for cache in (key_cache, value_cache)
        )
        visible = seen[:, None, None]
        score = _tree_sum(query * keys[:, :, None]).squeeze(-1).masked_fill(~visible, -math.inf)
        new_top = torch.maximum(top, score.amax(-1, keepdim=True))
        shift = new_top.masked_fill(new_top == -math.inf, 0.0)
        keep, weight = _exp(top - shift), _exp(score - shift)
        product = (weight[..., None] * values[:, :, None]).masked_fill(~visible[..., None], 0.0)
        # Rows that see nothing here keep their bits, the sign of a zero included.
        active = seen.any(-1).view(n, 1, 1, 1)
        total = torch.where(active, total * keep + _tree_sum(weight), total)
        acc = torch.where(active, acc * keep + _tree_sum(product.transpose(-1, -2)).squeeze(-1), acc)
        top = torch.where(active, new_top, top)
    return (acc / total).reshape(n, num_heads * dim).to(q.dtype)


def silu_mul(gate_up: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """SwiGLU's activation: silu(gate) * up of merged rows [n, 2 * i] = [gate | up] -> [n, i]."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return _write(gate / (1.0 + _exp(-gate)) * up, gate_up.dtype, out)


def log_softmax(logits: torch.Tensor) -> torch.Tensor:
    """Log probabilities of float32 rows [r, V]; a row of nothing but -inf stays so."""
    top = logits.amax(-1, keepdim=True)
    shift = top.masked_fill(top == -math.inf, 0.0)
    total = _tree_sum(_exp(logits - shift)).double().log().float()
    return logits - (shift + total).masked_fill(top == -math.inf, 0.0)


def argmax(logits: torch.Tensor) -> torch.Tensor:
    """int64 [r]: lowest index of the greatest value of each float32 row [r, V]. NaN never wins; all -inf gives 0."""
    clean = logits.masked_fill(logits.isnan(), -math.inf)
    best = clean == clean.amax(-1, keepdim=True)
    ids = torch.arange(logits.shape[-1])
    return torch.where(best, ids, logits.shape[-1]).amin(-1)


def apply_bitmask_(logits: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Set illegal logits to -inf in place.

    Args:
        logits: float32 [r, V].
        mask: int32 [r, words]; bit t % 32 of word t // 32 is 1 where token t is legal; tokens past it are illegal.
    """
    bits = (mask[:, :, None] >> torch.arange(32, dtype=torch.int32)) & 1
    legal = bits.reshape(mask.shape[0], -1)[:, : logits.shape[1]].bool()
    legal = torch.nn.functional.pad(legal, (0, logits.shape[1] - legal.shape[1]))
    return logits.masked_fill_(~legal, -math.inf)


def gumbel(seeds: torch.Tensor, positions: torch.Tensor, vocab: int) -> torch.Tensor:
    """Standard Gumbel noise float32 [r, vocab], a function of (seed, position, token id) alone.

    Random bits are Philox4x32-10's (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"): the key is the
    seed, the counter (c, position low, position high, 0); token t takes word t % 64 // 16 of c = t // 64 * 16 + t % 16.

    Args:
        seeds: int64 [r], read as 64 unsigned bits. positions: int64 [r].
    """
    groups = (vocab + 63) // 64
    words = _philox(torch.arange(groups * 16), positions, seeds)  # 4 of [r, groups * 16]
    bits = torch.stack([w.view(-1, groups, 16) for w in words], dim=2).reshape(-1, groups * 64)[:, :vocab]
    uniform = 1.0 - (bits.double() + 0.5) * 2.0**-32
    return (-_log(-_log(uniform))).float()


def copy_blocks(storage: torch.Tensor, pairs: Sequence[tuple[int, int]]) -> None:
    """Copy block src to dst of storage [2, layers, blocks, ...], for each (src, dst), in order."""
    for src, dst in block_pairs(pairs, storage.shape[2], storage.shape[2]).tolist():
        storage[:, :, dst].copy_(storage[:, :, src])


def swap_out(storage: torch.Tensor, host: torch.Tensor, pairs: Sequence[tuple[int, int]]) -> None:
    """Copy block `device` of storage [2, layers, blocks, ...] to `slot` of host [slots, 2, layers, ...].

    Args:
        pairs: (device, slot); no slot twice.
    """
    devices, slots = block_pairs(pairs, storage.shape[2], host.shape[0]).unbind(1)
    host[slots] = storage[:, :, devices.to(storage.device)].movedim(2, 0).to(host.device)


def swap_in(storage: torch.Tensor, host: torch.Tensor, pairs: Sequence[tuple[int, int]]) -> None:
    """The way back of `swap_out`; what the slots hold stays.

    Args:
        pairs: (device, slot); no device block twice.
    """
    devices, slots = block_pairs(pairs, storage.shape[2], host.shape[0]).unbind(1)
    storage[:, :, devices.to(storage.device)] = host[slots].movedim(0, 2).to(storage.device)


def block_pairs(pairs: Sequence[tuple[int, int]], first: int, second: int) -> torch.Tensor:
    """int64 [n, 2] of pairs of block numbers, below `first` and below `second`.

    Raises:
        IndexError: one is not.
    """
    kv_layout.check_pairs(pairs, first, second)
    return torch.tensor(pairs, dtype=torch.int64).view(-1, 2)


def _write(value: torch.Tensor, dtype: torch.dtype, out: torch.Tensor | None) -> torch.Tensor:
    return value.to(dtype) if out is None else out.copy_(value)


def _tree_sum(x: torch.Tensor) -> torch.Tensor:
    """Sum over the last dimension, kept, by halving: the order depends on its length alone."""
    width = x.shape[-1]
    size = 1 << (width - 1).bit_length()
    if size != width:
        x = torch.nn.functional.pad(x, (0, size - width))
    while size > 1:
        size //= 2
        x = x[..., :size] + x[..., size:]
    return x


def _exp(x: torch.Tensor) -> torch.Tensor:
    """e^x in float32 (Cephes' polynomial), elementwise operations only: torch.exp may treat vector tails otherwise."""
    tiny = x < -87.3
    x = x.clamp(-87.3, 88.0)
    n = torch.round(x * 1.44269504088896341)
    r = x - n * 0.693359375
    r = r - n * -2.12194440e-4
    p = r * 1.9875691500e-4 + 1.3981999507e-3
    for c in (8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
        p = p * r + c
    p = p * (r * r) + r + 1.0
    power = ((n.to(torch.int32) + 127) << 23).view(torch.float32)
    return (p * power).masked_fill(tiny, 0.0)


def _log(x: torch.Tensor) -> torch.Tensor:
    """ln of normal float64 x > 0, operation for operation what gumbel.cpp does."""
    bits = x.view(torch.int64)
    e = ((bits + (0x3FF0000000000000 - 0x3FE6A09E667F3BCD)) >> 52) - 1023
    m = (bits - (e << 52)).view(torch.float64)
    s = (m - 1.0) / (m + 1.0)
    z = s * s
    p = z * (2.0 / 15.0) + (2.0 / 13.0)
    for k in (11.0, 9.0, 7.0, 5.0, 3.0, 1.0):
        p = p * z + 2.0 / k
    return p * s + e.double() * 0.6931471805599453


def _philox(counter: torch.Tensor, positions: torch.Tensor, seeds: torch.Tensor) -> tuple[torch.Tensor, ...]:
    low = 0xFFFFFFFF
    k0, k1 = (seeds & low)[:, None], ((seeds >> 32) & low)[:, None]
    c0 = counter.expand(seeds.shape[0], -1)
    c1, c2 = (positions & low)[:, None].expand_as(c0), ((positions >> 32) & low)[:, None].expand_as(c0)
    c3 = torch.zeros_like(c0)
    for _ in range(10):
        a, b = c0 * 0xD2511F53, c2 * 0xCD9E8D57  # wraps modulo 2^64, as unsigned
        c0, c1 = ((b >> 32) & low) ^ c1 ^ k0, b & low
        c2, c3 = ((a >> 32) & low) ^ c3 ^ k1, a & low
        k0, k1 = (k0 + 0x9E3779B9) & low, (k1 + 0xBB67AE85) & low
    return c0, c1, c2, c3
