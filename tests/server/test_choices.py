"""Chat completions and completions of several choices: their streams and their results, fed with events."""

from __future__ import annotations

import json

import pytest

from specserve.core.config import ServerConfig
from specserve.core.messages import (
    ChoiceFinishedEvent,
    DeltaEvent,
    FailedEvent,
    FinishedEvent,
    Logprob,
    PositionLogprobs,
    StartedEvent,
    Usage,
)
from specserve.server.chat import ChatView, CompletionView, parse_chat, parse_completion
from specserve.server.limits import Limits

LIMITS = Limits.of(ServerConfig(), 100, 300)
DONE = b"data: [DONE]\n\n"


def chat(**options):
    values = {"messages": [{"role": "user", "content": "x"}], **options}
    return ChatView("c", parse_chat(values, LIMITS, "fake"), "fake", 1)


def completion(**options):
    return CompletionView("c", parse_completion({"prompt": "x", **options}, LIMITS, "fake"), "fake", 1)


def delta(index, text):
    entries = tuple(PositionLogprobs(Logprob(ord(c), c, -1.0)) for c in text)
    return DeltaEvent("c", tuple(map(ord, text)), text, entries, index=index)


def end(index, reason="stop", score=None):
    return ChoiceFinishedEvent("c", index, reason, 100 + index, score)


def finished(reason="stop"):
    return FinishedEvent("c", reason, Usage(3, 9), 7)


def chunks(view, *events):
    """What a stream shows, each chunk as (index, its delta or text, finish_reason); and the raw chunks."""
    frames = view.open() + [frame for event in events for frame in view.feed(event)] + view.close()
    assert frames[-1] == DONE
    raw = [json.loads(frame[6:]) for frame in frames[:-1]]
    shown = []
    for chunk in raw:
        for choice in chunk.get("choices", ()):
            shown.append((choice["index"], choice.get("delta", choice.get("text")), choice["finish_reason"]))
    return shown, raw


def result(view, *events):
    for event in events:
        view.feed(event)
    return view.result()


ROLE = {"role": "assistant", "content": ""}
SIDE_BY_SIDE = (
    StartedEvent("c", 7, 3, 0),
    delta(2, "a"),
    delta(0, "b"),
    end(2, "length"),
    delta(0, "c"),
    end(0),
    end(1),
    end(3),
    finished("length"),
)


def test_each_choice_of_a_chat_stream_has_its_role_its_text_and_its_end():
    shown, raw = chunks(chat(n=4, stream=True, stream_options={"include_usage": True}), *SIDE_BY_SIDE)
    assert shown == [
        (0, ROLE, None),
        (1, ROLE, None),
        (2, ROLE, None),
        (2, {"content": "a"}, None),
        (0, {"content": "b"}, None),
        (2, {}, "length"),
        (0, {"content": "c"}, None),
        (0, {}, "stop"),
        (1, {}, "stop"),
        (3, ROLE, None),
        (3, {}, "stop"),
    ]
    assert [chunk["choices"][0]["seed"] for chunk in raw if chunk["choices"] and "seed" in chunk["choices"][0]] == [
        102,
        100,
        101,
        103,
    ]
    assert raw[-1]["choices"] == []
    assert (raw[-1]["usage"]["completion_tokens"], raw[-1]["seed"]) == (9, 7)
    assert all(len(chunk["choices"]) == 1 for chunk in raw[:-1])


def test_a_completion_stream_has_no_roles():
    shown, _ = chunks(completion(n=4, stream=True), *SIDE_BY_SIDE)
    texts = [(2, "a", None), (0, "b", None), (2, "", "length"), (0, "c", None)]
    assert shown == [*texts, (0, "", "stop"), (1, "", "stop"), (3, "", "stop")]


def test_a_chat_result_has_every_choice_by_index():
    whole = result(chat(n=4, logprobs=True), *SIDE_BY_SIDE)
    assert [(c["index"], c["message"]["content"], c["finish_reason"], c["seed"]) for c in whole["choices"]] == [
        (0, "bc", "stop", 100),
        (1, "", "stop", 101),
        (2, "a", "length", 102),
        (3, "", "stop", 103),
    ]
    logprobs = [[entry["token"] for entry in c["logprobs"]["content"]] for c in whole["choices"]]
    assert logprobs == [["b", "c"], [], ["a"], []]
    assert (whole["seed"], whole["usage"]["prompt_tokens"]) == (7, 3)


@pytest.mark.parametrize("options", [{"n": 2, "best_of": 4}, {"n": 2, "beam_width": 4}])
def test_ranked_choices_have_their_score(options):
    events = (delta(0, "good"), end(0, score=-0.25), delta(1, "ok"), end(1, score=-0.5), finished())
    whole = result(completion(**options, logprobs=0), *events)
    assert [(c["text"], c["score"]) for c in whole["choices"]] == [("good", -0.25), ("ok", -0.5)]
    assert [c["logprobs"]["tokens"] for c in whole["choices"]] == [list("good"), list("ok")]
    shown, raw = chunks(completion(**options, stream=True), *events)
    assert shown == [(0, "good", None), (0, "", "stop"), (1, "ok", None), (1, "", "stop")]
    assert [chunk["choices"][0].get("score") for chunk in raw] == [None, -0.25, None, -0.5]


def test_a_best_of_that_returns_one_ends_once():
    shown, _ = chunks(chat(best_of=3, stream=True), delta(0, "good"), end(0, score=-1.0), finished())
    assert shown == [(0, ROLE, None), (0, {"content": "good"}, None), (0, {}, "stop")]


@pytest.mark.parametrize("options", [{}, {"n": 1}, {"n": None}, {"best_of": 1}, {"beam_width": 1}])
def test_one_choice_ends_with_the_request(options):
    shown, raw = chunks(chat(stream=True, **options), delta(0, "a"), finished("length"))
    assert shown == [(0, ROLE, None), (0, {"content": "a"}, None), (0, {}, "length")]
    assert raw[-1]["choices"][0]["seed"] == 7
    whole = result(completion(**options), delta(0, "a"), finished())
    assert whole["choices"] == [{"index": 0, "text": "a", "logprobs": None, "finish_reason": "stop", "seed": 7}]


@pytest.mark.parametrize("last", [finished("cancelled"), FailedEvent("c", "engine_died", "gone", status=503)])
def test_choices_of_a_request_that_was_cut_have_no_end_of_their_own(last):
    events = (delta(0, "a"), delta(1, "b"), end(1), last)
    shown, raw = chunks(chat(n=2, stream=True), *events)
    assert [(index, reason) for index, _, reason in shown if reason] == [(1, "stop")]
    if isinstance(last, FailedEvent):
        assert raw[-1]["error"]["code"] == "engine_died"
    assert [c["finish_reason"] for c in result(chat(n=2), *events)["choices"]] == [None, "stop"]


def test_one_choice_of_a_request_that_was_cut_has_no_end_either():
    events = (delta(0, "a"), finished("cancelled"))
    assert chunks(chat(stream=True), *events)[0] == [(0, ROLE, None), (0, {"content": "a"}, None)]
    assert result(chat(), *events)["choices"][0]["finish_reason"] is None


def test_a_chat_stream_says_something_before_the_engine_does():
    assert [len(view.open()) for view in (chat(), chat(n=2), completion(n=2))] == [1, 1, 0]
