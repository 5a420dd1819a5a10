"""LLM: the Python API. The same engine as the server's, in this process.

from specserve import LLM, SamplingParams

with LLM("demo") as llm:
    print(llm.generate("The capital of France is", SamplingParams(max_tokens=8))[0].text)
"""

from __future__ import annotations

import itertools
import threading
import uuid
import weakref
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType, TracebackType
from typing import Any, cast

from specserve.core.config import EngineConfig, SpeculationConfig
from specserve.core.errors import InvalidRequestError, SpecserveError
from specserve.core.messages import (
    TERMINAL,
    AbortCommand,
    ChoiceFinishedEvent,
    DeltaEvent,
    EngineStats,
    Event,
    FailedEvent,
    FinishedEvent,
    GenerateCommand,
    PositionLogprobs,
    Usage,
)
from specserve.core.sampling import SamplingParams
from specserve.engine.backend import Backend
from specserve.engine.faults import error_of
from specserve.engine.heap import uncollected
from specserve.engine.mailbox import Mailbox, Mailboxes
from specserve.engine.prompts import PromptEncoder, Prompts, encode_prompts
from specserve.engine.streaming import stream_events
from specserve.engine.thread import EngineThread

SUFFIX: Mapping[str, Any] = MappingProxyType({"methods": ["suffix"], "num_speculative_tokens": 5})
ABORT_SECONDS = 10.0  # how long an interrupted `generate` waits for what it started to end


@dataclass(frozen=True, slots=True)
class Choice:
    """One of the answers to one prompt.

    Attributes:
        index: its place in `GenerationResult.choices`.
        token_ids, text, finish_reason, logprobs: as in GenerationResult.
        seed: a request of one choice with it gives this choice again (beams: the request's own).
        score: what choices were ranked by: mean log probability (best_of) or length-normalised sum (beams); else None.
    """

    index: int
    token_ids: list[int]
    text: str
    finish_reason: str
    seed: int
    score: float | None = None
    logprobs: list[PositionLogprobs] | None = None


@dataclass(frozen=True, slots=True)
class GenerationResult:
    """What one prompt gave: its first choice, which is the best where choices are ranked, and all of them.

    Attributes:
        token_ids: of the answer; the end token included, tokens that only made a stop text excluded.
        text: the answer without stop text; an incomplete last character is left out.
        finish_reason: "stop" or "length".
        logprobs: one entry a token of token_ids where asked for, else None.
        usage: token counts of the whole request, with drafted, accepted, rejected and cached_tokens.
        seed: replays the answer.
        numerics: "invariant" or "fast".
        choices: at least one; the first says what the fields above say.
    """

    token_ids: list[int]
    text: str
    finish_reason: str
    usage: Usage
    seed: int
    numerics: str = "invariant"
    logprobs: list[PositionLogprobs] | None = None
    choices: list[Choice] = field(kw_only=True)


class LLM:
    """A model, ready to generate. May be used from many threads at once.

    Args:
        model: "demo", a Hugging Face folder, a GGUF file or a hub name.
        dtype, quantization, kv_memory, block_size, max_batched_tokens, threads: see EngineConfig.
        speculation: how drafts are made; None or "off" drafts nothing. Never changes which tokens come.
        options: further fields of EngineConfig, such as numerics, prefix_cache, max_model_len.

    Raises:
        ConfigError: names the option at fault.
        ModelLoadError: the model cannot be found, read or verified.
    """

    def __init__(
        self,
        model: str = "demo",
        *,
        dtype: str = "bfloat16",
        quantization: str = "auto",
        speculation: Mapping[str, Any] | SpeculationConfig | str | None = SUFFIX,
        kv_memory: str | int = "2GiB",
        block_size: int = 16,
        max_batched_tokens: int = 512,
        threads: int | None = None,
        progress: Callable[..., None] | None = None,
        **options: Any,
    ) -> None:
        values = {
            "model": model,
            "dtype": dtype,
            "quantization": quantization,
            "speculation": speculation,
            "kv_memory": kv_memory,
            "block_size": block_size,
            "max_batched_tokens": max_batched_tokens,
            "threads": threads,
        }
        config = EngineConfig.from_dict({**values, **options})
        with uncollected():
            # Imported here: the layers above the engine, and numpy.
            from specserve.cluster.build import build_engine

            backend = EngineThread(lambda: build_engine(config, progress))
            # build_engine's vocabulary is the model's whole tokenizer.
            self._start(backend, lambda: cast("PromptEncoder", backend.vocabulary))

    @classmethod
    def over(cls, backend: Backend, tokenizer: PromptEncoder) -> LLM:
        """An LLM over an engine of the caller's; `close` closes it."""
        llm = cls.__new__(cls)
        llm._start(backend, lambda: tokenizer)
        return llm

    def _start(self, backend: Backend, load_tokenizer: Callable[[], PromptEncoder]) -> None:
        self._boxes = Mailboxes()
        self._backend = backend
        self._prefix = uuid.uuid4().hex[:8]
        self._numbers = itertools.count()
        # Also when the interpreter ends, or the object is dropped: no thread outlives its LLM.
        self._finalizer = weakref.finalize(self, backend.close)
        try:
            backend.start(self._boxes.deliver)
            self._tokenizer = load_tokenizer()
        except BaseException:
            self._finalizer()
            raise

    def generate(
        self, prompts: Prompts, params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[GenerationResult]:
        """Answers in the order of the prompts; a single prompt gives a list of one.

        Args:
            prompts: a text, a list of token ids or a list of chat messages; or a list of any of these.
            params: for all, or one a prompt.

        Raises:
            SpecserveError: of the first prompt that failed; the others are ended before.
        """
        prompt_ids = encode_prompts(prompts, self._tokenizer)
        each = _params_of(params, len(prompt_ids))
        commands = [self._command(ids, p) for ids, p in zip(prompt_ids, each, strict=True)]
        return _Batch(self._backend, self._boxes).run(commands)

    async def stream(
        self,
        prompt: str | Sequence[int] | Sequence[Mapping[str, Any]],
        params: SamplingParams | None = None,
        *,
        report_speculation: bool = False,
    ) -> AsyncIterator[DeltaEvent | ChoiceFinishedEvent | FinishedEvent]:
        """New output as it comes, then the FinishedEvent. Leaving the loop early aborts the request.

        With several choices each delta tells its choice by `index`, and a ChoiceFinishedEvent ends each choice.

        Raises:
            SpecserveError: the request failed.
        """
        prompt_ids = encode_prompts(prompt, self._tokenizer)
        if len(prompt_ids) != 1:
            raise InvalidRequestError("prompt: stream takes one prompt", param="prompt")
        command = self._command(prompt_ids[0], _params_of(params, 1)[0], report_speculation)
        events = stream_events(self._backend, self._boxes, command)
        try:
            async for event in events:
                if isinstance(event, FailedEvent):
                    raise error_of(event)
                if isinstance(event, (DeltaEvent, ChoiceFinishedEvent, FinishedEvent)):
                    yield event
        finally:
            await events.aclose()

    def stats(self) -> EngineStats:
        """Gauges and counters of the engine."""
        return self._backend.stats()

    def close(self) -> None:
        """End everything that was started; what still runs fails. Idempotent."""
        self._finalizer()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _command(self, ids: tuple[int, ...], params: SamplingParams, report: bool = False) -> GenerateCommand:
        name = f"llm-{self._prefix}-{next(self._numbers)}"
        return GenerateCommand(name, ids, params, report_speculation=report)


def _params_of(params: object, count: int) -> list[SamplingParams]:
    """One for each of `count` prompts; raises InvalidRequestError naming params[i]."""
    if params is None:
        params = SamplingParams()
    if isinstance(params, SamplingParams):
        return [params] * count
    if not isinstance(params, (list, tuple)):
        raise InvalidRequestError("params: must be a SamplingParams or a list of them", param="params")
    for i, each in enumerate(params):
        if not isinstance(each, SamplingParams):
            raise InvalidRequestError(f"params[{i}]: must be a SamplingParams", param=f"params[{i}]")
    if len(params) != count:
        raise InvalidRequestError(f"params: {len(params)} for {count} prompts", param="params")
    return list(params)


def _placed(error: SpecserveError, index: int) -> SpecserveError:
    """An engine's error about "prompt" says which of the prompts it is about."""
    if error.param is not None and (error.param == "prompt" or error.param.startswith("prompt[")):
        place = f"prompts[{index}]"
        error.param = place + error.param.removeprefix("prompt")
        if error.message.startswith("prompt"):
            error.message = place + error.message.removeprefix("prompt")
            error.args = (error.message,)
    return error


@dataclass(slots=True)
class _Answer:
    """One request of a batch as its events come in."""

    command: GenerateCommand
    box: Mailbox
    deltas: list[list[DeltaEvent]] = field(default_factory=lambda: [[]])  # by choice
    ends: dict[int, ChoiceFinishedEvent] = field(default_factory=dict)
    end: FinishedEvent | FailedEvent | None = None

    def read(self) -> None:
        while self.end is None and (event := self.box.take()) is not None:
            if isinstance(event, DeltaEvent):
                self._begin(event.index)
                self.deltas[event.index].append(event)
            elif isinstance(event, ChoiceFinishedEvent):
                self._begin(event.index)
                self.ends[event.index] = event
            elif isinstance(event, TERMINAL):
                self.end = event

    def result(self, end: FinishedEvent) -> GenerationResult:
        choices = [self._choice(index, self.ends.get(index, end)) for index in range(len(self.deltas))]
        first = choices[0]
        return GenerationResult(
            token_ids=first.token_ids,
            text=first.text,
            finish_reason=first.finish_reason,
            usage=end.usage,
            seed=first.seed,
            numerics=end.numerics,
            logprobs=first.logprobs,
            choices=choices,
        )

    def _begin(self, index: int) -> None:
        while len(self.deltas) <= index:
            self.deltas.append([])

    def _choice(self, index: int, end: ChoiceFinishedEvent | FinishedEvent) -> Choice:
        deltas = self.deltas[index]
        logprobs = [entry for delta in deltas for entry in delta.logprobs]
        return Choice(
            index=index,
            token_ids=[token for delta in deltas for token in delta.token_ids],
            text="".join(delta.text for delta in deltas),
            finish_reason=end.finish_reason,
            seed=end.seed,
            score=end.score if isinstance(end, ChoiceFinishedEvent) else None,
            logprobs=logprobs if self.command.params.logprobs is not None else None,
        )


class _Batch:
    """The requests of one `generate`, waited for by the thread that called it."""

    def __init__(self, backend: Backend, boxes: Mailboxes) -> None:
        self._backend = backend
        self._boxes = boxes
        self._news = threading.Semaphore(0)
        self._answers: list[_Answer] = []

    def run(self, commands: Sequence[GenerateCommand]) -> list[GenerationResult]:
        try:
            for command in commands:
                box = self._boxes.open(command.request_id, self._news.release)
                assert box is not None, "ids are drawn from a counter"
                self._answers.append(_Answer(command, box))
                try:
                    self._backend.send(command)
                except BaseException:
                    self._boxes.close(self._answers.pop().command.request_id)
                    raise
            self._wait(None)
        except BaseException:
            # An error of one prompt, or Ctrl-C: nothing that was started here goes on.
            self._abort()
            raise
        finally:
            for answer in self._answers:
                self._boxes.close(answer.command.request_id)
        return [a.result(a.end) for a in self._answers if isinstance(a.end, FinishedEvent)]

    def _wait(self, timeout: float | None) -> None:
        """Until all have ended; raises the error of one that failed, unless a timeout is given (then none)."""
        open_answers = [a for a in self._answers if a.end is None]
        while open_answers and self._news.acquire(timeout=timeout):
            for answer in open_answers:
                answer.read()
                if timeout is None and isinstance(answer.end, FailedEvent):
                    raise _placed(error_of(answer.end), self._answers.index(answer))
            open_answers = [a for a in open_answers if a.end is None]

    def _abort(self) -> None:
        for answer in self._answers:
            if answer.end is None:
                try:
                    self._backend.send(AbortCommand(answer.command.request_id))
                except SpecserveError:
                    return  # no engine any more
        self._wait(ABORT_SECONDS)


__all__ = ["LLM", "Choice", "Event", "GenerationResult"]
