"""The bytes every token stands for, read from a tokenizer.json's decoder.

Owns how decoders write spaces and bytes. It must not know the tokenizers library.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from minserve.backend.base import CheckpointError
from minserve.weights.vocabulary import byte_alphabet

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True, slots=True)
class BytesTable:
    """tokens[id]: the token's bytes, b"" where the vocabulary has a hole.

    strips_first_space: the decoder drops one space at the start of a text.
    """

    tokens: tuple[bytes, ...]
    strips_first_space: bool


def bytes_table(
    document: Mapping[str, Any], vocabulary: Mapping[str, int], size: int, added_ids: Collection[int]
) -> BytesTable:
    """Added tokens are written as they are; the others as the decoder reads them. CheckpointError: unknown decoder."""
    decoders = {step["type"]: step for step in _steps(document.get("decoder"))}
    table = [b""] * size
    if "ByteLevel" in decoders:
        foreign = dict.fromkeys(range(256), 256)  # what Latin-1 has and the alphabet has not, it shall not have either
        letters = foreign | {ord(character): byte for character, byte in byte_alphabet().items()}
        for token, i in vocabulary.items():
            try:
                table[i] = token.encode() if i in added_ids else token.translate(letters).encode("latin-1")
            except UnicodeEncodeError:  # not written in the alphabet
                table[i] = token.encode()
        return BytesTable(tuple(table), strips_first_space=False)
    metaspace = decoders.get("Metaspace")
    if metaspace is None and "ByteFallback" not in decoders and "Replace" not in decoders:
        raise CheckpointError(f"tokenizer.json: decoder {sorted(decoders)} is not supported")
    space = metaspace.get("replacement", "\u2581") if metaspace else "\u2581"
    for token, i in vocabulary.items():
        byte = _BYTE_TOKEN.fullmatch(token) if "ByteFallback" in decoders else None
        if byte:
            table[i] = bytes([int(byte[1], 16)])
        else:
            table[i] = (token if i in added_ids else token.replace(space, " ")).encode()
    strip = decoders.get("Strip", {}).get("start", 0) == 1
    return BytesTable(tuple(table), strip or (metaspace is not None and _adds_space(metaspace)))


def _steps(decoder: Any) -> list[Mapping[str, Any]]:
    """A decoder, or the decoders of a sequence."""
    if not isinstance(decoder, dict):
        return []
    steps = decoder.get("decoders", []) if decoder.get("type") == "Sequence" else [decoder]
    return [step for step in steps if isinstance(step, dict) and "type" in step]


def _adds_space(metaspace: Mapping[str, Any]) -> bool:
    return bool(metaspace.get("add_prefix_space", metaspace.get("prepend_scheme", "always") != "never"))
