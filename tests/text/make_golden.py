"""Makes golden/sentencepiece.json: a tiny SentencePiece model and what SentencePiece itself makes of some texts.

Run by hand, in an environment with `pip install sentencepiece`: python -m tests.text.make_golden
"""

from __future__ import annotations

import json
import random
import tempfile
from pathlib import Path

GOLDEN = Path(__file__).parent / "golden" / "sentencepiece.json"

SYLLABLES = [
    "ba",
    "ce",
    "di",
    "fo",
    "gu",
    "la",
    "me",
    "ni",
    "or",
    "pu",
    "ra",
    "se",
    "ti",
    "un",
    "ve",
    "is",
    "the",
    "and",
]
SYLLABLES += ["ing", "er", "ed", "ation", "er", "ß", "é", "ни", "то", "日", "本", "の"]
TEXTS = [
    "Hello, world! The banding of tines.",
    " a leading space",
    "two  spaces,   three, and a trailing one ",
    "tabs\tand\nnewlines\n\nhere",
    "The numbers 3.14 and 1234567",
    "café, straße, naïve, 日本の, нито",
    "emoji 😀 and a family 👨‍👩‍👧",
    "baceditation ceding sedation the orthe",
    "",
    " ",
    "▁",
    "<0x0A> is not a byte here",
    "user text with <end_of_turn> inside",
]


def corpus(lines: int = 4000) -> list[str]:
    """Made-up words from a fixed seed: enough repetition to learn merges from."""
    rng = random.Random(7)
    words = ["".join(rng.choices(SYLLABLES, k=rng.randint(1, 4))) for _ in range(400)]
    return [
        " ".join(rng.choices(words, k=rng.randint(3, 12))) + rng.choice([".", "!", ", 12", ""]) for _ in range(lines)
    ]


def train(add_dummy_prefix: bool) -> dict[str, object]:
    import sentencepiece as spm  # type: ignore[import-not-found]

    with tempfile.TemporaryDirectory() as folder:
        prefix = str(Path(folder) / "m")
        spm.SentencePieceTrainer.train(
            sentence_iterator=iter(corpus()),
            model_prefix=prefix,
            model_type="bpe",
            vocab_size=640,
            byte_fallback=True,
            character_coverage=0.9995,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            add_dummy_prefix=add_dummy_prefix,
            control_symbols=["<start_of_turn>", "<end_of_turn>"],
            minloglevel=2,
        )
        model = spm.SentencePieceProcessor(model_file=prefix + ".model")
    size = model.get_piece_size()
    kinds = [
        3 if model.is_control(i) else 2 if model.is_unknown(i) else 6 if model.is_byte(i) else 1 for i in range(size)
    ]
    return {
        "add_space_prefix": add_dummy_prefix,
        "tokens": [model.id_to_piece(i) for i in range(size)],
        "scores": [model.get_score(i) for i in range(size)],
        "types": kinds,
        "texts": [
            {"text": text, "ids": model.encode(text), "decoded": model.decode(model.encode(text))} for text in TEXTS
        ],
    }


if __name__ == "__main__":
    GOLDEN.parent.mkdir(exist_ok=True)
    GOLDEN.write_text(json.dumps([train(True), train(False)], ensure_ascii=False, indent=None) + "\n", encoding="utf-8")
