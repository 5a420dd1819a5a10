"""TokenTree: the one type for drafts, their masks and their verification. A chain is a tree with one branch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

NO_NODE = -1


@dataclass(frozen=True, slots=True)
class TokenTree:
    """Drafted tokens in topological order (a parent before its children).

    Attributes:
        tokens: token id of each node, shape [n].
        first_child: index of a node's first child or NO_NODE, shape [n].
        next_sibling: index of a node's next sibling or NO_NODE, shape [n].
        probs: probability with which the drafter drew each node, shape [n]; 1.0 for deterministic drafters.
        sources: name of the drafter of each node ("suffix", "draft_model", ...), shape [n].
    """

    tokens: tuple[int, ...] = ()
    first_child: tuple[int, ...] = ()
    next_sibling: tuple[int, ...] = ()
    probs: tuple[float, ...] = ()
    sources: tuple[str, ...] = ()

    @classmethod
    def chain(cls, tokens: Sequence[int], source: str, probs: Sequence[float] | None = None) -> TokenTree:
        """A tree with one branch: node i + 1 is the only child of node i."""
        n = len(tokens)
        child = tuple(i + 1 if i + 1 < n else NO_NODE for i in range(n))
        return cls(
            tokens=tuple(tokens),
            first_child=child,
            next_sibling=(NO_NODE,) * n,
            probs=tuple(probs) if probs is not None else (1.0,) * n,
            sources=(source,) * n,
        )

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def is_chain(self) -> bool:
        return all(s == NO_NODE for s in self.next_sibling)

    def children(self, node: int) -> Iterator[int]:
        """Children of `node` in order; of the (virtual) root for NO_NODE."""
        child = (0 if self.tokens else NO_NODE) if node == NO_NODE else self.first_child[node]
        while child != NO_NODE:
            yield child
            child = self.next_sibling[child]

    def truncate(self, n: int) -> TokenTree:
        """The first `n` nodes. Topological order keeps every kept node's ancestors."""
        if n >= len(self.tokens):
            return self

        def cut(links: tuple[int, ...]) -> tuple[int, ...]:
            return tuple(x if x < n else NO_NODE for x in links[:n])

        return TokenTree(
            self.tokens[:n], cut(self.first_child), cut(self.next_sibling), self.probs[:n], self.sources[:n]
        )

    def check(self) -> None:
        """Assert the invariants; tests call it after every operation."""
        n = len(self.tokens)
        assert len(self.first_child) == len(self.next_sibling) == len(self.probs) == len(self.sources) == n
        reached = 0
        stack = [NO_NODE]
        while stack:
            node = stack.pop()
            for child in self.children(node):
                assert child > node, "a parent comes before its children"
                reached += 1
                stack.append(child)
        assert reached == n, "every node is reachable exactly once"


EMPTY_TREE = TokenTree()
