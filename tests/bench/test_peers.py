"""The bench against other engines: its prompts, clocks, ratios, and the files that it makes for them."""

import json
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from gguf import quants

from bench.common import Row
from bench.engines.child import decode, serve
from bench.engines.environment import Environment, NotInstalled, reason
from bench.engines.measured import Measured, Store
from bench.engines.table import OURS, agreement, better, rows
from bench.engines.turns import Child, ChildFailed, closing, rotated, turns
from bench.engines.weights import gguf_variant, requantise
from bench.engines.work import PRECISIONS, WORKS, Texts, command, rate


class Counting:
    """An engine that gives each request one token a step, and `at_first` with its first."""

    def __init__(self, at_first=1):
        self.at_first = at_first
        self.live = {}
        self.most = 0
        self.order = []

    def start(self, request, prompt, out):
        self.live[request] = (len(prompt), out, 0)
        self.order.append(request)
        self.most = max(self.most, len(self.live))

    def step(self):
        given = []
        for request, (length, out, done) in list(self.live.items()):
            tokens = [length + done + i for i in range(1 if done else self.at_first)]
            given.append((request, tokens))
            self.live[request] = (length, out, done + len(tokens))
            if done + len(tokens) >= out:
                del self.live[request]
        return given


def test_a_new_request_starts_when_one_ends():
    engine = Counting()
    answer = serve(engine, [[0] * n for n in (3, 4, 5, 6, 7)], 4, 2)
    assert engine.most == 2
    assert engine.order == [0, 1, 2, 3, 4]
    assert answer["tokens"] == [3, 4, 5, 6], "of the first request alone"
    assert answer["seconds"] > 0


def test_decoding_is_timed_from_the_first_tokens_on():
    answer = decode(Counting(at_first=3), [0] * 5, 8)
    assert answer["early"] == 3
    assert answer["tokens"] == [5, 6, 7, 8, 9, 10, 11, 12]
    assert rate(WORKS[0], [[0] * 64], {"early": 3, "seconds": 5.0}) == (128 - 3) / 5


def test_more_tokens_than_asked_for_are_an_error():
    with pytest.raises(RuntimeError, match="more tokens"):
        serve(Counting(at_first=5), [[0]], 4, 1)


@pytest.mark.parametrize("work", WORKS, ids=lambda work: f"work {work.number}")
def test_prompts_are_the_same_each_time_and_new_each_round(work):
    texts = Texts(list(range(5000)))
    first, again, second = texts.prompts(work, 1), Texts(list(range(5000))).prompts(work, 1), texts.prompts(work, 2)
    assert first == again
    assert len(first) == work.count
    assert all(work.lengths[0] <= len(p) - work.prefix <= work.lengths[1] for p in first)
    assert first[0][:16] != second[0][:16], "a cache of prefixes must not know them"


def test_a_shared_prefix_is_shared_and_what_follows_is_not():
    work = WORKS[4]
    prompts = Texts(list(range(5000))).prompts(work, 1)
    assert len({tuple(p[:1024]) for p in prompts}) == 1
    assert len({tuple(p[1024:]) for p in prompts}) > 30


def test_a_short_text_is_repeated():
    assert all(len(p) == 2048 for p in Texts([1, 2, 3]).prompts(WORKS[3], 1))
    with pytest.raises(ValueError, match="no text"):
        Texts([])


def test_every_workload_counts_its_own_tokens():
    answer = {"seconds": 2.0, "early": 1}
    assert rate(WORKS[1], [[0]] * 64, answer) == 64 * 64 / 2
    assert rate(WORKS[3], [[0] * 2048], answer) == 1024
    assert command(WORKS[0], [[1]])["do"] == "decode"
    assert command(WORKS[2], [[1]]) == {"do": "serve", "prompts": [[1]], "out": 64, "width": 32}


def test_the_ratio_is_to_the_better_peer():
    rates = {OURS: [30.0, 31.0, 32.0], "a": [9.0, 20.0, 50.0], "b": [21.0, 22.0, 23.0]}
    ours, *peers = rows(WORKS[1], "q8", rates, {})
    assert ours.baseline == 22.0, "by the median, not by the best round"
    assert ours.ratio == pytest.approx(31 / 22)
    assert (ours.goal, ours.ok) == (1.5, False)
    assert [r.value for r in peers] == [20.0, 22.0]
    assert [r.goal for r in peers] == [None, None]


def test_a_peer_that_cannot_run_is_a_row_with_the_reason():
    made = rows(WORKS[0], "bf16", {OURS: [30.0], "a": [20.0]}, {"b": "it has no wheel"})
    assert made[0].ratio == 1.5
    assert made[0].ok
    assert made[-1] == Row("bf16, 1 stream, 64 in, 128 out: decode: b not measured: it has no wheel", 0.0, "")


def test_without_peers_there_is_no_verdict():
    (ours,) = rows(WORKS[0], "bf16", {OURS: [30.0]}, {})
    assert (ours.ratio, ours.ok) == (None, None)
    assert better({}) is None
    assert rows(WORKS[0], "bf16", {"a": [2.0]}, {OURS: "x"})[0].name.endswith(": a")


def test_goals_by_precision():
    table = {work.number: [work.goal(p) for p in PRECISIONS] for work in WORKS}
    assert table == {
        1: [1.2, 1.5, 1.5],
        2: [1.1, 1.5, 1.5],
        3: [1.05, 1.3, 1.3],
        4: [0.95, 1.3, 1.3],
        5: [2, 2, 2],
    }


def test_agreement_is_of_the_beginning():
    assert agreement({OURS: [1, 2, 3], "a": [1, 2, 4], "b": [1, 2, 3]}) == {"a": 2, "b": 3}
    assert agreement({"a": [1]}) == {}


def test_every_engine_is_first_in_turn():
    assert [rotated(["a", "b", "c"], n)[0] for n in range(4)] == ["a", "b", "c", "a"]
    assert rotated([], 3) == []


class Answering:
    """A child that answers in `seconds`; it fails when it is asked for the n-th time."""

    def __init__(self, seconds, fails_at=None):
        self.seconds, self.fails_at, self.asked = seconds, fails_at, []

    def ask(self, asked):
        self.asked.append(asked)
        if len(self.asked) == self.fails_at:
            raise ChildFailed("it died")
        return {"seconds": self.seconds, "early": 1, "tokens": [len(self.asked)]}


def test_all_get_the_same_prompts_in_turn_and_the_first_round_does_not_count():
    children = {"a": Answering(1.0), "b": Answering(2.0)}
    ticks = []
    found = turns(children, WORKS[1], Texts(range(900)), 3, ticks.append)
    assert found == Measured(rates={"a": [4096.0] * 3, "b": [2048.0] * 3}, tokens={"a": [2], "b": [2]})
    assert ticks == ["a", "b", "b", "a", "a", "b", "b", "a"]
    assert children["a"].asked == children["b"].asked
    assert len(children["a"].asked[0]["prompts"]) == 16


def test_who_fails_is_left_out_and_the_others_go_on():
    children = {"a": Answering(1.0, fails_at=2), "b": Answering(2.0)}
    found = turns(children, WORKS[0], Texts(range(900)), 2, lambda name: None)
    assert found.rates == {"b": [127 / 2.0] * 2}
    assert found.missing == {"a": "it died"}
    assert list(children) == ["b"]


def test_an_engine_that_cannot_be_loaded_says_why(tmp_path):
    with pytest.raises(ChildFailed, match=r"llama\.cpp ended with status 1: .*No module named 'llama_cpp'"):
        Child("llama.cpp", Path(sys.executable), {"model": "x", "threads": 1}, tmp_path / "log")


FAKE = """
import sys
print('{"load_seconds": 1}', flush=True)
for line in sys.stdin:
    if "die" in line:
        raise SystemExit("as it was told")
    print(line.strip(), flush=True)
"""


def test_a_child_answers_and_its_end_is_told(tmp_path, monkeypatch):
    script = tmp_path / "child.py"
    script.write_text(FAKE)
    monkeypatch.setattr("bench.engines.turns.CHILD", script)
    children = {"fake": Child("fake", Path(sys.executable), {}, tmp_path / "log")}
    with closing(children):
        assert children["fake"].config == {"load_seconds": 1}
        assert children["fake"].ask({"do": "echo"}) == {"do": "echo"}
        stat = Path(f"/proc/{children['fake']._process.pid}/stat")
        if stat.exists():
            assert stat.read_text().rsplit(")", 1)[1].split()[0] in "TtRS", "it is stopped, or about to be"
        with pytest.raises(ChildFailed, match="status 1: as it was told"):
            children["fake"].ask({"do": "die"})


def small_model(path):
    """A GGUF file of one vector and two matrices."""
    dice = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_token_list(["a", "b"])
    writer.add_string("general.name", "small")
    writer.add_file_type(3)
    matrix = dice.standard_normal((4, 64), np.float32)
    writer.add_tensor("output_norm.weight", dice.standard_normal(64, np.float32))
    writer.add_tensor("token_embd.weight", quants.quantize(matrix, Type.Q8_0), raw_dtype=Type.Q8_0)
    writer.add_tensor("blk.0.attn_q.weight", quants.quantize(matrix, Type.Q4_1), raw_dtype=Type.Q4_1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def tensors_of(path):
    return {t.name: (Type(t.tensor_type), np.array(t.data)) for t in gguf.GGUFReader(path).tensors}


@pytest.mark.parametrize("matrices", [Type.BF16, Type.F16, Type.Q8_0, Type.Q4_0])
def test_a_variant_holds_the_same_weights_in_another_type(tmp_path, matrices):
    source, target = tmp_path / "source.gguf", tmp_path / "target.gguf"
    small_model(source)
    requantise(source, target, matrices, Type.Q8_0)
    before, after = tensors_of(source), tensors_of(target)
    assert list(after) == list(before)
    assert after["token_embd.weight"][0] == Type.Q8_0
    np.testing.assert_array_equal(after["token_embd.weight"][1], before["token_embd.weight"][1])
    assert after["output_norm.weight"][0] == Type.F32
    np.testing.assert_array_equal(after["output_norm.weight"][1], before["output_norm.weight"][1])
    kind, data = after["blk.0.attn_q.weight"]
    assert kind == matrices
    values = quants.dequantize(before["blk.0.attn_q.weight"][1], Type.Q4_1)
    expected = quants.dequantize(quants.quantize(values, matrices), matrices)
    np.testing.assert_array_equal(quants.dequantize(data, kind), expected)


def test_a_variant_keeps_the_metadata(tmp_path):
    source, target = tmp_path / "source.gguf", tmp_path / "target.gguf"
    small_model(source)
    requantise(source, target, Type.F16, Type.F16)
    fields = gguf.GGUFReader(target).fields
    assert fields["general.name"].contents() == "small"
    assert fields["tokenizer.ggml.tokens"].contents() == ["a", "b"]
    assert fields["general.file_type"].contents() == 1
    assert fields["llama.block_count"].contents() == 1


def test_a_variant_is_made_once(tmp_path):
    small_model(tmp_path / "source.gguf")
    said = []
    made = gguf_variant(tmp_path / "source.gguf", tmp_path, "q8", said.append)
    assert gguf_variant(tmp_path / "source.gguf", tmp_path, "q8", said.append) == made
    assert said == ["writing demo-q8.gguf"]
    assert not list(tmp_path.glob("*.part"))


def test_the_reason_is_the_error_and_not_the_last_line():
    assert reason("Collecting x\nERROR: no matching distribution\n\n[notice] a new pip\n").startswith("ERROR: no")
    assert reason("boom\n") == "boom"
    assert reason("") == "it said nothing"


def test_what_cannot_be_installed_says_why_and_leaves_no_stamp(tmp_path):
    environment = Environment(tmp_path / "peers", "cpu", lambda text: None)
    environment.python.parent.mkdir(parents=True)
    environment.python.write_text("#!/bin/sh\necho ERROR: no wheel for you\nexit 1\n")
    environment.python.chmod(0o755)
    environment.python.with_name("pip").touch()
    with pytest.raises(NotInstalled, match="no wheel for you"):
        environment.install("openvino")
    assert not list(environment.folder.glob("*.json"))


def test_what_is_installed_is_left_alone_until_the_processor_changes(tmp_path):
    said = []
    environment = Environment(tmp_path / "peers", "cpu", said.append)
    environment.python.parent.mkdir(parents=True)
    environment.python.write_text('#!/bin/sh\necho "$@" "$CXXFLAGS" >> ' + f"{tmp_path}/calls\n")
    environment.python.chmod(0o755)
    environment.python.with_name("pip").touch()
    environment.install("llama.cpp")
    environment.install("llama.cpp")
    assert len((tmp_path / "calls").read_text().splitlines()) == 1
    assert "gcc_amx.h" in (tmp_path / "calls").read_text(), "GCC's AMX intrinsics need it"
    assert json.loads((environment.folder / "installed-llama.cpp.json").read_text())["processor"] == "cpu"
    Environment(environment.folder, "another", said.append).install("llama.cpp")
    assert "--force-reinstall" in (tmp_path / "calls").read_text().splitlines()[1]
    assert len(said) == 2


def test_a_cut_run_goes_on_where_it_was(tmp_path):
    path, settings = tmp_path / "deep" / "measured.json", {"commit": "1", "only": ("q8",)}
    measured = Measured({"a": [1.0]}, {"b": "why"}, {"a": [3]}, {"a": {"threads": 2}})
    Store(path, settings, resume=False).put("x", measured)
    again = Store(path, settings, resume=True)
    assert again.get("x") == measured
    assert again.get("y") is None
    again.put("y", measured)
    assert Store(path, settings, resume=True).get("x") == measured
    assert Store(path, {**settings, "commit": "2"}, resume=True).get("x") is None
    assert Store(path, settings, resume=False).get("x") is None


def test_a_torn_file_of_a_cut_run_is_passed_over(tmp_path):
    path = tmp_path / "measured.json"
    path.write_text('{"settings": ')
    assert Store(path, {}, resume=True).get("x") is None
