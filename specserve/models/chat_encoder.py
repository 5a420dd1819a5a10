"""A conversation to token ids, with the texts in it kept apart from the template's special tokens."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import jinja2
import tokenizers

from specserve.core.errors import InvalidRequestError
from specserve.core.imports import TRANSFORMERS
from specserve.models.chat import checked_messages

# Arguments of transformers' apply_chat_template that are not variables of the template.
_RESERVED = ("conversation", "chat_template", "tokenize", "return_tensors", "return_dict", "padding", "truncation")


class ChatEncoder:
    """Renders a fast tokenizer's chat template and encodes it.

    The texts of messages and tools are data. Where one contains the text of a special token (`<|im_end|>`), that
    becomes the ordinary tokens of its characters, so no message can end its turn or open another role's. Every other
    conversation gets exactly the ids of rendering the template and encoding the whole.
    """

    def __init__(self, hf: Any) -> None:
        self._hf = hf
        self._backend: tokenizers.Tokenizer = hf.backend_tokenizer
        added = self._backend.get_added_tokens_decoder()
        self._special = {token: each.content for token, each in added.items() if each.special}
        self._guard = Guard(list(self._special.values()))

    def prepare(self) -> None:
        """Fetch the tokenizer's own way to render templates."""
        if self._hf.chat_template:
            _ = self._hf.apply_chat_template

    def encode(self, messages: Any, tools: Any, add_generation_prompt: bool, options: Mapping[str, Any]) -> list[int]:
        """See Tokenizer.encode_chat."""
        for name in options:
            if name in _RESERVED:
                raise InvalidRequestError(f"{name}: is not a variable of a chat template", param=name)
        values = {"messages": checked_messages(messages), "tools": list(tools) if tools else None, "options": options}
        if not self._guard.tainted(values):
            text = self._render(values, add_generation_prompt)
            return list(self._backend.encode(text, add_special_tokens=False).ids)
        sealed, restore, has_marks = self._guard.seal(values)
        return self._encode_sealed(self._render(sealed, add_generation_prompt), restore, has_marks)

    def _render(self, values: Mapping[str, Any], add_generation_prompt: bool) -> str:
        if not self._hf.chat_template:
            raise InvalidRequestError(
                "messages: this model has no chat template; give a text prompt instead", param="messages"
            )
        try:
            with TRANSFORMERS:  # which may be imported for the first time by this
                text = self._hf.apply_chat_template(
                    values["messages"],
                    tools=values["tools"],
                    add_generation_prompt=add_generation_prompt,
                    tokenize=False,
                    **values["options"],
                )
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
            # A template's own words ("roles must alternate") are about its rules, not about the texts.
            reason = str(error) if isinstance(error, jinja2.TemplateError) else type(error).__name__
            raise InvalidRequestError(
                f"messages: the model's chat template refuses this conversation ({reason})", param="messages"
            ) from None
        return str(text)

    def _encode_sealed(self, text: str, restore: Callable[[str], str], has_marks: Callable[[str], bool]) -> list[int]:
        """Encode between the special tokens that the template wrote; pieces with marks know no special tokens."""
        encoding = self._backend.encode(text, add_special_tokens=False)
        ids: list[int] = []
        piece: list[int] = []
        begin = 0

        def flush(end: int) -> None:
            if has_marks(text[begin:end]):
                plain = self._plain_first if begin == 0 else self._plain_later
                piece[:] = plain.encode(restore(text[begin:end]), add_special_tokens=False).ids
            ids.extend(piece)
            piece.clear()

        for token, (first, last) in zip(encoding.ids, encoding.offsets, strict=True):
            if token in self._special:
                flush(first)
                ids.append(token)
                begin = last
            else:
                piece.append(token)
        flush(len(text))
        return ids

    @cached_property
    def _plain_first(self) -> tokenizers.Tokenizer:
        """The tokenizer without its special tokens."""
        return _without_specials(json.loads(self._backend.to_str()))

    @cached_property
    def _plain_later(self) -> tokenizers.Tokenizer:
        """The same for a piece after a special token: SentencePiece's dummy space belongs to the first piece only."""
        values = json.loads(self._backend.to_str())
        return _without_specials(values | {"pre_tokenizer": _never_prepend(values["pre_tokenizer"])})


def _without_specials(values: Mapping[str, Any]) -> tokenizers.Tokenizer:
    plain = tokenizers.Tokenizer.from_str(json.dumps(values))
    plain.encode_special_tokens = True
    return plain


def _never_prepend(part: Any) -> Any:
    if isinstance(part, list):
        return [_never_prepend(inner) for inner in part]
    if not isinstance(part, dict):
        return part
    never = {"prepend_scheme": "never"} if part.get("prepend_scheme") == "first" else {}
    return {key: _never_prepend(inner) for key, inner in part.items()} | never


class Guard:
    """Takes the texts of special tokens out of untrusted values, and puts them back after the template was rendered.

    Each occurrence becomes a mark of letters and digits that no template treats in a special way, and that cannot be
    guessed, so a rendered text's special tokens are exactly those that the template wrote.
    """

    def __init__(self, special_texts: Sequence[str]) -> None:
        longest_first = sorted(special_texts, key=len, reverse=True)
        self._special = re.compile("|".join(re.escape(text) for text in longest_first)) if longest_first else None

    def tainted(self, value: Any) -> bool:
        """Whether any text inside the value, keys included, has the text of a special token."""
        if self._special is None:
            return False
        special, found = self._special, False

        def look(text: str) -> str:
            nonlocal found
            found = found or special.search(text) is not None
            return text

        _map_texts(value, look)
        return found

    def seal(self, value: Any) -> tuple[Any, Callable[[str], str], Callable[[str], bool]]:
        """(the value with marks, puts the texts back into a text, tells whether a text has marks)."""
        assert self._special is not None
        special, nonce = self._special, f"specserve{secrets.token_hex(12)}"
        texts: list[str] = []

        def mark(found: re.Match[str]) -> str:
            texts.append(found[0])
            return f"{nonce}n{len(texts) - 1}x"

        marks = re.compile(nonce + r"n(\d+)x")
        return (
            _map_texts(value, lambda text: special.sub(mark, text)),
            lambda text: marks.sub(lambda found: texts[int(found[1])], text),
            lambda text: nonce in text,
        )


def _map_texts(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {_map_texts(key, change): _map_texts(inner, change) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_map_texts(inner, change) for inner in value]
    return value
