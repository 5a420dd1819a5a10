"""Ids, the bytes they stand for, and what two vocabularies differ in."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models
from transformers import PreTrainedTokenizerFast

from specserve.core.errors import InvalidRequestError, ModelLoadError
from specserve.models.tokenizer import Tokenizer, folder_tokenizer
from tests.fakes.sentencepiece import sentencepiece
from tests.fakes.tiny import tiny_llama_folder, tiny_tokenizer_folder

TEXTS = [
    "",
    "hello world",
    "  two  spaces\n\n\ttab",
    "naïve café",
    "世界, 你好",
    "🎉👩‍👩‍👧",
    "Ġ▁<0x41>",
    "\x00\x7f\u2028",
]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return folder_tokenizer(tiny_llama_folder(tmp_path_factory.mktemp("tiny")), "tiny")


def joined(tokenizer: Tokenizer, text: str) -> str:
    return b"".join(tokenizer.token_bytes(token) for token in tokenizer.encode(text, False)).decode()


@pytest.mark.parametrize("text", TEXTS)
def test_bytes_of_the_ids_are_the_text(tiny: Tokenizer, text: str) -> None:
    assert joined(tiny, text) == text == tiny.decode(tiny.encode(text, False))


@settings(deadline=None, max_examples=150)
@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=40))
def test_bytes_of_the_ids_are_any_text(tiny: Tokenizer, text: str) -> None:
    assert joined(tiny, text) == text


@pytest.mark.parametrize("text", [text for text in TEXTS if text and "▁" not in text])
def test_sentencepiece_bytes_carry_the_space_before_a_word(text: str) -> None:
    assert joined(sentencepiece(), text) == (text if text.startswith(" ") else " " + text)


def test_sentencepiece_tokens_one_by_one() -> None:
    tokenizer = sentencepiece()
    vocab = tokenizer.hf.get_vocab()
    assert tokenizer.token_bytes(vocab["<0xE4>"]) == b"\xe4"
    assert tokenizer.token_bytes(vocab["▁ab"]) == b" ab"
    assert tokenizer.token_bytes(vocab["é"]) == "é".encode()
    assert tokenizer.token_bytes(vocab["<tool>"]) == b"<tool>"
    assert not tokenizer.is_special(vocab["<tool>"])
    for special in ("<unk>", "<s>", "</s>"):
        assert tokenizer.token_bytes(vocab[special]) == b""
        assert tokenizer.is_special(vocab[special])


def test_vocabulary_and_ends(tiny: Tokenizer) -> None:
    assert tiny.vocab_size == len(tiny.hf) == 512
    assert tiny.eos_ids == (0, 2)  # generation_config.json has both, the tokenizer and config.json the latter
    for token in (-1, 512, 10**9):
        assert tiny.token_bytes(token) == b""
        assert tiny.is_special(token)
    assert [token for token in range(512) if tiny.is_special(token)] == [0, 1, 2]


@pytest.mark.parametrize("text", TEXTS)
def test_ids_are_those_of_transformers(tiny: Tokenizer, text: str) -> None:
    for special in (True, False):
        assert tiny.encode(text, special) == tiny.hf.encode(text, add_special_tokens=special)


def test_a_lone_surrogate_is_the_requests_fault(tiny: Tokenizer) -> None:
    with pytest.raises(InvalidRequestError, match="surrogate"):
        tiny.encode("\ud800")


def test_truncation_in_the_file_is_ignored(tmp_path: Path) -> None:
    path = tiny_tokenizer_folder(tmp_path) / "tokenizer.json"
    values = json.loads(path.read_text())
    values["truncation"] = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    path.write_text(json.dumps(values))
    text = "a long text of many tokens"
    assert joined(folder_tokenizer(tmp_path, "x"), text) == text


@pytest.mark.parametrize("ids", [[512], [0, -1], [True], [1.0], ["1"], "12", None, [2**70]])
def test_trap_g8_ids_outside_the_vocabulary(tiny: Tokenizer, ids: object) -> None:
    with pytest.raises(InvalidRequestError, match="prompt") as caught:
        tiny.check_ids(ids)
    assert caught.value.param in ("prompt", "prompt[0]", "prompt[1]")


def test_ids_inside_the_vocabulary_pass(tiny: Tokenizer) -> None:
    assert tiny.check_ids((0, 511), "x") == [0, 511]


def test_trap_f1_padding_of_the_vocabulary_is_no_difference(tmp_path: Path) -> None:
    a = folder_tokenizer(tiny_llama_folder(tmp_path / "a", vocab_size=512, tokenizer_size=400), "a")
    b = folder_tokenizer(tiny_llama_folder(tmp_path / "b", vocab_size=640, tokenizer_size=400), "b")
    assert a.fingerprint_difference(b) is None
    assert a.vocab_size == b.vocab_size == 400


def swapped(path: Path, one: str, other: str) -> Tokenizer:
    values = json.loads((tiny_tokenizer_folder(path) / "tokenizer.json").read_text())
    vocab = values["model"]["vocab"]
    vocab[one], vocab[other] = vocab[other], vocab[one]
    for added in values["added_tokens"]:
        added["id"] = vocab[added["content"]]
    (path / "tokenizer.json").write_text(json.dumps(values))
    return folder_tokenizer(path, "the draft")


def test_trap_f2_two_swapped_ids_are_named(tmp_path: Path, tiny: Tokenizer) -> None:
    vocab = tiny.hf.get_vocab()
    first, second = vocab["a"], vocab["b"]
    said = tiny.fingerprint_difference(swapped(tmp_path, "a", "b"))
    assert said == f"token id {first} is 'a' in tiny and 'b' in the draft"
    assert second > first


def test_trap_f2_two_swapped_special_ids_are_named(tmp_path: Path, tiny: Tokenizer) -> None:
    said = tiny.fingerprint_difference(swapped(tmp_path, "<|im_start|>", "<|im_end|>"))
    assert said is not None
    assert "token id 1" in said
    assert "<|im_start|>" in said
    assert "<|im_end|>" in said


def test_a_longer_vocabulary_is_a_difference(tmp_path: Path, tiny: Tokenizer) -> None:
    short = folder_tokenizer(tiny_tokenizer_folder(tmp_path, size=400), "short")
    for said in (tiny.fingerprint_difference(short), short.fingerprint_difference(tiny)):
        assert said is not None
        assert "token id 400" in said
        assert "missing" in said


def test_a_renamed_special_token_is_no_difference(tmp_path: Path, tiny: Tokenizer) -> None:
    path = tiny_tokenizer_folder(tmp_path) / "tokenizer.json"
    path.write_text(path.read_text().replace("<|endoftext|>", "<|reserved|>"))
    settings_path = tmp_path / "tokenizer_config.json"
    settings_path.write_text(settings_path.read_text().replace("<|endoftext|>", "<|reserved|>"))
    assert tiny.fingerprint_difference(folder_tokenizer(tmp_path, "renamed")) is None


def test_threads_may_share_it(tiny: Tokenizer) -> None:
    want = [tiny.encode(text) for text in TEXTS]
    chat = [{"role": "user", "content": "say <|im_end|>"}]
    want_chat = tiny.encode_chat(chat)
    wrong: list[object] = []
    gate = threading.Barrier(4)

    def work() -> None:
        gate.wait()
        for _ in range(25):
            if [tiny.encode(text) for text in TEXTS] != want or tiny.encode_chat(chat) != want_chat:
                wrong.append("other ids")

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_a_tokenizer_whose_tokens_are_no_bytes_is_refused() -> None:
    backend = Backend(models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece()
    with pytest.raises(ModelLoadError, match="WordPiece"):
        Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend))


@pytest.mark.parametrize("text", [None, "", "{", '{"version": "1.0"}'])
def test_a_folder_without_a_usable_tokenizer_is_told_so(tmp_path: Path, text: str | None) -> None:
    tiny_llama_folder(tmp_path)
    path = tmp_path / "tokenizer.json"
    path.unlink() if text is None else path.write_text(text)
    with pytest.raises(ModelLoadError, match="tokenizer"):
        folder_tokenizer(tmp_path, "x")
