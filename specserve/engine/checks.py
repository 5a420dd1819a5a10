"""Checks of a generate command that need the vocabulary and the context limit."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol

from specserve.core.errors import ContextLengthError, InvalidRequestError
from specserve.core.messages import GenerateCommand
from specserve.core.sampling import SamplingParams


class Vocabulary(Protocol):
    """What the engine knows of the tokenizer."""

    @property
    def vocab_size(self) -> int:
        """Number of ids with a meaning: 0 .. vocab_size - 1."""

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """The model's end tokens."""

    def token_bytes(self, token_id: int) -> bytes:
        """Exact bytes that a token stands for; b"" for special tokens."""


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """Limits of one engine.

    Attributes:
        max_model_len: tokens of prompt and output together.
        logits_size: width of the logits and of the masks; 0 for the vocabulary's own size.
        num_speculative_tokens: drafted tokens a step at most, whoever sets the budgets.
        numerics: reported with each answer.
        weights: what the model runs on, such as "q4_1+q8_0"; reported at start.
        compile_threads, compile_limit, compile_timeout: see CompilePool.
    """

    max_model_len: int
    logits_size: int = 0
    num_speculative_tokens: int = 5
    numerics: str = "invariant"
    weights: str = ""
    compile_threads: int = 2
    compile_limit: int = 1024
    compile_timeout: float = 60.0


def check_prompt(command: GenerateCommand, vocab_size: int, max_model_len: int) -> None:
    """Raises InvalidRequestError or ContextLengthError; the length first, so that no huge list is read."""
    ids = command.prompt_token_ids
    if not ids:
        raise InvalidRequestError("prompt: is empty", param="prompt")
    if len(ids) >= max_model_len:
        raise ContextLengthError(
            f"prompt: has {len(ids)} tokens; the context holds {max_model_len}, one of them for the answer",
            param="prompt",
        )
    _check_ids("prompt", ids, vocab_size)


def check_params(params: SamplingParams, vocab_size: int) -> None:
    """Raises InvalidRequestError for token ids outside the vocabulary."""
    _check_ids("logit_bias", params.logit_bias, vocab_size)
    _check_ids("stop_token_ids", params.stop_token_ids, vocab_size)
    _check_ids("banned_token_ids", params.banned_token_ids, vocab_size)
    if params.allowed_token_ids is not None:
        _check_ids("allowed_token_ids", params.allowed_token_ids, vocab_size)


def resolve_params(command: GenerateCommand, max_model_len: int, room_in_pool: int, seed: int) -> SamplingParams:
    """The parameters with `seed` filled in and max_tokens set to what the context leaves at most.

    max_tokens None is also held to what the KV pool can hold; a number that the pool can never hold is refused by the
    scheduler instead.

    Args:
        room_in_pool: tokens of the answer that the pool can hold when the request has it alone.
    """
    params = command.params
    prompt = len(command.prompt_token_ids)
    room = max_model_len - prompt
    if params.max_tokens is None:
        budget = min(room, room_in_pool) if room_in_pool > 0 else room
    else:
        budget = min(params.max_tokens, room)
    if (params.max_tokens, params.seed) == (budget, seed):
        return params
    return dataclasses.replace(params, seed=seed, max_tokens=budget, min_tokens=min(params.min_tokens, budget))


def _check_ids(name: str, ids: Collection[int], vocab_size: int) -> None:
    for i, token in enumerate(ids):
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab_size:
            place = name if name == "logit_bias" else f"{name}[{i}]"
            shown = token if isinstance(token, int) else type(token).__name__
            raise InvalidRequestError(f"{place}: {shown} is not a token id from 0 to {vocab_size - 1}", param=place)
