"""SequenceKV: the KV of one sequence in the target's and the draft's pool, or in host memory."""

from __future__ import annotations

from specserve.kv.prefix import PrefixChain
from specserve.kv.table import BlockTable


class SequenceKV:
    """The KV of one sequence.

    Attributes:
        target, draft: block tables; draft is None without a draft model.
        chain: prefix digests, common to both tables.
        written: drafted tokens past `draft.committed` that were written in the draft's cache as scratch.
    """

    __slots__ = ("chain", "draft", "target", "written")

    def __init__(self, target: BlockTable, draft: BlockTable | None, chain: PrefixChain) -> None:
        self.target = target
        self.draft = draft
        self.chain = chain
        self.written = 0

    @property
    def swapped(self) -> bool:
        """Its KV is in host memory: nothing but `rollback`, `release` and a swap-in is possible."""
        return self.target.swapped

    def check(self) -> None:
        """Assert the invariants; tests call it after every operation."""
        self.target.check()
        if self.draft is not None:
            self.draft.check()
            assert self.draft.swapped is self.swapped
            assert self.swapped or self.draft.committed + self.written <= self.draft.capacity
        assert not (self.swapped and self.written)
