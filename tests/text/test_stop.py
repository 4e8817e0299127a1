"""Stop strings in text that comes in pieces, against a search in the whole."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minserve.text.stop import StopChecker


def run(stops: list[str], pieces: list[str], **options: bool) -> tuple[list[str], str | None]:
    """What is emitted for each piece (plus the flush, if nothing matched) and the match."""
    checker = StopChecker(stops, **options)
    out = []
    for piece in pieces:
        text, match = checker.push(piece)
        out.append(text)
        if match is not None:
            return out, match
    return [*out, checker.flush()], None


# bug: 7
def test_a_stop_string_over_several_tokens_never_leaks() -> None:
    assert run(["DEFGHIJ"], ["ABC", "DEF", "G", "HI", "J", "K"]) == (["ABC", "", "", "", ""], "DEFGHIJ")


# bug: 7
def test_a_stop_string_inside_a_token_ends_the_text_before_it() -> None:
    assert run(["gamma"], ["beta ", "gamma! delta"]) == (["beta ", ""], "gamma")


# bug: 8
def test_a_half_matched_stop_string_is_returned_at_the_end() -> None:
    assert run(["\n\n"], ["a", "\n"]) == (["a", "", "\n"], None)


# bug: 10
def test_the_earliest_completing_stop_string_wins() -> None:
    assert run(["world", "wor"], ["hello world"]) == (["hello "], "wor")
    assert run(["o w", "hello world"], ["hello world"]) == (["hell"], "o w")


# bug: 10
def test_ties_go_to_the_first_in_the_list() -> None:
    assert run(["bc", "abc"], ["xabc"]) == (["xa"], "bc")
    assert run(["abc", "bc"], ["xabc"]) == (["x"], "abc")


def test_only_what_might_become_a_stop_string_is_held() -> None:
    assert run(["abcde"], ["xab", "x", "abab", "c"]) == (["x", "abx", "ab", "", "abc"], None)


def test_a_failed_match_can_be_the_start_of_another() -> None:
    assert run(["aab"], ["aaab"]) == (["a"], "aab")
    assert run(["aab"], ["a", "a", "a", "b"]) == (["", "", "a", ""], "aab")


def test_the_stop_string_stays_where_it_is_asked_for() -> None:
    assert run(["STOP"], ["go ST", "OP now"], include=True) == (["go ", "STOP"], "STOP")


def test_matches_that_complete_too_early_do_not_count() -> None:
    checker = StopChecker(["ab", "abc"])
    assert checker.push("xab", allowed=False) == ("x", None)
    assert checker.push("c") == ("", "abc")
    assert StopChecker(["ab"]).push("xab", allowed=False) == ("xab", None)


def test_a_match_begun_too_early_counts_when_it_completes_later() -> None:
    checker = StopChecker(["ab"])
    assert checker.push("xa", allowed=False) == ("x", None)
    assert checker.push("b!") == ("", "ab")


def test_an_empty_stop_string_is_a_mistake() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopChecker(["a", ""])


def reference(stops: list[str], text: str) -> tuple[str, str | None]:
    """The definition: the smallest end of a match; of several with it, the first in the list."""
    ends = [(text.find(stop) + len(stop), i) for i, stop in enumerate(stops) if stop in text]
    if not ends:
        return text, None
    end, index = min(ends)
    return text[: end - len(stops[index])], stops[index]


@given(
    stops=st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=4),
    pieces=st.lists(st.text("abc", max_size=4), max_size=20),
)
def test_any_cutting_gives_what_a_search_of_the_whole_text_gives(stops: list[str], pieces: list[str]) -> None:
    emitted, match = run(stops, pieces)
    assert ("".join(emitted), match) == reference(stops, "".join(pieces))


@given(
    stops=st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=4),
    text=st.text("abc", max_size=20),
)
def test_exactly_the_longest_possible_beginning_is_held(stops: list[str], text: str) -> None:
    checker = StopChecker(stops)
    emitted, match = checker.push(text)
    if match is None:
        ends = [text[-k:] for k in range(1, len(text) + 1)]
        longest = max((len(e) for e in ends if any(s.startswith(e) and s != e for s in stops)), default=0)
        assert len(text) - len(emitted) == longest


def test_the_cost_is_that_of_the_new_text() -> None:
    checker = StopChecker(["a" * 500 + "b"])
    started = time.perf_counter()
    for _ in range(20_000):
        checker.push("a")
    assert time.perf_counter() - started < 2
