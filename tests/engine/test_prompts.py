from __future__ import annotations

import pytest

from specserve.core.errors import InvalidRequestError
from specserve.engine.prompts import encode_prompts
from tests.fakes.vocab import ToyVocabulary

V = ToyVocabulary()
CHAT = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("prompts", "expected"),
    [
        ("hello", [V.encode("hello")]),
        (["hello", "abc"], [V.encode("hello"), V.encode("abc")]),
        ([1, 2, 3], [[1, 2, 3]]),
        ((1, 2), [[1, 2]]),
        ([[1, 2], [3]], [[1, 2], [3]]),
        (CHAT, [V.encode_chat(CHAT)]),
        ([CHAT, "hello", [5]], [V.encode_chat(CHAT), V.encode("hello"), [5]]),
    ],
)
def test_forms(prompts, expected):
    assert encode_prompts(prompts, V) == [tuple(ids) for ids in expected]


@pytest.mark.parametrize(
    ("prompts", "param"),
    [
        ([], "prompts"),
        (5, "prompts"),
        (None, "prompts"),
        ("", "prompts"),
        (["a", ""], "prompts[1]"),
        (["a", []], "prompts[1]"),
        (["a", 5], "prompts[1]"),
        (["a", [1, -1]], "prompts[1][1]"),
        ([1, True], "prompts[1]"),
        ([1, "a"], "prompts[1]"),
        ([CHAT, [CHAT[0], "x"]], "prompts[1][1]"),
        ([{"content": "no role"}], "prompts[0]"),
    ],
)
def test_errors_name_the_prompt(prompts, param):
    with pytest.raises(InvalidRequestError) as caught:
        encode_prompts(prompts, V)
    assert caught.value.param == param


def test_errors_of_the_encoder_name_the_prompt():
    class Refuses(ToyVocabulary):
        def encode(self, text):
            raise InvalidRequestError("prompt: has a lone surrogate", param="prompt")

    with pytest.raises(InvalidRequestError, match=r"prompts\[1\]: .*surrogate") as caught:
        encode_prompts([[1], "x"], Refuses())
    assert caught.value.param == "prompts[1]"
