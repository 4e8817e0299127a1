"""Thinking and answer, parted however the text is cut."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minserve.text.reasoning import ReasoningSplitter


def split(pieces: list[str], *, inside: bool = False, begun: bool = False) -> tuple[str, str]:
    splitter = ReasoningSplitter(inside=inside, begun=begun)
    parts = [*(splitter.push(piece) for piece in pieces), splitter.flush()]
    return "".join(r for r, _ in parts), "".join(c for _, c in parts)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("<think>\nhm\n</think>\n\nYes.", ("hm\n", "Yes.")),
        ("\n<think>hm</think>Yes.", ("hm", "Yes.")),
        ("Yes.", ("", "Yes.")),
        ("<thin air", ("", "<thin air")),
        ("  Yes.", ("", "  Yes.")),
        ("<think>never closed", ("never closed", "")),
        ("<think>a </thi", ("a </thi", "")),
        ("<think></think>", ("", "")),
        ("Yes. <think>no</think>", ("", "Yes. <think>no</think>")),
        ("<think>a</think>b</think>c", ("a", "b</think>c")),
        ("", ("", "")),
        ("<thi", ("", "<thi")),
    ],
)
def test_thinking_is_split_from_the_answer(text: str, parts: tuple[str, str]) -> None:
    assert split([text]) == parts
    assert split(list(text)) == parts


def test_a_tag_that_the_prompt_opened_counts() -> None:
    assert split(["\nhm", "</", "think>", "\n\n", "Yes."], inside=True) == ("hm", "Yes.")


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (" is indeed", (" is indeed", "")),
        ("\n\nSo 4.</think>\n\nYes.", ("\n\nSo 4.", "Yes.")),
        ("</think>\n\nYes.", ("", "Yes.")),
        (" </think> Yes.", (" ", "Yes.")),
    ],
)
def test_a_thought_that_the_prompt_began_goes_on_with_its_white_space(text: str, parts: tuple[str, str]) -> None:
    assert split([text], inside=True, begun=True) == parts
    assert split(list(text), inside=True, begun=True) == parts


def test_reasoning_is_streamed_before_it_ends() -> None:
    splitter = ReasoningSplitter()
    assert splitter.push("<think>") == ("", "")
    assert splitter.push("one <") == ("one ", "")
    assert splitter.push("two") == ("<two", "")


@given(
    pieces=st.lists(st.sampled_from(["<think>", "</think>", "<th", "ink>", "</", " ", "\n", "a", "<"]), max_size=12),
    inside=st.booleans(),
    begun=st.booleans(),
)
def test_the_parts_do_not_depend_on_the_cuts(pieces: list[str], inside: bool, begun: bool) -> None:
    begun = inside and begun
    assert split(pieces, inside=inside, begun=begun) == split(["".join(pieces)], inside=inside, begun=begun)
