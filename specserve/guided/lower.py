"""From a JSON Schema to rules: each goal becomes a rule, each of its alternatives a branch."""

from __future__ import annotations

import time
from typing import Any

from specserve.guided import automaton
from specserve.guided.automaton import Dfa, TooComplexError
from specserve.guided.document import Document, refuse
from specserve.guided.ebnf import MAX_REPEAT, write
from specserve.guided.expand import Expander
from specserve.guided.expr import NEVER, Class, Expr, Lit, Ranges, Ref, Repeat, alt, repeat, seq
from specserve.guided.flat import ANYTHING, Flat, Goal
from specserve.guided.intervals import decimals, integers, whole_range
from specserve.guided.jsontext import Style, any_value_rules, encode_class, integer, number, quoted, value
from specserve.guided.lower_array import array
from specserve.guided.lower_object import members
from specserve.guided.texts import direct, string_dfa
from specserve.guided.values import allowed_values

MAX_RULES = 20_000
MAX_DIVISOR = 1_000
# A larger maxLength means this one: no context holds a longer string.
LONGEST_TEXT = 131_072


class Lowering:
    """Builds the rules of one document.

    Attributes:
        rules: finished rules by name.
        style: separators.
        expander: gives the alternatives of a goal.
    """

    def __init__(self, document: Document, style: Style, deadline: float) -> None:
        self.style = style
        self.expander = Expander(document, deadline)
        self.rules: dict[str, Expr] = any_value_rules(style)
        self._names: dict[Goal, str] = {}
        self._todo: list[Goal] = []
        self._automata: dict[Dfa, str] = {}

    def run(self) -> str:
        """The grammar's text; the document's root is its root."""
        root = self.goal(frozenset([("", True)]))
        self.rules["root"] = root
        while self._todo:
            self.expander.tick()
            goal = self._todo.pop()
            branches = [self._flat(flat) for flats in self.expander.expand(goal).values() for flat in flats]
            self.define(self._names[goal], alt(branches))
        text = write(self.rules)
        if text is None:
            raise refuse("", "no JSON value of finite size satisfies it")
        return text

    def define(self, name: str, body: Expr) -> Ref:
        """Add a rule."""
        if len(self.rules) > MAX_RULES:
            raise refuse("", f"needs more than {MAX_RULES} grammar rules")
        self.rules[name] = body
        return Ref(name)

    def fresh(self, kind: str) -> str:
        """A rule name that is not in use."""
        return f"{kind}{len(self.rules)}"

    def goal(self, goal: Goal) -> Expr:
        """A reference to the rule of `goal`."""
        if goal == ANYTHING:
            return Ref("any")
        if goal not in self._names:
            self._names[goal] = f"v{len(self._names)}"
            self._todo.append(goal)
        return Ref(self._names[goal])

    def automaton(self, dfa: Dfa, *, text: bool = True) -> Expr:
        """A reference to the rules of an automaton: over a JSON string's inside, or (text=False) as it is."""
        if dfa.empty:
            return NEVER
        if dfa not in self._automata:
            prefix = f"d{len(self._automata)}"
            self._automata[dfa] = prefix
            for name, body in automaton.to_rules(dfa, prefix, encode_class if text else _verbatim).items():
                self.define(name, body)
        return Ref(f"{self._automata[dfa]}_0")

    def _flat(self, flat: Flat) -> Expr:
        if flat.values is not None:
            return alt([value(v, self.style) for v in allowed_values(self.expander, flat)])
        if flat == Flat(flat.kind):
            return _FREE[flat.kind]
        if flat.kind == "number":
            return self._number(flat)
        if flat.kind == "string":
            inside = direct(flat)
            if inside is None:
                return quoted(self.automaton(string_dfa(flat)))
            if isinstance(inside, Repeat) and isinstance(inside.item, Class) and (inside.high or 0) > MAX_REPEAT:
                return seq(Lit('"'), self._long(inside.item, inside.low, inside.high or 0))
            return quoted(inside)
        if flat.excluded:
            raise refuse(flat.excluded[0][1], "arrays and objects cannot be excluded one by one")
        return array(self, flat) if flat.kind == "array" else members(self, flat)

    def _long(self, item: Class, low: int, high: int) -> Expr:
        """The rest of a string of many characters, closing quote included, as a rule for each MAX_REPEAT of them.

        The quote inside the last rule keeps the matcher from having to guess where the string ends.
        """
        high = max(low, min(high, LONGEST_TEXT))
        block = self.define(self.fresh("b"), repeat(item, MAX_REPEAT, MAX_REPEAT))
        blocks, rest = divmod(high, MAX_REPEAT)
        body = self.define(self.fresh("l"), seq(repeat(item, max(0, low - blocks * MAX_REPEAT), rest), Lit('"')))
        for i in range(blocks - 1, -1, -1):
            least = max(0, low - i * MAX_REPEAT)
            branches: list[Expr] = [seq(block, body)]
            if least < MAX_REPEAT:
                ending = seq(repeat(item, least, MAX_REPEAT - 1), Lit('"'))
                branches.append(self.define(self.fresh("e"), ending))
            body = self.define(self.fresh("l"), alt(branches))
        return body

    def _number(self, flat: Flat) -> Expr:
        if not flat.whole:
            if flat.excluded:
                raise refuse(flat.excluded[0][1], "numbers can be excluded only where they must be integers")
            try:
                return decimals(flat.bounds) if not flat.bounds.free else number()
            except ValueError as error:
                raise refuse("", str(error)) from None
        plain = integer() if flat.bounds.free else integers(*whole_range(flat.bounds))
        if (not flat.excluded and not flat.multiples) or plain == NEVER:
            return plain
        parts = [automaton.build(plain)]
        if flat.excluded:
            parts.append(automaton.complement(automaton.literals(str(int(v)) for v, _ in flat.excluded)))
        for divisor, pointer in flat.multiples:
            if divisor > MAX_DIVISOR:
                raise refuse(pointer, f"is supported up to {MAX_DIVISOR}")
            parts.append(_multiples(divisor))
        try:
            return self.automaton(automaton.intersect_all(parts), text=False)
        except TooComplexError as error:
            where = (flat.multiples or ((0, ""),))[0][1]
            raise refuse(where, f"together with the other constraints on this number it {error}") from None


_FREE: dict[str, Expr] = {
    "null": Lit("null"),
    "boolean": alt([Lit("true"), Lit("false")]),
    "number": number(),
    "string": Ref("any_string"),
    "array": Ref("any_array"),
    "object": Ref("any_object"),
}


def _verbatim(ranges: Ranges) -> Expr:
    return Class(ranges)


def _multiples(divisor: int) -> Dfa:
    """Digit texts (with an optional sign) of the multiples of `divisor`; one state for each remainder."""
    minus = ord("-")
    digits = [ord(c) for c in "0123456789"]
    after_sign = [(d, d, 2 + i % divisor) for i, d in enumerate(digits)]
    edges = [tuple(sorted([(minus, minus, 1), *after_sign])), tuple(after_sign)]
    for remainder in range(divisor):
        edges.append(tuple((d, d, 2 + (remainder * 10 + i) % divisor) for i, d in enumerate(digits)))
    return automaton.trim(Dfa(tuple(edges), (False, False, True, *[False] * (divisor - 1))))


def lower_schema(schema: Any, style: Style, *, max_depth: int, deadline: float | None = None) -> str:
    """GBNF text of the JSON texts that satisfy `schema`.

    Raises:
        GrammarError: the schema is invalid, unsatisfiable, or has a keyword that cannot be enforced whole.
    """
    document = Document(schema, max_depth=max_depth)
    return Lowering(document, style, time.monotonic() + 60 if deadline is None else deadline).run()
