"""A GGUF file's vocabulary as a tokenizer.json document, so that there is one way to build a tokenizer.

Owns which regular expressions split text for each `tokenizer.ggml.pre` name, and how SentencePiece scores become
merges. Pure data in, pure data out: it must not know the tokenizers library.

The patterns are those of the models' own tokenizer.json files. Facts checked against llama.cpp's llama-vocab.cpp.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from minserve.backend.base import CheckpointError
from minserve.weights.vocabulary import GgufVocabulary, TokenType

Document = dict[str, Any]

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_TAIL}"
_QWEN2 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_TAIL}"
_QWEN35 = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TEKKEN = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}|{_CASED_TAIL}"
_GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTIONS}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTIONS}?|\p{{N}}{{1,3}}|{_CASED_TAIL}"
)
_DEEPSEEK3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CJK = "[一-龥\u3040-ゟ゠-ヿ]+"

_GPT2_SPLIT = (_GPT2,)
_DIGIT_GPT2 = (r"\p{N}", _GPT2)
# Each expression splits what the ones before it left, matches and gaps alike becoming pieces of their own.
PRE_TOKENIZERS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "default": (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"),
        **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo", "exaone4", "modern-bert"), _GPT2_SPLIT),
        **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone"), _DIGIT_GPT2),
        **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "lfm2"), (_LLAMA3,)),
        **dict.fromkeys(("smaug-bpe", "dbrx", "glm4", "chatglm-bpe"), (_LLAMA3,)),
        **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "stablelm2", "megrez"), (_QWEN2,)),
        "qwen35": (_QWEN35,),
        "tekken": (_TEKKEN,),
        **dict.fromkeys(("gpt-4o", "llama4"), (_GPT4O,)),
        "falcon": (r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]"),
        "deepseek-coder": (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", r"\p{N}"),
        "deepseek-v3": (r"\p{N}{1,3}", _CJK, _DEEPSEEK3),
    }
)
# Words that are tokens themselves are taken whole, without applying merges.
_IGNORE_MERGES = frozenset({"llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "lfm2", "tekken"})
_NFC = frozenset({"qwen2", "deepseek-r1-qwen", "stablelm2", "megrez", "qwen35", "command-r"})

_SPACE = "\u2581"  # SentencePiece writes a space as ▁


def gguf_document(vocabulary: GgufVocabulary) -> Document:
    """The tokenizer.json document of a GGUF vocabulary. CheckpointError names what can't be rebuilt."""
    tokens = vocabulary.tokens
    ids = {token: i for i, token in enumerate(tokens)}
    if len(ids) != len(tokens):
        raise CheckpointError(f"tokenizer.ggml.tokens: {len(tokens) - len(ids)} duplicate tokens")
    for name, values in (("scores", vocabulary.scores), ("token_type", vocabulary.types)):
        if values and len(values) != len(tokens):
            raise CheckpointError(f"tokenizer.ggml.{name}: {len(values)} values for {len(tokens)} tokens")
    if vocabulary.model == "gpt2":
        document = _byte_level(vocabulary, ids)
    elif vocabulary.model == "llama":
        document = _sentencepiece(vocabulary, ids)
    else:
        raise CheckpointError(f"tokenizer.ggml.model {vocabulary.model!r} is not supported; supported: gpt2, llama")
    document |= {"version": "1.0", "truncation": None, "padding": None, "post_processor": None}
    document["added_tokens"] = [
        {
            "id": i,
            "content": tokens[i],
            "special": kind != TokenType.USER_DEFINED,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
        }
        for i, kind in enumerate(vocabulary.types)
        if kind in (TokenType.CONTROL, TokenType.USER_DEFINED, TokenType.UNKNOWN)
    ]
    return document


def _byte_level(vocabulary: GgufVocabulary, ids: Mapping[str, int]) -> Document:
    """GPT-2's scheme (Radford et al. 2019): bytes written as printable characters, merges by rank."""
    pre = vocabulary.pre or "default"
    if pre not in PRE_TOKENIZERS:
        known = ", ".join(sorted(PRE_TOKENIZERS))
        raise CheckpointError(f"tokenizer.ggml.pre {pre!r} is not supported; supported: {known}")
    if not vocabulary.merges:
        raise CheckpointError("tokenizer.ggml.merges is missing")
    splits = [
        {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        for pattern in PRE_TOKENIZERS[pre]
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {
        "normalizer": {"type": "NFC"} if pre in _NFC else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*splits, byte_level]},
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "ignore_merges": pre in _IGNORE_MERGES,
            "vocab": ids,
            "merges": [_pair(merge) for merge in vocabulary.merges],
        },
    }


def _pair(merge: str) -> list[str]:
    left, space, right = merge.partition(" ")
    if not (left and space and right):
        raise CheckpointError(f"tokenizer.ggml.merges: {merge[:40]!r} is not a pair")
    return [left, right]


def _sentencepiece(vocabulary: GgufVocabulary, ids: Mapping[str, int]) -> Document:
    """SentencePiece's BPE (Kudo, Richardson 2018) with byte fallback: no pre-tokenizer, spaces are part of tokens."""
    if not vocabulary.merges and not vocabulary.scores:
        raise CheckpointError("tokenizer.ggml.scores and merges are missing")
    merges = [_pair(m) for m in vocabulary.merges] or _merges(vocabulary, ids)
    to_space = {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "}
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    prepend = [{"type": "Prepend", "prepend": _SPACE}] if vocabulary.add_space_prefix else []
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if vocabulary.add_space_prefix else []
    return {
        "normalizer": {"type": "Sequence", "normalizers": [*prepend, replace]},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": [to_space, {"type": "ByteFallback"}, {"type": "Fuse"}, *strip]},
        "model": {
            "type": "BPE",
            "unk_token": None if vocabulary.unk_id is None else vocabulary.tokens[vocabulary.unk_id],
            "fuse_unk": True,
            "byte_fallback": True,
            "vocab": ids,
            "merges": merges,
        },
    }


_MAX_PIECE = 256  # characters: a longer token is not split into merges, so that building stays linear


def _merges(vocabulary: GgufVocabulary, ids: Mapping[str, int]) -> list[list[str]]:
    """Every way to make a token from two others, ordered by the token's score, best first.

    SentencePiece merges the adjacent pair whose joint token has the best score, which is what ranks in that order do.
    """
    tokens = vocabulary.tokens
    types = vocabulary.types or [TokenType.NORMAL] * len(tokens)
    textual = (TokenType.NORMAL, TokenType.USER_DEFINED)
    order = sorted(range(len(tokens)), key=lambda i: -vocabulary.scores[i])
    merges: list[list[str]] = []
    for i in order:
        token = tokens[i]
        if types[i] not in textual or len(token) > _MAX_PIECE:
            continue
        splits = [(token[:k], token[k:]) for k in range(1, len(token))]
        pairs = [pair for pair in splits if pair[0] in ids and pair[1] in ids]
        pairs.sort(key=lambda pair: (ids[pair[0]], ids[pair[1]]))
        merges.extend([left, right] for left, right in pairs)
    return merges
