"""Assertion keywords of JSON Schema: what each asks of each kind of value, and what its negation asks.

A Dnf maps each kind of value to its alternatives; a kind that is missing is not allowed at all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from specserve.guided.document import refuse
from specserve.guided.flat import KINDS, NOTHING, Flat, Members, Pattern, canonical, kind_of, meet
from specserve.guided.formats import REFUSED, expression
from specserve.guided.intervals import Bounds, exact

Dnf = dict[str, list[Flat]]
MAX_ALTERNATIVES = 256


def everything() -> Dnf:
    """Any value."""
    return {kind: [Flat(kind)] for kind in KINDS}


def of_kind(*flats: Flat) -> Dnf:
    """Values that satisfy one of `flats`."""
    out: Dnf = {}
    for flat in flats:
        out.setdefault(flat.kind, []).append(flat)
    return out


def about(flat: Flat) -> Dnf:
    """Values of `flat`'s kind must satisfy it; all others are free."""
    return {**everything(), flat.kind: [flat]}


def plausible(flat: Flat) -> bool:
    """False if the constraints on the value itself contradict each other at first sight."""
    if flat.values is not None and not flat.values:
        return False
    if flat.bounds.empty:
        return False
    pairs = (
        (flat.min_length, flat.max_length),
        (flat.min_items, flat.max_items),
        (max(flat.min_members, len(flat.required)), flat.max_members),
    )
    return all(high is None or low <= high for low, high in pairs)


def both(a: Dnf, b: Dnf, pointer: str) -> Dnf:
    """Values that are in both."""
    out: Dnf = {}
    for kind in KINDS:
        if kind in a and kind in b:
            if len(a[kind]) * len(b[kind]) > 64 * MAX_ALTERNATIVES:
                raise refuse(pointer, f"has more than {MAX_ALTERNATIVES} combinations of alternatives")
            merged = [flat for x in a[kind] for y in b[kind] if plausible(flat := meet(x, y))]
            merged = [flat for i, flat in enumerate(merged) if flat not in merged[:i]]
            if len(merged) > MAX_ALTERNATIVES:
                raise refuse(pointer, f"has more than {MAX_ALTERNATIVES} combinations of alternatives")
            if merged:
                out[kind] = merged
    return out


def either(parts: list[Dnf], pointer: str) -> Dnf:
    """Values that are in one of the parts."""
    out: Dnf = {}
    for part in parts:
        for kind, flats in part.items():
            known = out.setdefault(kind, [])
            known.extend(flat for flat in flats if flat not in known)
            if Flat(kind) in known:
                out[kind] = [Flat(kind)]
            if len(known) > MAX_ALTERNATIVES:
                raise refuse(pointer, f"has more than {MAX_ALTERNATIVES} alternatives")
    return out


def types(value: Any, positive: bool, pointer: str) -> Dnf:
    names = set(value) if isinstance(value, list) else {value}
    if not positive:
        if "integer" in names and "number" not in names:
            raise refuse(pointer, "numbers that are not integers cannot be asked for by negation")
        return of_kind(*(Flat(kind) for kind in KINDS if kind not in names))
    flats = [Flat(kind) for kind in KINDS if kind in names]
    if "integer" in names and "number" not in names:
        flats.append(Flat("number", whole=True))
    return of_kind(*flats)


def enum(values: list[Any], positive: bool, pointer: str) -> Dnf:
    if positive:
        unique = list({canonical(v): v for v in values}.values())
        groups: dict[str, list[Any]] = {}
        for v in unique:
            groups.setdefault(kind_of(v), []).append(v)
        return of_kind(*(Flat(kind, values=tuple(group)) for kind, group in groups.items()))
    out = everything()
    for kind in {kind_of(v) for v in values}:
        gone = [v for v in values if kind_of(v) == kind]
        if kind in ("null", "boolean"):
            rest = tuple(v for v in ((None,) if kind == "null" else (True, False)) if v not in gone)
            out[kind] = [Flat(kind, values=rest)] if rest else []
        else:
            out[kind] = [Flat(kind, excluded=tuple((v, pointer) for v in gone))]
    return {kind: flats for kind, flats in out.items() if flats}


def bound(keyword: str, schema: Mapping[str, Any], positive: bool, pointer: str) -> Dnf:
    value = schema[keyword]
    if isinstance(value, bool):  # exclusiveMinimum: true of draft 4 belongs to minimum
        return everything() if positive else {}
    low = keyword.endswith("inimum")
    is_open = keyword.startswith("exclusive") or schema.get("exclusiveMinimum" if low else "exclusiveMaximum") is True
    x = exact(value)
    if positive:
        bounds = Bounds(low=x, low_open=is_open) if low else Bounds(high=x, high_open=is_open)
        return about(Flat("number", bounds=bounds))
    bounds = Bounds(high=x, high_open=not is_open) if low else Bounds(low=x, low_open=not is_open)
    return of_kind(Flat("number", bounds=bounds))


def multiple_of(value: Any, positive: bool, pointer: str) -> Dnf:
    x = exact(value)
    if not positive:
        raise refuse(pointer, "cannot be negated")
    if x.denominator != 1:
        raise refuse(pointer, "is supported for whole numbers only")
    return about(Flat("number", whole=True, multiples=((x.numerator, pointer),)))


_SIZES = {
    "minLength": ("string", "min_length"),
    "maxLength": ("string", "max_length"),
    "minItems": ("array", "min_items"),
    "maxItems": ("array", "max_items"),
    "minProperties": ("object", "min_members"),
    "maxProperties": ("object", "max_members"),
}


def size(keyword: str, value: Any, positive: bool) -> Dnf:
    kind, name = _SIZES[keyword]
    limit = int(value)
    if positive:
        change: dict[str, Any] = {name: limit}
        return about(Flat(kind, **change))
    if name.startswith("min"):
        if limit == 0:
            return {}
        change = {name.replace("min", "max"): limit - 1}
    else:
        change = {name.replace("max", "min"): limit + 1}
    return of_kind(Flat(kind, **change))


def pattern(value: str, positive: bool, pointer: str) -> Dnf:
    flat = Flat("string", patterns=(Pattern(value, positive, pointer),))
    return about(flat) if positive else of_kind(flat)


def text_format(value: Any, positive: bool, pointer: str) -> Dnf:
    if value in REFUSED:
        raise refuse(pointer, f"the format {value!r} is not supported")
    if not isinstance(value, str) or expression(value) is None:
        return everything() if positive else {}  # an annotation, which never fails
    if not positive:
        raise refuse(pointer, "cannot be negated")
    return about(Flat("string", formats=((value, pointer),)))


def required(names: list[str], positive: bool) -> Dnf:
    names = list(dict.fromkeys(names))
    if positive:
        return about(Flat("object", required=tuple(names)))
    return of_kind(*(without(name) for name in names))


def without(name: str) -> Flat:
    """Objects that lack this property."""
    return Flat("object", members=(Members(named=((name, NOTHING),)),))


def unique_items(value: bool, positive: bool, pointer: str) -> Dnf:
    if not value:
        return everything() if positive else {}
    if not positive:
        raise refuse(pointer, "cannot be negated")
    return about(Flat("array", unique=pointer))


Handler = Callable[[Mapping[str, Any], bool, str], Dnf]

# keyword -> (schema that has it, positive, pointer of the keyword) -> what it asks
ASSERTIONS: dict[str, Handler] = {
    "type": lambda s, p, at: types(s["type"], p, at),
    "enum": lambda s, p, at: enum(s["enum"], p, at),
    "const": lambda s, p, at: enum([s["const"]], p, at),
    **{
        name: (lambda s, p, at, name=name: bound(name, s, p, at))  # type: ignore[misc]
        for name in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
    },
    **{name: (lambda s, p, at, name=name: size(name, s[name], p)) for name in _SIZES},  # type: ignore[misc]
    "multipleOf": lambda s, p, at: multiple_of(s["multipleOf"], p, at),
    "pattern": lambda s, p, at: pattern(s["pattern"], p, at),
    "format": lambda s, p, at: text_format(s["format"], p, at),
    "required": lambda s, p, at: required(s["required"], p),
    "uniqueItems": lambda s, p, at: unique_items(s["uniqueItems"], p, at),
}
