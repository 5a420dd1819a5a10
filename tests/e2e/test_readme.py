"""What the README shows runs as it is written: both clients, the Python API, the pair's file, the commands."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from specserve.cli.options import read_options
from tests.fakes.data import ROOT
from tests.fakes.real_server import Server, running_server

README = (ROOT / "README.md").read_text(encoding="utf-8")
CHROMIUM_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


def block(language: str, contains: str) -> str:
    """The one code block in that language that contains the text."""
    found = [b for b in re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL) if contains in b]
    assert len(found) == 1
    return found[0]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running_server("--kv-memory", "256MiB") as running:
        yield running


def run_python(code: str, **env: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_python_client(server: Server) -> None:
    out = run_python(block("python", "import websockets"), SPECSERVE_URL=server.url)
    assert '"city"' in out
    assert "output_tokens" in out


def test_in_process(tmp_path: Path) -> None:
    out = run_python(block("python", "from specserve import LLM"))
    assert "'yes'" in out or "'no'" in out


def test_browser_client(server: Server, tmp_path: Path) -> None:
    driver_path, browser_path = shutil.which("chromedriver"), shutil.which("chromium") or shutil.which("google-chrome")
    if not driver_path or not browser_path:
        pytest.skip("Chromium and chromedriver are not installed (make browser)")
    from selenium import webdriver
    from selenium.webdriver.support.ui import WebDriverWait

    options = webdriver.ChromeOptions()
    options.binary_location = browser_path
    for flag in (*CHROMIUM_FLAGS, f"--user-data-dir={tmp_path}"):
        options.add_argument(flag)
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver_path))
    try:
        driver.get(f"{server.http}/")
        driver.execute_script("document.open(); document.write(arguments[0]); document.close();", block("html", "<pre"))
        state = "return document.getElementById('answer')?.dataset.state || ''"
        WebDriverWait(driver, 60).until(lambda d: d.execute_script(state))
        assert driver.execute_script(state) in ("response.completed", "response.incomplete")
        assert driver.execute_script("return document.getElementById('answer').textContent").strip()
    finally:
        driver.quit()


def test_pair_file(tmp_path: Path) -> None:
    text = block("toml", "[speculation]")
    assert tomllib.loads(text)
    path = tmp_path / "specserve.toml"
    path.write_text(text)
    engine, server = read_options(path, {}, {}, None)
    assert engine.speculation is not None
    assert engine.speculation.methods == ("suffix", "draft_model")
    assert engine.speculation.model == "path/to/draft"
    assert server.port == 8000


def test_the_pair_runs_from_a_file(tmp_path: Path) -> None:
    """The README's file with real models put in: the demo model drafts for itself."""
    text = block("toml", "[speculation]").replace("path/to/target", "demo").replace("path/to/draft", "demo")
    path = tmp_path / "specserve.toml"
    path.write_text(text)
    with running_server("--config", str(path)) as running:
        out = run_python(block("python", "import websockets"), SPECSERVE_URL=running.url)
    assert "draft_model" in out


def test_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in set(re.findall(r"^make ([\w-]+)", README, re.MULTILINE)):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
