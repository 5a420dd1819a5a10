"""Tokenizer: text and chat messages to ids, ids to the exact bytes they stand for. Safe to use from many threads."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from specserve.core.errors import InvalidRequestError, ModelLoadError
from specserve.core.imports import TRANSFORMERS
from specserve.models.chat import check_text
from specserve.models.chat_encoder import ChatEncoder
from specserve.models.token_bytes import byte_table


class Tokenizer:
    """A fast tokenizer as the engine sees it.

    Texts in chat messages are data: the text of a special token in them (`<|im_end|>`) becomes the ordinary tokens of
    its characters, never the special token. In a raw prompt given to `encode` it does become the special token.

    Attributes:
        hf: the underlying transformers tokenizer.
        name: as the user named the model.
        vocab_size: ids from 0 that have a meaning; the model's logits may be wider.
        eos_ids: ids that end an answer, ascending.
    """

    def __init__(self, hf: Any, *, name: str = "", eos_ids: Iterable[int] = (), unused_ids: Iterable[int] = ()) -> None:
        if not getattr(hf, "is_fast", False):
            raise ModelLoadError(
                f"tokenizer: {type(hf).__name__} has no fast form (tokenizer.json), which is needed", param="model"
            )
        self.hf = hf
        self.name = name
        self._backend: tokenizers.Tokenizer = hf.backend_tokenizer
        # Some files ask for these. Set once, here: changing them while another thread encodes is an error.
        self._backend.no_truncation()
        self._backend.no_padding()
        self._chat = ChatEncoder(hf)
        unused = frozenset(unused_ids)
        self._table = byte_table(self._backend, unused)
        while self._table and len(self._table) - 1 in unused:
            self._table.pop()
        self.vocab_size = len(self._table)
        ids = {*eos_ids, *([hf.eos_token_id] if hf.eos_token_id is not None else [])}
        self.eos_ids: tuple[int, ...] = tuple(sorted(i for i in ids if 0 <= i < self.vocab_size))

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of a text; `add_special_tokens` adds what the model wants around a prompt (BOS).

        Raises:
            InvalidRequestError: the text has a lone surrogate.
        """
        check_text(text, "prompt")
        return list(self._backend.encode(text, add_special_tokens=add_special_tokens).ids)

    def prepare_chat(self) -> None:
        """Import what chat templates need, which the first conversation would wait for otherwise."""
        self._chat.prepare()

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **options: Any,
    ) -> list[int]:
        """Ids of a conversation under the model's chat template.

        Args:
            messages: objects with role and content (a text or a list of text parts).
            tools: function descriptions for the template.
            options: further variables of the template, such as enable_thinking.

        Raises:
            InvalidRequestError: names the field at fault; or there is no template, or it refuses the conversation.
        """
        return self._chat.encode(messages, tools, add_generation_prompt, options)

    def token_bytes(self, token: int) -> bytes:
        """The exact bytes the token stands for; b"" for special tokens and ids without one."""
        return (self._table[token] or b"") if 0 <= token < self.vocab_size else b""

    def is_special(self, token: int) -> bool:
        """Whether the id is a special token or stands for nothing."""
        return not 0 <= token < self.vocab_size or self._table[token] is None

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids without special tokens; bytes that are no UTF-8 become U+FFFD."""
        return b"".join(self.token_bytes(token) for token in ids).decode("utf-8", "replace")

    def check_ids(self, ids: Any, name: str = "prompt") -> list[int]:
        """The ids as a list. Raises InvalidRequestError that names the first that is no id of this vocabulary."""
        if not isinstance(ids, (list, tuple)):
            raise InvalidRequestError(f"{name}: must be a list of token ids", param=name)
        for i, token in enumerate(ids):
            if type(token) is not int or not 0 <= token < self.vocab_size:
                where = f"{name}[{i}]"
                raise InvalidRequestError(
                    f"{where}: must be a token id from 0 to {self.vocab_size - 1} of this model's vocabulary",
                    param=where,
                )
        return list(ids)

    def fingerprint_difference(self, other: Tokenizer) -> str | None:
        """The first id that means different things here and in `other`, in words; None where all mean the same.

        Padding of the vocabulary is no difference, nor is a special token's name, unless that name is another id's.
        """
        for token in range(max(self.vocab_size, other.vocab_size)):
            mine, theirs = self._meaning(token), other._meaning(token)
            if mine == theirs or (self._is_free(token) and other._is_free(token)):
                continue
            renamed = mine[0] is None and theirs[0] is None
            if renamed and other._id_of(mine[1]) is None and self._id_of(theirs[1]) is None:
                continue
            return (
                f"token id {token} is {self._describe(token)} in {self.name or 'the first'} and "
                f"{other._describe(token)} in {other.name or 'the second'}"
            )
        return None

    def _meaning(self, token: int) -> tuple[bytes | None, str | None]:
        value = self._table[token] if token < self.vocab_size else None
        return value, self._backend.id_to_token(token) if value is None and token < self.vocab_size else None

    def _is_free(self, token: int) -> bool:
        return self._meaning(token) == (None, None)

    def _id_of(self, text: str | None) -> int | None:
        return self._backend.token_to_id(text) if text is not None else None

    def _describe(self, token: int) -> str:
        value, text = self._meaning(token)
        if value is not None:
            return repr(value.decode("utf-8", "backslashreplace"))
        return f"the special token {text}" if text is not None else "missing"


def folder_tokenizer(folder: Path, name: str) -> Tokenizer:
    """The tokenizer of a folder in Hugging Face format.

    Raises:
        ModelLoadError: there is none, or it cannot be read.
    """
    # Imported here: the Auto classes take a quarter of a second, as long as a packed model to load.
    with TRANSFORMERS:
        from transformers import AutoTokenizer

    try:
        hf = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers and tokenizers raise nearly anything for damaged files
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ModelLoadError(f"tokenizer: cannot read the one in {folder}: {reason}", param="model") from None
    eos_ids = [*_eos_in(folder / "generation_config.json"), *_eos_in(folder / "config.json")]
    return Tokenizer(hf, name=name, eos_ids=eos_ids)


def _eos_in(path: Path) -> list[int]:
    try:
        found = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
    except (OSError, ValueError, AttributeError):
        return []
    return [i for i in (found if isinstance(found, list) else [found]) if type(i) is int]
