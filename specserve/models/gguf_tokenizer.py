"""The tokenizer inside a GGUF file, converted by transformers once (seconds) and kept in the cache."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import pre_tokenizers

from specserve.core.errors import ModelLoadError
from specserve.core.imports import TRANSFORMERS
from specserve.models.gguf_file import GGUFFile
from specserve.models.home import home, locked, remove, remove_leftovers
from specserve.models.tokenizer import Tokenizer

# Raised whenever the conversion changes.
_VERSION = 1
_EXTRA = "specserve.json"
_UNUSED = 5  # ggml's token type of padding
_EOS_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
# Vocabularies whose digits are split one by one before GPT-2's pattern applies; transformers does not know them.
_SINGLE_DIGITS = ("smollm", "starcoder", "refact", "command-r")


class KeptTokenizer:
    """A converted tokenizer in the cache, as transformers' own in all that is asked of it. What most processes ask
    needs no transformers, which takes longer to import than a packed model to load; the rest fetches it.

    Attributes:
        backend_tokenizer: of the tokenizers library.
        chat_template: None where the model has none.
        eos_token_id: None where the model has none.

    Args:
        folder: as `save_pretrained` left it.
    """

    is_fast = True

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.backend_tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        eos = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8")).get("eos_token")
        self.eos_token_id = self.backend_tokenizer.token_to_id(eos) if eos is not None else None
        template = folder / "chat_template.jinja"
        self.chat_template = template.read_text(encoding="utf-8") if template.exists() else None

    @cached_property
    def full(self) -> Any:
        """transformers' own; fetched once."""
        with TRANSFORMERS:
            from transformers import PreTrainedTokenizerFast

            return PreTrainedTokenizerFast.from_pretrained(self._folder, local_files_only=True)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.full, name)

    def __len__(self) -> int:
        return len(self.full)


def gguf_tokenizer(file: GGUFFile, name: str) -> Tokenizer:
    """The tokenizer of a GGUF file, with its chat template.

    Raises:
        ModelLoadError: the file has no tokenizer, or one of a kind that is not supported.
    """
    key = hashlib.sha256(f"{_VERSION} {importlib.metadata.version('transformers')} {tokenizers.__version__}\n".encode())
    key.update(file.header())
    folder = home() / "tokenizers" / key.hexdigest()[:32]
    found = _load(folder, name)
    if found is not None:
        return found
    with locked(folder.parent, folder.name):
        found = _load(folder, name)
        if found is None:
            remove_leftovers(folder.parent, f"part-{folder.name}")
            remove(folder)
            part = folder.parent / f"part-{folder.name}"
            _convert(file, part)
            part.rename(folder)
            found = _load(folder, name)
    if found is None:
        raise ModelLoadError(
            f"tokenizer: the converted one in {folder} cannot be read; delete that folder", param="model"
        )
    return found


def _load(folder: Path, name: str) -> Tokenizer | None:
    try:
        extra = json.loads((folder / _EXTRA).read_text(encoding="utf-8"))
        hf = KeptTokenizer(folder)
        eos_ids, unused_ids = list(extra["eos_ids"]), list(extra["unused_ids"])
    except FileNotFoundError:
        return None
    except Exception:  # a damaged cache is made again, whatever the readers make of it
        return None
    return Tokenizer(hf, name=name, eos_ids=eos_ids, unused_ids=unused_ids)


def _convert(file: GGUFFile, folder: Path) -> None:
    hf = _converted(file)
    hf.save_pretrained(folder)
    kinds = file.metadata.get("tokenizer.ggml.token_type")
    unused = [i for i, kind in enumerate(kinds) if kind == _UNUSED] if isinstance(kinds, list) else []
    eos = [file.metadata.get(f"tokenizer.ggml.{key}") for key in _EOS_KEYS]
    extra = {"eos_ids": [i for i in eos if type(i) is int], "unused_ids": unused}
    (folder / _EXTRA).write_text(json.dumps(extra), encoding="utf-8")


def _converted(file: GGUFFile) -> Any:
    if "tokenizer.ggml.tokens" not in file.metadata:
        raise ModelLoadError(f"tokenizer: {file.path.name} has no tokenizer in it", param="model")
    # Imported here: it takes longer than a packed model to load.
    with TRANSFORMERS:
        from transformers import AutoTokenizer, PreTrainedTokenizerFast

    try:
        hf = AutoTokenizer.from_pretrained(file.path.parent, gguf_file=file.path.name, local_files_only=True)
    except Exception as error:  # transformers raises nearly anything for kinds it does not know
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ModelLoadError(
            f"tokenizer: cannot convert the one in {file.path.name}: {reason}", param="model"
        ) from None
    backend = hf.backend_tokenizer
    if file.metadata.get("tokenizer.ggml.pre") in _SINGLE_DIGITS:
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=hf.bos_token,
        eos_token=hf.eos_token,
        unk_token=hf.unk_token,
        pad_token=hf.pad_token,
        chat_template=hf.chat_template or file.metadata.get("tokenizer.chat_template"),
        clean_up_tokenization_spaces=False,
    )
