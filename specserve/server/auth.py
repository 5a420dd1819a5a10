"""Who may connect: API keys and browser origins. Keys are compared in constant time and never logged."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from specserve.core.config import ServerConfig
from specserve.core.errors import SpecserveError

KEY_PREFIX = "openai-insecure-api-key."
PROTOCOLS = ("realtime", "responses", "specserve")


class AuthenticationError(SpecserveError):
    """No key, or a wrong one (401)."""

    code = "invalid_api_key"
    status = 401


class OriginError(SpecserveError):
    """A browser page of another site (403)."""

    code = "origin_not_allowed"
    status = 403


@dataclass(frozen=True, slots=True)
class Identity:
    """Who sent a request.

    Attributes:
        namespace: a hash of the key: seeds the prefix cache, so that keys never share prefixes. "" without keys.
        subprotocol: the plain WebSocket subprotocol to accept, or None.
    """

    namespace: str = ""
    subprotocol: str | None = None


def authenticate(config: ServerConfig, headers: Mapping[str, str], subprotocols: Sequence[str] = ()) -> Identity:
    """Check the origin and the key. Names in `headers` are lower case.

    Raises:
        OriginError: the Origin is neither this server's own nor listed.
        AuthenticationError: no key or a wrong one.
    """
    check_origin(config, headers.get("origin"), headers.get("host", ""))
    plain = next((name for name in subprotocols if name in PROTOCOLS), None)
    if not config.api_keys:
        return Identity("", plain)
    offered = _offered(headers.get("authorization", ""), subprotocols)
    if offered is None:
        raise AuthenticationError("an API key is needed: send it as Authorization: Bearer", code="missing_api_key")
    found = None
    # Every key is compared, whichever matches, so that time tells nothing.
    for key in config.api_keys:
        if hmac.compare_digest(key.encode(), offered.encode("utf-8", "replace")):
            found = key
    if found is None:
        raise AuthenticationError("the API key is not valid")
    return Identity(hashlib.sha256(b"specserve namespace\0" + found.encode()).hexdigest()[:32], plain)


def check_origin(config: ServerConfig, origin: str | None, host: str) -> None:
    """Tools send no Origin and pass; browsers always send it, and must come from this host or a listed origin."""
    if origin is None or "*" in config.allowed_origins or origin in config.allowed_origins:
        return
    try:
        parts = urlsplit(origin)
        name = parts.hostname or ""
        own = parts.scheme in ("http", "https") and bool(host) and parts.netloc.lower() == host.lower()
    except ValueError:
        own, name = False, ""
    # A server on the loopback interface is reached by a hostile page whose name resolves to it (DNS rebinding):
    # there, host and Origin agree, but the name is not a local one.
    if not own or (_loopback(config.host) and not _loopback(name)):
        raise OriginError("pages of this origin may not connect; list it in server.allowed_origins")


def _offered(authorization: str, subprotocols: Sequence[str]) -> str | None:
    scheme, _, key = authorization.partition(" ")
    if scheme.lower() == "bearer" and key.strip():
        return key.strip()
    for name in subprotocols:
        if name.startswith(KEY_PREFIX) and len(name) > len(KEY_PREFIX):
            return name[len(KEY_PREFIX) :]
    return None


def _loopback(name: str) -> bool:
    if name.lower() == "localhost" or name.lower().endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False
