"""The peers' own environment in the user's cache folder: versions are pinned, each peer is installed by itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

Say = Callable[[str], None]
# The packages that decide the figures. llama.cpp is compiled for this very processor.
REQUIREMENTS = {
    "llama.cpp": ("llama-cpp-python==0.3.36", "numpy==2.4.6"),
    "openvino": (
        "openvino-genai==2026.4.1.0",
        "openvino==2026.4.1",
        "openvino-tokenizers==2026.4.1.0",
        "nncf==3.4.0",
        "numpy==2.4.6",
    ),
}
OPTIONS = {"llama.cpp": ("--no-cache-dir", "--force-reinstall", "--no-binary", "llama-cpp-python"), "openvino": ()}
CMAKE = "-DGGML_NATIVE=ON -DLLAVA_BUILD=OFF"
REPAIR = Path(__file__).with_name("gcc_amx.h")


class NotInstalled(Exception):
    """A peer cannot be had; the message says why."""


class Environment:
    """A folder with a virtual environment and the models that were made for it.

    Args:
        folder: need not exist yet.
        processor: what this machine is; peers are installed anew where it is another.
    """

    def __init__(self, folder: Path, processor: str, say: Say) -> None:
        self.folder = folder
        self.models = folder / "models"
        self.python = folder / "venv" / "bin" / "python"
        self._pip = self.python.with_name("pip")  # comes last: an environment without it is half made
        self._processor, self._say = processor, say

    def install(self, peer: str) -> None:
        """Raises NotInstalled. What is there already, in this version, is left alone."""
        stamp = self.folder / f"installed-{peer}.json"
        wanted = {"requirements": list(REQUIREMENTS[peer]), "processor": self._processor, "cmake": CMAKE}
        if peer == "llama.cpp":
            wanted["repair"] = REPAIR.read_text()
        if self._pip.exists() and _read(stamp) == wanted:
            return
        stamp.unlink(missing_ok=True)
        self.folder.mkdir(parents=True, exist_ok=True)
        if not self._pip.exists():
            self._say(f"making an environment in {self.folder}")
            self._run("venv", [sys.executable, "-m", "venv", "--clear", str(self.folder / "venv")])
        self._say(f"installing {', '.join(REQUIREMENTS[peer])}" + (" (compiles)" if peer == "llama.cpp" else ""))
        build = {"CMAKE_ARGS": CMAKE, "CMAKE_BUILD_PARALLEL_LEVEL": str(os.cpu_count() or 1)}
        build = {name: os.environ.get(name, value) for name, value in build.items()}
        build["CXXFLAGS"] = f"{os.environ.get('CXXFLAGS', '')} -include {REPAIR}"
        pip = [str(self.python), "-m", "pip", "install", "--disable-pip-version-check", "--progress-bar", "off"]
        self._run(f"install-{peer}", [*pip, *OPTIONS[peer], *REQUIREMENTS[peer]], build)
        stamp.write_text(json.dumps(wanted))

    def run(self, name: str, script: Path, *arguments: str) -> None:
        """Run a script in the environment. Raises NotInstalled where it fails."""
        self._run(name, [str(self.python), str(script), *arguments])

    def _run(self, name: str, command: Sequence[str], variables: Mapping[str, str] | None = None) -> None:
        log = self.folder / f"{name}.log"
        with log.open("wb") as output:
            ran = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **(variables or {})},
                check=False,
            )
        if ran.returncode:
            raise NotInstalled(f"{reason(log.read_text(errors='replace'))} (all of it: {log})")


def reason(log: str) -> str:
    """The line of a log that says best why a program failed."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    errors = [line for line in lines if line.lower().startswith(("error:", "error ", "cmake error"))]
    return (errors or lines or ["it said nothing"])[-1][:200]


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None
