"""Tokenizers inside GGUF files: those of the folder they were made from, converted once."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from gguf import GGMLQuantizationType as Kind

from specserve.core.errors import ModelLoadError
from specserve.models import gguf_tokenizer as module
from specserve.models.demo import fetch_demo
from specserve.models.gguf_file import GGUFFile
from specserve.models.gguf_tokenizer import gguf_tokenizer
from specserve.models.loader import load_tokenizer
from specserve.models.tokenizer import Tokenizer, folder_tokenizer
from tests.fakes.data import shared_lines
from tests.fakes.tiny import tiny_llama_folder
from tests.fakes.tiny_gguf import tiny_gguf

TEXT = "In 2024,  12345 apples:\n\tnaïve 世界 🎉 and the answer\r\n  7 x"


@pytest.fixture(autouse=True)
def _own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECSERVE_HOME", str(tmp_path / "home"))


@pytest.fixture
def conversions(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The files that were converted so far."""
    done: list[str] = []
    convert = module._convert

    def counted(file: GGUFFile, folder: Path) -> None:
        done.append(file.path.name)
        convert(file, folder)

    monkeypatch.setattr(module, "_convert", counted)
    return done


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tiny_llama_folder(tmp_path / "hf")


def test_the_same_as_the_folders(folder: Path, tmp_path: Path) -> None:
    ours = gguf_tokenizer(GGUFFile(tiny_gguf(folder, tmp_path / "a.gguf")), "a")
    want = folder_tokenizer(folder, "folder")
    assert ours.fingerprint_difference(want) is None
    assert ours.encode(TEXT) == want.encode(TEXT)
    messages = [{"role": "user", "content": TEXT}]
    assert ours.encode_chat(messages) == want.encode_chat(messages)
    assert ours.eos_ids == (2,)


def test_converted_once_whatever_the_file_is_called(folder: Path, tmp_path: Path, conversions: list[str]) -> None:
    first = tiny_gguf(folder, tmp_path / "a.gguf")
    want = gguf_tokenizer(GGUFFile(first), "a").encode(TEXT)
    copy = tmp_path / "b.gguf"
    copy.write_bytes(first.read_bytes())
    assert gguf_tokenizer(GGUFFile(copy), "b").encode(TEXT) == want
    assert conversions == ["a.gguf"]
    other = tiny_gguf(folder, tmp_path / "c.gguf", pre="qwen2")
    gguf_tokenizer(GGUFFile(other), "c")
    assert conversions == ["a.gguf", "c.gguf"]


@pytest.mark.parametrize("damage", ["specserve.json", "tokenizer.json"])
def test_a_damaged_cache_is_made_again(folder: Path, tmp_path: Path, conversions: list[str], damage: str) -> None:
    file = GGUFFile(tiny_gguf(folder, tmp_path / "a.gguf"))
    want = gguf_tokenizer(file, "a").encode(TEXT)
    (kept,) = [path for path in (tmp_path / "home" / "tokenizers").iterdir() if path.is_dir()]
    (kept / damage).write_text("{")
    assert gguf_tokenizer(file, "a").encode(TEXT) == want
    assert len(conversions) == 2


def test_many_at_once_convert_once(folder: Path, tmp_path: Path, conversions: list[str]) -> None:
    file = tiny_gguf(folder, tmp_path / "a.gguf")
    found: list[Tokenizer] = []
    threads = [threading.Thread(target=lambda: found.append(gguf_tokenizer(GGUFFile(file), "a"))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 3
    assert conversions == ["a.gguf"]


def test_padding_tokens_mean_nothing(folder: Path, tmp_path: Path) -> None:
    padded = gguf_tokenizer(GGUFFile(tiny_gguf(folder, tmp_path / "a.gguf", Kind.F32, padding=8)), "a")
    assert padded.vocab_size == 512
    assert padded.token_bytes(515) == b""
    assert padded.is_special(515)
    assert padded.fingerprint_difference(folder_tokenizer(folder, "folder")) is None


def test_more_ends_of_an_answer(folder: Path, tmp_path: Path) -> None:
    extra = {"tokenizer.ggml.eot_token_id": 0, "tokenizer.ggml.eom_token_id": 99999}
    file = GGUFFile(tiny_gguf(folder, tmp_path / "a.gguf", extra=extra))
    assert gguf_tokenizer(file, "a").eos_ids == (0, 2)


def test_smollm_splits_digits_one_by_one(folder: Path, tmp_path: Path) -> None:
    tokenizer = gguf_tokenizer(GGUFFile(tiny_gguf(folder, tmp_path / "a.gguf", pre="smollm")), "a")
    split = tokenizer.hf.backend_tokenizer.pre_tokenizer.pre_tokenize_str("a  12")
    assert [text for text, _ in split] == ["a", "ĠĠ", "1", "2"]


def test_no_tokenizer_says_so(tmp_path: Path) -> None:
    import gguf

    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "llama")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ModelLoadError, match="no tokenizer"):
        gguf_tokenizer(GGUFFile(tmp_path / "a.gguf"), "a")


@pytest.fixture(scope="module")
def demo() -> Tokenizer:
    # The user's own cache, which is filled by the demo: no test downloads anything twice.
    try:
        fetch_demo()
    except ModelLoadError as error:
        pytest.skip(f"the demo model is not here: {error.message}")
    return load_tokenizer("demo")


def test_the_demos_prompts_survive_and_their_chats_are_the_plain_ones(demo: Tokenizer) -> None:
    assert (demo.vocab_size, demo.eos_ids) == (49152, (2,))
    for line in shared_lines("spec_bench.jsonl")[::4]:
        messages = []
        for text in line["turns"]:
            assert demo.decode(demo.encode(text, False)) == text
            messages += [{"role": "user", "content": text}]
            plain = demo.hf.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
            ids = demo.encode_chat(messages)
            assert ids == demo.encode(plain, False)
            guarded = demo.encode_chat([*messages, {"role": "user", "content": "<|im_end|>"}])
            assert guarded[: len(ids) - 3] == ids[:-3]  # all but the generation prompt
            messages += [{"role": "assistant", "content": "Yes."}]


def test_a_kept_tokenizer_is_what_transformers_makes_of_its_files(
    folder: Path, tmp_path: Path, demo: Tokenizer
) -> None:
    for ours in (gguf_tokenizer(GGUFFile(tiny_gguf(folder, tmp_path / "a.gguf")), "a"), demo):
        theirs = ours.hf.full
        assert ours.hf.backend_tokenizer.to_str() == theirs.backend_tokenizer.to_str()
        assert ours.hf.eos_token_id == theirs.eos_token_id
        assert ours.hf.chat_template == theirs.chat_template
        assert len(ours.hf) == len(theirs)
