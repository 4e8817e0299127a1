"""Text to token ids and back. The only module that imports the tokenizers library.

Owns the rule that ordinary text never yields a special token: the library is always run with special tokens switched
off, and where a caller allows them (a chat template's own output) this module splits the text at them itself. Owns the
bytes of every token, so that decoding is joining bytes. It must not know templates, requests or streams.

Objects are immutable after construction and may be used from several threads.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import tokenizers
from tokenizers import AddedToken
from tokenizers.models import WordLevel

from minserve.backend.base import CheckpointError
from minserve.request import RequestError
from minserve.text.rebuild import gguf_document
from minserve.text.vocabulary_bytes import BytesTable, bytes_table
from minserve.weights.vocabulary import GgufVocabulary, TokenizerJson

MAX_JSON_BYTES = 256 * 1024 * 1024
MAX_TOKEN_ID = 4_000_000

# Tokens that end a turn or a text in the model families we know, whatever the files say about eos. Not </s>: where it
# ends a text the files say so, and in gemma's vocabulary it is an HTML tag.
_END_TOKENS = frozenset({"<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|end|>"})
_END_TOKENS |= {"<end_of_turn>", "<eos>", "<|return|>", "<EOT>", "<｜end▁of▁sentence｜>", "<|END_OF_TURN_TOKEN|>"}
# Turn markers that some files forget to mark as special: user text must not become one of them either.
_STARTS = frozenset({"<|im_start|>", "<start_of_turn>", "<|start_header_id|>", "<|end_header_id|>", "<bos>"})
# Tokens that some files mark as special although they delimit text that readers must see.
_VISIBLE = frozenset({"<think>", "</think>", "<tool_call>", "</tool_call>"})

Parts = list[tuple[str, int | None]]  # a special token and its id, or a plain text and None


class Tokenizer:
    """One model's vocabulary. Build it with `from_source`.

    vocab_size: largest id + 1 (a model's embedding may have more rows). bos_id, eos_id: None if there is none.
    add_bos: whether a plain text starts with bos. end_ids: tokens that end a generation. special_ids: tokens that are
    never text. special_texts: special token -> id.
    """

    def __init__(
        self,
        document: dict[str, Any],
        bos: str | int | None = None,
        eos: str | int | None = None,
        add_bos: bool | None = None,
        end_ids: Iterable[int] = (),
    ) -> None:
        """document: a tokenizer.json's content. bos, eos: text or id. add_bos None: the post-processor decides."""
        _set_special_flags(document)
        self._library = _build(document)
        self._continued = _continued(document) or self._library
        vocabulary = self._library.get_vocab(with_added_tokens=True)
        if not vocabulary:
            raise CheckpointError("tokenizer.json: the vocabulary is empty")
        self.vocab_size = max(vocabulary.values()) + 1
        if self.vocab_size > MAX_TOKEN_ID:
            raise CheckpointError(f"tokenizer.json: token id {self.vocab_size - 1} is too large")
        added = [token for token in document.get("added_tokens") or [] if token["content"] in vocabulary]
        special = [token for token in added if token["special"]]
        self.special_texts: Mapping[str, int] = {t["content"]: vocabulary[t["content"]] for t in special}
        self._special = tuple(self.special_texts)
        self.special_ids = frozenset(self.special_texts.values())
        self._splitter = _splitter(special)
        added_ids = {vocabulary[token["content"]] for token in added}
        self._bytes: BytesTable = bytes_table(document, vocabulary, self.vocab_size, added_ids)
        prefix = _template_prefix(self._library)
        self.bos_id = self._id_of(bos, "bos_token")
        if self.bos_id is None and prefix:
            self.bos_id = prefix[0]
        self.eos_id = self._id_of(eos, "eos_token")
        self.add_bos = self.bos_id is not None and (bool(prefix) if add_bos is None else add_bos)
        known_ends = {i for text, i in self.special_texts.items() if text in _END_TOKENS}
        eos_ids = set() if self.eos_id is None else {self.eos_id}
        self.end_ids = frozenset({*end_ids, *eos_ids, *known_ends})

    @classmethod
    def from_source(cls, source: TokenizerJson | GgufVocabulary) -> Tokenizer:
        """A tokenizer from what a model's files say. CheckpointError if they make no sense."""
        if isinstance(source, GgufVocabulary):
            return cls(gguf_document(source), source.bos_id, source.eos_id, source.add_bos, source.end_ids)
        document = _parsed(source.data)
        return cls(document, source.bos_token, source.eos_token, source.add_bos, source.end_ids)

    # -- text to ids

    def encode(self, text: str, *, bos: bool = False, allow_special: bool = False) -> list[int]:
        """Token ids of a text. bos: start as a plain text starts, which adds bos only if the tokenizer wants one.

        Special tokens written out in `text` are plain characters unless allow_special. RequestError for text that has
        no UTF-8 form (lone surrogates).
        """
        ids = [self.bos_id] if bos and self.add_bos and self.bos_id is not None else []
        return ids + self.encode_parts(self.split_special(text) if allow_special else [(text, None)])

    def split_special(self, text: str) -> Parts:
        """The text cut at special tokens, leftmost and longest first; their own white space rules apply (lstrip)."""
        encoding = self._splitter.encode(text)
        return [
            (self._special[i - 1], self.special_texts[self._special[i - 1]]) if i else (text[start:end], None)
            for i, (start, end) in zip(encoding.ids, encoding.offsets, strict=True)
        ]

    def encode_parts(self, parts: Sequence[tuple[str, int | None]]) -> list[int]:
        """What split_special returned, perhaps edited, as ids. Plain texts never yield special tokens."""
        ids: list[int] = []
        for i, (piece, special) in enumerate(parts):
            ids.extend(self._encode_plain(piece, first=i == 0) if special is None else [special])
        return ids

    def _encode_plain(self, text: str, *, first: bool) -> list[int]:
        library = self._library if first else self._continued
        try:
            return list(library.encode(text, add_special_tokens=False).ids)
        except TypeError as error:  # the library's word for text that can't be written as UTF-8
            raise RequestError("The text contains half of a surrogate pair, which is not a character.") from error

    # -- ids to text

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes a token stands for; b"" for ids without a token (a model's embedding is often padded)."""
        return self._bytes.tokens[token_id] if 0 <= token_id < self.vocab_size else b""

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """The text of a whole sequence, as a text of its own. Invalid UTF-8 becomes U+FFFD."""
        data = b"".join(self.token_bytes(i) for i in ids if not (skip_special and i in self.special_ids))
        if self.strips_first_space and data.startswith(b" "):
            data = data[1:]
        return data.decode("utf-8", errors="replace")

    @property
    def strips_first_space(self) -> bool:
        """SentencePiece puts a space before a text when encoding; it is no part of the text when decoding."""
        return self._bytes.strips_first_space

    def token_id(self, text: str) -> int | None:
        """The id of the token that is written exactly so in the vocabulary."""
        try:
            found: int | None = self._library.token_to_id(text)
        except UnicodeEncodeError:  # half of a surrogate pair
            return None
        return found

    def token_text(self, token_id: int | None) -> str:
        """How the vocabulary writes a token; "" if there is none."""
        return "" if token_id is None else self._library.id_to_token(token_id) or ""

    def _id_of(self, token: str | int | None, name: str) -> int | None:
        if isinstance(token, int):
            return token
        if token is None:
            return None
        found = self.token_id(token)
        if found is None:
            raise CheckpointError(f"tokenizer_config.json: {name} {token[:40]!r} is not in the vocabulary")
        return found


def _parsed(data: bytes) -> dict[str, Any]:
    """A tokenizer.json's content, in which what this module reads itself has the types it must have."""
    if len(data) > MAX_JSON_BYTES:
        raise CheckpointError(f"tokenizer.json is larger than {MAX_JSON_BYTES >> 20} MiB")
    try:
        document = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise CheckpointError("tokenizer.json is not valid JSON") from error
    if not isinstance(document, dict) or not isinstance(document.get("model"), dict):
        raise CheckpointError("tokenizer.json: not an object with a model")
    added = document.get("added_tokens") or []
    fields = (("id", int), ("content", str), ("special", bool))
    if not isinstance(added, list) or not all(
        isinstance(t, dict) and all(isinstance(t.get(name), kind) for name, kind in fields) for t in added
    ):
        raise CheckpointError("tokenizer.json: added_tokens must be objects with id, content and special")
    if any(not 0 <= t["id"] < MAX_TOKEN_ID for t in added):
        raise CheckpointError("tokenizer.json: an added token's id is out of range")
    return document


def _set_special_flags(document: dict[str, Any]) -> None:
    for token in document.get("added_tokens") or []:
        if token["content"] in _END_TOKENS | _STARTS:
            token["special"] = True
        elif token["content"] in _VISIBLE or len(token["content"]) < 2:  # a single character is text
            token["special"] = False


def _build(document: Mapping[str, Any]) -> tokenizers.Tokenizer:
    try:
        library = tokenizers.Tokenizer.from_str(json.dumps(document))
    except Exception as error:  # the library raises bare Exceptions
        raise CheckpointError(f"tokenizer.json: {str(error)[:200]}") from error
    library.no_truncation()
    library.no_padding()
    library.encode_special_tokens = True  # "encode them as text": special tokens in text are not recognised
    return library


def _continued(document: Mapping[str, Any]) -> tokenizers.Tokenizer | None:
    """For text that follows a special token, where that differs: a Metaspace that marks only the first word."""
    pre = document.get("pre_tokenizer")
    if not isinstance(pre, dict) or pre.get("type") != "Metaspace" or pre.get("prepend_scheme") != "first":
        return None
    return _build({**document, "pre_tokenizer": {**pre, "prepend_scheme": "never"}})


def _template_prefix(library: tokenizers.Tokenizer) -> list[int]:
    """What the post-processor puts before a text: [bos] or nothing."""
    plain = library.encode("a", add_special_tokens=False).ids
    full = library.encode("a", add_special_tokens=True).ids
    return list(full[: full.index(plain[0])]) if plain and plain[0] in full else []


def _splitter(special: Sequence[Mapping[str, Any]]) -> tokenizers.Tokenizer:
    """Cuts a text at special tokens: its word 0 is every text between two of them, word i the i-th of them."""
    splitter = tokenizers.Tokenizer(WordLevel({"\0": 0}, unk_token="\0"))
    flags = ("single_word", "lstrip", "rstrip")
    splitter.add_special_tokens([AddedToken(t["content"], **{f: bool(t.get(f)) for f in flags}) for t in special])
    return splitter
