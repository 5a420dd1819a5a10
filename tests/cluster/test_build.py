"""build_engine on tiny models in Hugging Face format: the whole engine, in this thread."""

import json
import logging
import math
import subprocess
import sys
import threading
import time

import pytest
import torch

from specserve.cluster.build import PreparedCompiler, build_engine
from specserve.core.config import EngineConfig, SpeculationConfig
from specserve.core.errors import ConfigError, ModelLoadError
from specserve.core.messages import FinishedEvent, GenerateCommand
from specserve.core.sampling import SamplingParams
from specserve.kernels.cpu import native
from specserve.models.home import home
from tests.fakes.engines import answer
from tests.fakes.tiny import EOS_ID, tiny_llama_folder

PROMPTS = [tuple(range(20 + i, 44 + 3 * i)) * 2 for i in range(4)]

# With what is made of it once.
DEMO_HERE = (home() / "demo").exists() and any((home() / "tokenizers").glob("*/specserve.json"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_llama_folder(tmp_path_factory.mktemp("target"), vocab_size=400, max_position=256)


@pytest.fixture(autouse=True)
def _threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def config(folder, speculation=None, **options):
    options = {"kv_memory": "1MiB", "dtype": "float32", "threads": 1, "block_size": 8, **options}
    if isinstance(speculation, dict):
        speculation = SpeculationConfig.from_dict(speculation)
    return EngineConfig(model=str(folder), speculation=speculation, **options)


def run(engine, **params):
    options = {"max_tokens": 24, "temperature": 0.8, **params}
    for i, prompt in enumerate(PROMPTS):
        engine.handle(GenerateCommand(f"r{i}", prompt, SamplingParams(seed=i, **options)))
    events = {}
    while engine.has_work:
        for event in engine.step():
            events.setdefault(event.request_id, []).append(event)
        time.sleep(engine.pause() or 0)  # as the loop does while grammars are compiled
    assert engine.kv.baseline()
    engine.scheduler.check()
    engine.close()
    return {name: answer(each) for name, each in events.items()}


@pytest.fixture(scope="module")
def plain(folder):
    return {name: a.token_ids for name, a in run(build_engine(config(folder))).items()}


def test_without_drafts(plain):
    assert len(plain) == len(PROMPTS)
    assert all(plain.values())


@pytest.mark.parametrize("adaptive", [True, False])
@pytest.mark.parametrize("methods", [["suffix"], ["draft_model"], ["suffix", "draft_model"]], ids="+".join)
def test_drafts_never_change_the_answers(folder, plain, methods, adaptive):
    speculation = {"methods": methods, "num_speculative_tokens": 4, "adaptive": adaptive}
    if "draft_model" in methods:
        speculation["model"] = str(folder)
    answers = run(build_engine(config(folder, speculation)))
    assert {name: a.token_ids for name, a in answers.items()} == plain
    for a in answers.values():
        assert isinstance(a.end, FinishedEvent)
        assert a.end.usage.drafted == a.end.usage.accepted + a.end.usage.rejected
        if methods == ["draft_model"] and not adaptive:
            assert a.end.usage.drafted == a.end.usage.accepted > 0


def test_trap_f1_a_draft_with_another_padded_width(folder, plain, tmp_path):
    other = tiny_llama_folder(tmp_path, seed=5, vocab_size=448, tokenizer_size=400, layers=1)
    speculation = {"methods": ["draft_model"], "model": str(other), "adaptive": False}
    answers = run(build_engine(config(folder, speculation)))
    assert {name: a.token_ids for name, a in answers.items()} == plain


def test_trap_f2_a_draft_whose_tokenizer_has_two_ids_swapped(folder, tmp_path):
    other = tiny_llama_folder(tmp_path, vocab_size=400)
    path = other / "tokenizer.json"
    values = json.loads(path.read_text(encoding="utf-8"))
    vocabulary = values["model"]["vocab"]
    first, second = sorted(vocabulary, key=vocabulary.__getitem__)[50:52]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    path.write_text(json.dumps(values), encoding="utf-8")
    with pytest.raises(ConfigError, match=rf"token id {min(vocabulary[first], vocabulary[second])} ") as caught:
        build_engine(config(folder, {"methods": ["draft_model"], "model": str(other)}))
    assert caught.value.param == "speculation.model"


def test_trap_f5_the_split_is_told(folder, caplog):
    told = []
    with caplog.at_level(logging.INFO, logger="specserve"):
        engine = build_engine(
            config(folder, {"methods": ["draft_model"], "model": str(folder)}),
            lambda done, total, what: told.append(what),
        )
    assert engine.kv.target.num_blocks == engine.kv.draft.num_blocks > 0
    assert any("target 0.5 MiB, draft 0.5 MiB" in what for what in told)
    assert "draft 0.5 MiB" in caplog.text
    engine.close()


def test_host_memory_of_every_pool(folder):
    speculation = {"methods": ["draft_model"], "model": str(folder)}
    told = []
    engine = build_engine(config(folder, speculation, swap_memory="1MiB"), lambda *args: told.append(args[2]))
    blocks = engine.kv.host.num_blocks
    assert engine.kv.draft_host.num_blocks == blocks == engine.kv.target.num_blocks > 0
    assert [runner.host.num_blocks for runner in engine.executor._runners] == [blocks, blocks]
    assert any(what.endswith(f"host: {blocks * 8:,} tokens") for what in told)
    assert 0 < engine.executor.measure_swap() < math.inf
    engine.close()


@pytest.mark.parametrize("options", [{"swap_memory": 0}, {"preemption": "recompute"}, {"swap_memory": 100}])
def test_without_host_memory(folder, options):
    engine = build_engine(config(folder, **options))
    assert engine.kv.host.num_blocks == 0
    assert engine.kv.draft_host is None
    assert [runner.host.num_blocks for runner in engine.executor._runners] == [0]
    engine.close()


def test_the_configured_context_and_threads(folder):
    engine = build_engine(config(folder, max_model_len=64))
    assert engine.limits.max_model_len == 64
    assert torch.get_num_threads() == 1
    engine.close()
    with pytest.raises(ConfigError, match="max_model_len"):
        build_engine(config(folder, max_model_len=9999))
    with pytest.raises(ConfigError, match="kv_memory"):
        build_engine(config(folder, kv_memory=1000))


@pytest.mark.parametrize("methods", [["suffix"], ["draft_model"]], ids="+".join)
def test_guided_answers_are_the_same_with_drafts(folder, methods):
    guided = {"regex": "(yes|no|maybe)( (yes|no|maybe)){3,8}"}
    expected = run(build_engine(config(folder)), guided=guided, max_tokens=60)
    speculation = {"methods": methods, "adaptive": False}
    if "draft_model" in methods:
        speculation["model"] = str(folder)
    answers = run(build_engine(config(folder, speculation)), guided=guided, max_tokens=60)
    for name, a in answers.items():
        assert a.token_ids == expected[name].token_ids
        assert set(a.text.split()) <= {"yes", "no", "maybe"}
        if methods == ["draft_model"]:
            assert a.end.usage.accepted == a.end.usage.drafted > 0


def test_trap_b14_a_minimum_that_the_grammar_cannot_fill(folder):
    answers = run(build_engine(config(folder)), guided={"choice": ["true", "false"]}, min_tokens=20)
    for a in answers.values():
        assert a.text in ("true", "false")
        assert a.end.finish_reason == "stop"


def test_an_end_token_ends_the_answer(folder):
    answers = run(build_engine(config(folder, {"methods": ["suffix"]})), logit_bias={EOS_ID: 100.0}, min_tokens=5)
    for a in answers.values():
        assert a.token_ids[-1] == EOS_ID
        assert len(a.token_ids) == 6


def test_impossible_options_fail_that_request_alone(folder):
    engine = build_engine(config(folder))
    engine.handle(GenerateCommand("bad", (5, 6), SamplingParams(allowed_token_ids=(7,), banned_token_ids=(7,))))
    engine.handle(GenerateCommand("good", (5, 6), SamplingParams(max_tokens=4)))
    events = {}
    while engine.has_work:
        for event in engine.step():
            events.setdefault(event.request_id, []).append(event)
    assert answer(events["bad"]).end.code == "no_legal_token"
    assert len(answer(events["good"]).token_ids) == 4
    engine.close()


def test_a_missing_draft_model_is_told_of_its_own_option(folder, tmp_path):
    speculation = SpeculationConfig(methods=("draft_model",), model=str(tmp_path / "absent"))
    with pytest.raises(ModelLoadError, match=r"^speculation\.model: ") as refused:
        build_engine(config(folder, speculation))
    assert refused.value.param == "speculation.model"


class Made:
    """A compiler."""

    def compile(self, guided):
        return guided["choice"]


def test_grammars_wait_for_the_compiler():
    making = threading.Event()

    def make():
        assert making.wait(60)
        return Made()

    compiler = PreparedCompiler(make)
    compiled = []
    waiting = threading.Thread(target=lambda: compiled.append(compiler.compile({"choice": "a"})))
    waiting.start()
    making.set()
    waiting.join(60)
    assert compiled == ["a"]


def test_a_compiler_that_cannot_be_made_fails_grammars_alone(caplog):
    def make():
        raise ImportError("no such library")

    compiler = PreparedCompiler(make)
    for _ in range(2):
        with pytest.raises(ImportError, match="no such library"):
            compiler.compile({"choice": ["a"]})
    assert len(caplog.records) == 1


def test_a_compiler_that_could_not_be_made_is_tried_again():
    tries = []

    def make():
        tries.append(None)
        if len(tries) == 1:
            raise ImportError("not yet")
        return Made()

    compiler = PreparedCompiler(make, delay=3600.0)
    with pytest.raises(ImportError, match="not yet"):
        compiler.compile({"choice": "a"})
    assert compiler.compile({"choice": "a"}) == "a"
    assert len(tries) == 2


def test_the_interpreter_waits_for_the_compiler_that_a_daemon_makes():
    """Threads are daemons where their maker is: the timer is, and an end in the middle of an import can crash."""
    seen = []
    made = threading.Event()

    def make():
        seen.append(threading.current_thread().daemon)
        made.set()

    PreparedCompiler(make, delay=0.0)
    assert made.wait(60)
    assert seen == [False]


def test_a_compiler_is_made_once_when_asked_for_and_not_before():
    made = []

    def make():
        made.append(None)
        return Made()

    compiler = PreparedCompiler(make, delay=3600.0)
    assert made == []
    assert compiler.compile({"choice": "a"}) == "a"
    assert compiler.compile({"choice": "b"}) == "b"
    assert made == [None]


def test_no_start_up_imports_what_only_some_requests_need():
    """Either takes longer than a packed model to load."""
    code = """
import sys
import specserve.cluster.build, specserve.models.loader
from specserve.models.loader import load_tokenizer
if len(sys.argv) > 1:
    assert load_tokenizer("demo").encode("a")
print([name for name in ("transformers", "xgrammar", "huggingface_hub") if name in sys.modules])
"""
    arguments = ["demo"] if DEMO_HERE else []
    run = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True)
    assert run.stdout == "[]\n"


@pytest.mark.skipif(not DEMO_HERE, reason="the demo model is not here")
def test_the_first_chat_and_the_first_grammar_may_come_together():
    """Both import transformers, which is not made for two threads at once."""
    code = """
import threading
from specserve import LLM, SamplingParams
with LLM("demo", kv_memory="64MiB") as llm:
    params = SamplingParams(max_tokens=1)
    hello = [{"role": "user", "content": "Hi"}]
    chats = [threading.Thread(target=llm.generate, args=(hello, params)) for _ in range(3)]
    for chat in chats:
        chat.start()
    print(len(llm.generate("x", SamplingParams(guided={"regex": "[a-f]{3}"}))[0].text))
    for chat in chats:
        chat.join()
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout == "3\n"
    assert "Error" not in run.stderr


def test_an_instruction_set_that_cannot_be_had_is_told_as_the_option_it_is(monkeypatch, tmp_path):
    monkeypatch.setenv("SPECSERVE_ISA", "mmx")
    native.forget()
    try:
        with pytest.raises(ConfigError, match="SPECSERVE_ISA=mmx: there is no such instruction set") as caught:
            build_engine(EngineConfig(model=str(tiny_llama_folder(tmp_path))))
    finally:
        monkeypatch.undo()
        native.forget()
    assert caught.value.param == "SPECSERVE_ISA"


@pytest.mark.skipif(not DEMO_HERE, reason="the demo model has not been fetched")
@pytest.mark.skipif(native.library() is None, reason="there is no native library")
@pytest.mark.parametrize("speculation", [None, {"methods": ["draft_model"], "model": "demo"}], ids=["alone", "draft"])
def test_plain_requests_need_no_torch(speculation):
    """Its import takes longer than everything up to the first token. Whoever asks for more gets it all the same."""
    code = f"""
import sys
from specserve import LLM, SamplingParams
from specserve.cluster.build import PreparedCompiler
PreparedCompiler.__init__.__defaults__ = (600.0,)  # the library for grammars brings torch along
options = {{"temperature": 0.9, "top_p": 0.9, "seed": 1, "logit_bias": {{5: -3.0}}, "n": 2}}
with LLM("demo", kv_memory="64MiB", swap_memory="16MiB", threads=1, speculation={speculation!r}) as llm:
    for params in ({{"temperature": 0.0}}, {{"top_k": 20, "min_p": 0.05}}, options):
        found = llm.generate(["Hello", "One two three"] * 2, SamplingParams(max_tokens=20, **params))
        assert all(answer.token_ids for answer in found)
    print("torch" in sys.modules)
    print(len(llm.generate("Hi", SamplingParams(max_tokens=3, logprobs=2))[0].logprobs), "torch" in sys.modules)
    import torch
    print(torch.get_num_threads())
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (ran.stdout, ran.returncode) == ("False\n3 True\n1\n", 0), ran.stderr
