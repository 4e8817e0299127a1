"""What a model's files say about its tokenizer, as plain data.

Owns the two forms a vocabulary comes in: tokenizer.json, and the arrays of a GGUF file; and the alphabet in which some
write bytes. It must not know how text is split or joined: `text/` builds a tokenizer from these.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum


class TokenType(IntEnum):
    """ggml's token types (llama.h). CONTROL tokens are special; USER_DEFINED ones are matched whole but are text."""

    UNDEFINED = 0
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True, slots=True)
class TokenizerJson:
    """data: the bytes of tokenizer.json. The tokens are texts, from tokenizer_config.json, where it names them.

    end_ids: what generation_config.json (or config.json) says ends a generation.
    add_bos: whether plain prompts start with the bos token; None: tokenizer.json's post-processor decides.
    """

    data: bytes
    bos_token: str | None = None
    eos_token: str | None = None
    add_bos: bool | None = None
    end_ids: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class GgufVocabulary:
    """The `tokenizer.ggml.*` metadata. tokens, scores and types are parallel lists; a token's id is its index.

    model: "gpt2" (byte-level BPE, with merges and a pre-tokenizer's name in `pre`) or "llama" (SentencePiece BPE:
    scores instead of merges, "▁" for a space, <0x0A> byte tokens). end_ids: what the file says ends a turn or a text.
    add_space_prefix: a "▁" goes before the text. Ids are inside the vocabulary or None.
    """

    model: str
    pre: str
    tokens: Sequence[str]
    scores: Sequence[float]  # empty if the file has none
    types: Sequence[int]  # TokenType; empty if the file has none
    merges: Sequence[str]  # "left right", best first; empty if the file has none
    bos_id: int | None
    eos_id: int | None
    unk_id: int | None
    end_ids: frozenset[int]
    add_bos: bool
    add_space_prefix: bool


def byte_alphabet() -> dict[str, int]:
    """Character -> byte of byte-level BPE (Radford et al. 2019): printable bytes are themselves, others U+0100 up."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in set(printable)]
    return alphabet | {chr(256 + i): byte for i, byte in enumerate(others)}
