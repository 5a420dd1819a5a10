"""Typed errors. Each carries what a user needs to fix it: a code, the field at fault and a sentence.

The server maps ``status`` to HTTP and puts ``code``, ``param`` and ``message`` into the one ``error`` event.
"""

from __future__ import annotations


class SpecserveError(Exception):
    """Base of every error that may reach a user.

    Args:
        message: one sentence that says what is wrong and how to fix it; never prompt, schema or output text.
        param: dotted path of the field at fault ("params.temperature"), or None.
        code: machine-readable reason; defaults to the class's own.
    """

    code = "server_error"
    status = 500

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        if code is not None:
            self.code = code

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), self.message, self.param, self.code))


def _rebuild(kind: type[SpecserveError], message: str, param: str | None, code: str) -> SpecserveError:
    return kind(message, param=param, code=code)


class InvalidRequestError(SpecserveError):
    """The request itself is wrong: a bad value, an unknown option, a token id outside the vocabulary (400)."""

    code = "invalid_request"
    status = 400


class ConfigError(SpecserveError):
    """A start-up option is wrong; the process does not start."""

    code = "invalid_config"
    status = 500


class GrammarError(InvalidRequestError):
    """A schema, regex or grammar cannot be compiled or enforced whole (400, never a silently looser grammar)."""

    code = "invalid_grammar"


class ContextLengthError(InvalidRequestError):
    """Prompt plus max_tokens does not fit the model's context."""

    code = "context_length_exceeded"


class CapacityError(InvalidRequestError):
    """The request can never fit the KV pool, whatever else runs."""

    code = "kv_capacity_exceeded"


class OverloadedError(SpecserveError):
    """The queue is full; try again later."""

    code = "overloaded"
    status = 503


class EngineDeadError(SpecserveError):
    """The engine process ended while the request ran; it is being started again."""

    code = "engine_died"
    status = 503


class ModelLoadError(SpecserveError):
    """A model could not be found, read or verified."""

    code = "model_load_failed"
