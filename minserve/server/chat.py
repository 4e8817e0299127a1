"""/v1/chat/completions: from deltas to chat chunks and chat responses.

Owns the shape of chat choices. A choice's stream is a role chunk, content chunks, and one chunk with an empty delta and
the finish reason. The role chunk waits for the first token, so that whoever times the first chunk times the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from msgspec import UNSET

from minserve.request import TextDelta, TokenLogprob
from minserve.server.answer import Answer, Head, Options, coalesce, finish_of
from minserve.server.generation import Generation, Tally
from minserve.server.logprobs import TokenNames, chat_entries
from minserve.server.wire import (
    AssistantMessage,
    ChatChoice,
    ChatChunkChoice,
    ChatLogprobs,
    Delta,
    Response,
    event,
)
from minserve.text.reasoning import ReasoningSplitter


@dataclass(slots=True)
class _Choice:
    """What is kept of one choice; text and entries only for whole answers."""

    index: int
    splitter: ReasoningSplitter | None
    thinking: bool = True  # until the first content
    thought: bool = False  # there was any reasoning at all
    early_tokens: int = 0  # tokens while thinking
    content: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    last: TextDelta | None = None

    def split(self, delta: TextDelta) -> tuple[str, str]:
        """(reasoning, content) of a delta."""
        if self.splitter is None:
            return "", delta.text
        reasoning, content = self.splitter.push(delta.text)
        if delta.finish is not None:
            rest = self.splitter.flush()
            reasoning, content = reasoning + rest[0], content + rest[1]
        self.thought = self.thought or bool(reasoning)
        self.thinking = self.thinking and not content
        if self.thinking:
            self.early_tokens += len(delta.token_ids)
        return reasoning, content

    @property
    def reasoning_tokens(self) -> int:
        return self.early_tokens if self.thought else 0


class ChatAnswer(Answer):
    """splitters: what parts thinking from the answer, one per choice; None where the template knows no thinking."""

    def __init__(
        self,
        head: Head,
        options: Options,
        names: TokenNames,
        prompt: Sequence[int],
        splitters: Sequence[ReasoningSplitter | None],
        *,
        show_reasoning: bool = True,
    ) -> None:
        super().__init__(head, options)
        self._names = names
        self._prompt = prompt
        self._show_reasoning = show_reasoning
        self._choices = [_Choice(i, splitter) for i, splitter in enumerate(splitters)]
        self._begun = False
        self._prompt_told = False

    def plain(self) -> None:
        for choice in self._choices:
            choice.splitter = None

    # -- streams

    def events(self, deltas: Sequence[TextDelta], tally: Tally) -> bytes:
        out = []
        if deltas and not self._begun:  # in order, whichever comes first: OpenAI's SDK keeps choices as they begin
            self._begun = True
            opening = Delta(role="assistant", content="")
            out += [self._event(self._piece(choice, opening), tally) for choice in self._choices]
        for delta in coalesce(deltas):
            choice = self._choices[delta.choice]
            reasoning, content = choice.split(delta)
            if reasoning and self._show_reasoning:
                out.append(self._event(self._piece(choice, Delta(reasoning_content=reasoning)), tally))
            if content or delta.logprobs or (self.options.token_ids and delta.token_ids):
                out.append(self._event(self._piece(choice, Delta(content=content), delta), tally))
            if delta.finish is not None:
                tally.reasoning += choice.reasoning_tokens
                out.append(self._event(self._end(choice, delta), tally))
        return b"".join(out)

    def _event(self, choice: ChatChunkChoice, tally: Tally) -> bytes:
        response = self.chunk(choice, tally)
        if self.options.token_ids and not self._prompt_told:
            self._prompt_told = True
            response.prompt_token_ids = list(self._prompt)
        return event(response)

    def _piece(self, choice: _Choice, delta: Delta, tokens: TextDelta | None = None) -> ChatChunkChoice:
        piece = ChatChunkChoice(index=choice.index, delta=delta)
        if tokens is not None and self.options.logprobs:
            piece.logprobs = ChatLogprobs(chat_entries(tokens.logprobs, self._names))
        if tokens is not None and self.options.token_ids:
            piece.token_ids = list(tokens.token_ids)
        return piece

    def _end(self, choice: _Choice, delta: TextDelta) -> ChatChunkChoice:
        return ChatChunkChoice(
            index=choice.index, delta=Delta(), finish_reason=finish_of(delta), stop_reason=delta.stop_reason
        )

    # -- whole answers

    def collect(self, deltas: Sequence[TextDelta]) -> None:
        for delta in deltas:
            choice = self._choices[delta.choice]
            reasoning, content = choice.split(delta)
            choice.reasoning.append(reasoning)
            choice.content.append(content)
            choice.logprobs.extend(delta.logprobs)
            choice.token_ids.extend(delta.token_ids)
            choice.last = delta

    def whole(self, generation: Generation) -> Response:
        generation.tally.reasoning = sum(choice.reasoning_tokens for choice in self._choices)
        response = self.head.response([self._whole(choice) for choice in self._choices])
        if self.options.token_ids:
            response.prompt_token_ids = list(self._prompt)
        return self.totals(response, generation)

    def _whole(self, choice: _Choice) -> ChatChoice:
        assert choice.last is not None  # a generation is done when every choice has finished
        message = AssistantMessage("assistant", "".join(choice.content))
        reasoning = "".join(choice.reasoning)
        if reasoning and self._show_reasoning:
            message.reasoning_content = reasoning
        return ChatChoice(
            index=choice.index,
            message=message,
            logprobs=ChatLogprobs(chat_entries(choice.logprobs, self._names)) if self.options.logprobs else None,
            finish_reason=finish_of(choice.last),
            stop_reason=choice.last.stop_reason,
            token_ids=choice.token_ids if self.options.token_ids else UNSET,
        )
