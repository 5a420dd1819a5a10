"""SuffixDrafter: what followed the last time the text ended like this (prompt lookup; Saxena 2023, PLD)."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from specserve.core.protocols import DraftContext
from specserve.core.tree import EMPTY_TREE, TokenTree
from specserve.guided.masks import longest_legal
from specserve.spec.ends import cut_after_end


class SuffixIndex:
    """Where each n-gram of one request last occurred before its end; n from `shortest` to `longest`.

    `extend` costs O(longest - shortest) a new token. Only n-grams with a token after them are in the index, so that
    the text's own end never matches itself.
    """

    __slots__ = ("_last", "_longest", "_shortest", "size")

    def __init__(self, shortest: int, longest: int) -> None:
        self._shortest = shortest
        self._longest = longest
        self._last: dict[tuple[int, ...], int] = {}
        self.size = 0  # n-grams that end before this position are in

    def extend(self, tokens: Sequence[int]) -> None:
        """Index the tokens that are new since the last call (the last one has no continuation yet)."""
        last = self._last
        for end in range(max(self.size, 1), len(tokens)):
            window = tuple(tokens[max(end - self._longest, 0) : end])
            for n in range(self._shortest, len(window) + 1):
                last[window[len(window) - n :]] = end
        self.size = max(self.size, len(tokens))

    def continuations(self, tokens: Sequence[int]) -> list[int]:
        """Positions of what followed the text's suffix, longest suffix first, without repeats."""
        found: list[int] = []
        for n in range(min(self._longest, len(tokens)), self._shortest - 1, -1):
            position = self._last.get(tuple(tokens[len(tokens) - n :]))
            if position is not None and position not in found:
                found.append(position)
        return found


class SuffixDrafter:
    """Copies the continuation of the longest matching suffix in prompt and output, its most recent occurrence.

    Args:
        shortest, longest: suffix lengths tried (prompt_lookup_min, prompt_lookup_max).
        eos_ids: nothing is drafted past an end token.
    """

    name = "suffix"

    def __init__(self, shortest: int = 2, longest: int = 8, *, eos_ids: Collection[int] = ()) -> None:
        self._shortest = shortest
        self._longest = longest
        self._eos_ids = tuple(eos_ids)
        self._indexes: dict[str, SuffixIndex] = {}

    def propose(self, contexts: Sequence[DraftContext]) -> list[TokenTree]:
        return [self._propose(context) for context in contexts]

    def forget(self, request_id: str) -> None:
        self._indexes.pop(request_id, None)

    def _propose(self, context: DraftContext) -> TokenTree:
        request = context.request
        tokens = request.token_ids
        index = self._indexes.get(request.request_id)
        if index is None or index.size > len(tokens):
            index = self._indexes[request.request_id] = SuffixIndex(self._shortest, self._longest)
        index.extend(tokens)
        ends = request.params.end_ids(self._eos_ids)
        for start in index.continuations(tokens):
            drafted = cut_after_end(copy_forward(tokens, start, context.budget), ends)
            if context.matcher is not None:
                drafted = drafted[: longest_legal(context.matcher, drafted)]
            if drafted:
                return TokenTree.chain(drafted, self.name)
        return EMPTY_TREE


def copy_forward(tokens: Sequence[int], start: int, count: int) -> list[int]:
    """`count` tokens from `start` on; past the end the copy reads its own output, so that periods go on (LZ77)."""
    period = len(tokens) - start
    return [tokens[start + i % period] for i in range(count)]
