"""Mailboxes of requests with several choices; those of one are tested with the client."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from specserve.core.messages import (
    ChoiceFinishedEvent,
    DeltaEvent,
    FinishedEvent,
    Logprob,
    PositionLogprobs,
    ProgressEvent,
    SpeculationStep,
    Usage,
)
from specserve.engine.mailbox import Mailbox, merge


def take_all(box):
    taken = []
    while (event := box.take()) is not None:
        taken.append(event)
    return taken


def filled(*events):
    box = Mailbox(lambda: None)
    for event in events:
        box.put(event)
    return box


def delta(index, token):
    return DeltaEvent("a", (token,), chr(token), index=index)


def end(index, reason="stop"):
    return ChoiceFinishedEvent("a", index, reason, 7)


END = FinishedEvent("a", "stop", Usage(), 7)


def test_deltas_of_different_choices_are_never_merged():
    box = filled(delta(1, 65), delta(0, 66), delta(1, 67), delta(0, 68), END)
    assert take_all(box) == [
        DeltaEvent("a", (65, 67), "AC", index=1),
        DeltaEvent("a", (66, 68), "BD", index=0),
        END,
    ]


def test_a_choices_end_stays_behind_its_deltas_and_before_the_end():
    box = filled(delta(0, 65), delta(1, 66), end(0), delta(1, 67), end(1, "length"), END)
    taken = take_all(box)
    assert taken == [
        DeltaEvent("a", (65,), "A"),
        DeltaEvent("a", (66, 67), "BC", index=1),
        end(0),
        end(1, "length"),
        END,
    ]


def test_nothing_is_merged_over_the_end_of_its_own_choice_or_an_event_of_the_whole_request():
    events = [delta(0, 65), end(0), delta(0, 66), ProgressEvent("a", 1, 2), delta(0, 67)]
    assert take_all(filled(*events)) == events


def test_a_delta_that_was_taken_takes_no_more():
    box = filled(delta(1, 65))
    assert box.take() == delta(1, 65)
    box.put(delta(1, 66))
    assert take_all(box) == [delta(1, 66)]


def test_merging_keeps_everything_and_the_index():
    entry = PositionLogprobs(Logprob(65, "A", -1.0))
    step = SpeculationStep((65,), ("A",), ("suffix",), 1)
    whole = merge([DeltaEvent("a", (65,), "A", (entry,), (step,), 3)] * 2)
    assert whole == DeltaEvent("a", (65, 65), "AA", (entry, entry), (step, step), 3)


def test_what_waits_is_bounded_by_the_number_of_choices():
    box = filled(*(delta(i % 64, 65) for i in range(64 * 100)))
    taken = take_all(box)
    assert [event.index for event in taken] == list(range(64))
    assert {event.text for event in taken} == {"A" * 100}


PUTS = st.lists(st.one_of(st.tuples(st.just("put"), st.integers(0, 3)), st.just(("take", 0))), max_size=60)


@given(PUTS)
def test_each_choice_reads_the_same_whenever_it_is_taken(moves):
    """Whatever the consumer's pace, each choice's tokens come in order and whole, and its end after all of them."""
    box, taken, put = Mailbox(lambda: None), [], {i: [] for i in range(4)}
    for number, (move, index) in enumerate(moves):
        if move == "put":
            put[index].append(number)
            box.put(DeltaEvent("a", (number,), "", index=index))
        else:
            taken.append(box.take())
    for index in range(4):
        box.put(end(index))
    box.put(END)
    taken = [event for event in [*taken, *take_all(box)] if event is not None]
    assert taken[-1] is END
    for index in range(4):
        own = [event for event in taken[:-1] if event.index == index]
        assert [token for event in own[:-1] for token in event.token_ids] == put[index]
        assert own[-1] == end(index)
