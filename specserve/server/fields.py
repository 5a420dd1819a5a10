"""Typed reads of untrusted objects. Every failure names the field by the client's own name; null means absent."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from specserve.core.errors import InvalidRequestError


def wrong(name: str, message: str, code: str | None = None) -> InvalidRequestError:
    return InvalidRequestError(f"{name}: {message}", param=name, code=code)


def text(values: Mapping[str, Any], name: str, at: str = "", most: int | None = None) -> str | None:
    value = values.get(name)
    if value is None:
        return None
    if not isinstance(value, str):
        raise wrong(at + name, "must be a text")
    if most is not None and not 0 < len(value) <= most:
        raise wrong(at + name, f"must have 1 to {most} characters")
    return value


def flag(values: Mapping[str, Any], name: str, default: bool = False) -> bool:
    value = values.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise wrong(name, "must be true or false")
    return value


def whole(values: Mapping[str, Any], name: str, low: int, high: int) -> int | None:
    value = values.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise wrong(name, f"must be a whole number from {low} to {high}")
    return value


def mapping(values: Mapping[str, Any], name: str, at: str = "") -> Mapping[str, Any] | None:
    value = values.get(name)
    if value is None:
        return None
    if not isinstance(value, dict):
        raise wrong(at + name, "must be an object")
    return value


def only(values: Mapping[str, Any], known: Collection[str], at: str = "") -> None:
    """Fail on the first name that is not known: options fail closed."""
    for name in values:
        if name not in known:
            # The name comes from the client: bounded, because it goes into the answer.
            shown = at + name[:100]
            raise wrong(shown, "unknown option", code="unknown_parameter")


def refuse(values: Mapping[str, Any], harmless: Mapping[str, tuple[Any, ...]]) -> None:
    """Fail on options that are known but not supported, unless null or at a value that asks for nothing."""
    for name, allowed in harmless.items():
        value = values.get(name)
        if value is None or any(type(value) is type(entry) and value == entry for entry in allowed):
            continue
        raise wrong(name, "not supported here; leave it out", code="unsupported_parameter")


def metadata(values: Mapping[str, Any], most: int) -> dict[str, str]:
    found = mapping(values, "metadata") or {}
    if len(found) > most:
        raise wrong("metadata", f"must have at most {most} pairs")
    for key, value in found.items():
        if len(key) > 64 or not isinstance(value, str) or len(value) > 512:
            raise wrong("metadata", "must map names of at most 64 characters to texts of at most 512")
    return dict(found)
