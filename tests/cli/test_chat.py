"""Colouring of accepted draft tokens: text may arrive later and in other pieces than the steps that made it."""

from __future__ import annotations

from specserve.cli.chat import DraftColours


def step(*texts: str, accepted: int) -> dict:
    return {"tokens": [{"text": t} for t in texts], "accepted": accepted}


def test_accepted_prefix_is_drafted() -> None:
    colours = DraftColours()
    colours.speculation(step(" the", " cat", " sat", accepted=2))
    assert colours.split(" the cat ran") == (" the cat", " ran")
    assert colours.split(" off") == ("", " off")


def test_nothing_accepted() -> None:
    colours = DraftColours()
    colours.speculation(step(" the", accepted=0))
    assert colours.split(" the") == ("", " the")


def test_accepted_text_in_two_pieces() -> None:
    colours = DraftColours()
    colours.speculation(step("ab", "cd", accepted=2))
    assert colours.split("ab") == ("ab", "")
    assert colours.split("cde") == ("cd", "e")
