"""Flags win over the file; a wrong option is one line that names it, never a traceback."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from typer.testing import CliRunner

from specserve.cli.main import app
from specserve.cli.options import parse_speculation, read_options
from specserve.core.config import EngineConfig, ServerConfig
from specserve.core.errors import ConfigError


def test_flags_win(tmp_path: Path) -> None:
    path = tmp_path / "specserve.toml"
    path.write_text('dtype = "float32"\nthreads = 1\n[speculation]\nmethods = ["suffix"]\n[server]\nport = 7\n')
    engine, server = read_options(path, {"dtype": "bfloat16", "model": None}, {"port": 0, "host": None}, "off")
    assert (engine.dtype, engine.threads, engine.model) == ("bfloat16", 1, "demo")
    assert engine.speculation is None
    assert server.port == 0


@pytest.mark.parametrize("text", ["0", " 0 ", "0.0", "0GiB", "0 mb", "00b"])
def test_no_swap_memory(text: str, tmp_path: Path) -> None:
    engine, _ = read_options(None, {"swap_memory": text}, {}, None)
    assert engine.swap_memory == 0
    path = tmp_path / "specserve.toml"
    path.write_text(f'swap_memory = "{text}"\n')
    assert read_options(path, {}, {}, None)[0].swap_memory == 0


def test_policies_reach_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[EngineConfig] = []

    def run(engine: EngineConfig, server: ServerConfig) -> int:
        seen.append(engine)
        return 0

    fake = ModuleType("specserve.cli.serve")
    fake.run = run  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "specserve.cli.serve", fake)
    flags = ["--target-itl-ms", "37.5", "--preemption", "swap", "--swap-memory", "64MiB"]
    for arguments in (flags, ["--target-itl-ms", "0", "--swap-memory", "0"], []):
        assert CliRunner().invoke(app, ["serve", *arguments]).exit_code == 0
    given = [(e.target_itl_ms, e.preemption, e.swap_memory) for e in seen]
    assert given == [(37.5, "swap", 64 * 2**20), (0.0, "auto", 0), (None, "auto", 512 * 2**20)]


def test_help_says_what_the_policies_are() -> None:
    shown = CliRunner().invoke(app, ["serve", "--help"], env={"COLUMNS": "400", "TERM": "dumb"}).output
    for words in (
        "--target-itl-ms",
        "twice what a step",
        "--preemption",
        "recompute",
        "--swap-memory",
        "0 never swaps",
    ):
        assert words in shown


@pytest.mark.parametrize("text", ["on", "[1]", "{", '"suffix"'])
def test_bad_speculation(text: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_speculation(text)
    assert refused.value.param == "speculation"


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["serve", "--dtype", "int3"], "dtype"),
        (["serve", "--speculation", '{"methods": ["magic"]}'], "speculation.methods[0]"),
        (["serve", "--config", "absent.toml"], "absent.toml"),
        (["serve", "--quantization", "q5"], "quantization: 'q5' must be one of auto, none, q8, q4"),
        (["serve", "--port", "70000"], "port"),
        (["serve", "--target-itl-ms", "-1"], "target_itl_ms"),
        (["serve", "--target-itl-ms", "nan"], "target_itl_ms"),
        (["serve", "--target-itl-ms", "60001"], "target_itl_ms"),
        (["serve", "--preemption", "never"], "preemption: 'never' must be one of auto, swap, recompute"),
        (["serve", "--swap-memory", "much"], "swap_memory"),
        (["serve", "--swap-memory", "-1"], "swap_memory"),
        (["serve", "--swap-memory", ""], "swap_memory"),
        (["serve", "--preemption", "swap", "--swap-memory", "0"], "swap_memory"),
        (["serve", "--api-key", ""], "server.api_keys"),
        (["serve", "--api-key", "sk-one", "--api-key", "caf\u00e9"], "server.api_keys: key 2"),
    ],
)
def test_wrong_options_are_one_line(arguments: list[str], word: str) -> None:
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 1
    assert word in result.stderr
    assert "Traceback" not in result.output
    assert len(result.stderr.strip().splitlines()) == 1


def test_an_empty_key_variable_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECSERVE_API_KEY", "")
    result = CliRunner().invoke(app, ["serve"])
    assert result.exit_code == 1
    assert "server.api_keys" in result.stderr


def test_help_loads_no_torch() -> None:
    code = "import sys, specserve.cli.main\nassert not {'torch', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
