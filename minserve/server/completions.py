"""/v1/completions: from deltas to completion chunks and responses, with echoed prompts and their log probabilities.

Owns the shape of completion choices, which is the same in a chunk and in a whole response. Choices are numbered prompt
by prompt: index = prompt * n + k.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from msgspec import UNSET

from minserve.request import TextDelta, TokenLogprob
from minserve.server.answer import Answer, Head, Options, coalesce, finish_of
from minserve.server.generation import Generation, Tally
from minserve.server.logprobs import CompletionEntries, TokenNames
from minserve.server.wire import CompletionChoice, CompletionLogprobs, Response, event


@dataclass(frozen=True, slots=True)
class PromptShown:
    """A prompt's ids, and its text if it is to be echoed."""

    ids: tuple[int, ...]
    echo: str | None


@dataclass(slots=True)
class _Choice:
    """What is kept of one choice; text, entries and ids only for whole answers."""

    index: int
    prompt: PromptShown
    entries: CompletionEntries
    begun: bool = False
    text: list[str] = field(default_factory=list)
    logprobs: CompletionLogprobs = field(default_factory=CompletionLogprobs)
    token_ids: list[int] = field(default_factory=list)
    last: TextDelta | None = None


class CompletionAnswer(Answer):
    def __init__(self, head: Head, options: Options, names: TokenNames, prompts: Sequence[PromptShown], n: int) -> None:
        super().__init__(head, options)
        self._n = n
        self._choices = [_Choice(i, prompts[i // n], CompletionEntries(names)) for i in range(len(prompts) * n)]
        self._scores: dict[int, tuple[TokenLogprob, ...]] = {}  # first choice of a prompt -> its prompt's logprobs

    def plain(self) -> None:
        for choice in self._choices:
            choice.prompt = replace(choice.prompt, echo=None)

    # -- streams

    def events(self, deltas: Sequence[TextDelta], tally: Tally) -> bytes:
        out = []
        for delta in coalesce(deltas):
            choice = self._choices[delta.choice]
            first = not choice.begun
            text, logprobs = self._shown(choice, delta)
            if text or (logprobs is not None and logprobs.tokens) or (self.options.token_ids and delta.token_ids):
                piece = CompletionChoice(index=choice.index, text=text, logprobs=logprobs)
                if self.options.token_ids:
                    piece.token_ids = list(delta.token_ids)
                    piece.prompt_token_ids = list(choice.prompt.ids) if first else UNSET
                out.append(event(self.chunk(piece, tally)))
            if delta.finish is not None:
                end = CompletionChoice(
                    index=choice.index, text="", finish_reason=finish_of(delta), stop_reason=delta.stop_reason
                )
                out.append(event(self.chunk(end, tally)))
        return b"".join(out)

    def _shown(self, choice: _Choice, delta: TextDelta) -> tuple[str, CompletionLogprobs | None]:
        """Text and entries of a delta; the first one of a choice brings the echoed prompt."""
        first, choice.begun = not choice.begun, True
        text = delta.text
        entries: CompletionLogprobs | None = None
        if first and choice.prompt.echo is not None:
            text = choice.prompt.echo + text
            if self.options.logprobs:
                scores = self._prompt_scores(choice.index, delta)
                entries = choice.entries.prompt(choice.prompt.ids, scores, choice.prompt.echo)
        if self.options.logprobs:
            own = choice.entries.add(delta.logprobs)
            entries = own if entries is None else _extended(entries, own)
        return text, entries

    def _prompt_scores(self, index: int, delta: TextDelta) -> tuple[TokenLogprob, ...]:
        """The engine scores a prompt once, for the first choice; its siblings show the same."""
        leader = index - index % self._n
        return self._scores.setdefault(leader, delta.prompt_logprobs)

    # -- whole answers

    def collect(self, deltas: Sequence[TextDelta]) -> None:
        for delta in deltas:
            choice = self._choices[delta.choice]
            text, logprobs = self._shown(choice, delta)
            choice.text.append(text)
            choice.token_ids.extend(delta.token_ids)
            if logprobs is not None:
                _extended(choice.logprobs, logprobs)
            choice.last = delta

    def whole(self, generation: Generation) -> Response:
        return self.totals(self.head.response([self._whole(choice) for choice in self._choices]), generation)

    def _whole(self, choice: _Choice) -> CompletionChoice:
        assert choice.last is not None  # a generation is done when every choice has finished
        return CompletionChoice(
            index=choice.index,
            text="".join(choice.text),
            logprobs=choice.logprobs if self.options.logprobs else None,
            finish_reason=finish_of(choice.last),
            stop_reason=choice.last.stop_reason,
            token_ids=choice.token_ids if self.options.token_ids else UNSET,
            prompt_token_ids=list(choice.prompt.ids) if self.options.token_ids else UNSET,
        )


def _extended(to: CompletionLogprobs, more: CompletionLogprobs) -> CompletionLogprobs:
    to.tokens += more.tokens
    to.token_logprobs += more.token_logprobs
    to.top_logprobs += more.top_logprobs
    to.text_offset += more.text_offset
    return to
