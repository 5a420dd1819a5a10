"""SamplingState: what the worker keeps of one request to choose its tokens."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from specserve.core.plan import NewRequest
from specserve.core.sampling import SamplingParams
from specserve.kernels.cpu.sample import pack_options

if TYPE_CHECKING:
    import torch
else:
    from specserve.kernels.lazy import torch


@dataclass(slots=True)
class SamplingState:
    """One request's options as arrays, and its history as far as they need it.

    Attributes:
        seed: as int64 (the bits of the unsigned 64-bit seed).
        num_prompt_tokens: positions before it hold the prompt.
        end_ids: int64 [e], ids that end the answer (forbidden below min_tokens).
        forbidden: bool [V], ids that are never allowed; None for none.
        bias: (int64 [b], float32 [b]) ids and what is added to their logits; None for none.
        counts: tensor int32 [V], how often each id is in the output so far; None without penalties.
        in_prompt: tensor bool [V], ids of the prompt; None without a repetition penalty.
        packed: the options for the native sampler; None where it does not know them (penalties).
        plain: nothing but the ids of the largest logits is asked for, min_tokens aside.
    """

    params: SamplingParams
    seed: int
    num_prompt_tokens: int
    end_ids: npt.NDArray[np.int64]
    forbidden: npt.NDArray[np.bool_] | None = None
    bias: tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]] | None = None
    counts: torch.Tensor | None = None
    in_prompt: torch.Tensor | None = None
    packed: bytes | None = None
    plain: bool = False

    @property
    def truncates(self) -> bool:
        """Whether top-k, top-p or min-p may drop tokens. They never drop the best one, so greedy skips them."""
        p = self.params
        return not p.greedy and (p.top_k > 0 or p.top_p < 1.0 or p.min_p > 0.0)

    @property
    def always_plain(self) -> bool:
        """Plain at every position."""
        return self.plain and self.params.min_tokens == 0

    @property
    def always_packed(self) -> bool:
        """Its options and the logits are all that its tokens come from, and tokens are all that is asked for."""
        p = self.params
        return self.packed is not None and p.guided is None and p.logprobs is None and not p.beams and p.min_tokens == 0

    def edits(self, position: int) -> bool:
        """Whether any option changes the logits of the token at `position` (grammar and temperature aside)."""
        return (
            self.forbidden is not None
            or self.bias is not None
            or self.counts is not None
            or self.below_minimum(position)
        )

    def below_minimum(self, position: int) -> bool:
        """Whether the token at `position` must not be an end token yet (min_tokens)."""
        return position - self.num_prompt_tokens < self.params.min_tokens

    def append(self, tokens: Iterable[int]) -> None:
        """Emitted tokens become history."""
        if self.counts is not None:
            for token in tokens:
                self.counts[token] += 1


class StateTable:
    """Sampling states by request id.

    Args:
        vocab_size: V, ids with a meaning; the logits' padding beyond it is never sampled.
        eos_ids: the model's end tokens.
    """

    def __init__(self, vocab_size: int, eos_ids: Collection[int]) -> None:
        self.vocab_size = vocab_size
        self._eos_ids = frozenset(eos_ids)
        self._states: dict[str, SamplingState] = {}
        self._choosy = 0  # states that are not `always_plain`
        self._unpacked = 0  # states that are not `always_packed`

    def __len__(self) -> int:
        return len(self._states)

    def __getitem__(self, request_id: str) -> SamplingState:
        return self._states[request_id]

    def update(self, added: Iterable[NewRequest], removed: Iterable[str]) -> None:
        """Drop states, then create or replace."""
        for request_id in removed:
            self._replace(request_id, None)
        for new in added:
            self._replace(new.request_id, self._create(new))

    def all_plain(self, request_ids: Iterable[str]) -> bool:
        """All are known, and no known request asks for more than the ids of its largest logits. Looks at no state."""
        return self._choosy == 0 and all(map(self._states.__contains__, request_ids))

    @property
    def all_packed(self) -> bool:
        """What `always_packed` says, of every known request."""
        return self._unpacked == 0

    def _replace(self, request_id: str, state: SamplingState | None) -> None:
        old = self._states.pop(request_id, None)
        if old is not None:
            self._choosy -= not old.always_plain
            self._unpacked -= not old.always_packed
        if state is not None:
            self._states[request_id] = state
            self._choosy += not state.always_plain
            self._unpacked += not state.always_packed

    def _create(self, new: NewRequest) -> SamplingState:
        p = new.params
        state = SamplingState(
            params=p,
            seed=new.seed - 2**64 if new.seed >= 2**63 else new.seed,
            num_prompt_tokens=new.num_prompt_tokens,
            end_ids=self._ids(sorted(p.end_ids(self._eos_ids))),
            forbidden=self._forbidden(p),
        )
        if p.logit_bias:
            known = {token: value for token, value in p.logit_bias.items() if token < self.vocab_size}
            state.bias = (self._ids(known), np.array(list(known.values()), dtype=np.float32))
        if p.presence_penalty or p.frequency_penalty or p.repetition_penalty != 1.0:
            output = torch.tensor(new.token_ids[new.num_prompt_tokens :], dtype=torch.int64)
            state.counts = torch.bincount(output, minlength=self.vocab_size).to(torch.int32)
        if p.repetition_penalty != 1.0:
            state.in_prompt = torch.zeros(self.vocab_size, dtype=torch.bool)
            state.in_prompt[list(new.token_ids[: new.num_prompt_tokens])] = True
        if state.counts is None:
            state.packed = pack_options(
                state.seed,
                p.temperature,
                top_k=p.top_k,
                top_p=p.top_p,
                min_p=p.min_p,
                forbidden=state.forbidden,
                bias=state.bias,
            )
        options = (p.guided, p.logprobs, p.beams or None, state.forbidden, state.bias, state.counts)
        state.plain = p.greedy and all(option is None for option in options)
        return state

    def _forbidden(self, p: SamplingParams) -> npt.NDArray[np.bool_] | None:
        if p.allowed_token_ids is None and not p.banned_token_ids:
            return None
        forbidden = np.full(self.vocab_size, p.allowed_token_ids is not None)
        forbidden[self._ids(p.allowed_token_ids or ())] = False
        forbidden[self._ids(p.banned_token_ids)] = True
        return forbidden

    def _ids(self, ids: Iterable[int]) -> npt.NDArray[np.int64]:
        """int64, without ids that the vocabulary does not have."""
        return np.array([i for i in ids if i < self.vocab_size], dtype=np.int64)
