"""Sampler: the token at position i is argmax(processed_logits_i + gumbel(seed, i)); greedy adds no noise.

The same code serves the target's rows 0..K and the draft model's, each with the history that its position has. What a
row gives depends on its logits, its request's options and seed and its position, never on the other rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import numpy.typing as npt

from specserve.core.protocols import Bitmask
from specserve.kernels.cpu.memory import empty
from specserve.kernels.cpu.ops import argmax, gumbel
from specserve.kernels.cpu.sample import NO_TOKEN, ROW, UNDECIDED, best_rows, sample_rows
from specserve.kernels.lazy import inference
from specserve.worker.process import apply_options
from specserve.worker.states import SamplingState
from specserve.worker.truncate import truncate

if TYPE_CHECKING:
    import torch
else:
    from specserve.kernels.lazy import torch

HostLogits = npt.NDArray[np.float32]
Logits: TypeAlias = "HostLogits | torch.Tensor"
MAX_ROWS = 32  # rows processed at once: bounds the memory of their copies


@dataclass(frozen=True, slots=True)
class RowGroup:
    """Adjacent rows of one request.

    Attributes:
        first, count: rows of the logits.
        position: of the token that row 0 samples, counted in the request's whole sequence.
        prefix: tokens before it that are not in the state's history yet.
        chain: draft tokens between the rows (at least count - 1).
        mask: int32 [count, words], or None.
        keep_processed: hand back the processed logits of these rows.
    """

    state: SamplingState
    first: int
    count: int
    position: int
    prefix: tuple[int, ...] = ()
    chain: tuple[int, ...] = ()
    mask: Bitmask | None = None
    keep_processed: bool = False

    @property
    def edits(self) -> bool:
        return self.mask is not None or self.state.edits(self.position)

    @property
    def plain(self) -> bool:
        """Nothing but an argmax of the model's logits is asked for."""
        return self.state.params.greedy and not self.keep_processed and not self.edits


@dataclass(slots=True)
class Sampled:
    """One entry a row of the logits.

    Attributes:
        token_ids: NO_TOKEN where a row has no finite entry.
        probs: probability of each token in the distribution it was drawn from, if asked for; 1.0 for greedy.
        processed: row -> float32 [V], the distribution's logits before noise, where a group keeps them.
    """

    token_ids: list[int]
    probs: list[float] = field(default_factory=list)
    processed: dict[int, HostLogits] = field(default_factory=dict)


def sample(logits: Logits, groups: Sequence[RowGroup], vocab_size: int, *, probs: bool = False) -> Sampled:
    """Sample every row: natively where that can be had and decides the row, else in torch, with the same result.

    Args:
        logits: float32 [m, at least vocab_size]; not changed. Ids from vocab_size on are padding.
        groups: of different rows; what a row of none of them gives means nothing.
        probs: whether to give probabilities.
    """
    logits = logits[:, :vocab_size]
    result = Sampled([NO_TOKEN] * len(logits), [1.0] * len(logits) if probs else [])
    others = [g for g in groups if not g.plain]
    if len(others) < len(groups):
        result.token_ids = best(logits)
    host = on_host(logits)
    if others and host is not None:
        others = _draw(host, others, result, probs)
    if others:
        _sample(as_tensor(logits), others, result, probs)
    return result


def on_host(logits: Logits) -> HostLogits | None:
    """Logits as an array over the same memory, with adjacent columns; None where they are not so."""
    if not isinstance(logits, np.ndarray):
        if logits.device.type != "cpu":
            return None
        logits = logits.numpy()
    return logits if logits.strides[1] == logits.itemsize else None


def as_tensor(logits: Logits) -> torch.Tensor:
    """Logits as a tensor over the same memory."""
    return torch.from_numpy(logits) if isinstance(logits, np.ndarray) else logits


def draw(logits: Logits, groups: Iterable[tuple[bytes | None, int, int]], vocab_size: int) -> list[int] | None:
    """What `sample` gives where nothing but packed options and the logits decides; None where torch must decide.

    Args:
        logits: as in `sample`.
        groups: see `packed_rows`.
    """
    host = on_host(logits)
    if host is None:
        return None
    rows = packed_rows(groups, host.ctypes.data, host.strides[0])
    tokens = None if rows is None else sample_rows((rows,), len(host), vocab_size)
    return None if tokens is None or UNDECIDED in tokens else tokens


def packed_rows(groups: Iterable[tuple[bytes | None, int, int]], at: int = 0, stride: int = 0) -> bytes | None:
    """Rows for `sample_rows`; None where a group has no packed options.

    Args:
        groups: of rows that follow each other: packed options, position of the first row's token, rows.
        at, stride: address of the first row's logits, and bytes to the next one's.
    """
    parts: list[bytes] = []
    for options, position, count in groups:
        if options is None:
            return None
        for j in range(position, position + count):
            parts += (ROW.pack(at, 0, 0, 0, j), options)
            at += stride
    return b"".join(parts)


def best(logits: Logits) -> list[int]:
    """argmax of each row of float32 [n, V], the lowest id among equals; NO_TOKEN where that entry is not finite."""
    host = on_host(logits)
    found = None if host is None else best_rows(host)
    return _best(as_tensor(logits)).tolist() if found is None else found


def _draw(logits: HostLogits, groups: Sequence[RowGroup], result: Sampled, probs: bool) -> list[RowGroup]:
    """Sample groups natively; those that are left."""
    at, stride, vocab_size = logits.ctypes.data, logits.strides[0], logits.shape[1]
    left, parts, drawn = [], [], []
    processed: dict[int, HostLogits] = {}
    for g in groups:
        options, mask = g.state.packed, g.mask
        if options is None or g.state.below_minimum(g.position) or (mask is not None and not _readable(mask)):
            left.append(g)
            continue
        begin, words = (0, 0) if mask is None else (mask.ctypes.data, mask.shape[1])
        keeps = g.keep_processed or (probs and not g.state.params.greedy)
        for j in range(g.count):
            row, kept = g.first + j, 0
            if keeps:
                processed[row] = empty((vocab_size,))
                kept = processed[row].ctypes.data
            parts.append(ROW.pack(at + row * stride, begin + j * words * 4, words, kept, g.position + j))
            parts.append(options)
        drawn.append(g)
    tokens = sample_rows(parts, len(parts) // 2, vocab_size) if drawn else None
    if tokens is None:
        return list(groups)
    end = 0
    for g in drawn:
        begin, end = end, end + g.count
        found = tokens[begin:end]
        if UNDECIDED in found:
            left.append(g)
            continue
        result.token_ids[g.first : g.first + g.count] = found
        for row in range(g.first, g.first + g.count):
            if g.keep_processed:
                result.processed[row] = processed[row]
            if probs and not g.state.params.greedy:
                result.probs[row] = _probability(processed[row], result.token_ids[row])
    return left


def _readable(mask: Bitmask) -> bool:
    return bool(mask.dtype == np.int32 and mask.flags.c_contiguous)


def _probability(row: HostLogits, token: int) -> float:
    """Of a token in the distribution of processed logits, float32 [V]."""
    peak = row.max()
    if not np.isfinite(peak):
        return math.nan
    return math.exp(float(row[max(token, 0)]) - float(peak)) / float(np.exp(row - peak).sum(dtype=np.float64))


@inference
def _sample(logits: torch.Tensor, groups: Sequence[RowGroup], result: Sampled, probs: bool) -> None:
    """Sample groups in torch."""
    for batch in batches(groups):
        rows = np.concatenate([np.arange(g.first, g.first + g.count) for g in batch])
        tokens = _sample_rows(logits, rows, batch, result, probs)
        for row, token in zip(rows.tolist(), tokens.tolist(), strict=True):
            result.token_ids[row] = token


def _sample_rows(
    logits: torch.Tensor, rows: np.ndarray, groups: Sequence[RowGroup], result: Sampled, probs: bool
) -> np.ndarray:
    """The rows of some groups, int64 [n]: options, temperature, truncation, noise, argmax."""
    x = logits.index_select(0, torch.from_numpy(rows)).contiguous()
    counts = np.array([g.count for g in groups])
    begins = np.cumsum(counts) - counts
    for g, begin in zip(groups, begins, strict=True):
        if g.edits:
            apply_options(x[begin : begin + g.count], g.state, g.position, g.prefix, g.chain, g.mask)
    params = [g.state.params for g in groups]
    temperature = np.repeat(np.array([p.temperature or 1.0 for p in params], dtype=np.float32), counts)
    x.div_(torch.from_numpy(temperature)[:, None])
    for g, begin, p in zip(groups, begins, params, strict=True):
        if g.state.truncates:
            for row in x[begin : begin + g.count]:
                truncate(row, k=p.top_k, p=p.top_p, smallest=p.min_p)
        if g.keep_processed:
            result.processed.update((g.first + j, x[begin + j].clone().numpy()) for j in range(g.count))
    noisy = np.repeat(np.array([not p.greedy for p in params]), counts)
    normal = torch.logsumexp(x, 1) if probs else None
    drawn = _with_noise(x, groups, counts, noisy)
    tokens = _best(drawn)
    if normal is not None:
        chosen = torch.exp(x[torch.arange(len(x)), torch.from_numpy(np.maximum(tokens, 0))] - normal).tolist()
        for row, is_noisy, value in zip(rows.tolist(), noisy.tolist(), chosen, strict=True):
            result.probs[row] = value if is_noisy else 1.0
    return tokens


def _with_noise(x: torch.Tensor, groups: Sequence[RowGroup], counts: np.ndarray, noisy: np.ndarray) -> torch.Tensor:
    """x with Gumbel noise on the rows that are not greedy. x float32 [n, V] is not changed."""
    if not noisy.any():
        return x
    begins = np.cumsum(counts) - counts
    seeds = np.repeat(np.array([g.state.seed for g in groups], dtype=np.int64), counts)
    bases = np.repeat(np.array([g.position for g in groups], dtype=np.int64) - begins, counts)
    positions = bases + np.arange(len(bases))
    chosen = torch.from_numpy(np.flatnonzero(noisy))
    noise = gumbel(torch.from_numpy(seeds)[chosen], torch.from_numpy(positions)[chosen], x.shape[1])
    if len(chosen) == len(x):
        return noise.add_(x)
    drawn = x.clone()
    drawn[chosen] += noise
    return drawn


@inference
def _best(x: torch.Tensor) -> np.ndarray:
    """argmax of each row, int64 [n], the lowest id among equals; NO_TOKEN where the largest entry is not finite."""
    # Padding makes the rows strided: they are copied a few at a time.
    starts = range(0, len(x), MAX_ROWS)
    best = argmax(x) if x.is_contiguous() else torch.cat([argmax(x[i : i + MAX_ROWS].contiguous()) for i in starts])
    peak = x.gather(1, best[:, None])[:, 0]
    return np.asarray(torch.where(torch.isfinite(peak), best, NO_TOKEN).numpy())


def batches(groups: Sequence[RowGroup]) -> Iterator[list[RowGroup]]:
    """Groups in runs of at most MAX_ROWS rows (one group at least)."""
    batch: list[RowGroup] = []
    rows = 0
    for g in groups:
        if batch and rows + g.count > MAX_ROWS:
            yield batch
            batch, rows = [], 0
        batch.append(g)
        rows += g.count
    if batch:
        yield batch
