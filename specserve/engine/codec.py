"""The messages between the API process and the engine process: MessagePack, typed on both sides, versioned.

A message is one tag byte, one version byte and a MessagePack body. Bodies of commands and events are lists of
[name of the dataclass, its fields]. SamplingParams travel as a map of the fields that are not at their default, and are
validated again where they arrive; `guided` travels as JSON text, which keeps its order and integers of any size.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import msgspec

from specserve.core.errors import InvalidRequestError, SpecserveError
from specserve.core.messages import (
    AbortCommand,
    ChoiceFinishedEvent,
    Command,
    DeltaEvent,
    EngineStats,
    Event,
    FailedEvent,
    FinishedEvent,
    GenerateCommand,
    ProgressEvent,
    QueuedEvent,
    StartedEvent,
)
from specserve.core.sampling import SamplingParams

VERSION = 1
COMMANDS, EVENTS, STATS, PROGRESS, READY, FAILED = b"C", b"E", b"S", b"P", b"R", b"F"

_EVENT_TYPES = (
    QueuedEvent,
    StartedEvent,
    ProgressEvent,
    DeltaEvent,
    ChoiceFinishedEvent,
    FinishedEvent,
    FailedEvent,
)
_DECODERS: dict[str, Any] = {kind.__name__: msgspec.msgpack.Decoder(kind) for kind in (*_EVENT_TYPES, AbortCommand)}
_LIST = msgspec.msgpack.Decoder(list[tuple[str, msgspec.Raw]])
_STATS = msgspec.msgpack.Decoder(EngineStats)
_ENCODER = msgspec.msgpack.Encoder()
_DEFAULTS = SamplingParams()


class CodecError(SpecserveError):
    """A message that this version does not understand."""

    code = "bad_message"


def pack(tag: bytes, body: object) -> bytes:
    """One message of any tag."""
    return tag + bytes([VERSION]) + _ENCODER.encode(body)


def unpack(message: bytes) -> tuple[bytes, memoryview]:
    """Tag and body.

    Raises:
        CodecError: empty, or of another version.
    """
    if len(message) < 3 or message[1] != VERSION:
        raise CodecError(f"an engine message is not of version {VERSION}")
    return message[:1], memoryview(message)[2:]


def unpack_body(body: memoryview) -> Any:
    """The body of a message without a type of its own (READY, PROGRESS, FAILED)."""
    return msgspec.msgpack.decode(body)


def params_to_map(params: SamplingParams) -> dict[str, Any]:
    """The fields that are not at their default."""
    values = {f.name: getattr(params, f.name) for f in fields(SamplingParams)}
    changed = {name: value for name, value in values.items() if value != getattr(_DEFAULTS, name)}
    if "guided" in changed:
        changed["guided"] = json.dumps(dict(changed["guided"]))
    return changed


def params_from_map(values: dict[str, Any]) -> SamplingParams:
    """Raises InvalidRequestError, as SamplingParams does."""
    if "guided" in values:
        values["guided"] = json.loads(values["guided"])
    return SamplingParams.from_dict(values)


def encode_command(command: Command) -> bytes:
    """One command.

    Raises:
        InvalidRequestError: it holds something that cannot be sent (a lone surrogate, an object that is not JSON).
    """
    try:
        if isinstance(command, AbortCommand):
            return pack(COMMANDS, [("AbortCommand", command)])
        body = {f.name: getattr(command, f.name) for f in fields(GenerateCommand)}
        body["params"] = params_to_map(command.params)
        return pack(COMMANDS, [("GenerateCommand", body)])
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        name = "guided" if command.params.guided is not None else "params"  # type: ignore[union-attr]
        raise InvalidRequestError(f"{name}: cannot be sent ({type(error).__name__})", param=name) from None


def decode_commands(body: memoryview) -> list[Command]:
    """Raises CodecError."""
    return [_decode_one(name, raw) for name, raw in _entries(body)]


def encode_events(events: Sequence[Event]) -> bytes:
    return pack(EVENTS, [(type(event).__name__, event) for event in events])


def decode_events(body: memoryview) -> list[Event]:
    """Raises CodecError."""
    return [_decode_one(name, raw) for name, raw in _entries(body)]


def encode_stats(stats: EngineStats) -> bytes:
    return pack(STATS, stats)


def decode_stats(body: memoryview) -> EngineStats:
    return _STATS.decode(body)


def _entries(body: memoryview) -> list[tuple[str, msgspec.Raw]]:
    try:
        return _LIST.decode(body)
    except msgspec.MsgspecError as error:
        raise CodecError(f"an engine message cannot be decoded ({type(error).__name__})") from None


def _decode_one(name: str, raw: msgspec.Raw) -> Any:
    try:
        if name == "GenerateCommand":
            values = msgspec.msgpack.decode(raw, type=dict[str, Any], strict=False)
            values["prompt_token_ids"] = tuple(values["prompt_token_ids"])
            values["params"] = params_from_map(values["params"])
            return GenerateCommand(**values)
        return _DECODERS[name].decode(raw)
    except (msgspec.MsgspecError, KeyError, TypeError) as error:
        raise CodecError(f"an engine message cannot be decoded ({type(error).__name__})") from None
