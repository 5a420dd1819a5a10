"""Where the shared test inputs are. A user's clone has none; tests that read them skip then, with a reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


def shared_data(name: str) -> Path:
    """Path of one shared input; skips the calling test where it is absent."""
    path = ROOT.parent / "shared" / "data" / name
    if not path.exists():
        pytest.skip(f"shared test input {name} is not on this machine")
    return path


def shared_lines(name: str) -> list[dict[str, Any]]:
    """The objects of a JSON Lines file of the shared inputs."""
    with shared_data(name).open(encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]
