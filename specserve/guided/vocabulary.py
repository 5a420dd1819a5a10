"""The tokens that a grammar is matched against."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Vocabulary:
    """Exact bytes of every token.

    Attributes:
        token_bytes: bytes of each id; b"" for control tokens, which no grammar ever allows.
        vocab_size: width of the logits, at least len(token_bytes); ids past the tokenizer's own are never legal.
        eos_ids: ids that end an answer; legal exactly where the grammar may end.
    """

    token_bytes: tuple[bytes, ...]
    vocab_size: int
    eos_ids: tuple[int, ...]

    @classmethod
    def build(cls, token_bytes: Sequence[bytes], vocab_size: int | None, eos_ids: Sequence[int]) -> Vocabulary:
        """Checked, with the bytes of end tokens dropped (an end token is never text)."""
        size = len(token_bytes) if vocab_size is None else vocab_size
        ends = tuple(sorted(set(eos_ids)))
        if size < len(token_bytes):
            raise ValueError(f"vocab_size {size} is less than the {len(token_bytes)} tokens")
        if not ends or not all(0 <= i < len(token_bytes) for i in ends):
            raise ValueError("eos_ids must name at least one token, and tokens of the vocabulary only")
        return cls(tuple(b"" if i in ends else bytes(b) for i, b in enumerate(token_bytes)), size, ends)

    @property
    def words(self) -> int:
        """32-bit words of one mask row."""
        return -(-self.vocab_size // 32)
