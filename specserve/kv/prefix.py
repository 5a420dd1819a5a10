"""Chained prefix hashes: the name of a full block is a digest of its namespace and of every token up to its end.

A cryptographic hash, because equal digests mean that one request reads another's KV: nobody may construct two prompts
that share one.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import lru_cache
from hashlib import blake2b

DIGEST_BYTES = 32


@lru_cache(maxsize=1024)
def _root(namespace: str, block_size: int) -> bytes:
    """The digest before the first block. Seeds the chain, so that namespaces never meet."""
    seed = f"{block_size}:{namespace}".encode("utf-8", "surrogatepass")
    return blake2b(seed, digest_size=DIGEST_BYTES, person=b"specserve-kv").digest()


def block_digest(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """Digest of one full block of tokens after `parent`. Fixed width a token, so that the bytes are unambiguous."""
    return blake2b(parent + array("q", token_ids).tobytes(), digest_size=DIGEST_BYTES).digest()


class PrefixChain:
    """Digests of the full blocks of one growing sequence, each computed once.

    Attributes:
        digests: one for each full block hashed so far; `digests[i]` names tokens 0 .. (i + 1) * block_size.
    """

    __slots__ = ("block_size", "digests", "namespace")

    def __init__(self, namespace: str, block_size: int) -> None:
        self.namespace = namespace
        self.block_size = block_size
        self.digests: list[bytes] = []

    def digest(self, token_ids: Sequence[int], block: int) -> bytes:
        """Digest of full block number `block` of `token_ids`; blocks before it are hashed first where they are new.

        `token_ids` must go on what earlier calls were given: known tokens never change.
        """
        digests = self.digests
        size = self.block_size
        while len(digests) <= block:
            start = len(digests) * size
            if start + size > len(token_ids):
                raise ValueError(f"block {block} of {len(token_ids)} tokens is not full")
            parent = digests[-1] if digests else _root(self.namespace, size)
            digests.append(block_digest(parent, token_ids[start : start + size]))
        return digests[block]

    def fork(self, num_blocks: int) -> PrefixChain:
        """A chain that shares the first `num_blocks` digests and goes its own way."""
        chain = PrefixChain(self.namespace, self.block_size)
        chain.digests = self.digests[:num_blocks]
        return chain
