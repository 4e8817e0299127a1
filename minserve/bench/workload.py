"""Prompts: plain English sentences, different for every request and seed, cut to a number of tokens.

Owns nothing. Sentences are drawn from a small grammar, so no corpus is shipped and no two prompts share more than a
few words (a prefix cache gets nothing from them unless `shared_tokens` asks for a common start).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

_SUBJECTS = """the harbour master|an old engineer|her younger brother|the night train|a careful gardener|the committee
|our neighbour|the museum|a visiting professor|the orchestra|the fishing fleet|a small bakery|the northern road
|the new bridge|a retired pilot|the city library|the river|an apprentice|the observatory|the winter market""".replace(
    "\n", ""
).split("|")
_VERBS = """explained|measured|forgot|painted|repaired|described|promised|collected|followed|opened|ignored|counted
|remembered|carried|translated|replaced|studied|questioned|delayed|admired""".replace("\n", "").split("|")
_OBJECTS = """the broken clock|a list of names|every second window|the first chapter|two barrels of salt|a map of the
 coast|the price of copper|an unusual recipe|the colour of the water|a letter from abroad|the second movement|three
 empty rooms|the weather report|a row of apple trees|the oldest records|an argument about time|the spare engine
|a box of lenses|the missing page|a quiet evening""".replace("\n", "").split("|")
_ENDS = """before the rain began|without saying why|in less than an hour|for the third time|as if nothing had happened
|although nobody had asked|while the others waited|near the end of spring|to everyone's surprise|with great patience
|because it was late|on the way to the station|just after sunrise|for reasons of its own""".replace("\n", "").split("|")

Cut = Callable[[str, int], str]  # text, tokens -> its first tokens as text


def cut_by_characters(text: str, tokens: int) -> str:
    """Without the model's tokenizer: about 4.8 characters of this English a token."""
    return text[: int(tokens * 4.8)]


def sentences(rng: random.Random) -> Iterator[str]:
    while True:
        parts = (rng.choice(_SUBJECTS), rng.choice(_VERBS), rng.choice(_OBJECTS), rng.choice(_ENDS))
        sentence = " ".join(parts) + "."
        yield sentence[0].upper() + sentence[1:]


def text_of(rng: random.Random, tokens: int, cut: Cut) -> str:
    """About (with a tokenizer: exactly) this many tokens of English."""
    if tokens <= 0:
        return ""
    words: list[str] = []
    length, source = 0, sentences(rng)
    while length < tokens * 7 + 100:
        words.append(next(source))
        length += len(words[-1]) + 1
    return cut(" ".join(words), tokens)


def prompts(count: int, tokens: int, *, shared_tokens: int, seed: int, cut: Cut) -> list[str]:
    """`count` prompts of `tokens` tokens each, the first `shared_tokens` of them the same in all."""
    shared = text_of(random.Random(f"shared-{seed}"), shared_tokens, cut)
    own = max(tokens - shared_tokens, 0)
    out = []
    for i in range(count):
        text = text_of(random.Random(f"{seed}-{i}"), own, cut)
        out.append(f"{shared}\n\n{text}" if shared else text)
    return out
