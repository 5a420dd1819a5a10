"""What was measured before an interruption, so that a long run can go on where it was."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass(slots=True)
class Measured:
    """One workload in one precision.

    Attributes:
        rates: engine -> tokens a second of each round.
        missing: engine -> why it has none.
        tokens: engine -> first tokens of an answer.
        engines: engine -> how it was set.
    """

    rates: dict[str, list[float]] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    tokens: dict[str, list[int]] = field(default_factory=dict)
    engines: dict[str, dict[str, Any]] = field(default_factory=dict)


class Store:
    """Measured by name, in a file that is written after each.

    Args:
        settings: what the figures depend on; what was measured with others is not taken over.
        resume: take over what is there.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any], *, resume: bool) -> None:
        self._path = path
        self._settings = json.loads(json.dumps(dict(settings)))
        self._found: dict[str, Measured] = {}
        if resume:
            self._found = self._read()

    def get(self, name: str) -> Measured | None:
        return self._found.get(name)

    def put(self, name: str, measured: Measured) -> None:
        self._found[name] = measured
        body = {"settings": self._settings, "measured": {k: asdict(v) for k, v in self._found.items()}}
        self._path.parent.mkdir(parents=True, exist_ok=True)
        part = self._path.with_suffix(".part")
        part.write_text(json.dumps(body))
        part.replace(self._path)

    def _read(self) -> dict[str, Measured]:
        try:
            body = json.loads(self._path.read_text())
        except (OSError, ValueError):
            return {}
        if body["settings"] != self._settings:
            return {}
        return {name: Measured(**values) for name, values in body["measured"].items()}
