"""Marks that keep text inside messages from reading as a special token, whatever a template puts around it.

Owns where a text must be broken and what with. It must not know templates or tokenizers.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Collection, Iterable


def unused_digits(texts: Iterable[str]) -> str:
    """Sixteen digits that occur in none of the texts and can't overlap themselves (the only 1 comes first).

    Digits, because they survive whatever templates do to text: trimming, changing case, writing JSON.
    """
    texts = list(texts)
    while True:
        digits = "1" + "".join(secrets.choice("023456789") for _ in range(15))
        if not any(digits in text for text in texts):
            return digits


class Breaker:
    """Breaks special tokens written out in a text by a seam after their first character.

    The beginning of a special token at the very end of a text is broken as well: the template might complete it.
    """

    def __init__(self, special: Collection[str]) -> None:
        self._special = frozenset(special)
        self._prefixes = frozenset(token[:k] for token in special for k in range(1, len(token)))
        first = "".join(sorted({re.escape(token[0]) for token in special}))
        self._first = re.compile(f"[{first}]") if first else None

    def apply(self, text: str, seam: str) -> str:
        """The text with seams in it. One look at each character that can begin a special token."""
        if self._first is None:
            return text
        out = []
        done = 0
        for match in self._first.finditer(text):
            if self._begins(text, match.start()):
                out.append(text[done : match.end()])
                done = match.end()
        return seam.join([*out, text[done:]])

    def _begins(self, text: str, start: int) -> bool:
        """Whether a special token starts here, or would if the text went on."""
        for end in range(start + 1, len(text) + 1):
            piece = text[start:end]
            if piece in self._special:
                return True
            if piece not in self._prefixes:
                return False
        return True
