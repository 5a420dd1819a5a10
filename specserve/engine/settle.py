"""What a step's outputs mean: cut where answers end, counted, and turned into events. Changes nothing but judges."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from specserve.core.errors import InvalidRequestError
from specserve.core.messages import DeltaEvent, Event, ProgressEvent, SpeculationStep
from specserve.core.plan import SampledTokens, ScheduledRequest, StepPlan, StepResult
from specserve.core.tree import EMPTY_TREE, TokenTree
from specserve.engine.beams import BeamGroup
from specserve.engine.judge import Verdict
from specserve.engine.live import LiveRequest, TokenBytes, position_logprobs, speculation_step


@dataclass(slots=True)
class Settled:
    """Of one step: the result to commit, and what follows from it once it is committed.

    Attributes:
        drafts: each verified draft, as far as the answer went, and how many of its tokens were accepted.
        searches: beam searches with an output in this step.
    """

    result: StepResult
    events: list[Event] = field(default_factory=list)
    finished: list[tuple[LiveRequest, str]] = field(default_factory=list)
    failed: list[tuple[LiveRequest, Exception]] = field(default_factory=list)
    drafts: list[tuple[TokenTree, int]] = field(default_factory=list)
    searches: list[BeamGroup] = field(default_factory=list)


def settle(
    plan: StepPlan,
    result: StepResult,
    lives: Mapping[str, LiveRequest],
    broken: Mapping[str, Exception],
    token_bytes: TokenBytes,
) -> Settled:
    """Judge every output. A request whose judge fails, or that is in `broken`, emits nothing and fails alone."""
    settled = Settled(result)
    outputs: list[SampledTokens] = []
    for scheduled, output in zip(plan.requests, result.outputs, strict=True):
        live = lives.get(output.request_id)
        if live is None:
            outputs.append(_cut(output, 0))
            continue
        before = live.judge.num_tokens
        try:
            if output.request_id in broken:
                raise broken[output.request_id]
            outputs.append(_settle_one(settled, live, scheduled, output, token_bytes))
        except Exception as error:
            live.judge.num_tokens = before
            settled.failed.append((live, error))
            outputs.append(_cut(output, 0))
    if settled.searches:
        _resolve(settled, plan, outputs, lives)
    settled.result = StepResult(result.step, tuple(outputs), result.timings)
    return settled


def _settle_one(
    settled: Settled, live: LiveRequest, scheduled: ScheduledRequest, output: SampledTokens, token_bytes: TokenBytes
) -> SampledTokens:
    if live.beam is not None and scheduled.num_logits:
        live.beam.collect(scheduled, output)
        if live.beam not in settled.searches:
            settled.searches.append(live.beam)
        return output
    if output.error is not None:
        raise InvalidRequestError(output.error, code="no_legal_token")
    if scheduled.num_logits == 0:
        total = live.request.num_prompt_tokens
        computed = min(scheduled.start + len(scheduled.token_ids), total)
        settled.events.append(ProgressEvent(live.request_id, computed, total))
        return output
    if not output.token_ids:
        raise InvalidRequestError("no token is left that the request's restrictions allow", code="no_legal_token")
    verdict = live.judge.judge(output.token_ids, output.logprobs)
    release = verdict.release
    draft, accepted = EMPTY_TREE, 0
    steps: tuple[SpeculationStep, ...] = ()
    if scheduled.draft.tokens:
        draft, accepted = _verified(scheduled.draft, output, verdict)
        if live.report_speculation and draft:
            steps = (speculation_step(draft, accepted, token_bytes),)
        live.count_draft(draft, accepted)
        if draft:
            settled.drafts.append((draft, accepted))
    if release.token_ids or release.text or steps:
        logprobs = position_logprobs(release, token_bytes) if release.logprobs else ()
        settled.events.append(DeltaEvent(live.request_id, release.token_ids, release.text, logprobs, steps))
    if verdict.finish_reason is not None:
        settled.finished.append((live, verdict.finish_reason))
    if verdict.num_tokens == len(output.token_ids) and (output.num_drafted, output.num_accepted) == (
        len(draft.tokens),
        accepted,
    ):
        return output
    cut = _cut(output, verdict.num_tokens)
    return cut._replace(num_drafted=len(draft), num_accepted=accepted)


def _resolve(settled: Settled, plan: StepPlan, outputs: list[SampledTokens], lives: Mapping[str, LiveRequest]) -> None:
    """Let the searches choose; drafted tokens along which all beams of one went become their outputs."""
    held: dict[str, tuple[int, ...]] = {}
    for search in settled.searches:
        try:
            held.update(search.resolve())
        except Exception as error:
            settled.failed.append((next(iter(search.lives.values())), error))
    for i, scheduled in enumerate(plan.requests):
        live = lives.get(scheduled.request_id)
        if live is None or live.beam is None or not scheduled.num_logits:
            continue
        tokens = held.get(scheduled.request_id, ())
        outputs[i] = outputs[i]._replace(token_ids=tokens, num_accepted=len(tokens))
        live.count_draft(scheduled.draft, len(tokens))
        if scheduled.draft:
            settled.drafts.append((scheduled.draft, len(tokens)))


def _verified(draft: TokenTree, output: SampledTokens, verdict: Verdict) -> tuple[TokenTree, int]:
    """The part of the draft that counts, and its accepted tokens.

    Where the answer ends inside the accepted tokens, what was drafted behind the end was neither accepted nor
    rejected: it counts for nothing.
    """
    if not draft:
        return EMPTY_TREE, 0
    accepted = min(output.num_accepted, verdict.num_tokens)
    if verdict.finish_reason is not None and accepted == verdict.num_tokens:
        return draft.truncate(accepted), accepted
    return draft, accepted


def _cut(output: SampledTokens, count: int) -> SampledTokens:
    """The first `count` tokens of an output."""
    return output._replace(
        token_ids=output.token_ids[:count],
        logprobs=output.logprobs[:count],
        num_accepted=min(output.num_accepted, count),
    )
