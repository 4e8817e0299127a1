"""Computed blocks found again: across requests, while they are computed, and by nobody else. Blocks have 4 tokens."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest

from minserve import prefix
from tests.driver import Driver, driver, prompt
from tests.fake_program import VOCAB
from tests.policy.plans import BULK, make_limits


@pytest.mark.parametrize(("length", "cached"), [(1, 0), (4, 0), (8, 4), (9, 8), (12, 8), (13, 12)])
def test_the_same_prompt_again_computes_at_least_its_last_token(length: int, cached: int) -> None:  # bug: 26
    d = driver()
    first = d.submit("a", prompt(length), max_tokens=3)[0]
    d.run()
    again = d.submit("b", prompt(length), max_tokens=3)[0]
    d.run()
    assert d.tokens(first) == d.tokens(again) == d.expected[again].tokens
    assert d.end(again).usage.cached == cached  # type: ignore[union-attr]
    assert d.chunks(again)[0] == (cached, length - cached)
    assert (d.scheduler.counts().prefix_queries, d.scheduler.counts().prefix_hits) == (2 * length, cached)


def test_a_conversation_goes_on_where_its_blocks_end() -> None:
    d = driver()
    first = d.submit("a", prompt(10), max_tokens=7)[0]
    d.run()
    again = d.submit("b", prompt(10) + d.tokens(first) + prompt(3, 2), max_tokens=2)[0]
    d.run()
    assert d.end(again).usage.cached == 16, "output is indexed too"  # type: ignore[union-attr]
    assert d.tokens(again) == d.expected[again].tokens


def test_another_salt_finds_nothing() -> None:  # bug: 29
    d = driver()
    d.submit("a", prompt(20), salt=b"tenant a")
    d.run()
    other, same = d.submit("b", prompt(20), salt=b"tenant b")[0], d.submit("c", prompt(20), salt=b"tenant a")[0]
    d.run()
    assert d.end(other).usage.cached == 0  # type: ignore[union-attr]
    assert d.end(same).usage.cached == 16  # type: ignore[union-attr]


def test_without_prefix_caching_nothing_is_kept() -> None:
    d = Driver(make_limits(), caching=False)
    for name in "ab":
        d.submit(name, prompt(20))
        d.run()
    counts = d.scheduler.counts()
    assert (counts.blocks_cached, counts.prefix_queries, counts.prefix_hits) == (0, 0, 0)
    assert d.computed("b#0") == 20 + 4


def test_prompt_log_probabilities_are_whole_every_time() -> None:  # bug: 27
    d = driver(max_step_tokens=16, chunk_tokens=16)
    for name in ("a", "b"):
        d.submit(name, prompt(21), prompt_logprobs=0)
        d.run()
        assert list(d.events[f"{name}#0"][0].prompt_logprobs) == d.expected[f"{name}#0"].prompt_logprobs


def test_eight_cold_requests_with_one_system_prompt_compute_it_once() -> None:
    d = driver(max_seqs=8, max_step_tokens=64, chunk_tokens=32)
    system = prompt(80)
    names = [d.submit(f"r{i}", system + prompt(3, 1 + i), max_tokens=3)[0] for i in range(8)]
    plan = d.step()
    assert plan.waits == {"prefix": 7}
    d.run()
    assert d.computed() == 80 + 8 * (3 + 2)
    assert all(d.tokens(name) == d.expected[name].tokens for name in names)
    assert [d.end(name).usage.cached for name in names] == [0] + [80] * 7  # type: ignore[union-attr]


def test_an_interactive_request_does_not_wait_for_bulk_but_bulk_jumps_ahead() -> None:
    """Both compute the same prompt; bulk reads slowly, then finds what interactive computed."""
    d = driver(max_seqs=3, max_step_tokens=40, chunk_tokens=40, num_blocks=200, max_rows=16)
    slow = d.submit("slow", prompt(150), pool=BULK, max_tokens=2)[0]
    d.step()
    fast = d.submit("fast", prompt(150), max_tokens=2)[0]
    plan = d.step()
    assert fast in plan.admitted
    d.run()
    assert d.computed(slow, fast) < 150 + 100
    assert any(later > start + count for (start, count), (later, _) in pairwise(d.chunks(slow))), "it jumped"
    for name in (slow, fast):
        assert d.tokens(name) == d.expected[name].tokens
    d.check_idle()


def test_nobody_waits_for_a_prefix_that_who_stands_behind_it_computes() -> None:
    d = driver(max_seqs=3, max_step_tokens=16, chunk_tokens=16, max_rows=16)
    d.submit("first", prompt(100), max_tokens=2)
    d.step()
    behind = d.submit("behind", prompt(100), priority=1, max_tokens=2)[0]
    urgent = d.submit("urgent", prompt(100), priority=-1, max_tokens=2)[0]
    plan = d.step()
    assert plan.admitted == (urgent,)
    assert plan.waits == {"prefix": 1}
    d.run()
    assert d.computed() < 200
    assert all(d.tokens(name) == d.expected[name].tokens for name in (behind, urgent))


def test_equal_outputs_end_up_in_the_same_blocks() -> None:
    """Greedy twins fill equal blocks; the second holds the first one's."""
    d = driver(max_seqs=2, max_rows=8)
    for name in ("a", "b"):
        d.submit(name, prompt(8), max_tokens=40)
    for _ in range(20):
        d.step()
    counts = d.scheduler.counts()
    used = counts.blocks_total - counts.blocks_free - counts.blocks_cached
    assert used <= 2 + 5 + 2


def test_a_long_queue_costs_no_hashing(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[bytes] = []

    def counted(parent: bytes, tokens: Sequence[int]) -> bytes:
        made.append(parent)
        return original(parent, tokens)

    original = prefix.block_key
    monkeypatch.setattr(prefix, "block_key", counted)
    d = driver(max_seqs=2, max_rows=8)
    for i in range(200):
        d.submit(f"r{i}", prompt(400, i % VOCAB), max_tokens=100)
    for _ in range(30):
        d.step()
    before = len(made)
    for _ in range(10):
        d.step()
    assert len(made) - before <= 10
