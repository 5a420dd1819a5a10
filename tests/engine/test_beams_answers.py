"""Which answers a beam search gives: as long as memory allows, and each once."""

import pytest

from specserve.core.messages import DeltaEvent, FinishedEvent, GenerateCommand
from specserve.core.sampling import SamplingParams
from specserve.sched.family import beam_blocks
from tests.fakes.engines import VOCABULARY, command, make_rig


@pytest.mark.parametrize("blocks", [20, 21, 33, 64])
def test_without_a_limit_a_search_takes_what_fits(blocks):
    rig = make_rig(blocks=blocks, block_size=4, max_model_len=10_000)
    beams = SamplingParams(beam_width=4, max_tokens=None, ignore_eos=True)
    events = rig.run(GenerateCommand("a", (5, 6, 7, 8, 9, 10), beams))["a"]
    (end,) = [e for e in events if isinstance(e, FinishedEvent)]
    assert end.finish_reason == "length"
    tokens = end.usage.completion_tokens
    assert beam_blocks(6, tokens, 4, 4) <= blocks < beam_blocks(6, tokens + 4, 4, 4)


def test_answers_that_differ_behind_a_stop_text_are_one():
    letters = tuple(VOCABULARY.id(letter) for letter in "abcd")
    for prompt in ("hi", "ab", "cd", "da"):
        rig = make_rig()
        job = {"beam_width": 5, "n": 5, "max_tokens": 4, "stop": ["a", "b"], "allowed_token_ids": letters}
        events = rig.run(command("a", prompt, **job))["a"]
        shown = [(e.token_ids, e.text) for e in events if isinstance(e, DeltaEvent)]
        assert len(set(shown)) == len(shown) > 1
