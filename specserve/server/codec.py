"""JSON in and out. What comes in is untrusted: numbers are finite, nesting is bounded, the top is an object."""

from __future__ import annotations

from typing import Any

import orjson

from specserve.core.errors import InvalidRequestError
from specserve.server.limits import MAX_DEPTH


def loads(data: bytes | str, what: str = "the message") -> dict[str, Any]:
    """One JSON object.

    Raises:
        InvalidRequestError: code "invalid_json"; the message has a position, never the content.
    """
    try:
        value = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        # orjson's own sentence says what and where; it quotes nothing of the document.
        raise InvalidRequestError(f"{what} is not valid JSON: {error.msg}", code="invalid_json") from None
    if not isinstance(value, dict):
        raise InvalidRequestError(f"{what} must be a JSON object", code="invalid_json")
    if _too_deep(value):
        raise InvalidRequestError(f"{what} is nested deeper than {MAX_DEPTH} levels", code="invalid_json")
    return value


def dumps(value: Any) -> bytes:
    """Compact JSON; NaN and infinities become null. A lone surrogate, which JSON cannot carry, becomes "?"."""
    try:
        return orjson.dumps(value, option=orjson.OPT_NON_STR_KEYS)
    except TypeError:
        return orjson.dumps(_clean(value), option=orjson.OPT_NON_STR_KEYS)


def _too_deep(value: Any) -> bool:
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [
            child
            for node in level
            for child in (node.values() if isinstance(node, dict) else node)
            if isinstance(child, (dict, list))
        ]
        if not level:
            return False
    return True


def _clean(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode("utf-8")
    if isinstance(value, dict):
        return {_clean(key): _clean(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_clean(item) for item in value]
    return value
