"""A small SentencePiece-style tokenizer: U+2581 for a space, <0xNN> for bytes, one added token that is not special."""

from __future__ import annotations

from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from specserve.models.tokenizer import Tokenizer


def sentencepiece() -> Tokenizer:
    pieces = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        "a",
        "b",
        "▁a",
        "ab",
        "▁ab",
        "é",
    ]
    vocab = {text: i for i, text in enumerate(pieces)}
    merges = [("▁", "a"), ("a", "b"), ("▁", "ab")]
    backend = Backend(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens([AddedToken(text, special=True) for text in pieces[:3]])
    backend.add_tokens([AddedToken("<tool>", special=False)])
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>"), name="sp")
