"""Blocks saved by forks, against figures worked out by hand."""

import pytest

from bench.policies import sharing
from bench.policies.sharing import Saving, beam_search, parallel_sampling
from bench.policies.workload import ALPACA, SHAREGPT, Job


def test_samples_share_the_full_blocks_of_their_prompt():
    # After the prompt of 40 a sample of 10 grows to 49: of 3 blocks, then 4 from position 48 on, 2 are the prompt's.
    for width in (2, 5):
        saving = Saving(width)
        saving.run([Job(0.0, 40, 10)])
        unshared = width * (8 * 3 + 1 * 4)
        assert saving.unshared == unshared
        assert saving.held == unshared - (width - 1) * 2 * 9


def test_one_sequence_saves_nothing():
    assert parallel_sampling(ALPACA, 5, 1, 1) == 0
    assert beam_search(ALPACA, 5, 1, 1) == 0


def test_more_sequences_save_more():
    samples = [parallel_sampling(ALPACA, 60, width, 1) for width in (2, 4, 6)]
    assert samples == sorted(samples)
    assert samples[1] / samples[0] == pytest.approx(0.75 / 0.5)
    assert samples[2] / samples[0] == pytest.approx((5 / 6) / 0.5)
    assert 0.04 < samples[0] < 0.1


@pytest.mark.parametrize("width", [2, 4, 6])
def test_beams_save_more_than_samples(width):
    beams = beam_search(ALPACA, 30, width, 1)
    assert parallel_sampling(ALPACA, 30, width, 1) < beams < 1 - 1 / width


def test_beams_that_never_change_are_samples():
    assert beam_search(SHAREGPT, 3, 4, 1, replaced=0.0) == parallel_sampling(SHAREGPT, 3, 4, 1)


def test_beams_that_change_more_share_more():
    rare, often = (beam_search(ALPACA, 30, 4, 1, replaced=share) for share in (0.1, 1.0))
    assert rare < often


def test_what_is_left_over_is_noticed(monkeypatch):
    monkeypatch.setattr(sharing.KVManager, "release", lambda self, seq: None)
    with pytest.raises(RuntimeError, match="left over"):
        Saving(2).run([Job(0.0, 4, 2)])
