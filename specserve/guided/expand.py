"""From subschemas to alternatives of flat constraints: `allOf` merged, choices multiplied out, `not` pushed in.

Only what applies to the same value is expanded; properties and items stay goals (sets of subschemas that all hold),
so that recursive schemas end.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from specserve.core.errors import GrammarError
from specserve.guided.document import Document, child, refuse
from specserve.guided.flat import ANYTHING, NOTHING, Contains, Flat, Goal, Items, Literal, Members, Pattern, meet
from specserve.guided.keywords import ASSERTIONS, Dnf, about, both, either, everything, of_kind, plausible, required

_IN_PLACE = ("allOf", "anyOf", "oneOf", "not", "if", "$ref", "dependentSchemas", "dependencies", "$dynamicRef")
# Keyword -> the handler of its group (keywords whose meaning depends on each other share one).
_HANDLERS = {
    "$ref": "_ref",
    "$dynamicRef": "_refused",
    "$recursiveRef": "_refused",
    "not": "_not",
    "allOf": "_all_of",
    "anyOf": "_any_of",
    "oneOf": "_one_of",
    "if": "_condition",
    "dependencies": "_dependencies",
    "dependentRequired": "_dependencies",
    "dependentSchemas": "_dependencies",
    "properties": "_members",
    "patternProperties": "_members",
    "additionalProperties": "_members",
    "unevaluatedProperties": "_members",
    "propertyNames": "_property_names",
    "items": "_items",
    "prefixItems": "_items",
    "additionalItems": "_items",
    "unevaluatedItems": "_items",
    "contains": "_contains",
}


class _CycleError(GrammarError):
    """A subschema applies itself to the same value."""


class Expander:
    """Expands goals of one document; results are kept.

    Args:
        deadline: `time.monotonic()` after which the work is given up.
    """

    def __init__(self, document: Document, deadline: float) -> None:
        self.document = document
        self.deadline = deadline
        self._known: dict[Goal, Dnf] = {}
        self._literals: dict[Literal, Dnf] = {}
        self._active: set[Literal] = set()

    def tick(self) -> None:
        """Raises GrammarError once the time budget is used up."""
        if time.monotonic() > self.deadline:
            raise refuse("", "takes longer to compile than the time budget allows")

    def expand(self, goal: Goal) -> Dnf:
        """Alternatives of all values that satisfy every literal of `goal`."""
        if goal not in self._known:
            result = everything()
            for literal in sorted(goal):
                result = both(result, self.literal(literal), literal[0])
            self._known[goal] = result
        return self._known[goal]

    def literal(self, literal: Literal) -> Dnf:
        if literal in self._literals:
            return self._literals[literal]
        pointer, positive = literal
        self.tick()
        if literal[0] == NOTHING[0]:
            return {} if positive else everything()
        if literal in self._active:
            message = "applies itself to the same value without end"
            raise _CycleError(refuse(child(pointer, "$ref"), message).message, param="guided.json_schema" + pointer)
        schema = self.document.at(pointer)
        if isinstance(schema, bool):
            return everything() if schema == positive else {}
        if not isinstance(schema, Mapping):
            raise refuse(pointer, "must be a schema")
        self._active.add(literal)
        try:
            parts = self._parts(pointer, schema, positive)
            if positive:
                result = everything()
                for part in parts:
                    result = both(result, part, pointer)
            else:
                result = either(parts, pointer)
        finally:
            self._active.discard(literal)
        self._literals[literal] = result
        return result

    def satisfiable(self, goal: Goal, depth: int = 4) -> bool:
        """False only if no value satisfies `goal` for sure."""
        if depth == 0:
            return True
        try:
            dnf = self.expand(goal)
        except _CycleError:
            return True
        return any(self.possible(flat, depth) for flats in dnf.values() for flat in flats)

    def possible(self, flat: Flat, depth: int = 4) -> bool:
        """False only if no value satisfies `flat` for sure."""
        if not plausible(flat):
            return False
        if flat.kind == "object":
            return all(self.satisfiable(member_goal(flat, name), depth - 1) for name in flat.required)
        if flat.kind == "array":
            return all(self.satisfiable(item_goal(flat, i), depth - 1) for i in range(min(flat.min_items, 16)))
        return True

    def _parts(self, pointer: str, schema: Mapping[str, Any], positive: bool) -> list[Dnf]:
        """What each keyword asks (or, negated, what breaks it)."""
        parts: list[Dnf] = []
        done: set[str] = set()
        for keyword in schema:
            if keyword in ASSERTIONS:
                parts.append(ASSERTIONS[keyword](schema, positive, child(pointer, keyword)))
                continue
            name = _HANDLERS.get(keyword)
            if name is not None and name not in done:
                done.add(name)
                parts.extend(getattr(self, name)(pointer, schema, positive))
        return parts

    def _ref(self, pointer: str, schema: Mapping[str, Any], positive: bool) -> list[Dnf]:
        if not isinstance(schema["$ref"], str):
            raise refuse(child(pointer, "$ref"), "must be a text")
        return [self.literal((self.document.resolve(schema["$ref"], pointer), positive))]

    def _refused(self, pointer: str, schema: Mapping[str, Any], positive: bool) -> list[Dnf]:
        keyword = "$dynamicRef" if "$dynamicRef" in schema else "$recursiveRef"
        raise refuse(child(pointer, keyword), "is not supported")

    def _not(self, pointer: str, schema: Mapping[str, Any], positive: bool) -> list[Dnf]:
        return [self.literal((child(pointer, "not"), not positive))]

    def _all_of(self, pointer: str, schema: Mapping[str, Any], positive: bool) -> list[Dnf]:
        return [self.literal((child(pointer, "allOf", i), positive)) for i in range(len(schema["allOf"]))]

    def _any_of(self, pointer: str, schema: Mapping[str, Any], positive: bool) -> list[Dnf]:
        where = child(pointer, "anyOf")
        parts = [self.literal((child(where, i), positive)) for i in range(len(schema["anyOf"]))]
        return [either(parts, where)] if positive else [self._all(parts, where)]

    def _all(self, parts: list[Dnf], where: str) -> Dnf:
        result = everything()
        for part in parts:
            result = both(result, part, where)
        return result

    def _one_of(self, pointer: str, schema: Mapping[str, Any], positive: bool) -> list[Dnf]:
        """Exactly one: branches that overlap take the negation of those they overlap with."""
        where = child(pointer, "oneOf")
        n = len(schema["oneOf"])
        parts = [self.literal((child(where, i), True)) for i in range(n)]
        overlaps: list[set[int]] = [set() for _ in range(n)]
        for i in range(n):
            for j in range(i):
                if self._meets(parts[i], parts[j]):
                    overlaps[i].add(j)
                    overlaps[j].add(i)
        if not positive:
            if any(overlaps):
                raise refuse(where, "cannot be negated where its branches overlap")
            return [self._all([self.literal((child(where, i), False)) for i in range(n)], where)]
        exact = []
        for i in range(n):
            try:
                others = [self.literal((child(where, j), False)) for j in sorted(overlaps[i])]
            except _CycleError:
                raise
            except GrammarError as error:
                raise refuse(where, f"branches {i} and another overlap, and {error.message}") from None
            exact.append(self._all([parts[i], *others], where))
        return [either(exact, where)]

    def _meets(self, a: Dnf, b: Dnf) -> bool:
        self.tick()
        pairs = ((x, y) for kind, flats in a.items() for x in flats for y in b.get(kind, ()))
        return any(self.possible(meet(x, y)) for x, y in pairs)

    def _condition(self, pointer: str, schema: Mapping[str, Any], positive: bool) -> list[Dnf]:
        branches = [name for name in ("then", "else") if name in schema]
        if not branches:
            return []
        where = child(pointer, "if")
        if not positive:
            raise refuse(where, "cannot be negated")
        yes, no = self.literal((where, True)), self.literal((where, False))
        if "then" in schema:
            yes = both(yes, self.literal((child(pointer, "then"), True)), where)
        if "else" in schema:
            no = both(no, self.literal((child(pointer, "else"), True)), where)
        return [either([yes, no], where)]

    def _dependencies(self, pointer: str, schema: Mapping[str, Any], positive: bool) -> list[Dnf]:
        parts = []
        for keyword in ("dependencies", "dependentRequired", "dependentSchemas"):
            for name, value in schema.get(keyword, {}).items():
                where = child(pointer, keyword, name)
                names = [value] if isinstance(value, str) else value
                holds = required(names, positive) if isinstance(names, list) else self.literal((where, positive))
                has = of_kind(Flat("object", required=(name,)))
                if positive:
                    parts.append(either([required_not(name), both(has, holds, where)], where))
                else:
                    parts.append(both(has, holds, where))
        return parts

    def _members(self, pointer: str, schema: Mapping[str, Any], positive: bool) -> list[Dnf]:
        named = tuple((n, (child(pointer, "properties", n), True)) for n in schema.get("properties", {}))
        where = child(pointer, "patternProperties")
        patterns = tuple(
            (Pattern(p, True, child(where, p)), (child(where, p), True)) for p in schema.get("patternProperties", {})
        )
        rest = self._rest(pointer, schema, "additionalProperties", "unevaluatedProperties")
        if positive:
            return [about(Flat("object", members=(Members(named, patterns, rest),)))]
        if rest is not None or any(not self._trivial(literal) for _, literal in patterns):
            raise refuse(child(pointer, "additionalProperties" if rest else "patternProperties"), "cannot be negated")
        return [
            of_kind(Flat("object", required=(n,), members=(Members(named=((n, (at, False)),)),)))
            for n, (at, _) in named
            if not self._trivial((at, True))
        ]

    def _rest(self, pointer: str, schema: Mapping[str, Any], keyword: str, unevaluated: str) -> Literal | None:
        """The literal for what the other keywords of the group leave open; None if that is free."""
        if not self._free(schema, unevaluated):
            if any(name in schema for name in (*_IN_PLACE, "contains")):
                raise refuse(child(pointer, unevaluated), "is supported only without other applicators beside it")
            if keyword not in schema:
                return child(pointer, unevaluated), True
        return None if self._free(schema, keyword) else (child(pointer, keyword), True)

    def _free(self, schema: Mapping[str, Any], keyword: str) -> bool:
        return schema.get(keyword, True) is True or schema[keyword] == {}

    def _trivial(self, literal: Literal) -> bool:
        return self.document.at(literal[0]) in (True, {})

    def _items(self, pointer: str, schema: Mapping[str, Any], positive: bool) -> list[Dnf]:
        keyword = "items" if isinstance(schema.get("items"), list) else "prefixItems"
        first = tuple((child(pointer, keyword, i), True) for i in range(len(schema.get(keyword, ()))))
        follow = "additionalItems" if keyword == "items" else "items"
        rest = self._rest(pointer, schema, follow, "unevaluatedItems")
        if positive:
            return [about(Flat("array", items=(Items(first, rest),)))]
        if rest is not None and first:
            raise refuse(child(pointer, follow), "cannot be negated")
        if rest is not None:  # some item breaks it
            return [of_kind(Flat("array", contains=(Contains((rest[0], False), 1, rest[0]),)))]
        return [
            of_kind(Flat("array", min_items=i + 1, items=(Items((*[ANY_LITERAL] * i, (at, False)), None),)))
            for i, (at, _) in enumerate(first)
        ]

    def _contains(self, pointer: str, schema: Mapping[str, Any], positive: bool) -> list[Dnf]:
        where = child(pointer, "contains")
        low = int(schema.get("minContains", 1))
        if "maxContains" in schema:
            raise refuse(child(pointer, "maxContains"), "is not supported")
        if positive:
            return [about(Flat("array", contains=(Contains((where, True), low, where),)))] if low else []
        if low != 1:
            raise refuse(child(pointer, "minContains"), "cannot be negated")
        return [of_kind(Flat("array", items=(Items((), (where, False)),)))]

    def _property_names(self, pointer: str, schema: Mapping[str, Any], positive: bool) -> list[Dnf]:
        where = child(pointer, "propertyNames")
        if positive:
            return [about(Flat("object", names=((where, True),)))]
        raise refuse(where, "cannot be negated")


# The literal `true`.
ANY_LITERAL: Literal = (NOTHING[0], False)


def required_not(name: str) -> Dnf:
    """Values that are not objects with this property."""
    return about(Flat("object", members=(Members(named=((name, NOTHING),)),)))


def member_goal(flat: Flat, name: str, matched: frozenset[str] | None = None) -> Goal:
    """What the property `name` must satisfy.

    Args:
        matched: patterns that the name matches; None where patterns are not to be considered (an upper bound).
    """
    goal: set[Literal] = set()
    for layer in flat.members:
        named = dict(layer.named)
        found = name in named
        if found:
            goal.add(named[name])
        if matched is not None:
            for pattern, literal in layer.patterns:
                if pattern.text in matched:
                    goal.add(literal)
                    found = True
            if not found and layer.rest is not None:
                goal.add(layer.rest)
        elif not found and not layer.patterns and layer.rest is not None:
            goal.add(layer.rest)
    return frozenset(goal - {ANY_LITERAL}) or ANYTHING


def item_goal(flat: Flat, index: int) -> Goal:
    """What the item at `index` must satisfy."""
    goal: set[Literal] = set()
    for layer in flat.items:
        if index < len(layer.first):
            goal.add(layer.first[index])
        elif layer.rest is not None:
            goal.add(layer.rest)
    return frozenset(goal - {ANY_LITERAL}) or ANYTHING
