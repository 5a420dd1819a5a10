"""Intake: from a generate command to the requests, output states and group that it becomes."""

from __future__ import annotations

import dataclasses
import secrets
from dataclasses import dataclass

from specserve.core.messages import GenerateCommand
from specserve.core.request import Family, Request, Status
from specserve.core.sampling import SamplingParams, choice_seed
from specserve.engine.beams import BeamGroup
from specserve.engine.checks import EngineLimits, Vocabulary, check_params, check_prompt, resolve_params
from specserve.engine.choices import ChoiceGroup
from specserve.engine.group import Group, member_id
from specserve.engine.judge import Judge
from specserve.engine.live import LiveRequest
from specserve.kv.manager import KVManager
from specserve.sched.family import beam_room


@dataclass(frozen=True, slots=True)
class Intake:
    """What one command starts with.

    Attributes:
        lives: its sequences; of a beam search the first one.
        group: None for a request of one sequence.
    """

    lives: tuple[LiveRequest, ...]
    group: Group | None = None

    @property
    def first(self) -> LiveRequest:
        return self.lives[0]


def take_in(
    command: GenerateCommand, limits: EngineLimits, vocabulary: Vocabulary, kv: KVManager, arrival: int
) -> Intake:
    """Check a command and make its requests.

    Raises:
        InvalidRequestError, ContextLengthError: what is wrong with it.
    """
    size = vocabulary.vocab_size
    check_prompt(command, size, limits.max_model_len)
    check_params(command.params, size)
    seed = secrets.randbits(64) if command.params.seed is None else command.params.seed
    beams, prompt = max(command.params.beams, 1), len(command.prompt_token_ids)
    room = kv.max_positions - prompt if beams == 1 else beam_room(prompt, beams, kv.target.num_blocks, kv.block_size)
    params = resolve_params(command, limits.max_model_len, room, seed)
    maker = _Maker(command, vocabulary, arrival)
    if params.num_sequences == 1:
        return Intake((maker.live(command.request_id, params, None, 0),))
    family = Family(in_step=params.beams > 0)
    if params.beams:
        live = maker.live(member_id(command.request_id, 0), params, family, 0)
        live.request.places = params.beams
        search = BeamGroup(command.request_id, live, vocabulary.token_bytes, limits.numerics)
        live.group = live.beam = search
        return Intake((live,), search)
    lives = []
    for index in range(params.num_sequences):
        own = dataclasses.replace(params, seed=choice_seed(seed, index), logprobs=_needed_logprobs(params))
        lives.append(maker.live(member_id(command.request_id, index), own, family, index))
    group = ChoiceGroup(command.request_id, params, lives, limits.numerics)
    for live in lives:
        live.group = group
    return Intake(tuple(lives), group)


def _needed_logprobs(params: SamplingParams) -> int | None:
    """Choices are ranked by log probabilities, whether they are asked for or not."""
    return 0 if params.logprobs is None and params.num_sequences > params.n else params.logprobs


@dataclass(frozen=True, slots=True)
class _Maker:
    command: GenerateCommand
    vocabulary: Vocabulary
    arrival: int

    def live(self, name: str, params: SamplingParams, family: Family | None, index: int) -> LiveRequest:
        command = self.command
        assert params.seed is not None, "the seed is drawn before"
        request = Request(
            name,
            list(command.prompt_token_ids),
            params,
            seed=params.seed,
            namespace=command.namespace,
            priority=command.priority,
            arrival=self.arrival,
            status=Status.WAITING if params.guided is None else Status.COMPILING,
            family=family,
            index=index,
        )
        end_ids = params.end_ids(self.vocabulary.eos_ids)
        judge = Judge(params, self.vocabulary.token_bytes, end_ids, params.max_tokens or 1)
        return LiveRequest(request, judge, command.report_speculation)
