"""SamplingParams: everything about how the tokens of one request are chosen. Validated at construction."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from specserve.core.errors import InvalidRequestError

MAX_LOGPROBS = 20
MAX_STOPS = 16
MAX_STOP_CHARS = 1024
MAX_ID_LIST = 4096
GUIDED_KINDS = ("json_schema", "json_object", "regex", "choice", "grammar")
SPECULATION_KEYS = ("num_speculative_tokens",)
MAX_CHOICES = 64
MAX_BEAMS = 16


def _fail(name: str, message: str) -> InvalidRequestError:
    return InvalidRequestError(f"{name}: {message}", param=name)


def _number(name: str, value: object, low: float, high: float) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise _fail(name, f"must be a finite number from {low:g} to {high:g}")
    if not low <= value <= high:
        raise _fail(name, f"is {value:g}, must be from {low:g} to {high:g}")
    return float(value)


def _integer(name: str, value: object, low: int, high: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise _fail(name, f"must be a whole number from {low} to {high}")
    if not low <= value <= high:
        raise _fail(name, f"is {value}, must be from {low} to {high}")
    return value


def _ids(name: str, value: object) -> tuple[int, ...]:
    if not isinstance(value, (list, tuple)) or len(value) > MAX_ID_LIST:
        raise _fail(name, f"must be a list of at most {MAX_ID_LIST} token ids")
    return tuple(_integer(f"{name}[{i}]", v, 0, 2**31 - 1) for i, v in enumerate(value))


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the tokens of one request are chosen.

    Attributes:
        max_tokens: tokens to generate at most; None for all that the context leaves.
        temperature: 0 is greedy; otherwise logits are divided by it.
        top_p, top_k, min_p: truncation of the processed distribution, after temperature; top_k 0 is off.
        seed: 64-bit; None draws one, which the result reports, so that any answer can be replayed.
        stop: texts that end the answer (not part of it). A text or a list of at most 16.
        stop_token_ids: ids that end the answer beside the model's own end tokens.
        ignore_eos: do not end at the model's end tokens (benchmarks).
        min_tokens: end tokens are not sampled before so many tokens.
        logprobs: None for none, else so many top entries beside the sampled token's own (0..20).
        logprobs_mode: "raw" for the model's own distribution, "processed" for the one sampled from.
        presence_penalty, frequency_penalty: subtracted for tokens of the output so far (-2..2).
        repetition_penalty: divides positive and multiplies negative logits of tokens seen in prompt or output.
        logit_bias: token id -> added to its logit (-100..100).
        allowed_token_ids, banned_token_ids: hard restrictions.
        guided: exactly one of {"json_schema": schema}, {"json_object": True}, {"regex": pattern},
            {"choice": [texts]}, {"grammar": ebnf or {"name": of a shipped grammar}}; optional "whitespace": "compact".
            Not together with stop or stop_token_ids, which would cut the value short.
        speculation: None as the engine is configured, False off, {"num_speculative_tokens": n} a cap.
        n: choices to return (1..64), each with its own seed (`choice_seed`); with beams, the n best hypotheses.
        best_of: choices to generate (n..64), of which the n with the highest mean log probability are returned.
        beam_width: beam search over so many hypotheses (1..16; 1 is greedy) instead of sampling; temperature must be 0.
        length_penalty: a finished hypothesis scores sum of log probabilities / length ** length_penalty (-10..10).
        early_stopping: True ends when `beam_width` hypotheses are finished; False when no running one is expected to
            beat the worst of them at its present length; "never" only when none could at any length.
    """

    max_tokens: int | None = 64
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None
    stop: str | list[str] | tuple[str, ...] | None = None
    logprobs: int | None = None
    guided: Mapping[str, Any] | None = None
    top_k: int = 0
    min_p: float = 0.0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    logprobs_mode: str = "raw"
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: tuple[int, ...] | None = None
    banned_token_ids: tuple[int, ...] = ()
    speculation: bool | Mapping[str, Any] | None = None
    n: int = 1
    best_of: int | None = None
    beam_width: int | None = None
    length_penalty: float = 1.0
    early_stopping: bool | str = False

    def __post_init__(self) -> None:
        self._check_numbers()
        self._check_choices()
        self._check_lists()
        self._check_guided()
        self._check_speculation()

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> SamplingParams:
        """From untrusted input: an unknown name is an error that names it."""
        known = {f.name for f in fields(cls)}
        for name in values:
            if name not in known:
                raise InvalidRequestError(f"{name}: unknown sampling option", param=str(name))
        return cls(**values)

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop texts as a tuple."""
        return self.stop if isinstance(self.stop, tuple) else ()

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def beams(self) -> int:
        """Hypotheses of a beam search; 0 without one."""
        return self.beam_width if self.beam_width is not None and self.beam_width > 1 else 0

    @property
    def num_sequences(self) -> int:
        """Sequences that run for this request at once, at most."""
        return self.beams or self.best_of or self.n

    @property
    def penalises(self) -> bool:
        """Whether the tokens so far change the logits."""
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0)

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def _check_numbers(self) -> None:
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, 1, 2**31 - 1)
        self._set("temperature", _number("temperature", self.temperature, 0.0, 10.0))
        if 0.0 < self.temperature < 1e-4:
            raise _fail("temperature", "must be 0 (greedy) or at least 0.0001")
        self._set("top_p", _number("top_p", self.top_p, 0.0, 1.0))
        if self.top_p == 0.0:
            raise _fail("top_p", "must be greater than 0; use temperature 0 for greedy output")
        self._set("min_p", _number("min_p", self.min_p, 0.0, 1.0))
        _integer("top_k", self.top_k, 0, 2**31 - 1)
        _integer("min_tokens", self.min_tokens, 0, 2**31 - 1)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise _fail("min_tokens", f"is {self.min_tokens}, more than max_tokens ({self.max_tokens})")
        if self.seed is not None:
            _integer("seed", self.seed, 0, 2**64 - 1)
        if self.logprobs is not None:
            _integer("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        if self.logprobs_mode not in ("raw", "processed"):
            raise _fail("logprobs_mode", 'must be "raw" or "processed"')
        self._set("presence_penalty", _number("presence_penalty", self.presence_penalty, -2.0, 2.0))
        self._set("frequency_penalty", _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0))
        self._set("repetition_penalty", _number("repetition_penalty", self.repetition_penalty, 0.01, 10.0))
        if not isinstance(self.ignore_eos, bool):
            raise _fail("ignore_eos", "must be true or false")

    def _check_choices(self) -> None:
        _integer("n", self.n, 1, MAX_CHOICES)
        if self.best_of is not None:
            _integer("best_of", self.best_of, 1, MAX_CHOICES)
            if self.best_of < self.n:
                raise _fail("best_of", f"is {self.best_of}, less than n ({self.n})")
        self._set("length_penalty", _number("length_penalty", self.length_penalty, -10.0, 10.0))
        if not isinstance(self.early_stopping, bool) and self.early_stopping != "never":
            raise _fail("early_stopping", 'must be true, false or "never"')
        if self.beam_width is None:
            for name, value in (("length_penalty", 1.0), ("early_stopping", False)):
                if getattr(self, name) != value:
                    raise _fail(name, "is an option of beam search: give beam_width with it, or leave it out")
            return
        _integer("beam_width", self.beam_width, 1, MAX_BEAMS)
        if self.best_of is not None:
            raise _fail("best_of", "chooses among samples; beam_width does so among hypotheses: give one of them")
        if self.n > self.beam_width:
            raise _fail("n", f"is {self.n}, more than beam_width ({self.beam_width})")
        if self.temperature != 0.0:
            raise _fail("temperature", "must be 0 with beam_width: beam search looks for the most likely answer")
        for name, value in (("top_p", 1.0), ("top_k", 0), ("min_p", 0.0)):
            if getattr(self, name) != value:
                raise _fail(name, "has no effect with beam_width, which draws nothing: leave it out")

    def _check_lists(self) -> None:
        stops = [self.stop] if isinstance(self.stop, str) else self.stop
        if stops is not None:
            if not isinstance(stops, (list, tuple)) or len(stops) > MAX_STOPS:
                raise _fail("stop", f"must be a text or a list of at most {MAX_STOPS} texts")
            for i, text in enumerate(stops):
                if not isinstance(text, str) or not 0 < len(text) <= MAX_STOP_CHARS:
                    raise _fail(f"stop[{i}]", f"must be a text of 1 to {MAX_STOP_CHARS} characters")
            self._set("stop", tuple(stops))
        self._set("stop_token_ids", _ids("stop_token_ids", self.stop_token_ids))
        self._set("banned_token_ids", _ids("banned_token_ids", self.banned_token_ids))
        if self.allowed_token_ids is not None:
            self._set("allowed_token_ids", _ids("allowed_token_ids", self.allowed_token_ids))
            if not self.allowed_token_ids:
                raise _fail("allowed_token_ids", "must name at least one token id")
        if not isinstance(self.logit_bias, Mapping) or len(self.logit_bias) > MAX_ID_LIST:
            raise _fail("logit_bias", f"must map at most {MAX_ID_LIST} token ids to numbers")
        bias = {}
        for token, value in self.logit_bias.items():
            number = int(token) if isinstance(token, str) and token.isascii() and token.isdigit() else token
            if isinstance(number, bool) or not isinstance(number, int):
                raise _fail("logit_bias", f"{token!r} is not a token id")
            key = _integer("logit_bias", number, 0, 2**31 - 1)
            bias[key] = _number(f"logit_bias[{key}]", value, -100.0, 100.0)
        self._set("logit_bias", bias)

    def _check_guided(self) -> None:
        if self.guided is None:
            return
        if not isinstance(self.guided, Mapping):
            raise _fail("guided", f"must be an object with one of {', '.join(GUIDED_KINDS)}")
        for name in self.guided:
            if name not in GUIDED_KINDS and name != "whitespace":
                raise _fail(f"guided.{name}", f"unknown; use one of {', '.join(GUIDED_KINDS)}")
        kinds = [k for k in GUIDED_KINDS if k in self.guided]
        if len(kinds) != 1:
            raise _fail("guided", f"must have exactly one of {', '.join(GUIDED_KINDS)}")
        for name in ("stop", "stop_token_ids"):
            if getattr(self, name):
                raise _fail(name, "would cut guided output short of what the grammar asks for; leave it out")

    def _check_speculation(self) -> None:
        value = self.speculation
        if value is None or isinstance(value, bool):
            return
        if not isinstance(value, Mapping):
            raise _fail("speculation", "must be true, false or an object with num_speculative_tokens")
        for name in value:
            if name not in SPECULATION_KEYS:
                raise _fail(f"speculation.{name}", f"unknown; use {', '.join(SPECULATION_KEYS)}")
        if "num_speculative_tokens" in value:
            _integer("speculation.num_speculative_tokens", value["num_speculative_tokens"], 0, 64)

    def end_ids(self, eos_ids: Iterable[int]) -> frozenset[int]:
        """Ids that end the answer: stop_token_ids, and the model's own end tokens unless they are ignored."""
        own = frozenset(self.stop_token_ids)
        return own if self.ignore_eos else own.union(eos_ids)

    def draft_cap(self) -> int | None:
        """Most drafted tokens a step that this request accepts; None for no cap of its own.

        Beams are drafted for only where asked: a draft pays there only if every beam goes on as drafted.
        """
        if self.speculation is False or (self.speculation is None and self.beams):
            return 0
        if isinstance(self.speculation, Mapping):
            cap = self.speculation.get("num_speculative_tokens")
            return int(cap) if cap is not None else None
        return None


_MASK = 2**64 - 1


def choice_seed(seed: int, index: int) -> int:
    """Seed of choice `index` of a request with `seed`: choice 0 keeps it, the others mix it (SplitMix64's finaliser).

    A request of one choice with this seed gives that choice again.
    """
    if index == 0:
        return seed
    z = (seed + index * 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)
