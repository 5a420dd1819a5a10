"""Regular expressions: ECMA-262 syntax as JSON Schema uses it, parsed into expressions.

What no grammar can hold (look-around, back-references, word boundaries, flags) is refused by name. Classes differ
between regular expression engines (does \\d hold U+0663?), so each pattern has two readings: the narrow one holds only
what every engine agrees to match, the wide one all that some engine may match. A pattern that must match is read
narrow, one that must not match is read wide: the result satisfies both kinds of validators.
"""

from __future__ import annotations

import unicodedata
from functools import cache

from specserve.guided.automaton import Dfa, TooComplexError, build
from specserve.guided.expr import (
    ANY,
    EMPTY,
    LAST,
    UNIVERSE,
    Alt,
    Begin,
    Class,
    End,
    Expr,
    Lit,
    Ranges,
    Repeat,
    Seq,
    alt,
    chars,
    common,
    invert,
    ranges_of,
    repeat,
    seq,
)

MAX_DEPTH = 100
MAX_LENGTH = 16_384
MAX_REPEAT = 5_000
# Groups are repeated more often in automata only, and those have at most so many states.
MAX_GROUP_REPEAT = 16
SMALL = 1_000
_SIMPLE = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v", "0": "\0"}
_SYNTAX = set("^$\\.*+?()[]{}|/-")
_NEWLINES = chars("\n\r\u2028\u2029")


class RegexError(ValueError):
    """A pattern that is malformed or that no grammar can hold; the text says what and where."""


class AnchorError(RegexError):
    """An anchor stands where it is neither the first nor the last thing."""


@cache
def _unicode_classes() -> dict[str, Ranges]:
    """Digits, word characters and spaces as the most generous engine reads them."""
    digits, words, spaces = [], [], []
    for code in range(LAST + 1):
        char = chr(code)
        if char.isspace():
            spaces.append((code, code))
        if char.isalnum():
            words.append((code, code))
            if unicodedata.category(char) == "Nd":
                digits.append((code, code))
    spaces.append((0xFEFF, 0xFEFF))
    words.append((0x5F, 0x5F))
    return {"d": ranges_of(digits), "w": ranges_of(words), "s": ranges_of(spaces)}


_ASCII = {
    "d": ranges_of([(0x30, 0x39)]),
    "w": ranges_of([(0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A)]),
    "s": chars(" \t\n\r\f\v"),
}


def shorthand(letter: str, *, wide: bool) -> Ranges:
    """The set of \\d, \\w, \\s, \\D, \\W or \\S in one of the two readings."""
    small = letter.lower()
    if small == letter:
        return _unicode_classes()[small] if wide else _ASCII[small]
    return invert(_ASCII[small] if wide else _unicode_classes()[small])


def parse(pattern: str, *, wide: bool = False) -> Expr:
    """The expression of a pattern, anchors kept as Begin and End.

    Raises:
        RegexError: it is malformed, too long or nested too deep, or uses what a grammar cannot hold.
    """
    if len(pattern) > MAX_LENGTH:
        raise RegexError(f"is {len(pattern)} characters long; at most {MAX_LENGTH} are allowed")
    parser = _Parser(pattern, wide)
    result = parser.alternatives(0)
    if parser.at < len(pattern):
        raise parser.fail("unmatched )")
    return result


class _Parser:
    """Recursive descent over `text`; `at` is the index of the next character."""

    def __init__(self, text: str, wide: bool) -> None:
        self.text = text
        self.wide = wide
        self.at = 0

    def fail(self, what: str) -> RegexError:
        return RegexError(f"{what} at character {self.at}")

    def peek(self, n: int = 1) -> str:
        return self.text[self.at : self.at + n]

    def alternatives(self, depth: int) -> Expr:
        if depth > MAX_DEPTH:
            raise self.fail(f"groups nest deeper than {MAX_DEPTH}")
        branches = [self.sequence(depth)]
        while self.peek() == "|":
            self.at += 1
            branches.append(self.sequence(depth))
        return alt(branches)

    def sequence(self, depth: int) -> Expr:
        items: list[Expr] = []
        while self.at < len(self.text) and self.peek() not in "|)":
            items.append(self.quantified(self.atom(depth)))
        return seq(*items)

    def atom(self, depth: int) -> Expr:
        char = self.peek()
        self.at += 1
        if char == "(":
            return self.group(depth)
        if char == "[":
            return Class(self.bracket())
        if char == ".":
            return Class(invert(chars("\n") if self.wide else _NEWLINES))
        if char == "^":
            return Begin()
        if char == "$":
            return alt([End(), Seq((Lit("\n"), End()))]) if self.wide else End()
        if char == "\\":
            return self.escape()
        if char in "*+?":
            raise self.fail(f"nothing to repeat before {char}")
        if char == "{" and self.counts(self.at - 1) is not None:
            raise self.fail("nothing to repeat before {")
        return Lit(char)

    def group(self, depth: int) -> Expr:
        if self.peek() == "?":
            rest = self.text[self.at + 1 :]
            if rest.startswith(("=", "!", "<=", "<!")):
                raise self.fail("look-around is not supported")
            if rest.startswith(":"):
                self.at += 2
            elif rest.startswith(("<", "P<")) and ">" in rest:
                self.at += 2 + rest.index(">")
            else:
                raise self.fail("this kind of group (?...) is not supported")
        inner = self.alternatives(depth + 1)
        if self.peek() != ")":
            raise self.fail("missing )")
        self.at += 1
        return inner

    def quantified(self, item: Expr) -> Expr:
        low: int
        high: int | None
        char = self.peek()
        if char in ("*", "+", "?"):
            self.at += 1
            low, high = {"*": (0, None), "+": (1, None), "?": (0, 1)}[char]
        elif char == "{" and (counts := self.counts(self.at)) is not None:
            low, high, self.at = counts
        else:
            return item
        if isinstance(item, (Begin, End)):
            raise self.fail("an anchor cannot be repeated")
        if max(low, high or 0) > MAX_REPEAT:
            raise self.fail(f"repeats more than {MAX_REPEAT} times")
        if high is not None and high < low:
            raise self.fail("the repeat's bounds are out of order")
        if self.peek() == "?":
            self.at += 1  # lazy or not, the same texts match
        if self.peek() in ("*", "+", "?") and self.peek():
            raise self.fail("a quantifier follows a quantifier")
        return repeat(item, low, high)

    def counts(self, start: int) -> tuple[int, int | None, int] | None:
        """Bounds of {n}, {n,} or {n,m} at `start`, and the index past it; None where { is only a character."""
        end = self.text.find("}", start)
        if end < 0 or end - start > 20:
            return None
        first, comma, second = self.text[start + 1 : end].partition(",")
        if not (first.isascii() and first.isdigit()):
            if comma and not first and second.isdigit():
                raise self.fail("{,n} means different things to different engines; write {0,n}")
            return None
        if second and not (second.isascii() and second.isdigit()):
            return None
        return int(first), int(second) if second else (None if comma else int(first)), end + 1

    def escape(self) -> Expr:
        char = self.peek()
        if char and char in "dDwWsS":
            self.at += 1
            return Class(shorthand(char, wide=self.wide))
        if char in ("b", "B"):
            raise self.fail("word boundaries are not supported")
        if char and char in "123456789k":
            raise self.fail("back-references are not supported")
        return Lit(self.escaped_char())

    def escaped_char(self) -> str:
        char = self.peek()
        self.at += 1
        if char in _SIMPLE:
            return _SIMPLE[char]
        if char in ("x", "u"):
            size = 2 if char == "x" else 4
            digits = self.peek(size)
            if len(digits) < size or any(d not in "0123456789abcdefABCDEF" for d in digits):
                raise self.fail(f"\\{char} needs {size} hexadecimal digits")
            self.at += size
            code = int(digits, 16)
            if 0xD800 <= code < 0xE000:
                raise self.fail("surrogates are no characters; write the character itself")
            return chr(code)
        if char in ("p", "P"):
            raise self.fail("Unicode properties (\\p) are not supported")
        if not char or (char.isascii() and char.isalnum()):
            raise self.fail(f"unknown escape \\{char}")
        return char

    def bracket(self) -> Ranges:
        negated = self.peek() == "^"
        self.at += negated
        pairs: list[tuple[int, int]] = []
        if self.peek() == "]":
            raise self.fail("an empty character class is not supported")
        while self.peek() != "]":
            if not self.peek():
                raise self.fail("missing ]")
            low = self.member(negated)
            if isinstance(low, tuple):
                pairs.extend(low)
                continue
            high = low
            if self.peek() == "-" and self.peek(2) not in ("-]", "-"):
                self.at += 1
                top = self.member(negated)
                if isinstance(top, tuple) or ord(top) < ord(low):
                    raise self.fail("bad range in a character class")
                high = top
            pairs.append((ord(low), ord(high)))
        self.at += 1
        ranges = common(ranges_of(pairs), UNIVERSE)
        return invert(ranges) if negated else ranges

    def member(self, negated: bool) -> str | Ranges:
        """One character, or the set of a shorthand. A negated class turns the reading round."""
        char = self.peek()
        self.at += 1
        if char != "\\":
            return char
        kind = self.peek()
        if kind and kind in "dDwWsS":
            self.at += 1
            return shorthand(kind, wide=self.wide != negated)
        if kind == "b":
            self.at += 1
            return "\b"
        return self.escaped_char()


def _has_anchor(expr: Expr) -> bool:
    if isinstance(expr, (Begin, End)):
        return True
    if isinstance(expr, (Seq,)) or hasattr(expr, "items"):
        return any(_has_anchor(item) for item in expr.items)
    return _has_anchor(expr.item) if hasattr(expr, "item") else False


def full(expr: Expr) -> Expr:
    """The texts that `expr` matches whole; redundant anchors at its ends are dropped.

    Raises:
        AnchorError: an anchor stands elsewhere.
    """
    return _strip(expr, EMPTY)


def search(expr: Expr) -> Expr:
    """The texts that hold a match of `expr` anywhere (JSON Schema's `pattern`)."""
    return _strip(expr, repeat(ANY, 0, None))


def _strip(expr: Expr, around: Expr) -> Expr:
    branches = expr.items if not isinstance(expr, Seq) and hasattr(expr, "items") else (expr,)
    out = []
    for branch in branches:
        items = list(branch.items) if isinstance(branch, Seq) else [branch]
        first = next((i for i, item in enumerate(items) if not isinstance(item, Begin)), len(items))
        begins, items = first > 0, items[first:]
        last = next((i for i in range(len(items), 0, -1) if not isinstance(items[i - 1], End)), 0)
        ends, items = last < len(items), items[:last]
        if len(items) == 1 and (not begins or not ends) and around != EMPTY and hasattr(items[0], "items"):
            inner = items[0]
            if _has_anchor(inner) and not begins and not ends:
                out.append(_strip(inner, around))
                continue
        if any(_has_anchor(item) for item in items):
            raise AnchorError("an anchor inside the pattern is not supported")
        out.append(seq(EMPTY if begins else around, *items, EMPTY if ends else around))
    return alt(out)


def counted_groups(expr: Expr) -> int:
    """The highest count by which a group (not a single character) is repeated; 0 for none."""
    if isinstance(expr, Repeat):
        plain = isinstance(expr.item, (Class, Lit))
        count = 0 if plain else max(expr.low, expr.high or 0)
        return max(count, counted_groups(expr.item))
    return max(map(counted_groups, expr.items), default=0) if isinstance(expr, (Seq, Alt)) else 0


def small(expr: Expr) -> Dfa | None:
    """The automaton of an expression with counted groups, where a matcher would have to guess how often they came.

    None if it is too large; the expression is then matched as it stands.

    Raises:
        RegexError: it is too large, and so are the counts.
    """
    try:
        return build(expr, limit=SMALL)
    except TooComplexError:
        if counted_groups(expr) > MAX_GROUP_REPEAT:
            raise RegexError(f"repeats a group more than {MAX_GROUP_REPEAT} times and is too complex") from None
        return None
