from __future__ import annotations

import codecs
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specserve.engine.detokenizer import Detokenizer

# Text and broken bytes, in pieces of any length.
BYTES = st.one_of(st.text().map(str.encode), st.binary(), st.sampled_from([b"\xe2\x82", b"\xf0\x9f", b"\xed\xa0\x80"]))
CHUNKS = (
    st.lists(BYTES, max_size=12)
    .map(b"".join)
    .flatmap(lambda data: st.lists(st.integers(0, len(data)), max_size=8).map(lambda cuts: split(data, sorted(cuts))))
)


def split(data: bytes, cuts: list[int]) -> list[bytes]:
    edges = [0, *cuts, len(data)]
    return [data[a:b] for a, b in itertools.pairwise(edges)]


def decode(chunks: list[bytes]) -> str:
    detokenizer = Detokenizer()
    return "".join(detokenizer.push(chunk) for chunk in chunks)


@given(CHUNKS)
def test_any_chunking_gives_the_text_of_the_whole(chunks):
    assert decode(chunks) == decode([b"".join(chunks)])


@given(CHUNKS)
def test_the_text_is_that_of_a_full_decode_but_for_an_incomplete_end(chunks):
    data = b"".join(chunks)
    whole = data.decode(errors="replace")
    text = decode(chunks)
    assert whole.startswith(text)
    rest = whole[len(text) :]
    # The decoder holds back the first two bytes of an encoded surrogate too, which decode to two marks.
    assert rest in ("", "�", "��"), "only one incomplete character may be missing, at the very end"
    if rest:
        pending = codecs.getincrementaldecoder("utf-8")(errors="replace")
        pending.decode(data)
        assert pending.getstate()[0], "and only if it is incomplete"


@given(st.text(), st.integers(1, 3))
def test_trap_e1_split_characters_never_show_replacements(text, size):
    data = text.encode()
    detokenizer = Detokenizer()
    for at in range(0, len(data), size):
        piece = detokenizer.push(data[at : at + size])
        assert piece.count("�") <= text.count("�")
    assert decode([data[i : i + size] for i in range(0, len(data), size)]) == text


@pytest.mark.parametrize(
    ("chunks", "text"),
    [
        ([b"\xe2", b"\x82", b"\xac"], "€"),
        ([b"\xe2\x82", b"x"], "�x"),
        ([b"\xff", b"a"], "�a"),
        ([b"a", b"\xe2\x82"], "a"),
        (["👩‍👧".encode()[:6], "👩‍👧".encode()[6:]], "👩‍👧"),
    ],
)
def test_examples(chunks, text):
    assert decode(chunks) == text


@given(st.text(), st.text(), st.text(), st.integers(0, 40))
def test_a_fork_goes_on_by_itself(before, one, other, cut):
    """The fork may come in the middle of a character."""
    begin = before.encode()[:cut]
    rest = before.encode()[cut:]
    detokenizer = Detokenizer()
    shown = detokenizer.push(begin)
    fork = detokenizer.fork()
    forked = fork.push(rest) + fork.push(one.encode())
    own = detokenizer.push(rest) + detokenizer.push(other.encode())
    assert shown + forked == before + one
    assert shown + own == before + other
