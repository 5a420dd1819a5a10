"""The promise on real weights: drafts, neighbours, cache, chunks and preemption never change which tokens come."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specserve import LLM, SamplingParams
from specserve.core.messages import DeltaEvent
from tests.fakes.pairs import random_draft_folder
from tests.fakes.prompts import chat, prompts

TEMPERATURES = (0.0, 0.8)
# The demo model's own blocks are q4. All tests run on them, those of EACH on bfloat16 too, slow runs everything.
QUANTIZATIONS = ("auto", "q8", "none")
EACH = pytest.mark.parametrize("engine", ["auto", pytest.param("q8", marks=pytest.mark.slow), "none"], indirect=True)


def params(temperature: float, tokens: int, **more: Any) -> SamplingParams:
    return SamplingParams(max_tokens=tokens, temperature=temperature, seed=1234, **more)


def ids(llm: LLM, texts: list[str], p: SamplingParams) -> list[list[int]]:
    return [list(r.token_ids) for r in llm.generate([chat(t) for t in texts], p)]


@pytest.fixture(params=["auto", *(pytest.param(other, marks=pytest.mark.slow) for other in QUANTIZATIONS[1:])])
def engine(request: pytest.FixtureRequest, engine: Callable[..., LLM]) -> Callable[..., LLM]:
    """The engines of one quantization, the draft models' included; float32 is not quantised."""

    def of(model: str = "demo", **options: Any) -> LLM:
        quantization = "none" if options.get("dtype") == "float32" else request.param
        return engine(model, quantization=quantization, **options)

    return of


@pytest.fixture(scope="module")
def random_draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_draft_folder(tmp_path_factory.mktemp("draft"))


def speculation(method: str, k: int, random_draft: Path) -> dict[str, Any]:
    model = {"suffix": None, "same": "demo", "random": str(random_draft)}[method]
    methods = ["suffix"] if model is None else ["draft_model"]
    return {"methods": methods, "model": model, "num_speculative_tokens": k, "adaptive": False}


def check_drafts(
    engine: Callable[..., LLM], random_draft: Path, method: str, k: int, count: int, tokens: int, **options: Any
) -> None:
    """Token ids with the drafter equal those without, greedy and sampled; acceptance is as the pair says."""
    texts = prompts(count)
    plain = engine(speculation=None, **options)
    drafted = engine(speculation=speculation(method, k, random_draft), **options)
    for temperature in TEMPERATURES:
        expected = ids(plain, texts, params(temperature, tokens))
        results = drafted.generate([chat(t) for t in texts], params(temperature, tokens))
        assert [list(r.token_ids) for r in results] == expected
        totals = [sum(getattr(r.usage, name) for r in results) for name in ("drafted", "accepted", "rejected")]
        assert totals[0] == totals[1] + totals[2]
        if method == "same":
            assert totals[0] > 0
            assert totals[2] == 0, "a draft model equal to the target is accepted whole"
        elif method == "random":
            assert totals[0] > 0
            assert totals[1] <= 0.02 * totals[0]


@EACH
@pytest.mark.parametrize("method", ["suffix", "same", "random"])
def test_drafts_never_change_tokens(engine: Callable[..., LLM], random_draft: Path, method: str) -> None:
    check_drafts(engine, random_draft, method, 4, count=6, tokens=40)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["suffix", "same", "random"])
@pytest.mark.parametrize("k", list(range(1, 9)))
def test_drafts_never_change_tokens_k(engine: Callable[..., LLM], random_draft: Path, method: str, k: int) -> None:
    check_drafts(engine, random_draft, method, k, count=20, tokens=128)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["suffix", "same", "random"])
def test_trap_a1_long_greedy_runs(engine: Callable[..., LLM], random_draft: Path, method: str) -> None:
    texts = prompts(4)
    p = params(0.0, 500, ignore_eos=True)
    expected = ids(engine(speculation=None), texts, p)
    assert ids(engine(speculation=speculation(method, 5, random_draft)), texts, p) == expected


@pytest.mark.parametrize("engine", ["none"], indirect=True)
def test_float32_drafts(engine: Callable[..., LLM], random_draft: Path) -> None:
    check_drafts(engine, random_draft, "suffix", 3, count=2, tokens=24, dtype="float32")


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_concurrent_streams_join_and_leave(engine: Callable[..., LLM], temperature: float) -> None:
    """Sixteen streams of mixed length; each starts when the one before it has given some tokens."""
    llm = engine(speculation={"methods": ["suffix"]})
    texts = prompts(16)
    lengths = [8 + 5 * (i * 7 % 16) for i in range(16)]
    alone = [ids(llm, [t], params(temperature, n))[0] for t, n in zip(texts, lengths, strict=True)]

    async def run() -> list[list[int]]:
        starts = [asyncio.Event() for _ in range(17)]
        starts[0].set()

        async def one(i: int) -> list[int]:
            await starts[i].wait()
            got: list[int] = []
            async for event in llm.stream(chat(texts[i]), params(temperature, lengths[i])):
                if isinstance(event, DeltaEvent):
                    got += event.token_ids
                if len(got) >= 1 + i % 4:
                    starts[i + 1].set()
            starts[i + 1].set()
            return got

        return await asyncio.gather(*(one(i) for i in range(16)))

    assert asyncio.run(run()) == alone


@EACH
def test_trap_d12_warm_equals_cold_and_d13_chunks(engine: Callable[..., LLM]) -> None:
    """A prefix hit and the size of prefill chunks change no token and no logprob."""
    texts = [(f"{t} " * 60)[:1400] for t in prompts(2)]
    p = params(0.8, 24, logprobs=2)
    outcomes = []
    for chunk in (512, 256, 16, 1):
        llm = engine(speculation={"methods": ["suffix"]}, max_batched_tokens=chunk)
        for _ in ("cold", "warm"):
            results = llm.generate([chat(t) for t in texts], p)
            assert min(r.usage.prompt_tokens for r in results) > 256, "there is more than one chunk"
            outcomes.append([(list(r.token_ids), r.logprobs) for r in results])
            cached = [r.usage.cached_tokens for r in results]
        assert all(c > 0 for c in cached), "the second run hits the cache"
    assert all(outcome == outcomes[0] for outcome in outcomes[1:])


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_trap_a5_preempted_equals_undisturbed(engine: Callable[..., LLM], preemption: str) -> None:
    """A pool for about three of eight requests: preemption must happen, and change nothing."""
    texts = [t[:200] for t in prompts(8)]
    p = params(0.8, 64, ignore_eos=True, logprobs=1)
    speculation = {"methods": ["suffix"]}
    expected = engine(speculation=speculation).generate([chat(t) for t in texts], p)
    small = engine(speculation=speculation, kv_memory="12MiB", preemption=preemption)
    results = small.generate([chat(t) for t in texts], p)
    assert [(r.token_ids, r.text, r.logprobs) for r in results] == [(r.token_ids, r.text, r.logprobs) for r in expected]
    counters = small.stats().counters
    assert counters["num_preemptions_total"] > 0
    assert (counters["num_swapped_total"] > 0) == (preemption == "swap")


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_trap_a22_choices_equal_single_requests(engine: Callable[..., LLM], temperature: float) -> None:
    """Each choice is what a request of one gives with its seed; neighbours keep their drafts and their tokens."""
    llm = engine(speculation={"methods": ["suffix"], "adaptive": False})
    texts = [t[:300] for t in prompts(4)]
    single = params(temperature, 32)
    expected = ids(llm, texts, single)
    several = [params(temperature, 32, n=4), *[single] * 3]
    results = llm.generate([chat(t) for t in texts], several)
    assert [r.token_ids for r in results] == expected
    assert all(r.usage.drafted > 0 for r in results[1:]) or temperature > 0
    for choice in results[0].choices:
        again = llm.generate(chat(texts[0]), SamplingParams(max_tokens=32, temperature=temperature, seed=choice.seed))
        assert again[0].token_ids == choice.token_ids


def test_trap_a9_logprobs_with_drafts(engine: Callable[..., LLM], random_draft: Path) -> None:
    texts = prompts(3)
    p = params(0.0, 24, logprobs=3)
    plain = engine(speculation=None).generate([chat(t) for t in texts], p)
    drafted = engine(speculation=speculation("same", 4, random_draft)).generate([chat(t) for t in texts], p)
    for a, b in zip(plain, drafted, strict=True):
        assert len(b.logprobs) == len(b.token_ids)
        assert [entry.token.token_id for entry in b.logprobs] == list(b.token_ids)
        assert a.logprobs == b.logprobs


@pytest.mark.parametrize("option", [{"frequency_penalty": 2.0}, {"frequency_penalty": -2.0}, {"min_p": 0.2}])
def test_trap_a10_penalties_with_drafts(engine: Callable[..., LLM], random_draft: Path, option: dict) -> None:
    texts = prompts(3)
    p = params(0.8 if "min_p" in option else 0.0, 32, **option)
    expected = ids(engine(speculation=None), texts, p)
    assert ids(engine(speculation=speculation("same", 4, random_draft)), texts, p) == expected
    assert ids(engine(speculation={"methods": ["suffix"], "adaptive": False}), texts, p) == expected
