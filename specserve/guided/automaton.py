"""Finite automata over characters: intersection, complement and emptiness, which expressions alone do not have."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import reduce

from specserve.guided.expr import (
    ANY,
    EMPTY,
    UNIVERSE,
    Alt,
    Begin,
    Class,
    End,
    Expr,
    Lit,
    Ranges,
    Ref,
    Repeat,
    Seq,
    alt,
    invert,
    ranges_of,
    repeat,
    seq,
)

MAX_NFA_STATES = 20_000
MAX_STATES = 1_500
MAX_MERGED = 256

Edges = tuple[tuple[int, int, int], ...]


class TooComplexError(ValueError):
    """The automaton would have more states than are affordable."""


@dataclass(frozen=True, slots=True)
class Dfa:
    """A deterministic automaton; state 0 is the start, a character without an edge is refused.

    Attributes:
        edges: for each state, sorted disjoint (low, high, target) intervals of code points.
        accepting: for each state, whether a text may end there.
    """

    edges: tuple[Edges, ...]
    accepting: tuple[bool, ...]

    @property
    def empty(self) -> bool:
        """Whether it accepts no text at all (a trimmed automaton has an accepting state otherwise)."""
        return not any(self.accepting)

    def accepts(self, text: str) -> bool:
        state = 0
        for char in text:
            code = ord(char)
            target = next((t for low, high, t in self.edges[state] if low <= code <= high), None)
            if target is None:
                return False
            state = target
        return self.accepting[state]


class _Nfa:
    """Thompson's construction. An empty edge may carry a condition: only at the text's start, or only at its end."""

    def __init__(self) -> None:
        self.empty: list[list[tuple[int, str]]] = []
        self.steps: list[list[tuple[Ranges, int]]] = []

    def state(self) -> int:
        if len(self.empty) >= MAX_NFA_STATES:
            raise TooComplexError(f"needs more than {MAX_NFA_STATES} states")
        self.empty.append([])
        self.steps.append([])
        return len(self.empty) - 1

    def add(self, expr: Expr, start: int) -> int:
        """Add `expr` behind `start`; returns the state after it."""
        if isinstance(expr, Seq):
            for item in expr.items:
                start = self.add(item, start)
            return start
        if isinstance(expr, Repeat):
            return self._repeat(expr, start)
        if isinstance(expr, Lit):
            for char in expr.text:
                start = self._step(((ord(char), ord(char)),), start)
            return start
        if isinstance(expr, Class):
            return self._step(expr.ranges, start)
        end = self.state()
        if isinstance(expr, Alt):
            for item in expr.items:
                self.empty[self.add(item, self._after(start))].append((end, ""))
        elif isinstance(expr, (Begin, End)):
            self.empty[start].append((end, "^" if isinstance(expr, Begin) else "$"))
        else:
            raise TypeError(f"an automaton cannot hold the rule {expr.name}")
        return end

    def _after(self, start: int) -> int:
        fresh = self.state()
        self.empty[start].append((fresh, ""))
        return fresh

    def _step(self, ranges: Ranges, start: int) -> int:
        end = self.state()
        self.steps[start].append((ranges, end))
        return end

    def _repeat(self, expr: Repeat, start: int) -> int:
        for _ in range(expr.low):
            start = self.add(expr.item, start)
        if expr.high is None:
            loop = self._after(start)
            self.empty[self.add(expr.item, loop)].append((loop, ""))
            return self._after(loop)
        end = self.state()
        for _ in range(expr.high - expr.low):
            self.empty[start].append((end, ""))
            start = self.add(expr.item, start)
        self.empty[start].append((end, ""))
        return end

    def closure(self, states: Iterable[int], conditions: str) -> frozenset[int]:
        found = set(states)
        stack = list(found)
        while stack:
            for target, condition in self.empty[stack.pop()]:
                if target not in found and (not condition or condition in conditions):
                    found.add(target)
                    stack.append(target)
        return frozenset(found)


def build(expr: Expr, limit: int = MAX_STATES) -> Dfa:
    """The automaton of the texts that `expr` matches whole.

    Raises:
        TooComplexError: more than `limit` states.
    """
    nfa = _Nfa()
    first = nfa.state()
    final = nfa.add(expr, first)
    # The start is a state of its own: only there may a Begin be crossed.
    start = (nfa.closure([first], "^"), True)
    index = {start: 0}
    edges: list[Edges] = []
    accepting: list[bool] = []
    todo = [start]
    for states, initial in todo:
        accepting.append(final in nfa.closure(states, "^$" if initial else "$"))
        out: list[tuple[int, int, int]] = []
        for low, high, targets in _moves([step for s in states for step in nfa.steps[s]]):
            key = (nfa.closure(targets, ""), False)
            if key not in index:
                if len(index) >= limit:
                    raise TooComplexError(f"needs more than {limit} states")
                index[key] = len(todo)
                todo.append(key)
            out.append((low, high, index[key]))
        edges.append(_joined(out))
    return trim(Dfa(tuple(edges), tuple(accepting)))


def _moves(steps: list[tuple[Ranges, int]]) -> list[tuple[int, int, frozenset[int]]]:
    """Elementary intervals of the steps, each with the set of states that it leads to."""
    events: dict[int, list[tuple[int, int]]] = {}
    for ranges, target in steps:
        for low, high in ranges:
            events.setdefault(low, []).append((1, target))
            events.setdefault(high + 1, []).append((-1, target))
    out: list[tuple[int, int, frozenset[int]]] = []
    active: dict[int, int] = {}
    points = sorted(events)
    for i, point in enumerate(points):
        for change, target in events[point]:
            active[target] = active.get(target, 0) + change
            if not active[target]:
                del active[target]
        if active:
            out.append((point, points[i + 1] - 1, frozenset(active)))
    return out


def _joined(edges: list[tuple[int, int, int]]) -> Edges:
    out: list[tuple[int, int, int]] = []
    for low, high, target in sorted(edges):
        if out and out[-1][2] == target and out[-1][1] + 1 == low:
            out[-1] = (out[-1][0], high, target)
        else:
            out.append((low, high, target))
    return tuple(out)


def trim(dfa: Dfa) -> Dfa:
    """Without states that the start does not reach or that reach no end, and with equal states merged."""
    n = len(dfa.edges)
    back: list[list[int]] = [[] for _ in range(n)]
    for state, edges in enumerate(dfa.edges):
        for _, _, target in edges:
            back[target].append(state)
    alive = {s for s in range(n) if dfa.accepting[s]}
    stack = list(alive)
    while stack:
        for state in back[stack.pop()]:
            if state not in alive:
                alive.add(state)
                stack.append(state)
    block = _blocks(dfa, alive)
    index = {block[0]: 0} if 0 in alive else {}
    if not index:
        return Dfa(((),), (False,))
    order = [0]
    edges_out: list[Edges] = []
    for state in order:
        out = []
        for low, high, target in dfa.edges[state]:
            if target in alive:
                if block[target] not in index:
                    index[block[target]] = len(order)
                    order.append(target)
                out.append((low, high, index[block[target]]))
        edges_out.append(_joined(out))
    return Dfa(tuple(edges_out), tuple(dfa.accepting[s] for s in order))


def _blocks(dfa: Dfa, alive: set[int]) -> dict[int, int]:
    """Moore's partition refinement: states with the same future share a block.

    Large automata are left as they are: chains need a round for each state, and size is all that is lost.
    """
    if len(alive) > MAX_MERGED:
        return {s: s for s in alive}
    block = {s: int(dfa.accepting[s]) for s in alive}
    count = len(set(block.values()))
    while True:
        names: dict[object, int] = {}
        fresh = {}
        for s in alive:
            future = _joined([(low, high, block[t]) for low, high, t in dfa.edges[s] if t in alive])
            fresh[s] = names.setdefault((block[s], future), len(names))
        if len(names) == count:
            return fresh
        block, count = fresh, len(names)


def intersect(a: Dfa, b: Dfa, limit: int = MAX_STATES) -> Dfa:
    """Texts that both accept."""
    index = {(0, 0): 0}
    todo = [(0, 0)]
    edges: list[Edges] = []
    for i, j in todo:
        out: list[tuple[int, int, int]] = []
        for low, high, s in a.edges[i]:
            for low2, high2, t in b.edges[j]:
                x, y = max(low, low2), min(high, high2)
                if x <= y:
                    if (s, t) not in index:
                        if len(index) >= 4 * limit:
                            raise TooComplexError(f"needs more than {4 * limit} states")
                        index[s, t] = len(todo)
                        todo.append((s, t))
                    out.append((x, y, index[s, t]))
        edges.append(_joined(out))
    result = trim(Dfa(tuple(edges), tuple(a.accepting[i] and b.accepting[j] for i, j in todo)))
    if len(result.edges) > limit:
        raise TooComplexError(f"needs more than {limit} states")
    return result


def intersect_all(parts: Iterable[Dfa]) -> Dfa:
    """Texts that every part accepts; small parts first."""
    return reduce(intersect, sorted(parts, key=lambda dfa: len(dfa.edges)))


def complement(dfa: Dfa) -> Dfa:
    """Texts that `dfa` does not accept."""
    sink = len(dfa.edges)
    edges = []
    for out in dfa.edges:
        gaps = invert(ranges_of((low, high) for low, high, _ in out))
        edges.append(_joined([*out, *((low, high, sink) for low, high in gaps)]))
    edges.append(tuple((low, high, sink) for low, high in UNIVERSE))
    return trim(Dfa(tuple(edges), (*(not a for a in dfa.accepting), True)))


def literals(texts: Iterable[str]) -> Dfa:
    """Exactly these texts."""
    return build(alt([Lit(text) if text else EMPTY for text in texts]), limit=50_000)


def of_length(low: int, high: int | None) -> Dfa:
    """Texts of `low` to `high` characters."""
    return build(repeat(ANY, low, high), limit=MAX_STATES)


def to_rules(dfa: Dfa, prefix: str, encode: Callable[[Ranges], Expr]) -> dict[str, Expr]:
    """Rules `prefix`_0 (the start), `prefix`_1, ... that generate what `dfa` accepts.

    A state's loop to itself becomes a star, so that only longer cycles recurse.

    Args:
        encode: how one character out of a set is written.
    """
    rules: dict[str, Expr] = {}
    for state, edges in enumerate(dfa.edges):
        by_target: dict[int, list[tuple[int, int]]] = {}
        for low, high, target in edges:
            by_target.setdefault(target, []).append((low, high))
        branches: list[Expr] = [
            seq(encode(tuple(pairs)), Ref(f"{prefix}_{target}"))
            for target, pairs in by_target.items()
            if target != state
        ]
        if dfa.accepting[state]:
            branches.append(EMPTY)
        loop = by_target.get(state)
        stay = repeat(encode(tuple(loop)), 0, None) if loop else EMPTY
        rules[f"{prefix}_{state}"] = seq(stay, alt(branches))
    return rules
