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


def test_host_memory_is_split_too_and_told():
    target, draft = TinyModel(hidden=32).info, TinyModel(hidden=8).info
    both = target.kv_bytes_per_block(16) + draft.kv_bytes_per_block(16)
    split = split_kv(2**20, 16, target, draft, swap_memory=25 * both + 1)
    assert split.host_blocks == 25
    assert split.num_blocks == split_kv(2**20, 16, target, draft).num_blocks, "it is another memory"
    assert split.describe().endswith("draft 0.2 MiB), host: 400 tokens")
    alone = split_kv(2**20, 16, target, swap_memory=25 * both)
    assert alone.host_blocks == 25 * both // target.kv_bytes_per_block(16) > 25


@pytest.mark.parametrize("swap_memory", [0, 100])
def test_host_memory_that_holds_no_block_is_none(swap_memory):
    split = split_kv(2**20, 16, TinyModel().info, swap_memory=swap_memory)
    assert split.host_blocks == 0
    assert split.describe().endswith("host: 0 tokens")


def test_context_length():
    info = TinyModel(max_position=64).info
    assert context_length(None, info) == 64
    assert context_length(32, info) == 32
    with pytest.raises(ConfigError, match="max_model_len"):
        context_length(65, info)
