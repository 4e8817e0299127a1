"""Perplexity of a text, through the engine that serves: prompt log probabilities, as `echo` with `logprobs` gives them.

Owns the method, which is that of llama.cpp's llama-perplexity, so that the numbers compare: the text is cut into
windows of `context` tokens, the first token of each is replaced by the beginning-of-text token, and only the second
half of a window counts, where every token has at least half a window before it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from minserve.engine import Engine
from minserve.request import SamplingParams, Submission

_SCORE = SamplingParams(max_tokens=0, temperature=0.0, prompt_logprobs=0)


@dataclass(frozen=True, slots=True)
class Perplexity:
    """value: exp of the mean negative log probability (nats) of `tokens` scored tokens."""

    value: float
    tokens: int


def windows(tokens: Sequence[int], context: int, bos: int | None) -> list[tuple[int, ...]]:
    """Whole windows of `context` tokens; what is left over at the end of the text is not used."""
    cuts = [tuple(tokens[at : at + context]) for at in range(0, len(tokens) - context + 1, context)]
    return cuts if bos is None else [(bos, *cut[1:]) for cut in cuts]


def logprobs(engine: Engine, tokens: tuple[int, ...]) -> list[float]:
    """Log probability of each token but the first, given those before it. The engine must have room for one more."""
    engine.submit(Submission("perplexity", tokens, _SCORE))
    out: list[float] = []
    while engine.has_work:
        for delivery in engine.step():
            if delivery.delta.error is not None:
                raise delivery.delta.error
            out += [scored.logprob for scored in delivery.delta.prompt_logprobs]
    return out


def perplexity(engine: Engine, tokens: Sequence[int], context: int) -> Perplexity:
    """Of a text's tokens. ValueError if they don't fill one window."""
    cuts = windows(tokens, context, engine.tokenizer.bos_id if engine.tokenizer.add_bos else None)
    if not cuts:
        raise ValueError(f"the text has {len(tokens)} tokens, fewer than one window of {context}")
    scores = [score for cut in cuts for score in logprobs(engine, cut)[context // 2 :]]
    return Perplexity(math.exp(-math.fsum(scores) / len(scores)), len(scores))
