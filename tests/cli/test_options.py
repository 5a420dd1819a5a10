"""Flags win over the file; a wrong option is one line that names it, never a traceback."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from specserve.cli.main import app
from specserve.cli.options import parse_speculation, read_options
from specserve.core.errors import ConfigError


def test_flags_win(tmp_path: Path) -> None:
    path = tmp_path / "specserve.toml"
    path.write_text('dtype = "float32"\nthreads = 1\n[speculation]\nmethods = ["suffix"]\n[server]\nport = 7\n')
    engine, server = read_options(path, {"dtype": "bfloat16", "model": None}, {"port": 0, "host": None}, "off")
    assert (engine.dtype, engine.threads, engine.model) == ("bfloat16", 1, "demo")
    assert engine.speculation is None
    assert server.port == 0


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
        (["serve", "--quantization", "q4"], "quantization"),
        (["serve", "--port", "70000"], "port"),
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
