"""Token ids to text, a few at a time: what has been returned so far plus `flush()` is the text of all of them.

Owns the bytes that are not yet a character (at most three). It must not know stop strings or requests.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence

from minserve.text.tokenizer import Tokenizer

_CONTEXT = 8  # prompt tokens that can hold the three bytes of an unfinished character


class Detokenizer:
    """Bytes of tokens through an incremental UTF-8 decoder: whole characters only, U+FFFD only once proven invalid.

    prompt: the ids before the first generated one. Its text is never returned, but a character that it leaves half
    written is finished by the output; if it isn't, the prompt's half leaves no trace. Special tokens have no text.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        tail = list(prompt[-_CONTEXT:])
        while tail and tail[-1] in tokenizer.special_ids:
            tail.pop()
        self._decoder.decode(b"".join(self._bytes(i) for i in tail))
        self._orphan = bool(self._decoder.getstate()[0])
        starts_text = not prompt or prompt[-1] in tokenizer.special_ids
        self._strip_space = starts_text and tokenizer.strips_first_space

    def push(self, ids: Iterable[int]) -> str:
        """The text that became complete with these tokens; may be empty."""
        data = b"".join(self._bytes(i) for i in ids)
        if self._strip_space and data:
            self._strip_space = False
            data = data.removeprefix(b" ")
        return self._without_orphan(self._decoder.decode(data))

    def flush(self) -> str:
        """What is left at the end of the generation: U+FFFD for an unfinished character, else nothing."""
        return self._without_orphan(self._decoder.decode(b"", final=True))

    def _bytes(self, token_id: int) -> bytes:
        return b"" if token_id in self._tokenizer.special_ids else self._tokenizer.token_bytes(token_id)

    def _without_orphan(self, text: str) -> str:
        """The prompt's half character, once proven invalid, is one U+FFFD at the very start: the prompt's, not ours."""
        if self._orphan and text:
            self._orphan = False
            return text.removeprefix("\ufffd")
        return text
