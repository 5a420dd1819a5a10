"""A beam search driven as the engine drives one. Which beams survive is a pure function of their texts."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from specserve.core.plan import SampledTokens, ScheduledRequest
from specserve.core.request import Request
from specserve.sched.scheduler import Scheduler
from tests.fakes.worker import best_tokens

Text = tuple[int, ...]


def survivors(texts: Sequence[Text], best: Sequence[Sequence[int]], width: int) -> list[tuple[int, int]]:
    """(beam, token) of those that go on. Often each beam once with its best token, so that drafts hold."""
    digest = hashlib.sha256(repr((width, sorted(texts))).encode()).digest()
    if len(texts) == width and digest[0] < 130:
        return [(i, tokens[0]) for i, tokens in enumerate(best)]
    every = [(i, token) for i, tokens in enumerate(best) for token in tokens]
    every.sort(key=lambda one: hashlib.sha256(repr((texts[one[0]], one[1])).encode()).digest())
    return every[:width]


def expected_beams(prompt: Sequence[int], width: int, max_tokens: int, salt: int = 0) -> list[Text]:
    """The texts that a search alone ends with, prompt included, sorted."""
    texts = [tuple(prompt)]
    for _ in range(max_tokens):
        best = [best_tokens(text, width, salt=salt).top_ids for text in texts]
        texts = sorted((*texts[i], token) for i, token in survivors(texts, best, width))
    return texts


class Search:
    """One search.

    Attributes:
        beams: its live requests by id.
        results: the texts that it ended with, sorted; None before.
    """

    def __init__(self, first: Request, width: int, salt: int) -> None:
        self.beams = {first.request_id: first}
        self.results: list[Text] | None = None
        self.prompt = list(first.token_ids)
        self.width = width
        self.salt = salt
        self._name = first.request_id.rpartition(".")[0]
        self._next = 1
        self._rows: dict[str, tuple[Text, list[Text]]] = {}  # drafted tokens, best tokens of each row
        self._children: list[tuple[Request, int]] = []
        first.places = width
        assert first.family is not None
        assert first.family.in_step

    @property
    def expected(self) -> list[Text]:
        first = next(iter(self.beams.values()))
        assert first.params.max_tokens is not None
        return expected_beams(self.prompt, self.width, first.params.max_tokens, self.salt)

    def collect(self, entry: ScheduledRequest, output: SampledTokens) -> None:
        if output.request_id in self.beams and output.candidates:
            self._rows[output.request_id] = entry.draft.tokens, [row.top_ids for row in output.candidates]

    def forget(self, request: Request) -> None:
        del self.beams[request.request_id]
        self._rows.pop(request.request_id, None)

    def resolve(self) -> dict[str, list[int]]:
        """Choose if every beam has its candidates. The drafted tokens that hold; `apply` does the rest."""
        if self._children or self.results is not None:
            return {}
        if not self.beams or self._rows.keys() != self.beams.keys():
            self._rows = {name: (draft, rows[:1]) for name, (draft, rows) in self._rows.items()}
            return {}
        beams = sorted(self.beams.values(), key=lambda beam: beam.token_ids)
        held: dict[str, list[int]] = {beam.request_id: [] for beam in beams}
        while True:
            level = len(held[beams[0].request_id])
            texts = [(*beam.token_ids, *held[beam.request_id]) for beam in beams]
            rows = [self._rows[beam.request_id][1] for beam in beams]
            chosen = survivors(texts, [row[level] for row in rows], self.width)
            if len(texts[0]) + 1 == len(self.prompt) + (beams[0].params.max_tokens or 0):
                self.results = sorted((*texts[i], token) for i, token in chosen)
                return held
            drafts = [self._rows[beam.request_id][0][level : level + 1] for beam in beams]
            ahead = all(level + 1 < len(row) for row in rows)
            if not (ahead and sorted(chosen) == [(i, draft[0]) for i, draft in enumerate(drafts)]):
                self._children = [(beams[i], token) for i, token in chosen]
                return held
            for i, token in chosen:
                held[beams[i].request_id].append(token)

    def apply(self, scheduler: Scheduler) -> list[Request]:
        """After the commit: end beams, fork beams, go on. The new beams."""
        if self.results is not None:
            for beam in self.beams.values():
                scheduler.finish(beam.request_id)
            return []
        children, self._children = self._children, []
        if not children:
            return []
        kept = {beam.request_id for beam, _ in children}
        for beam in [beam for name, beam in self.beams.items() if name not in kept]:
            scheduler.finish(beam.request_id)
            self.forget(beam)
        first: dict[str, tuple[Request, int]] = {}
        new = []
        for beam, token in children:
            if first.setdefault(beam.request_id, (beam, token)) == (beam, token):
                continue
            new.append(self._fork(scheduler, beam, token))
        for beam, token in first.values():
            beam.append((token,))
        self._rows.clear()
        return new

    def _fork(self, scheduler: Scheduler, parent: Request, token: int) -> Request:
        child = Request(
            f"{self._name}.{self._next}",
            self.prompt,
            parent.params,
            namespace=parent.namespace,
            priority=parent.priority,
            arrival=parent.arrival,
            family=parent.family,
            index=self._next,
        )
        self._next += 1
        child.append((*parent.output_token_ids, token))
        scheduler.fork(parent, child)
        self.beams[child.request_id] = child
        return child
