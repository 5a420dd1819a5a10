"""Token masks: int32 [rows, ceil(vocab_size / 32)], C-contiguous; bit t % 32 of word t // 32 is 1 where t is legal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from specserve.core.protocols import Matcher

Mask = NDArray[np.int32]


def allocate(rows: int, vocab_size: int) -> Mask:
    """A mask that allows everything."""
    return np.full((rows, -(-vocab_size // 32)), -1, dtype=np.int32)


def row_of(tokens: Iterable[int], vocab_size: int) -> Mask:
    """One row, shape [words], that allows exactly these tokens."""
    bits = np.zeros(-(-vocab_size // 32) * 32, dtype=np.uint8)
    bits[list(tokens)] = 1
    return np.packbits(bits, bitorder="little").view("<i4").astype(np.int32)


def legal(mask_row: Mask, token: int) -> bool:
    """Whether the row, shape [words], allows `token`."""
    return bool(int(mask_row[token >> 5]) >> (token & 31) & 1)


def tokens_of(mask_row: Mask) -> list[int]:
    """The ids that the row allows, ascending."""
    bits = np.unpackbits(mask_row.astype("<i4").view(np.uint8), bitorder="little")
    return [int(i) for i in np.flatnonzero(bits)]


def fill_chain(matcher: Matcher, draft_tokens: Sequence[int], mask: Mask) -> None:
    """Fill row j with the legal tokens after the first j drafted ones; the matcher is left as it was.

    Rows behind the first illegal draft token allow everything: no token is taken from them.

    Args:
        mask: shape [len(draft_tokens) + 1, words].
    """
    accepted = 0
    try:
        for row in range(len(draft_tokens) + 1):
            matcher.fill(mask, row)
            if row == len(draft_tokens):
                break
            if not matcher.accept(draft_tokens[row]):
                mask[row + 1 :] = -1
                break
            accepted += 1
    finally:
        if accepted:
            matcher.rollback(accepted)


def longest_legal(matcher: Matcher, draft_tokens: Sequence[int]) -> int:
    """How many leading draft tokens the grammar allows; the matcher is left as it was."""
    accepted = 0
    try:
        for token in draft_tokens:
            if not matcher.accept(token):
                break
            accepted += 1
    finally:
        if accepted:
            matcher.rollback(accepted)
    return accepted
