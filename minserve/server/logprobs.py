"""Log probabilities in OpenAI's two shapes: chat's list of entries, completions' parallel lists.

Values are natural logs under the raw softmax, before temperature and penalties. JSON has no -Infinity, so they are
clamped to -9999, the value OpenAI documents. Owns the text offsets of completions, which run on across the chunks of a
stream. It must not know streams or requests.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence

from minserve.request import TokenLogprob
from minserve.server.wire import CompletionLogprobs, TokenEntry, TopLogprob
from minserve.text.tokenizer import Tokenizer

_FLOOR = -9999.0


class TokenNames:
    """How a token is written on the wire: its text, or `token_id:N` where the caller asked for that."""

    def __init__(self, tokenizer: Tokenizer, *, as_ids: bool = False) -> None:
        self._tokenizer = tokenizer
        self._as_ids = as_ids

    def text(self, token_id: int) -> str:
        if self._as_ids:
            return f"token_id:{token_id}"
        return self.data(token_id).decode("utf-8", errors="replace")

    def data(self, token_id: int) -> bytes:
        """The token's own bytes, half characters as they are: clients join them."""
        return self._tokenizer.token_bytes(token_id)

    def is_special(self, token_id: int) -> bool:
        """Special tokens are no text: they are left out of what is generated."""
        return token_id in self._tokenizer.special_ids


def chat_entries(logprobs: Iterable[TokenLogprob], names: TokenNames) -> list[TokenEntry]:
    return [
        TokenEntry(
            names.text(lp.token_id),
            _clamp(lp.logprob),
            list(names.data(lp.token_id)),
            [TopLogprob(names.text(i), _clamp(value), list(names.data(i))) for i, value in lp.top],
        )
        for lp in logprobs
    ]


class CompletionEntries:
    """The lists of one choice, piece by piece. Offsets count characters from the start of the returned text."""

    def __init__(self, names: TokenNames) -> None:
        self._names = names
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._offset = 0

    def prompt(self, prompt: Sequence[int], logprobs: Sequence[TokenLogprob], text: str) -> CompletionLogprobs:
        """An echoed prompt, `text` in all. Nothing stands before its first token, so that one has no probability."""
        out = CompletionLogprobs()
        for token_id, lp in zip(prompt, (None, *logprobs), strict=True):
            self._add(out, token_id, lp, text)
        self._decoder.reset()
        self._offset = len(text)  # whatever the widths of its tokens came to
        return out

    def add(self, logprobs: Iterable[TokenLogprob]) -> CompletionLogprobs:
        out = CompletionLogprobs()
        for lp in logprobs:
            self._add(out, lp.token_id, lp)
        return out

    def _add(self, out: CompletionLogprobs, token_id: int, lp: TokenLogprob | None, text: str | None = None) -> None:
        out.tokens.append(self._names.text(token_id))
        out.token_logprobs.append(None if lp is None else _clamp(lp.logprob))
        out.top_logprobs.append(None if lp is None else self._top(lp))
        out.text_offset.append(self._offset)
        self._offset += self._width(token_id, text)

    def _width(self, token_id: int, text: str | None) -> int:
        """Characters that a token adds. Special ones and a tokenizer's dummy space do only where `text` has them."""
        piece = self._decoder.decode(self._names.data(token_id))
        special = self._names.is_special(token_id)
        if text is None:
            return 0 if special else len(piece)
        if self._offset == 0 and piece.startswith(" ") and not text.startswith(" "):
            return len(piece) - 1
        return len(piece) if not special or text.startswith(piece, self._offset) else 0

    def _top(self, lp: TokenLogprob) -> dict[str, float]:
        """By text, best first; where two ids read the same the better one stays. The chosen token is always in it."""
        top: dict[str, float] = {}
        for token_id, value in (*lp.top, (lp.token_id, lp.logprob)):
            top.setdefault(self._names.text(token_id), _clamp(value))
        return top


def _clamp(value: float) -> float:
    return max(value, _FLOOR)
