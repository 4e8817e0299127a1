"""Small tokenizers made in memory: a byte-level one, and SentencePiece ones from what SentencePiece itself made."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from minserve.text.tokenizer import Tokenizer
from minserve.weights.vocabulary import GgufVocabulary, TokenType, byte_alphabet

GOLDEN = Path(__file__).parent / "golden" / "sentencepiece.json"

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
VISIBLE = ("<think>", "</think>")
MERGES = (
    *("Ġ t", "h e", "Ġt he", "i n", "Ġ w", "o r", "Ġw or", "l d", "Ġwor ld", "H e", "l l", "He ll", "Hell o"),
    *("Ċ Ċ", "Ġ Ġ", "ð Ł", "Ã ©", "t h", "in k", "th ink", "1 2"),
)


def byte_vocabulary(
    *, pre: str = "smollm", merges: Sequence[str] = MERGES, add_bos: bool = False, bos: str = "<|im_start|>"
) -> GgufVocabulary:
    """Special tokens first, then the 256 bytes, the merges' results, and two visible tags."""
    letters = [character for character, _ in sorted(byte_alphabet().items(), key=lambda item: item[1])]
    tokens = [*SPECIAL, *letters, *(merge.replace(" ", "") for merge in merges), *VISIBLE]
    types = [TokenType.NORMAL] * len(tokens)
    types[: len(SPECIAL)] = [TokenType.CONTROL] * len(SPECIAL)
    types[-len(VISIBLE) :] = [TokenType.USER_DEFINED] * len(VISIBLE)
    return GgufVocabulary(
        model="gpt2",
        pre=pre,
        tokens=tokens,
        scores=(),
        types=types,
        merges=merges,
        bos_id=SPECIAL.index(bos),
        eos_id=2,
        unk_id=None,
        end_ids=frozenset({2}),
        add_bos=add_bos,
        add_space_prefix=False,
    )


@cache
def byte_tokenizer(add_bos: bool = False, bos: str = "<|im_start|>") -> Tokenizer:
    return Tokenizer.from_source(byte_vocabulary(add_bos=add_bos, bos=bos))


@dataclass(frozen=True)
class Golden:
    """A SentencePiece model, and (text, ids, decoded) as SentencePiece itself has them."""

    vocabulary: GgufVocabulary
    cases: tuple[tuple[str, list[int], str], ...]


@cache
def sentencepiece_golden(space_prefix: bool) -> Golden:
    """Made by make_golden.py. space_prefix: with SentencePiece's dummy prefix (llama 2) or without (gemma)."""
    entries = json.loads(GOLDEN.read_text(encoding="utf-8"))
    entry = next(e for e in entries if e["add_space_prefix"] == space_prefix)
    vocabulary = GgufVocabulary(
        model="llama",
        pre="default",
        tokens=entry["tokens"],
        scores=entry["scores"],
        types=entry["types"],
        merges=(),
        bos_id=1,
        eos_id=2,
        unk_id=0,
        end_ids=frozenset({2}),
        add_bos=True,
        add_space_prefix=space_prefix,
    )
    return Golden(vocabulary, tuple((case["text"], case["ids"], case["decoded"]) for case in entry["texts"]))


@cache
def sentencepiece_tokenizer(space_prefix: bool = True) -> Tokenizer:
    return Tokenizer.from_source(sentencepiece_golden(space_prefix).vocabulary)
