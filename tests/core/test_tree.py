"""TokenTree: a chain is a tree with one branch; truncation keeps ancestors."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specserve.core.tree import EMPTY_TREE, NO_NODE, TokenTree


def from_parents(parents: list[int]) -> TokenTree:
    n = len(parents)
    first, sibling = [NO_NODE] * n, [NO_NODE] * n
    last: dict[int, int] = {}
    for node, parent in enumerate(parents):
        if parent in last:
            sibling[last[parent]] = node
        elif parent != NO_NODE:
            first[parent] = node
        last[parent] = node
    return TokenTree(tuple(range(n)), tuple(first), tuple(sibling), (1.0,) * n, ("x",) * n)


@st.composite
def trees(draw: st.DrawFn) -> tuple[TokenTree, list[int]]:
    n = draw(st.integers(1, 12))
    parents = [NO_NODE] + [draw(st.integers(NO_NODE, i - 1)) for i in range(1, n)]
    return from_parents(parents), parents


@given(trees(), st.integers(0, 13))
def test_truncation_keeps_a_valid_tree(built: tuple[TokenTree, list[int]], n: int) -> None:
    tree, parents = built
    tree.check()
    cut = tree.truncate(n)
    cut.check()
    assert len(cut) == min(n, len(tree))
    for node in (NO_NODE, *range(len(cut))):
        assert list(cut.children(node)) == [c for c in range(len(cut)) if parents[c] == node]


def test_chain() -> None:
    chain = TokenTree.chain([5, 6, 7], "suffix")
    chain.check()
    assert chain.is_chain
    assert list(chain.children(NO_NODE)) == [0]
    assert list(chain.children(1)) == [2]
    assert not EMPTY_TREE
    EMPTY_TREE.check()


def test_check_can_fail() -> None:
    with pytest.raises(AssertionError):
        TokenTree((1, 2), (NO_NODE, NO_NODE), (NO_NODE, NO_NODE), (1.0, 1.0), ("x", "x")).check()
