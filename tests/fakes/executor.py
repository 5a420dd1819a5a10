"""A fake Executor with a toy model, and drafters for it. No torch.

The toy model reads the tokens of its context from a fake paged cache, through the block tables of the plan, so that a
wrong table, a copy that was not made or a rejected token that was kept changes what comes, as with a real model.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from specserve.core.plan import NewRequest, SampledTokens, ScheduledRequest, StepPlan, StepResult, TokenLogprobs
from specserve.core.protocols import Bitmask, DraftContext
from specserve.core.sampling import SamplingParams
from specserve.core.tree import TokenTree

# (context, seed or None for greedy) -> scores [vocab], the highest legal one is next.
Model = Callable[[tuple[int, ...], int | None], np.ndarray]


def hash_model(vocab_size: int, *, banned: Sequence[int] = ()) -> Model:
    """Scores are a pure function of the whole context (and the seed); `banned` never come by themselves."""

    def scores(context: tuple[int, ...], seed: int | None) -> np.ndarray:
        digest = hashlib.blake2b(repr((context, seed)).encode(), digest_size=8).digest()
        found = np.random.default_rng(int.from_bytes(digest)).random(vocab_size)
        found[list(banned)] -= 2.0
        return found

    return scores


def script_model(vocab_size: int, scripts: Mapping[tuple[int, ...], Sequence[int]], eos: int = 0) -> Model:
    """After the prompt that is a key its script comes, then `eos`."""

    def scores(context: tuple[int, ...], seed: int | None) -> np.ndarray:
        found = np.zeros(vocab_size)
        for prompt, script in scripts.items():
            if context[: len(prompt)] == prompt:
                at = len(context) - len(prompt)
                found[script[at] if at < len(script) else eos] = 1.0
        return found

    return scores


def peaked_model(vocab_size: int, *, flat: int, gap: float = 6.0, banned: Sequence[int] = ()) -> Model:
    """`hash_model` for the first `flat` tokens of a context; behind them one token is likelier than all others.

    Beams that part among the flat ones then go side by side, each along its likely tokens: drafts hold.
    """
    base = hash_model(vocab_size, banned=banned)

    def scores(context: tuple[int, ...], seed: int | None) -> np.ndarray:
        found = base(context, seed)
        if len(context) >= flat:
            found[found.argmax()] += gap + np.log(vocab_size)
        return found

    return scores


def seed_of(params: SamplingParams) -> int | None:
    return None if params.greedy else params.seed


class FakeExecutor:
    """Runs plans on a toy model.

    Attributes:
        plans: every plan, in order.
        fail_next: raised by the next `forward` (or `sample` where `fail_in` says so), once.
        before_forward: called with each plan.
    """

    def __init__(self, model: Model, vocab_size: int, block_size: int, end_ids: Sequence[int] = (0,)) -> None:
        self.model = model
        self.vocab_size = vocab_size
        self.block_size = block_size
        self.end_ids = end_ids
        self.plans: list[StepPlan] = []
        self.fail_next: Exception | None = None
        self.fail_in = "forward"
        self.before_forward: Callable[[StepPlan], None] = lambda plan: None
        self.closed = False
        self.states: dict[str, NewRequest] = {}
        self._history: dict[str, list[int]] = {}  # what a sampling state would know
        self._cache: dict[tuple[int, int], int] = {}
        self._host: dict[int, dict[int, int]] = {}  # slot -> offset -> token
        self._order: list[str] = []

    def forward(self, plan: StepPlan) -> None:
        assert not self._order, "forward and sample alternate"
        self.before_forward(plan)
        for request_id in plan.removed:
            self.states.pop(request_id, None)
        for new in plan.added:
            self.states[new.request_id] = new
            self._history[new.request_id] = list(new.token_ids)
        self._move(plan)
        self.plans.append(plan)
        self._fail("forward")
        for request in plan.requests:
            for i, token in enumerate(request.token_ids):
                position = request.start + i
                self._cache[self._slot(request, position)] = token
        self._order = [r.request_id for r in plan.requests]

    def sample(self, plan: StepPlan, masks: Mapping[str, Bitmask]) -> StepResult:
        self._order = []
        self._fail("sample")
        return StepResult(plan.step, tuple(self._output(r, masks.get(r.request_id)) for r in plan.requests))

    def close(self) -> None:
        self.closed = True

    def _fail(self, where: str) -> None:
        if self.fail_next is not None and self.fail_in == where:
            error, self.fail_next = self.fail_next, None
            raise error

    def _move(self, plan: StepPlan) -> None:
        """Swaps out, swaps in, copies. What a block held before is gone."""
        for swap in plan.swap_out:
            self._host[swap.host] = self._block(swap.device)
        for swap in plan.swap_in:
            self._write(swap.device, self._host[swap.host])
        for copy in plan.copies:
            self._write(copy.dst, self._block(copy.src))

    def _block(self, block: int) -> dict[int, int]:
        return {i: self._cache[block, i] for i in range(self.block_size) if (block, i) in self._cache}

    def _write(self, block: int, tokens: Mapping[int, int]) -> None:
        for offset in range(self.block_size):
            self._cache.pop((block, offset), None)
        self._cache.update({(block, offset): token for offset, token in tokens.items()})

    def _slot(self, request: ScheduledRequest, position: int) -> tuple[int, int]:
        return request.block_ids[position // self.block_size], position % self.block_size

    def _output(self, request: ScheduledRequest, mask: Bitmask | None) -> SampledTokens:
        if not request.num_logits:
            return SampledTokens(request.request_id, request.epoch)
        state = self.states[request.request_id]
        last = request.start + len(request.token_ids) - 1 - len(request.draft)
        context = tuple(self._cache[self._slot(request, p)] for p in range(last + 1))
        history = self._history[request.request_id]
        if state.params.beams:
            assert not state.params.penalises or context == tuple(history), "the state has another history"
            return self._beam(request, context, state, mask)
        tokens: list[int] = []
        entries: list[TokenLogprobs] = []
        for row in range(request.num_logits):
            scores = self._scores(context + tuple(tokens), state, None if mask is None else mask[row])
            token = int(scores.argmax())
            if scores[token] == -np.inf:
                break
            entries.append(_logprobs(scores, token, state.params.logprobs))
            tokens.append(token)
            if row < len(request.draft) and request.draft.tokens[row] != token:
                break
        if not tokens:
            return SampledTokens(request.request_id, request.epoch, error="no token is legal")
        assert context == tuple(history), "the cache holds something else"
        history.extend(tokens)
        accepted = len(tokens) - 1
        logprobs = tuple(entries) if state.params.logprobs is not None else ()
        return SampledTokens(request.request_id, request.epoch, tuple(tokens), len(request.draft), accepted, logprobs)

    def _beam(
        self, request: ScheduledRequest, context: tuple[int, ...], state: NewRequest, mask: Bitmask | None
    ) -> SampledTokens:
        """The best continuations of each row, by log probabilities with the options applied to them."""
        entries = []
        count = max(state.params.beams + len(state.params.end_ids(self.end_ids)), state.params.logprobs or 0)
        for row in range(request.num_logits):
            text = context + request.draft.tokens[:row]
            scores = log_softmax(self.model(text, None))
            scores = self._restrict(scores, text, state, None if mask is None else mask[row])
            best = [int(i) for i in np.argsort(-scores, kind="stable")[:count] if scores[i] > -np.inf]
            entries.append(TokenLogprobs(-1, None, tuple(best), tuple(float(scores[i]) for i in best)))
        if not entries[0].top_ids:
            return SampledTokens(request.request_id, request.epoch, error="no token is legal")
        return SampledTokens(
            request.request_id, request.epoch, num_drafted=len(request.draft), candidates=tuple(entries)
        )

    def _scores(self, context: tuple[int, ...], state: NewRequest, mask: np.ndarray | None) -> np.ndarray:
        return self._restrict(self.model(context, seed_of(state.params)).copy(), context, state, mask)

    def _restrict(
        self, scores: np.ndarray, context: tuple[int, ...], state: NewRequest, mask: np.ndarray | None
    ) -> np.ndarray:
        """Apply the options in place."""
        params = state.params
        if params.frequency_penalty:
            np.subtract.at(scores, list(context[state.num_prompt_tokens :]), params.frequency_penalty)
        for token, bias in params.logit_bias.items():
            scores[token] += bias
        if params.allowed_token_ids is not None:
            keep = list(params.allowed_token_ids)
            scores[[i for i in range(self.vocab_size) if i not in keep]] = -np.inf
        scores[list(params.banned_token_ids)] = -np.inf
        if len(context) - state.num_prompt_tokens < params.min_tokens:
            scores[[*self.end_ids, *params.stop_token_ids]] = -np.inf
        if mask is not None:
            bits = np.unpackbits(mask.view(np.uint8), bitorder="little")[: self.vocab_size]
            scores[bits == 0] = -np.inf
        return scores


def log_softmax(scores: np.ndarray) -> np.ndarray:
    shifted: np.ndarray = scores - scores.max()
    shifted -= np.log(np.exp(shifted).sum())
    return shifted


def _logprobs(scores: np.ndarray, token: int, count: int | None) -> TokenLogprobs:
    def value(i: int) -> float | None:
        return None if scores[i] == -np.inf else float(scores[i]) - 3.0

    top = [int(i) for i in np.argsort(-scores, kind="stable")[: count or 0]]
    return TokenLogprobs(token, value(token), tuple(top), tuple(value(i) for i in top))


class OracleDrafter:
    """Drafts what the toy model will say; every `wrong`-th token (of the whole text) is another one instead.

    Matchers are not asked: the engine has to cut.
    """

    name = "oracle"

    def __init__(self, model: Model, vocab_size: int, *, wrong: int = 0) -> None:
        self._model = model
        self._vocab_size = vocab_size
        self._wrong = wrong
        self.asked: list[str] = []
        self.budgets: list[int] = []
        self.forgotten: list[str] = []
        self.fail_next: Exception | None = None

    def propose(self, contexts: Sequence[DraftContext]) -> list[TokenTree]:
        if self.fail_next is not None:
            error, self.fail_next = self.fail_next, None
            raise error
        return [self._propose(c) for c in contexts]

    def forget(self, request_id: str) -> None:
        self.forgotten.append(request_id)

    def _propose(self, context: DraftContext) -> TokenTree:
        request = context.request
        self.asked.append(request.request_id)
        self.budgets.append(context.budget)
        known = tuple(request.token_ids)
        drafted: list[int] = []
        for _ in range(context.budget):
            token = int(self._model(known + tuple(drafted), seed_of(request.params)).argmax())
            if self._wrong and (len(known) + len(drafted)) % self._wrong == 0:
                token = (token + 1) % self._vocab_size
            drafted.append(token)
        return TokenTree.chain(drafted, self.name)
