"""Commands to the engine and events from it: what crosses between the API process and the engine process.

For every accepted GenerateCommand the events of its request id are, in order: at most one QueuedEvent, one
StartedEvent, any ProgressEvents and DeltaEvents, and exactly one terminal event (FinishedEvent or FailedEvent).
A refused command gives one FailedEvent alone. A request of several sequences (params.num_sequences > 1: n, best_of,
beams) also gives one ChoiceFinishedEvent for each choice that it returns, after that choice's deltas and before the
FinishedEvent; choices of n stream side by side, those of best_of and of beams come whole, best first, at the end. One
that is cancelled or fails gives none for choices that had not ended.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from specserve.core.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class GenerateCommand:
    """Start a request. `prompt_token_ids` are already tokenised and checked against the vocabulary."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    namespace: str = ""
    priority: int = 0
    report_speculation: bool = False


@dataclass(frozen=True, slots=True)
class AbortCommand:
    """End a request in whatever state it is; it then ends with FinishedEvent("cancelled"). Unknown ids are ignored."""

    request_id: str


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one request, complete in its terminal event.

    Attributes:
        completion_tokens: tokens generated, those of a matched stop text and the end token included; of all sequences
            of best_of, and of the returned hypotheses of a beam search.
        cached_tokens: prompt tokens that a prefix hit saved.
        drafted, accepted, rejected: draft tokens; drafted = accepted + rejected.
        by_source: drafter name -> (drafted, accepted).
    """

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    rejected: int = 0
    by_source: dict[str, tuple[int, int]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Logprob:
    """One entry of a distribution. `text` is the token's text by itself, `logprob` None for minus infinity."""

    token_id: int
    text: str
    logprob: float | None


@dataclass(frozen=True, slots=True)
class PositionLogprobs:
    """The emitted token's entry and the most likely ones at its position, best first."""

    token: Logprob
    top: tuple[Logprob, ...] = ()


@dataclass(frozen=True, slots=True)
class SpeculationStep:
    """What one step drafted for one request, and how many of it were accepted (the rest was rejected)."""

    token_ids: tuple[int, ...]
    texts: tuple[str, ...]
    sources: tuple[str, ...]
    num_accepted: int


@dataclass(frozen=True, slots=True)
class QueuedEvent:
    """The request waits for its grammar, for blocks or for a place."""

    request_id: str


@dataclass(frozen=True, slots=True)
class StartedEvent:
    """The request runs. `seed` replays it."""

    request_id: str
    seed: int
    prompt_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class ProgressEvent:
    """Prefill progress: `computed` of `total` prompt tokens are in the KV cache."""

    request_id: str
    computed: int
    total: int


@dataclass(frozen=True, slots=True)
class DeltaEvent:
    """New output. Text, ids and logprobs are withheld and trimmed together around stop texts and split characters.

    `token_ids` may be longer or shorter than `text` suggests for one event; over a whole choice they agree.
    `index` is the choice, 0 for a request with one.
    """

    request_id: str
    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[PositionLogprobs, ...] = ()
    speculation: tuple[SpeculationStep, ...] = ()
    index: int = 0


@dataclass(frozen=True, slots=True)
class ChoiceFinishedEvent:
    """Not terminal: one choice of a request of several sequences has ended.

    Attributes:
        finish_reason: "stop", "length" or "cancelled".
        seed: gives this choice again as a request of one (beams: the request's own).
        score: what choices were ranked by: mean log probability (best_of) or length-normalised sum (beams); None for n.
    """

    request_id: str
    index: int
    finish_reason: str
    seed: int
    score: float | None = None


@dataclass(frozen=True, slots=True)
class FinishedEvent:
    """Terminal. `finish_reason` is "stop" (end token, stop text or grammar's end), "length" or "cancelled".

    Of several choices: "length" where one of those returned ended so, else "stop".
    """

    request_id: str
    finish_reason: str
    usage: Usage
    seed: int
    numerics: str = "invariant"


@dataclass(frozen=True, slots=True)
class FailedEvent:
    """Terminal. The fields are those of SpecserveError; no prompt, schema or output text."""

    request_id: str
    code: str
    message: str
    param: str | None = None
    status: int = 500
    usage: Usage = field(default_factory=Usage)


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Gauges and counters of the engine, sent about once a second and on request."""

    running: int = 0
    waiting: int = 0
    kv_blocks: int = 0
    kv_blocks_used: int = 0
    draft_kv_blocks: int = 0
    draft_kv_blocks_used: int = 0
    host_kv_blocks: int = 0
    host_kv_blocks_used: int = 0
    swapped: int = 0
    counters: dict[str, float] = field(default_factory=dict)


Command = GenerateCommand | AbortCommand
Event = QueuedEvent | StartedEvent | ProgressEvent | DeltaEvent | ChoiceFinishedEvent | FinishedEvent | FailedEvent
TERMINAL = (FinishedEvent, FailedEvent)
