"""Flags and specserve.toml -> EngineConfig and ServerConfig. Flags win over the file; an unknown key is an error."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specserve.core.config import EngineConfig, ServerConfig, load_toml
from specserve.core.errors import ConfigError


def read_options(
    file: Path | None,
    engine_flags: Mapping[str, Any],
    server_flags: Mapping[str, Any],
    speculation: str | None,
) -> tuple[EngineConfig, ServerConfig]:
    """Merge the file's values and the flags that were given (those not None).

    Raises:
        ConfigError: naming the option at fault.
    """
    engine, server = load_toml(file) if file is not None else ({}, {})
    engine.update({name: value for name, value in engine_flags.items() if value is not None})
    server.update({name: value for name, value in server_flags.items() if value is not None})
    if speculation is not None:
        engine["speculation"] = parse_speculation(speculation)
    if "swap_memory" in engine:
        engine["swap_memory"] = none_or_size(engine["swap_memory"])
    return EngineConfig.from_dict(engine), ServerConfig.from_dict(server)


def none_or_size(value: Any) -> Any:
    """0 for a text that says no memory, such as "0" or "0 MiB"; anything else as it is. Sizes are never 0 elsewhere."""
    nothing = isinstance(value, str) and re.fullmatch(r"\s*0+(\.0+)?\s*([kmg]?i?b)?\s*", value, re.IGNORECASE)
    return 0 if nothing else value


def parse_speculation(text: str) -> dict[str, Any] | None:
    """The value of --speculation: "off" or a JSON object."""
    if text.strip().lower() == "off":
        return None
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(
            f'speculation: not JSON ({error}); write "off" or for example {{"methods": ["suffix"]}}',
            param="speculation",
        ) from None
    if not isinstance(value, dict):
        raise ConfigError(
            'speculation: must be "off" or a JSON object such as {"methods": ["suffix"]}', param="speculation"
        )
    return value
