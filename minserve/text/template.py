"""Messages to a prompt, by the model's own chat template.

Owns the guarantee that text inside messages never becomes a control token. It must not know HTTP or how templates run.

The guarantee: before rendering, every special token written out in a message is broken by a seam (see seams.py). After
rendering, what still reads as a special token was written by the template. The text is cut there, the seams are taken
out, and what lies between is encoded as plain text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from minserve.request import RequestError
from minserve.text.messages import Message, fold_system, map_strings, regular, strings_in
from minserve.text.reasoning import END, START, ReasoningSplitter
from minserve.text.sandbox import Failed, Refused, Template
from minserve.text.seams import Breaker, unused_digits
from minserve.text.tokenizer import Tokenizer

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_RESERVED = frozenset({"messages", "bos_token", "eos_token", "add_generation_prompt", "continue_final"})


class ChatTemplate:
    """A model's template, compiled. source None: the built-in ChatML, and `built_in` says so.

    render and encode raise RequestError (400) for messages that the template can't show. They may run in any thread.
    """

    def __init__(self, source: str | None, tokenizer: Tokenizer) -> None:
        self.built_in = source is None
        self.source = CHATML if source is None else source
        self._tokenizer = tokenizer
        self._template = Template(self.source)
        self._breaker = Breaker(tokenizer.special_texts)
        self._tokens = {
            "bos_token": tokenizer.token_text(tokenizer.bos_id),
            "eos_token": tokenizer.token_text(tokenizer.eos_id),
        }
        self._knows_developer = "developer" in self.source
        self._knows_system = self._shows_system()

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        *,
        add_generation_prompt: bool = True,
        continue_final: bool = False,
        **variables: Any,
    ) -> str:
        """The prompt as text. variables: `tools` and whatever else the template knows (chat_template_kwargs).

        continue_final: the prompt ends inside the last message, an assistant's, which the answer continues.
        """
        text, seam = self._render(messages, add_generation_prompt, continue_final, variables)
        return text.replace(seam, "")

    def encode(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        *,
        add_generation_prompt: bool = True,
        continue_final: bool = False,
        **variables: Any,
    ) -> list[int]:
        """The prompt as token ids. Control tokens only where the template wrote them; at most one bos."""
        text, seam = self._render(messages, add_generation_prompt, continue_final, variables)
        parts = self._tokenizer.split_special(text)
        ids = self._tokenizer.encode_parts([(piece.replace(seam, ""), special) for piece, special in parts])
        bos = self._tokenizer.bos_id
        if bos is None or not self._tokenizer.add_bos:
            return ids
        start = next((i for i, token_id in enumerate(ids) if token_id != bos), len(ids))
        return [bos, *ids[start:]]

    def reasoning(self, prompt: Sequence[int]) -> ReasoningSplitter | None:
        """What splits thinking from the answer to this prompt; None if the template knows no thinking."""
        if START not in self.source and END not in self.source:
            return None
        special = self._tokenizer.special_ids
        turn = next((i for i in range(len(prompt), 0, -1) if prompt[i - 1] in special), 0)
        text = self._tokenizer.decode(prompt[turn:])
        start = text.rfind(START)
        begun = text[start + len(START) :].strip() != ""
        return ReasoningSplitter(inside=start > text.rfind(END), begun=begun)

    def _render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool,
        continue_final: bool,
        variables: Mapping[str, Any],
    ) -> tuple[str, str]:
        """(text with seams, the seam)."""
        if bad := next((name for name in variables if name in _RESERVED), None):
            raise RequestError(f"chat_template_kwargs can't set {bad}.", param="chat_template_kwargs")
        chat = regular(messages, developer=self._knows_developer)
        if not self._knows_system:
            chat = fold_system(chat)
        texts = [self.source, *strings_in([chat, variables])]
        seam = unused_digits(texts)
        end_mark = unused_digits([seam, *texts])

        def broken(text: str) -> str:
            return self._breaker.apply(text, seam)

        chat = [{**map_strings(message, broken), "role": message["role"]} for message in chat]
        if continue_final:
            if chat[-1]["role"] != "assistant":
                raise RequestError("Only an assistant's message can be continued.", param="continue_final_message")
            chat[-1]["content"] += end_mark
        text = self._run(chat, add_generation_prompt and not continue_final, map_strings(variables, broken))
        if continue_final:
            text, found, _ = text.rpartition(end_mark)
            if not found:
                raise RequestError("The chat template hides the final message.", param="continue_final_message")
        return text, seam

    def _run(self, chat: Sequence[Message], add_generation_prompt: bool, variables: Mapping[str, Any]) -> str:
        values = {"tools": None, "documents": None, **variables, **self._tokens}
        try:
            return self._template.render({**values, "messages": chat, "add_generation_prompt": add_generation_prompt})
        except Refused as error:
            raise _unfit(f"The model's chat template refuses these messages: {str(error)[:200]}") from None
        except Failed as error:
            raise _unfit(f"The model's chat template can't render these messages: {error}.") from error

    def _shows_system(self) -> bool:
        """Some templates refuse or silently drop a system message; found out once, here."""
        probe = unused_digits([self.source])
        chat = [{"role": "system", "content": probe}, {"role": "user", "content": "x"}]
        try:
            return probe in self._run(chat, True, {})
        except RequestError:
            return False


def _unfit(message: str) -> RequestError:
    return RequestError(message, code="invalid_messages", param="messages")
