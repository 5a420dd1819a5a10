"""Configuration names what is wrong and never ignores a key."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from specserve.core.config import EngineConfig, ServerConfig, SpeculationConfig, load_toml, parse_bytes
from specserve.core.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "size"),
    [("2GiB", 2**31), ("512 MB", 512 * 10**6), ("1.5kib", 1536), ("1 TiB", 2**40), (4096, 4096), ("64", 64)],
)
def test_sizes(text: str | int, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "-1GiB", "2 elephants", 0, -5, True, None, "0"])
def test_bad_sizes(text: Any) -> None:
    with pytest.raises(ConfigError):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("values", "param"),
    [
        ({"dtype": "float16"}, "dtype"),
        ({"dtype": ["float32"]}, "dtype"),
        ({"quantization": "q5"}, "quantization"),
        ({"quantization": None}, "quantization"),
        ({"quantization": "q4", "dtype": "float32"}, "quantization"),
        ({"numerics": "sloppy"}, "numerics"),
        ({"prefix_cache": "off"}, "prefix_cache"),
        ({"prefix_cache": 0}, "prefix_cache"),
        ({"speculation": {"methods": ["suffix"], "adaptive": "no"}}, "speculation.adaptive"),
        ({"block_size": 0}, "block_size"),
        ({"block_size": 1.5}, "block_size"),
        ({"max_batched_tokens": 0}, "max_batched_tokens"),
        ({"threads": 0}, "threads"),
        ({"model": ""}, "model"),
        ({"modle": "demo"}, "modle"),
        ({"speculation": {"methods": ["eagle"]}}, "speculation.methods[0]"),
        ({"speculation": {"methods": "suffix"}}, "speculation.methods"),
        ({"speculation": {"methods": ["draft_model"]}}, "speculation.model"),
        ({"speculation": {"methods": ["suffix"], "model": "x"}}, "speculation.methods"),
        ({"speculation": {"num_speculative_tokens": 0}}, "speculation.num_speculative_tokens"),
        ({"speculation": {"k": 1}}, "speculation.k"),
        ({"speculation": "on"}, "speculation"),
        ({"speculation": {"method": "suffix", "methods": ["suffix"]}}, "speculation.method"),
    ],
)
def test_engine_refuses_and_names_the_option(values: dict[str, Any], param: str) -> None:
    with pytest.raises(ConfigError) as refused:
        EngineConfig.from_dict(values)
    assert refused.value.param == param


def test_speculation_forms() -> None:
    assert SpeculationConfig.from_dict(None) is None
    assert SpeculationConfig.from_dict({"method": "suffix"}) == SpeculationConfig()
    assert EngineConfig.from_dict({"speculation": None}).speculation is None
    assert EngineConfig.from_dict({"speculation": "off"}).speculation is None
    with pytest.raises(ConfigError, match='None or "off" switches drafts off'):
        SpeculationConfig.from_dict("on")


def test_server_refuses_unknown_keys() -> None:
    with pytest.raises(ConfigError) as refused:
        ServerConfig.from_dict({"prot": 1})
    assert refused.value.param == "server.prot"


@pytest.mark.parametrize(
    "keys", ["sk-one", 5, [5], [""], ["sk-one", ""], [" "], [" sk"], ["caf\u00e9"], ["a\nb"], ["a\x7f"]]
)
def test_server_refuses_keys_that_no_header_carries(keys: Any) -> None:
    with pytest.raises(ConfigError) as refused:
        ServerConfig.from_dict({"api_keys": keys})
    assert refused.value.param == "server.api_keys"


def test_server_lists() -> None:
    assert ServerConfig.from_dict({"api_keys": ["sk-one", "a b"]}).api_keys == ("sk-one", "a b")
    with pytest.raises(ConfigError, match=r"server\.allowed_origins"):
        ServerConfig.from_dict({"allowed_origins": "*"})


def test_toml(tmp_path: Path) -> None:
    path = tmp_path / "specserve.toml"
    path.write_text('model = "demo"\nspeculation = "off"\n[server]\nport = 9\n')
    engine, server = load_toml(path)
    assert engine == {"model": "demo", "speculation": None}
    assert server == {"port": 9}
    path.write_text("model = ")
    with pytest.raises(ConfigError, match="not valid TOML"):
        load_toml(path)
    with pytest.raises(ConfigError, match="cannot read"):
        load_toml(tmp_path / "absent.toml")
