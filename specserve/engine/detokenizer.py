"""Incremental detokeniser: bytes of tokens in, whole characters out."""

from __future__ import annotations

import codecs

_UTF8 = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """Decodes the concatenated bytes of tokens as UTF-8, whatever the borders between tokens.

    What it gives is what decoding all bytes at once with errors="replace" gives, except at the very end: an
    incomplete character there is withheld, and dropped if no token completes it. So U+FFFD stands only for bytes
    that can no longer become a character, never for one that two tokens share.
    """

    __slots__ = ("_decoder",)

    def __init__(self) -> None:
        self._decoder = _UTF8(errors="replace")

    def fork(self) -> Detokenizer:
        """An independent copy at the same state."""
        copy = Detokenizer()
        copy._decoder.setstate(self._decoder.getstate())
        return copy

    def push(self, data: bytes) -> str:
        """The characters that `data` completes."""
        return self._decoder.decode(data)
