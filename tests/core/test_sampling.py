"""SamplingParams refuses what is wrong, at construction, and names the field."""

from __future__ import annotations

import math
from typing import Any

import pytest

from specserve.core.errors import InvalidRequestError
from specserve.core.sampling import SamplingParams


@pytest.mark.parametrize(
    ("values", "param"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"max_tokens": "many"}, "max_tokens"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": math.nan}, "temperature"),
        ({"temperature": math.inf}, "temperature"),
        ({"temperature": 1e-6}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": -1}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"seed": -1}, "seed"),
        ({"seed": 2**64}, "seed"),
        ({"seed": 1.0}, "seed"),
        ({"stop": ""}, "stop[0]"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"stop": [1]}, "stop[0]"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": -1}, "logprobs"),
        ({"logprobs_mode": "cooked"}, "logprobs_mode"),
        ({"min_tokens": 65}, "min_tokens"),
        ({"presence_penalty": 2.1}, "presence_penalty"),
        ({"frequency_penalty": "x"}, "frequency_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {3: 101}}, "logit_bias[3]"),
        ({"logit_bias": [1]}, "logit_bias"),
        ({"logit_bias": dict.fromkeys(range(5000), 1)}, "logit_bias"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"allowed_token_ids": [-1]}, "allowed_token_ids[0]"),
        ({"banned_token_ids": list(range(5000))}, "banned_token_ids"),
        ({"stop_token_ids": "12"}, "stop_token_ids"),
        ({"ignore_eos": 1}, "ignore_eos"),
        ({"guided": "json"}, "guided"),
        ({"guided": {"choice": ["a"]}, "stop": "a"}, "stop"),
        ({"guided": {"choice": ["a"]}, "stop_token_ids": [5]}, "stop_token_ids"),
        ({"guided": {}}, "guided"),
        ({"guided": {"regex": "a", "choice": ["b"]}}, "guided"),
        ({"guided": {"xml": "a"}}, "guided.xml"),
        ({"speculation": 3}, "speculation"),
        ({"speculation": {"k": 3}}, "speculation.k"),
        ({"speculation": {"num_speculative_tokens": 65}}, "speculation.num_speculative_tokens"),
        ({"frobnicate": 1}, "frobnicate"),
    ],
)
def test_refuses_and_names_the_field(values: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        SamplingParams.from_dict(values)
    assert refused.value.param == param
    assert refused.value.message


def test_accepts_the_forms_people_use() -> None:
    params = SamplingParams(stop="a", logit_bias={"7": -100}, seed=2**64 - 1, allowed_token_ids=[1, 2])
    assert params.stops == ("a",)
    assert params.logit_bias == {7: -100.0}
    assert params.allowed_token_ids == (1, 2)
    assert SamplingParams(stop=["a", "b"]).stops == ("a", "b")
    assert SamplingParams(max_tokens=None, min_tokens=9).max_tokens is None


def test_draft_cap() -> None:
    assert SamplingParams().draft_cap() is None
    assert SamplingParams(speculation=True).draft_cap() is None
    assert SamplingParams(speculation=False).draft_cap() == 0
    assert SamplingParams(speculation={"num_speculative_tokens": 3}).draft_cap() == 3


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"length_penalty": 2.0}, "length_penalty"),
        ({"early_stopping": True}, "early_stopping"),
        ({"early_stopping": "never"}, "early_stopping"),
        ({"beam_width": 4, "top_p": 0.9}, "top_p"),
        ({"beam_width": 4, "top_k": 5}, "top_k"),
        ({"beam_width": 4, "min_p": 0.1}, "min_p"),
    ],
)
def test_options_without_effect_are_refused(options: dict[str, Any], name: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(**options)
    assert caught.value.param == name
