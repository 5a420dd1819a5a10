"""A schema document: its subschemas by JSON pointer, and the targets of its references."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, cast
from urllib.parse import unquote, urldefrag, urljoin

from jsonschema import Draft202012Validator
from jsonschema.exceptions import SchemaError
from jsonschema.validators import validator_for

from specserve.core.errors import GrammarError

PARAM = "guided.json_schema"


def refuse(pointer: str, message: str) -> GrammarError:
    """The error for the keyword at `pointer` ("/properties/a/not")."""
    place = pointer or "/"
    keyword = pointer.rsplit("/", 1)[-1].replace("~1", "/").replace("~0", "~")
    subject = f"keyword {keyword!r} at {place}" if keyword else "the schema"
    return GrammarError(f"json_schema: {subject}: {message}", param=PARAM + pointer)


def child(pointer: str, *keys: str | int) -> str:
    """`pointer` with further steps, escaped as RFC 6901 asks."""
    return pointer + "".join("/" + str(key).replace("~", "~0").replace("/", "~1") for key in keys)


class Document:
    """Reads one schema.

    Raises:
        GrammarError: it is not a valid schema, too deep or too large.
    """

    def __init__(self, schema: Any, *, max_depth: int, max_nodes: int = 50_000) -> None:
        self.root = schema
        self._bases: dict[str, str] = {}  # pointer of a schema resource -> its absolute URI
        self._targets: dict[str, str] = {}  # absolute URI or URI#anchor -> pointer
        self._walk(schema, max_depth, max_nodes)
        self._check()

    def _walk(self, schema: Any, max_depth: int, max_nodes: int) -> None:
        stack: list[tuple[Any, str, str, int]] = [(schema, "", "", 0)]
        self._targets[""] = ""
        seen = 0
        while stack:
            node, pointer, base, depth = stack.pop()
            seen += 1
            if depth > max_depth:
                raise refuse(pointer, f"nests deeper than {max_depth} levels")
            if seen > max_nodes:
                raise refuse("", f"has more than {max_nodes} values")
            if isinstance(node, list):
                stack.extend((item, child(pointer, i), base, depth + 1) for i, item in enumerate(node))
            elif isinstance(node, Mapping):
                base = self._identify(node, pointer, base)
                for key, item in node.items():
                    if not isinstance(key, str):
                        raise refuse(pointer, "has a key that is not a text")
                    if key not in ("enum", "const", "default", "examples"):
                        stack.append((item, child(pointer, key), base, depth + 1))

    def _identify(self, node: Mapping[str, Any], pointer: str, base: str) -> str:
        for key in ("$id", "id"):
            name = node.get(key)
            if isinstance(name, str) and not isinstance(node.get("type"), Mapping):
                if name.startswith("#"):
                    self._targets.setdefault(base + name, pointer)
                else:
                    base = urldefrag(urljoin(base, name))[0]
                    self._targets.setdefault(base, pointer)
        for key in ("$anchor", "$dynamicAnchor"):
            if isinstance(node.get(key), str):
                self._targets.setdefault(f"{base}#{node[key]}", pointer)
        self._bases[pointer] = base
        return base

    def _check(self) -> None:
        if not isinstance(self.root, (Mapping, bool)):
            raise refuse("", "must be an object, true or false")
        kind = validator_for(self.root, default=Draft202012Validator)
        try:
            kind.check_schema(cast("Any", self.root))
        except SchemaError as error:
            where = child("", *error.absolute_path)
            raise refuse(where, "has a value that its JSON Schema draft does not allow") from None
        except Exception:
            raise refuse("", "is not a valid JSON Schema") from None

    def at(self, pointer: str) -> Any:
        """The value at `pointer`; KeyError if there is none."""
        node = self.root
        for step in pointer.split("/")[1:]:
            key = step.replace("~1", "/").replace("~0", "~")
            if isinstance(node, list):
                if not re.fullmatch(r"\d{1,6}", key) or int(key) >= len(node):
                    raise KeyError(pointer)
                node = node[int(key)]
            elif isinstance(node, Mapping):
                node = node[key]
            else:
                raise KeyError(pointer)
        return node

    def resolve(self, reference: str, pointer: str) -> str:
        """Pointer of the subschema that `reference`, found in the schema at `pointer`, names."""
        where = child(pointer, "$ref")
        base = self._bases.get(pointer, "")
        uri, fragment = urldefrag(urljoin(base, reference) if not reference.startswith("#") else base + reference)
        if uri not in self._targets:
            raise refuse(where, "points outside the schema; remote references are not fetched")
        start = self._targets[uri]
        fragment = unquote(fragment)
        if not fragment or fragment.startswith("/"):
            target = start + fragment
        elif f"{uri}#{fragment}" in self._targets:
            target = self._targets[f"{uri}#{fragment}"]
        else:
            raise refuse(where, "names an anchor that the schema does not have")
        try:
            found = self.at(target)
        except KeyError:
            raise refuse(where, "points at nothing in the schema") from None
        if not isinstance(found, (Mapping, bool)):
            raise refuse(where, "does not point at a schema")
        return target
