"""Judge: decides, token by token, what of a step's output may be shown and where the answer ends.

Rules, in the order in which they are asked for each token:
  1. the grammar accepts it (anything else is a fault of the engine, not of the user);
  2. an end token (the model's, unless ignored, or one of stop_token_ids) ends the answer; it stays in the ids, its
     text is empty;
  3. a stop text that ends in its text, at min_tokens tokens or later, ends the answer; the text is cut where the stop
     text begins, ids and log probabilities keep the tokens whose text begins before the cut;
  4. a grammar after which nothing may follow ends the answer;
  5. the budget (max_tokens, or what the context leaves) ends it with "length", all others with "stop".
Nothing behind the token that ends the answer is looked at. Text, ids and log probabilities are released together:
a token is held back while its text has not begun outside a possible stop text or is not a whole character.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from specserve.core.errors import SpecserveError
from specserve.core.plan import TokenLogprobs
from specserve.core.protocols import Matcher
from specserve.core.sampling import SamplingParams
from specserve.engine.detokenizer import Detokenizer
from specserve.engine.stops import StopMatcher


class Release(NamedTuple):
    """Output that may be shown: ids, text and (where asked for) one log probability entry an id."""

    token_ids: tuple[int, ...] = ()
    text: str = ""
    logprobs: tuple[TokenLogprobs, ...] = ()


class Verdict(NamedTuple):
    """Of one step's tokens the first `num_tokens` count; `finish_reason` is set if the last of them ends the answer."""

    num_tokens: int
    release: Release
    finish_reason: str | None = None


@dataclass(slots=True)
class _Held:
    """A token not released yet; `begin` is the index of the character in which its text begins."""

    begin: int
    token_id: int
    logprob: TokenLogprobs | None


class Judge:
    """Output state of one request.

    Args:
        params: min_tokens and stop texts are read.
        token_bytes: exact bytes of a token id; b"" for special tokens.
        end_ids: ids that end the answer.
        budget: most tokens to generate.
        matcher: grammar state, advanced by each token that counts; or None.
    """

    def __init__(
        self,
        params: SamplingParams,
        token_bytes: Callable[[int], bytes],
        end_ids: frozenset[int],
        budget: int,
        matcher: Matcher | None = None,
    ) -> None:
        self.num_tokens = 0
        self.end_ids = end_ids
        self.budget = budget
        self.matcher = matcher
        self._min_tokens = params.min_tokens
        self._token_bytes = token_bytes
        self._detokenizer = Detokenizer()
        self._stops = StopMatcher(params.stops)
        self._queue: deque[_Held] = deque()
        self._text = ""  # decoded, not released
        self._released = 0  # characters
        self._decoded = 0  # characters

    @property
    def remaining(self) -> int:
        """Tokens that the budget leaves."""
        return self.budget - self.num_tokens

    def fork(self) -> Judge:
        """An independent copy at the same state, with a grammar state of its own."""
        other = copy.copy(self)
        other.matcher = self.matcher.fork() if self.matcher is not None else None
        other._detokenizer = self._detokenizer.fork()
        other._stops = self._stops.fork()
        other._queue = self._queue.copy()
        return other

    def end_by(self, token: int) -> str | None:
        """The finish reason that `token` would give next, or None. Nothing changes."""
        if token in self.end_ids:
            return "stop"
        if self.matcher is None and not self._stops:
            return "length" if self.num_tokens + 1 >= self.budget else None
        return self.fork().judge((token,)).finish_reason

    def judge(self, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs] = ()) -> Verdict:
        """Take one step's tokens in.

        Raises:
            SpecserveError: the grammar refuses a token; the request cannot go on.
        """
        if len(tokens) == 1 and not logprobs and not self._queue and self._goes_on(tokens[0]):
            return self._show(tokens[0])
        for i, token in enumerate(tokens):
            end, cut = self._push(token, logprobs[i] if logprobs else None)
            if end is not None:
                return Verdict(i + 1, self._release(cut, last=True), end)
        safe = self._decoded - self._stops.withheld
        return Verdict(len(tokens), self._release(safe, last=False))

    def _goes_on(self, token: int) -> bool:
        """Nothing but the token's own text decides what is shown: most tokens of most answers."""
        return not (
            self.matcher is not None or self._stops or token in self.end_ids or self.num_tokens + 1 >= self.budget
        )

    def _show(self, token: int) -> Verdict:
        """What _push and _release do where `_goes_on` and nothing is held back."""
        self.num_tokens += 1
        text = self._detokenizer.push(self._token_bytes(token))
        if not text:
            self._queue.append(_Held(self._decoded, token, None))
            return Verdict(1, Release())
        self._decoded += len(text)
        self._released += len(text)
        return Verdict(1, Release((token,), text))

    def flush(self) -> Release:
        """Everything held back (a cancelled request ends without a last token)."""
        return self._release(None, last=True)

    def _push(self, token: int, logprob: TokenLogprobs | None) -> tuple[str | None, int | None]:
        """(finish reason or None, character at which a stop text cuts or None)."""
        self.num_tokens += 1
        if self.matcher is not None and not self.matcher.accept(token):
            raise SpecserveError("the grammar refuses a token that was sampled under its mask")
        self._queue.append(_Held(self._decoded, token, logprob))
        if token in self.end_ids:
            return "stop", None
        cut = self._decode(self._token_bytes(token))
        if cut is not None:
            return "stop", cut
        if self.matcher is not None and (self.matcher.complete or self.matcher.terminated):
            return "stop", None
        return ("length" if self.num_tokens >= self.budget else None), None

    def _decode(self, data: bytes) -> int | None:
        """Decode and look for stop texts; the character at which one begins, or None."""
        piece = self._detokenizer.push(data)
        self._text += piece
        if not self._stops:
            self._decoded += len(piece)
            return None
        for char in piece:
            self._decoded += 1
            length = self._stops.feed(char)
            if length and self.num_tokens >= self._min_tokens:
                return self._decoded - length
        return None

    def _release(self, cut: int | None, *, last: bool) -> Release:
        """Characters before `cut` (all for None) and the tokens that begin there; `last` drops the rest."""
        end = len(self._text) if cut is None else cut - self._released
        text, self._text = self._text[:end], self._text[end:]
        self._released += len(text)
        taken = []
        while self._queue and (cut is None or self._queue[0].begin < cut):
            taken.append(self._queue.popleft())
        if last:
            self._queue.clear()
            self._text = ""
        logprobs = tuple(held.logprob for held in taken if held.logprob is not None)
        return Release(tuple(held.token_id for held in taken), text, logprobs)
