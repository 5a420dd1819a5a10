"""Formats of JSON Schema as regular expressions.

Each expression matches only texts that are valid under the format's RFC (so what is generated always validates); where
the RFC's language is not regular or has no use (quoted mail boxes, host names with "xn--"), the common part is matched.
A format without an entry here that validators assert is refused; one that no validator knows is an annotation.
"""

from __future__ import annotations

from functools import cache

from specserve.guided.expr import Expr
from specserve.guided.regex import full, parse

_YEAR_COMMON = r"(?:[0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)"
_LEAP = r"(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_DATE = (
    rf"(?:{_YEAR_COMMON}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    rf"|02-(?:0[1-9]|1[0-9]|2[0-8]))|{_LEAP}-02-29)"
)
_CLOCK = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,9})?"
_ZONE = r"(?:Z|[+\-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
_LABEL = r"[A-Za-z0-9]{1,20}(?:-[A-Za-z0-9]{1,20}){0,2}"
_HOST = rf"{_LABEL}(?:\.{_LABEL}){{0,3}}"
_ATOM = r"[A-Za-z0-9!#$%&'*+/=?^_`{|}~\-]{1,20}"
_OCTET = r"(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_IPV4 = rf"{_OCTET}\.{_OCTET}\.{_OCTET}\.{_OCTET}"
_H = r"[0-9A-Fa-f]{1,4}"
_IPV6 = "|".join(
    [rf"(?:{_H}:){{7}}{_H}", rf"(?:{_H}:){{6}}{_IPV4}", rf"::(?:{_H}(?::{_H}){{0,6}})?"]
    + [rf"{_H}(?::{_H}){{{n - 1}}}::(?:{_H}(?::{_H}){{0,{6 - n}}})?" for n in range(1, 7)]
    + [rf"(?:{_H}:){{7}}:", rf"::(?:[Ff]{{4}}:)?{_IPV4}"]
)
_PCT = r"%[0-9A-Fa-f]{2}"
_PCHAR = rf"(?:[A-Za-z0-9\-._~!$&'()*+,;=:@]|{_PCT})"
_SEGMENT = rf"{_PCHAR}*"
_TAIL = rf"(?:\?(?:{_PCHAR}|[/?])*)?(?:#(?:{_PCHAR}|[/?])*)?"
_AUTHORITY = rf"(?:(?:[A-Za-z0-9\-._~!$&'()*+,;=:]|{_PCT})*@)?(?:{_HOST}|{_IPV4}|\[(?:{_IPV6})\])(?::[0-9]{{1,5}})?"
_SCHEME = r"[A-Za-z][A-Za-z0-9+\-.]*"
_URI = rf"{_SCHEME}:(?://{_AUTHORITY}(?:/{_SEGMENT})*|///{_PCHAR}+(?:/{_SEGMENT})*|/?{_PCHAR}+(?:/{_SEGMENT})*){_TAIL}"
_RELATIVE = (
    rf"(?:(?:/(?:{_PCHAR}+(?:/{_SEGMENT})*)?)|//{_AUTHORITY}(?:/{_SEGMENT})*"
    rf"|(?:[A-Za-z0-9\-._~!$&'()*+,;=@]|{_PCT})+(?:/{_SEGMENT})*)?{_TAIL}"
)
_POINTER = r"(?:/(?:[^~/]|~[01])*)*"
_TIME_PART = r"T(?:[0-9]{1,9}H(?:[0-9]{1,9}M(?:[0-9]{1,9}S)?)?|[0-9]{1,9}M(?:[0-9]{1,9}S)?|[0-9]{1,9}S)"
_DAY_PART = r"(?:[0-9]{1,9}Y(?:[0-9]{1,9}M(?:[0-9]{1,9}D)?)?|[0-9]{1,9}M(?:[0-9]{1,9}D)?|[0-9]{1,9}D)"

_PATTERNS = {
    "date": _DATE,
    "time": _CLOCK + _ZONE,
    "date-time": f"{_DATE}T{_CLOCK}{_ZONE}",
    "duration": rf"P(?:{_DAY_PART}(?:{_TIME_PART})?|{_TIME_PART}|[0-9]{{1,9}}W)",
    "email": rf"{_ATOM}(?:\.{_ATOM}){{0,2}}@{_HOST}",
    "hostname": _HOST,
    "ipv4": _IPV4,
    "ipv6": _IPV6,
    "uuid": r"[0-9A-Fa-f]{8}-[0-9A-Fa-f]{4}-[0-9A-Fa-f]{4}-[0-9A-Fa-f]{4}-[0-9A-Fa-f]{12}",
    "uri": _URI,
    "uri-reference": f"{_URI}|{_RELATIVE}",
    "json-pointer": _POINTER,
    "relative-json-pointer": rf"(?:0|[1-9][0-9]{{0,8}})(?:#|{_POINTER})",
}
_PATTERNS |= {
    "idn-email": _PATTERNS["email"],
    "idn-hostname": _PATTERNS["hostname"],
    "iri": _PATTERNS["uri"],
    "iri-reference": _PATTERNS["uri-reference"],
    "uri-template": _PATTERNS["uri"],
    "ip-address": _PATTERNS["ipv4"],
    "host-name": _PATTERNS["hostname"],
}
# Asserted by validators, and no grammar holds them.
REFUSED = frozenset({"regex", "color"})


@cache
def expression(name: str) -> Expr | None:
    """The expression of a format; None if it is not known and so only an annotation."""
    pattern = _PATTERNS.get(name)
    return None if pattern is None else full(parse(pattern))
