"""The prompt field of /v1/completions: its four forms, and how each becomes token ids.

Owns what an empty prompt means and how many prompts a call may bring. Unlike chat, a raw prompt is the caller's own
text from its first token on, so special tokens written in it are special tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

from minserve.config import LimitsConfig
from minserve.request import RequestError
from minserve.server.completions import PromptShown
from minserve.server.messages import check_characters
from minserve.server.sampling import check_token_ids
from minserve.server.schema import Prompt
from minserve.text.tokenizer import Tokenizer


def prompt_list(prompt: Prompt | None, limits: LimitsConfig, vocab_size: int) -> list[str | tuple[int, ...]]:
    """The prompts of a call, texts or token ids. RequestError 400 for mixed, empty, too many or too long ones."""
    prompts = _separate(prompt)
    if len(prompts) > limits.max_prompts:
        raise RequestError(f"`prompt` may hold at most {limits.max_prompts} prompts.", param="prompt")
    check_characters(sum(len(p) for p in prompts), limits, "prompt")
    return [p if isinstance(p, str) else check_token_ids("prompt", p, vocab_size) for p in prompts]


def read_prompt(prompt: str | tuple[int, ...], tokenizer: Tokenizer, *, echo: bool) -> PromptShown:
    """Its token ids, and what of it comes back: a text as it was written, ids as the text that they stand for."""
    if isinstance(prompt, str):
        return PromptShown(_encoded(prompt, tokenizer), prompt if echo else None)
    return PromptShown(prompt, tokenizer.decode(prompt) if echo else None)


def _encoded(prompt: str, tokenizer: Tokenizer) -> tuple[int, ...]:
    """With the model's bos in front of a text that wants one; exactly one."""
    ids = tokenizer.encode(prompt, bos=True, allow_special=True)
    bos = tokenizer.bos_id
    if ids[:2] == [bos, bos] and tokenizer.add_bos:
        ids = ids[1:]  # the caller wrote it too
    if not ids:
        if bos is None:
            raise _empty()
        ids = [bos]
    return tuple(ids)


def _separate(prompt: Prompt | None) -> Sequence[str | list[int]]:
    if prompt is None or isinstance(prompt, str):
        return [prompt or ""]
    if not prompt:
        raise _empty()
    if all(isinstance(item, int) for item in prompt):
        return [[item for item in prompt if isinstance(item, int)]]
    texts = [item for item in prompt if isinstance(item, str)]
    if len(texts) == len(prompt):
        return texts
    lists = [item for item in prompt if isinstance(item, list)]
    if len(lists) < len(prompt):
        raise RequestError("`prompt` must not mix texts, token ids and lists of token ids.", param="prompt")
    if not all(lists):
        raise _empty()
    return lists


def _empty() -> RequestError:
    return RequestError("`prompt` must not be empty.", param="prompt")
