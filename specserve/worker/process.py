"""Logits to processed logits: each option is one function on one row or a few rows, changed in place.

The order is fixed: grammar, forbidden ids, min_tokens, logit bias, penalties (temperature and truncation follow). All
is elementwise, so that no row depends on the rows beside it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from specserve.core.protocols import Bitmask
from specserve.kernels.cpu.ops import apply_bitmask_
from specserve.worker.states import SamplingState

if TYPE_CHECKING:
    import torch
else:
    from specserve.kernels.lazy import torch

NEVER = float("-inf")


def grammar(rows: torch.Tensor, mask: Bitmask) -> None:
    """Only legal tokens stay; ids beyond the mask's words are not legal. rows float32 [n, V], mask int32 [n, words]."""
    apply_bitmask_(rows, torch.from_numpy(np.ascontiguousarray(mask, dtype=np.int32)))


def forbid(rows: torch.Tensor, forbidden: npt.NDArray[np.bool_]) -> None:
    """rows float32 [n, V], forbidden bool [V]."""
    rows.masked_fill_(torch.from_numpy(forbidden), NEVER)


def min_tokens(row: torch.Tensor, end_ids: npt.NDArray[np.int64], *, guided: bool) -> None:
    """No end token yet. Where a grammar leaves nothing else, the grammar wins. row float32 [V]."""
    ids = torch.from_numpy(end_ids)
    kept = row[ids]
    row[ids] = NEVER
    if guided and not bool(torch.isfinite(row).any()):
        row[ids] = kept


def add_bias(rows: torch.Tensor, bias: tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]) -> None:
    """rows float32 [n, V], bias (int64 [b], float32 [b])."""
    rows[:, torch.from_numpy(bias[0])] += torch.from_numpy(bias[1])


def penalise(row: torch.Tensor, state: SamplingState, counts: torch.Tensor) -> None:
    """Repetition (Keskar et al. 2019, CTRL, section 4.1; prompt and output), then frequency and presence (output).

    Args:
        row: float32 [V].
        counts: int32 [V], output tokens before this position, accepted draft tokens among them.
    """
    p = state.params
    seen = counts > 0
    if state.in_prompt is not None:
        scaled = torch.where(row > 0, row / p.repetition_penalty, row * p.repetition_penalty)
        row.copy_(torch.where(seen | state.in_prompt, scaled, row))
    if p.frequency_penalty:
        row.sub_(counts.to(torch.float32) * p.frequency_penalty)
    if p.presence_penalty:
        row.sub_(seen.to(torch.float32) * p.presence_penalty)


def apply_options(
    rows: torch.Tensor,
    state: SamplingState,
    position: int,
    prefix: tuple[int, ...],
    chain: tuple[int, ...],
    mask: Bitmask | None,
) -> None:
    """All options of one request on its rows, each row with the history that its position has.

    Args:
        rows: float32 [n, V]; row j is for the token at position + j, after prefix + chain[:j].
        prefix: tokens before row 0 that are not in the state's history yet.
        chain: the draft tokens between the rows, n - 1 of them.
        mask: int32 [n, words] or None.
    """
    if mask is not None:
        grammar(rows, mask)
    if state.forbidden is not None:
        forbid(rows, state.forbidden)
    for j in range(len(rows)):
        if state.below_minimum(position + j):
            min_tokens(rows[j], state.end_ids, guided=mask is not None)
    if state.bias is not None:
        add_bias(rows, state.bias)
    if state.counts is not None:
        counts = state.counts
        if prefix or chain:
            counts = counts.clone()
        for token in prefix:
            counts[token] += 1
        for j in range(len(rows)):
            if j:
                counts[chain[j - 1]] += 1
            penalise(rows[j], state, counts)
