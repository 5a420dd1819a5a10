import pytest

from specserve.cluster.build import context_length
from specserve.cluster.memory import split_kv
from specserve.core.errors import ConfigError
from tests.fakes.tiny_model import TinyModel


def test_trap_f5_both_caches_come_out_of_one_budget_and_the_split_is_told():
    target, draft = TinyModel(hidden=32).info, TinyModel(hidden=8).info
    split = split_kv(2**20, 16, target, draft)
    assert split.target_bytes + split.draft_bytes <= 2**20
    assert split.target_bytes == 4 * split.draft_bytes, "by bytes a token: both hold as many tokens"
    assert (split.num_blocks + 1) * (target.kv_bytes_per_block(16) + draft.kv_bytes_per_block(16)) > 2**20
    text = split.describe()
    assert f"{split.num_blocks * 16:,} tokens" in text
    assert "target 0.8 MiB" in text
    assert "draft 0.2 MiB" in text
    assert "draft" not in split_kv(2**20, 16, target).describe()


def test_too_little_memory():
    with pytest.raises(ConfigError, match="kv_memory"):
        split_kv(100, 16, TinyModel().info)


def test_context_length():
    info = TinyModel(max_position=64).info
    assert context_length(None, info) == 64
    assert context_length(32, info) == 32
    with pytest.raises(ConfigError, match="max_model_len"):
        context_length(65, info)
