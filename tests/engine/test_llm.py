"""The Python API over an engine with a fake executor."""

from __future__ import annotations

import asyncio
import concurrent.futures
import gc
import threading
import weakref

import pytest

from specserve.core.errors import ConfigError, EngineDeadError, GrammarError, InvalidRequestError
from specserve.core.messages import DeltaEvent, FinishedEvent
from specserve.core.sampling import SamplingParams
from specserve.engine.thread import EngineThread
from specserve.llm import LLM
from tests.fakes.engines import VOCABULARY, answer, command, make_rig


class Rigged:
    def __init__(self, **options):
        self.rig = make_rig(**options)
        self.backend = EngineThread(lambda: self.rig.engine)
        self.llm = LLM.over(self.backend, VOCABULARY)

    def __enter__(self):
        return self.llm

    def __exit__(self, *error):
        self.llm.close()
        self.rig.check_baseline()
        assert self.rig.executor.closed
        assert not self.backend._thread.is_alive()


def alone(prompt, **params):
    return answer(make_rig().run(command("a", prompt, **params))["a"])


def test_one_prompt_gives_a_list_of_one():
    expected = alone("hello", max_tokens=64)
    with Rigged(drafts=3) as llm:
        (result,) = llm.generate("hello")
        assert (result.token_ids, result.text) == (expected.token_ids, expected.text)
        assert result.finish_reason == "length"
        assert result.logprobs is None
        assert result.usage.completion_tokens == 64
        assert result.usage.drafted == result.usage.accepted > 0
        assert llm.generate("hello", SamplingParams(seed=result.seed))[0].token_ids == expected.token_ids


def test_many_prompts_keep_their_order_and_their_params():
    prompts = ["hello", [1, 2, 3], [{"role": "user", "content": "hi"}]]
    params = [SamplingParams(max_tokens=n, logprobs=1) for n in (30, 1, 7)]
    with Rigged() as llm:
        results = llm.generate(prompts, params)
        assert [len(r.token_ids) for r in results] == [30, 1, 7]
        assert results[1].token_ids == alone([1, 2, 3], max_tokens=1).token_ids
        assert [[p.token.token_id for p in r.logprobs] for r in results] == [r.token_ids for r in results]
        assert len(llm.generate(prompts, SamplingParams(max_tokens=2))) == 3
        with pytest.raises(InvalidRequestError, match="params: 1 for 3"):
            llm.generate(prompts, params[:1])


def test_guided_and_stop():
    with Rigged() as llm:
        assert llm.generate("x", SamplingParams(guided={"choice": ["ab"]}))[0].text == "ab"


def test_a_failed_prompt_raises_its_error_after_the_others_ended():
    with Rigged(max_model_len=5000, blocks=2000) as llm:
        long, bad = SamplingParams(max_tokens=4000), SamplingParams(guided={"regex": "("})
        with pytest.raises(GrammarError, match="cannot be parsed"):
            llm.generate(["a", "b", "c"], [long, bad, long])
        assert llm.stats().running == llm.stats().waiting == 0
        with pytest.raises(InvalidRequestError, match=r"^prompts\[1\]\[0\]: ") as refused:
            llm.generate([[1], [10**6]])
        assert refused.value.param == "prompts[1][0]"


def test_generate_from_many_threads():
    expected = {n: alone(f"hi{n}", max_tokens=30).token_ids for n in range(8)}
    with Rigged(drafts=2) as llm, concurrent.futures.ThreadPoolExecutor(8) as pool:
        params = SamplingParams(max_tokens=30)
        results = list(pool.map(lambda n: llm.generate(f"hi{n}", params)[0].token_ids, expected))
        assert results == list(expected.values())


def test_ctrl_c_aborts_what_generate_started():
    rigged = Rigged(max_model_len=5000, blocks=2000)
    with rigged as llm:

        class Interrupted:
            """Raised in the waiting thread, as Ctrl-C is."""

            def __init__(self, real):
                self._real, self.calls = real, 0

            def acquire(self, timeout=None):
                self.calls += 1
                if self.calls == 5:
                    raise KeyboardInterrupt
                return self._real.acquire(timeout=timeout)

            def release(self):
                self._real.release()

        real = threading.Semaphore
        threading.Semaphore = lambda value: Interrupted(real(value))
        try:
            with pytest.raises(KeyboardInterrupt):
                llm.generate(["a", "b"], SamplingParams(max_tokens=4000))
        finally:
            threading.Semaphore = real
        assert llm.stats().counters['request_success_total{finished_reason="cancelled"}'] == 2


def test_stream_yields_deltas_and_the_end():
    expected = alone("hello", max_tokens=20)

    async def test(llm):
        events = [e async for e in llm.stream("hello", SamplingParams(max_tokens=20), report_speculation=True)]
        assert all(isinstance(e, DeltaEvent) for e in events[:-1])
        assert isinstance(events[-1], FinishedEvent)
        assert "".join(e.text for e in events[:-1]) == expected.text
        assert sum(len(s.token_ids) for e in events[:-1] for s in e.speculation) == events[-1].usage.drafted > 0
        with pytest.raises(GrammarError):
            async for _ in llm.stream("x", SamplingParams(guided={"regex": "("})):
                pass
        with pytest.raises(InvalidRequestError, match="one prompt"):
            async for _ in llm.stream(["a", "b"]):
                pass
        async for event in llm.stream("hello", SamplingParams(max_tokens=100)):
            if isinstance(event, DeltaEvent):
                break

    with Rigged(drafts=3) as llm:
        asyncio.run(test(llm))
        asyncio.run(test(llm))  # another event loop


def test_closed_and_dropped():
    rigged = Rigged()
    rigged.llm.close()
    rigged.llm.close()
    with pytest.raises(EngineDeadError):
        rigged.llm.generate("x")
    dropped = Rigged()
    thread = dropped.backend._thread
    dropped.llm = None
    gc.collect()
    assert not thread.is_alive()


@pytest.mark.parametrize(("options", "param"), [({"dtype": "int3"}, "dtype"), ({"no_such": 1}, "no_such")])
def test_wrong_options_are_named(options, param):
    with pytest.raises(ConfigError) as caught:
        LLM("demo", **options)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("params", "param"),
    [({"max_tokens": 2}, "params"), (5, "params"), ([None], "params[0]"), ([SamplingParams(), 1], "params[1]")],
)
def test_params_of_another_type_are_named(params, param):
    with Rigged() as llm, pytest.raises(InvalidRequestError) as refused:
        llm.generate("x", params)
    assert refused.value.param == param


def test_close_lets_go_of_the_engine_while_the_llm_is_still_referenced():
    engine = make_rig().engine
    alive = weakref.ref(engine)
    engines = [engine]
    del engine
    llm = LLM.over(EngineThread(engines.pop), VOCABULARY)
    llm.generate("x")
    llm.close()
    gc.collect()
    assert alive() is None
