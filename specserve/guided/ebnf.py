"""Writing rules as GBNF text, the notation that xgrammar compiles."""

from __future__ import annotations

from collections.abc import Mapping

from specserve.guided.expr import EMPTY, LAST, NEVER, Alt, Class, Expr, Lit, Ranges, Ref, Repeat, Seq, alt, repeat, seq

# How far choices inside a repeated item are multiplied out, and counted repeats inside it written out.
MAX_BRANCHES = 32
MAX_UNROLLED = 4
# Most repeats written in one piece.
MAX_REPEAT = 128


def productive(rules: Mapping[str, Expr]) -> dict[str, Expr]:
    """The rules without branches that never end (no finite text matches them)."""
    known: set[str] = set()
    while True:
        fresh = {name for name, body in rules.items() if name not in known and _ends(body, known)}
        if not fresh:
            break
        known |= fresh
    return {name: _pruned(body, known) for name, body in rules.items() if name in known}


def _ends(expr: Expr, known: set[str]) -> bool:
    if isinstance(expr, Ref):
        return expr.name in known
    if isinstance(expr, Seq):
        return all(_ends(item, known) for item in expr.items)
    if isinstance(expr, Alt):
        return any(_ends(item, known) for item in expr.items)
    if isinstance(expr, Repeat):
        return expr.low == 0 or _ends(expr.item, known)
    return not (isinstance(expr, Class) and not expr.ranges)


def _pruned(expr: Expr, known: set[str]) -> Expr:
    if not _ends(expr, known):
        return NEVER
    if isinstance(expr, Seq):
        return seq(*(_pruned(item, known) for item in expr.items))
    if isinstance(expr, Alt):
        return alt([_pruned(item, known) for item in expr.items if _ends(item, known)])
    if isinstance(expr, Repeat):
        return repeat(_pruned(expr.item, known), expr.low, expr.high)
    return expr


def reachable(rules: Mapping[str, Expr], root: str) -> dict[str, Expr]:
    """The rules that `root` needs, in the order of first use."""
    out = {root: rules[root]}
    stack: list[Expr] = [rules[root]]
    while stack:
        expr = stack.pop()
        if isinstance(expr, Ref) and expr.name not in out:
            out[expr.name] = rules[expr.name]
            stack.append(rules[expr.name])
        elif isinstance(expr, (Seq, Alt)):
            stack.extend(expr.items)
        elif isinstance(expr, Repeat):
            stack.append(expr.item)
    return out


def write(rules: Mapping[str, Expr], root: str = "root") -> str | None:
    """GBNF text of the rules that `root` needs; None if no text matches `root`."""
    live = productive(rules)
    if root not in live:
        return None
    return "".join(f"{name} ::= {_text(body)}\n" for name, body in reachable(live, root).items())


def _text(expr: Expr) -> str:
    if expr == EMPTY:
        return '""'
    if isinstance(expr, Lit):
        return '"' + "".join(_char(ord(c), '"\\') for c in expr.text) + '"'
    if isinstance(expr, Class):
        return _class(expr.ranges)
    if isinstance(expr, Ref):
        return expr.name
    if isinstance(expr, Seq):
        return " ".join(_grouped(item) for item in expr.items)
    if isinstance(expr, Alt):
        return " | ".join(_text(item) for item in expr.items)
    if isinstance(expr, Repeat):
        item = _flat(expr.item)
        text = _negated(item) if isinstance(item, Class) else _grouped(item)
        return _counted(text, expr.low, expr.high)
    raise TypeError(f"{type(expr).__name__} must be gone before a grammar is written")


def _flat(expr: Expr) -> Expr:
    """A repeated item as one choice of plain sequences where that stays small.

    The backend keeps such a loop inside one automaton and knows its mask beforehand; a choice nested deeper becomes a
    rule of its own, and every token then has to be tried.
    """
    branches = _branches(expr)
    return expr if branches is None else alt(branches)


def _branches(expr: Expr) -> list[Expr] | None:
    """The flat branches of `expr`, None if there are rules inside or too many branches."""
    if isinstance(expr, (Lit, Class)):
        return [expr]
    if isinstance(expr, Alt):
        parts = [_branches(item) for item in expr.items]
        found = [branch for part in parts if part is not None for branch in part]
        return found if None not in parts and len(found) <= MAX_BRANCHES else None
    if isinstance(expr, Repeat):
        if expr.high is None or expr.high > MAX_UNROLLED:
            return None
        counts = range(expr.low, expr.high + 1)
        return _branches(alt([seq(*[expr.item] * count) for count in counts]))
    if not isinstance(expr, Seq):
        return None
    out: list[Expr] = [EMPTY]
    for item in expr.items:
        branches = _branches(item)
        if branches is None or len(out) * len(branches) > MAX_BRANCHES:
            return None
        out = [seq(left, right) for left in out for right in branches]
    return out


def _grouped(expr: Expr) -> str:
    text = _text(expr)
    return text if isinstance(expr, (Class, Ref, Lit)) else f"({text})"


def _counted(text: str, low: int, high: int | None) -> str:
    """`text` from `low` to `high` times, in pieces: xgrammar 0.2.9 makes wrong masks for longer repeats."""
    if high is None:
        head = f"{text}{{{MAX_REPEAT},{MAX_REPEAT}}} " * (low // MAX_REPEAT)
        rest = low % MAX_REPEAT
        return head + text + ({0: "*", 1: "+"}.get(rest) or f"{{{rest},}}")
    if high <= MAX_REPEAT:
        return text + ("?" if (low, high) == (0, 1) else f"{{{low},{high}}}")
    more = _counted(text, max(0, low - MAX_REPEAT), high - MAX_REPEAT)
    full = f"{text}{{{MAX_REPEAT},{MAX_REPEAT}}} ({more})"
    return f"({full} | {text}{{{low},{MAX_REPEAT - 1}}})" if low < MAX_REPEAT else f"({full})"


def _class(ranges: Ranges, start: str = "[") -> str:
    return start + "".join(_interval(low, high) for low, high in ranges) + "]"


def _negated(item: Class) -> str:
    """A repeated class, written by what it leaves out: the backend makes the masks of that form once, not for each
    count anew."""
    gaps = []
    position = 0
    for low, high in item.ranges:
        if low > position:
            gaps.append((position, low - 1))
        position = high + 1
    if position <= LAST:
        gaps.append((position, LAST))
    return _class(tuple(gaps), "[^")


def _interval(low: int, high: int) -> str:
    first = _char(low, "[]^-\\")
    return first if low == high else f"{first}-{_char(high, '[]^-' + chr(92))}"


def _char(code: int, special: str) -> str:
    if 0x20 <= code < 0x7F and chr(code) not in special:
        return chr(code)
    return f"\\u{code:04x}" if code <= 0xFFFF else f"\\U{code:08x}"
