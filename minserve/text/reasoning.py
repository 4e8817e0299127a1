"""Splits a model's thinking from its answer, in text that arrives in pieces.

Owns the text that might become a tag. It must not know tokens or templates. Only thinking at the start of an output
counts: a tag quoted later is text.
"""

from __future__ import annotations

START, END = "<think>", "</think>"


class ReasoningSplitter:
    """Feed it `push(text)`; the concatenated parts don't depend on how the text was cut.

    inside: the prompt already opened the tag. begun: it also holds the start of the thought. White space at the start
    of either part is dropped, but what joins a thought to its start in the prompt is not at its start.
    """

    def __init__(self, *, inside: bool = False, begun: bool = False) -> None:
        self._phase = "reasoning" if inside else "start"
        self._held = ""
        self._fresh = inside and not begun  # nothing of this part has been returned yet

    def push(self, text: str) -> tuple[str, str]:
        """(reasoning, content) that is certain now."""
        self._held += text
        if self._phase == "start":
            begun = self._held.lstrip()
            if START.startswith(begun):
                return "", ""
            if begun.startswith(START):
                self._phase, self._held, self._fresh = "reasoning", begun[len(START) :], True
            else:
                self._phase = "content"
        reasoning = ""
        if self._phase == "reasoning":
            thought, tag, rest = self._held.partition(END)
            if tag:
                reasoning = self._trimmed(thought)
                self._phase, self._held, self._fresh = "content", rest, True
            else:
                keep = _overlap(self._held, END)
                thought, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
                return self._trimmed(thought), ""
        content, self._held = self._trimmed(self._held), ""
        return reasoning, content

    def flush(self) -> tuple[str, str]:
        """The rest, once nothing can follow."""
        held, self._held = self._held, ""
        return (self._trimmed(held), "") if self._phase == "reasoning" else ("", self._trimmed(held))

    def _trimmed(self, text: str) -> str:
        if self._fresh:
            text = text.lstrip()
            self._fresh = not text
        return text


def _overlap(text: str, tag: str) -> int:
    """Length of the longest end of the text that begins the tag."""
    return next((k for k in range(min(len(tag) - 1, len(text)), 0, -1) if text.endswith(tag[:k])), 0)
