"""From exceptions to failed events and log lines that hold no prompt, schema or output text."""

from __future__ import annotations

import logging
import traceback

from specserve.core.errors import InvalidRequestError, SpecserveError
from specserve.core.messages import FailedEvent, Usage


def describe(error: BaseException) -> str:
    """Where an exception came from: its type and its frames, without its message, source lines and locals.

    A message may quote what a user wrote (a KeyError quotes the key), so none is ever logged.
    """
    frames = traceback.extract_tb(error.__traceback__)
    places = " < ".join(f"{frame.name} ({frame.filename}:{frame.lineno})" for frame in reversed(frames))
    return f"{type(error).__name__} in {places or 'unknown place'}"


def log_fault(logger: logging.Logger, what: str, error: BaseException) -> None:
    """One line for one fault; errors that are the user's own are no faults."""
    if not (isinstance(error, SpecserveError) and error.status < 500):
        logger.error("%s: %s", what, describe(error))


def failed_event(request_id: str, error: BaseException, usage: Usage | None = None) -> FailedEvent:
    """The terminal event for `error`; what is not a SpecserveError is told by its type alone."""
    usage = usage or Usage()
    if isinstance(error, SpecserveError):
        return FailedEvent(request_id, error.code, error.message, error.param, error.status, usage)
    message = f"the engine failed on this request ({type(error).__name__})"
    return FailedEvent(request_id, SpecserveError.code, message, None, SpecserveError.status, usage)


def error_of(event: FailedEvent) -> SpecserveError:
    """The typed exception of a failed event, as the Python API raises it."""
    kinds = [k for k in _kinds(SpecserveError) if (k.code, k.status) == (event.code, event.status)]
    general = InvalidRequestError if 400 <= event.status < 500 else SpecserveError
    kind = kinds[0] if kinds else general
    error = kind(event.message, param=event.param, code=event.code)
    error.status = event.status
    return error


def _kinds(base: type[SpecserveError]) -> list[type[SpecserveError]]:
    found = []
    for kind in base.__subclasses__():
        found.extend([kind, *_kinds(kind)])
    return found
