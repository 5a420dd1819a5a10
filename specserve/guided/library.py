"""The grammars that ship with the project: the folder `grammars/` and its index."""

from __future__ import annotations

import json
import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from specserve.core.errors import GrammarError

# In a checkout the folder lies at the top level; specserve/grammars is a link to it, and a copy in a wheel.
FOLDER = Path(__file__).resolve().parents[1] / "grammars"


@dataclass(frozen=True, slots=True)
class NamedGrammar:
    """One entry of the index.

    Attributes:
        kind: the guided option that its text is for: "grammar", "regex" or "json_schema".
        accepted, refused: one example each.
    """

    name: str
    kind: str
    description: str
    accepted: str
    refused: str
    content: Any


@cache
def named_grammars() -> dict[str, NamedGrammar]:
    """Every shipped grammar by name."""
    index = tomllib.loads((FOLDER / "index.toml").read_text(encoding="utf-8"))
    out = {}
    for name, entry in index.items():
        text = (FOLDER / entry["file"]).read_text(encoding="utf-8")
        content = json.loads(text) if entry["kind"] == "json_schema" else text
        if entry["kind"] == "regex":
            content = text.rstrip("\n")
        out[name] = NamedGrammar(
            name, entry["kind"], entry["description"], entry["accepted"], entry["refused"], content
        )
    return out


def find(name: object) -> NamedGrammar:
    """The grammar of this name; GrammarError lists the names otherwise."""
    known = named_grammars()
    if not isinstance(name, str) or name not in known:
        raise GrammarError(
            f"grammar.name: unknown; the shipped grammars are {', '.join(sorted(known))}", param="guided.grammar.name"
        )
    return known[name]
