"""PrefixChain: digests name the namespace and every token before."""

import pytest

from specserve.kv.prefix import DIGEST_BYTES, PrefixChain, block_digest


def digests(namespace, tokens, size=4):
    chain = PrefixChain(namespace, size)
    return [chain.digest(tokens, i) for i in range(len(tokens) // size)]


def test_equal_prefixes_give_equal_digests():
    one, two = digests("a", [*range(8), 1, 2, 3, 4]), digests("a", [*range(8), 9, 9, 9, 9])
    assert one[:2] == two[:2]
    assert one[2] != two[2]
    assert all(len(d) == DIGEST_BYTES for d in one)


def test_a_block_depends_on_everything_before_it():
    assert digests("a", [0, 0, 0, 0, 1, 2, 3, 4])[1] != digests("a", [0, 0, 0, 5, 1, 2, 3, 4])[1]


def test_namespaces_and_block_sizes_never_meet():
    tokens = list(range(8))
    assert not set(digests("a", tokens)) & set(digests("b", tokens))
    assert not set(digests("", tokens)) & set(digests("a", tokens))
    assert not set(digests("a", tokens, 4)) & set(digests("a", tokens, 8))


def test_token_boundaries_are_unambiguous():
    assert block_digest(b"", [1, 256]) != block_digest(b"", [257, 0])
    assert block_digest(b"", [2**31, 0]) != block_digest(b"", [0, 2**31])


def test_digests_are_computed_once_and_in_any_order():
    tokens = list(range(12))
    chain = PrefixChain("a", 4)
    last = chain.digest(tokens, 2)
    assert chain.digests == digests("a", tokens)
    assert chain.digest(tokens, 2) is last


def test_only_full_blocks_have_digests():
    with pytest.raises(ValueError, match="not full"):
        PrefixChain("a", 4).digest([1, 2, 3], 0)


def test_forks_go_their_own_ways():
    chain = PrefixChain("a", 2)
    chain.digest([1, 2, 3, 4], 1)
    child = chain.fork(1)
    assert child.digest([1, 2, 9, 9], 1) != chain.digests[1]
    assert child.digests[0] == chain.digests[0]
    assert chain.digests == digests("a", [1, 2, 3, 4], 2)
