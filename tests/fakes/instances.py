"""Puts the properties of an instance into the order that its schema declares, as the grammars ask for."""

from __future__ import annotations

from typing import Any


def in_declared_order(value: Any, schema: Any, root: Any, depth: int = 0) -> Any:
    """`value` with declared properties first, in their order, then the others as they are."""
    if depth > 40 or not isinstance(value, (dict, list)):
        return value
    names: list[str] = []
    needed: list[str] = []
    children: dict[str, list[Any]] = {}
    _collect(schema, root, names, needed, children, 0)
    if isinstance(value, list):
        rest = children.get("[]", [])
        return [in_declared_order(v, {"allOf": rest}, root, depth + 1) for v in value]
    ordered = [n for n in dict.fromkeys(names + needed) if n in value]
    ordered += [n for n in value if n not in ordered]
    return {
        n: in_declared_order(value[n], {"allOf": children.get(n) or children.get("*", [])}, root, depth + 1)
        for n in ordered
    }


def _collect(schema: Any, root: Any, names: list, needed: list, children: dict, depth: int) -> None:
    if not isinstance(schema, dict) or depth > 12:
        return
    target = _target(schema.get("$ref"), root)
    if target is not None:
        _collect(target, root, names, needed, children, depth + 1)
    for keyword, value in schema.items():
        if keyword == "properties" and isinstance(value, dict):
            for name, child in value.items():
                names.append(name)
                children.setdefault(name, []).append(child)
        elif keyword in ("allOf", "anyOf", "oneOf") and isinstance(value, list):
            for child in value:
                _collect(child, root, names, needed, children, depth + 1)
        elif keyword in ("if", "then", "else"):
            _collect(value, root, names, needed, children, depth + 1)
        elif keyword in ("items", "prefixItems"):
            children.setdefault("[]", []).extend(value if isinstance(value, list) else [value])
        elif keyword == "additionalProperties":
            children.setdefault("*", []).append(value)
        elif keyword == "patternProperties" and isinstance(value, dict):
            children.setdefault("*", []).extend(value.values())
        elif keyword == "required" and isinstance(value, list):
            needed.extend(value)


def _target(reference: Any, root: Any) -> Any:
    if not isinstance(reference, str) or not reference.startswith("#"):
        return None
    node = root
    try:
        for step in reference[1:].split("/")[1:]:
            key = step.replace("~1", "/").replace("~0", "~")
            node = node[int(key)] if isinstance(node, list) else node[key]
    except (KeyError, IndexError, ValueError, TypeError):
        return None
    return node
