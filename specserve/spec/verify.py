"""Drafter-invariant verification: a draft token is accepted exactly if it is the token the target itself samples.

The target's sample at a position depends on (logits, seed, position) alone, so the output is the target's own, token
for token, whoever drafted (Daliri, Musco, Suresh, "Coupling without Communication and Drafter-Invariant Speculative
Decoding", section 3).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specserve.core.tree import NO_NODE, TokenTree

NO_TOKEN = -1  # a row from which nothing could be sampled


@dataclass(frozen=True, slots=True)
class Verified:
    """What one draft gave.

    Attributes:
        token_ids: the accepted draft tokens, then the target's own next one; empty if the root's row has no token.
        num_accepted: of the draft; always len(token_ids) - 1 (0 for none).
        rows: row of each emitted token (0 is the root's, i + 1 that of node i).
    """

    token_ids: tuple[int, ...]
    num_accepted: int
    rows: tuple[int, ...]


def verify(tree: TokenTree, sampled: Sequence[int]) -> Verified:
    """Walk down the draft along the target's own samples.

    Args:
        tree: the draft, a chain or a tree of n nodes.
        sampled: n + 1 tokens: sampled[0] follows the committed tokens, sampled[i + 1] follows node i. NO_TOKEN where
            the row has no legal token; the walk ends before such a row, and the last token accepted then counts as
            sampled (it is the target's own sample as well), so that one known token is always left to compute.
    """
    if len(sampled) != len(tree) + 1:
        raise ValueError(f"{len(tree)} nodes need {len(tree) + 1} sampled tokens, not {len(sampled)}")
    tokens: list[int] = []
    rows: list[int] = []
    node = NO_NODE
    while True:
        token = sampled[node + 1]
        if token == NO_TOKEN:
            break
        tokens.append(token)
        rows.append(node + 1)
        node = next((child for child in tree.children(node) if tree.tokens[child] == token), NO_NODE)
        if node == NO_NODE:
            break
    return Verified(tuple(tokens), max(len(tokens) - 1, 0), tuple(rows))
