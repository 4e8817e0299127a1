"""Too little room, and who goes first: preemption, promises, bounded waits. Blocks have 4 tokens."""

from __future__ import annotations

from typing import Any

import pytest

from minserve.policy import order
from minserve.policy.order import MAX_SKIPS
from minserve.request import FinishReason, RequestError, StepPlan
from tests.driver import Driver, driver, prompt
from tests.fake_program import VOCAB
from tests.policy.plans import BULK, INTERACTIVE, make_limits, pools

# -- too little room


def test_what_can_never_fit_is_refused_and_leaves_nothing_behind() -> None:  # bug: 22
    d = driver(num_blocks=50)
    for tokens in (204, 200):
        with pytest.raises(RequestError, match="holds 200 tokens") as error:
            d.submit("r", prompt(tokens))
        assert (error.value.status, error.value.code) == (400, "context_length_exceeded")
    d.check_idle()
    name = d.submit("fits", prompt(196), max_tokens=2)[0]
    d.run()
    assert d.tokens(name) == d.expected[name].tokens


def test_output_beyond_all_blocks_ends_by_length() -> None:  # bug: 22
    d = driver(num_blocks=50)
    name = d.submit("r", prompt(160), max_tokens=80)[0]
    d.run()
    assert d.end(name).finish is FinishReason.LENGTH
    assert len(d.tokens(name)) == 41, "200 rows hold 40 of them; the last token needs none"
    d.check_idle()


def test_preemption_changes_neither_tokens_nor_counts_nor_log_probabilities() -> None:  # bug: 19
    def outcome(num_blocks: int) -> tuple[Driver, list[str]]:
        d = driver(num_blocks=num_blocks, max_seqs=16, max_step_tokens=64, chunk_tokens=24)
        names = [
            d.submit(
                f"r{i}",
                prompt(6 + i, i % VOCAB),
                temperature=float(i % 2),
                seed=i,
                max_tokens=20,
                logprobs=0,
                frequency_penalty=0.5 if i % 4 > 1 else 0.0,
                prompt_logprobs=0 if i % 5 == 0 else None,
            )[0]
            for i in range(16)
        ]
        d.run()
        return d, names

    (small, names), (large, _) = outcome(30), outcome(1000)
    assert sum(len(plan.preempted) for plan in small.plans) > 8
    assert not any(plan.preempted for plan in large.plans)
    for name in names:
        assert small.tokens(name) == large.tokens(name) == small.expected[name].tokens
        assert [e.logprob for e in small.events[name]] == [e.logprob for e in large.events[name]]
        assert [e.prompt_logprobs for e in small.events[name]] == [e.prompt_logprobs for e in large.events[name]]
        assert small.end(name).usage.completion == large.end(name).usage.completion == 20  # type: ignore[union-attr]
    small.check_idle()


def test_a_preempted_request_finds_its_own_blocks_again() -> None:
    """Bulk gives up its seat for one step; its eight full blocks are still there."""
    d = driver(max_seqs=2, max_rows=8, pools=pools(token_share=(1.0, 0.0)))
    bulk = [d.submit(f"b{i}", prompt(32, i), pool=BULK, max_tokens=9)[0] for i in range(2)]
    d.step()
    d.submit("urgent", prompt(4, 5), max_tokens=1)
    assert d.step().preempted == (bulk[1],)
    d.run()
    assert d.chunks(bulk[1])[0] == (0, 32)
    assert d.chunks(bulk[1])[1] == (32, 1), "nothing is computed twice"
    assert d.end(bulk[1]).usage.cached == 0, "its own rows are no cache hit"  # type: ignore[union-attr]
    assert all(d.tokens(name) == d.expected[name].tokens for name in bulk)


# -- order and fairness


def test_a_long_prompt_holds_up_neither_short_ones_nor_those_who_decode() -> None:  # bug: 57
    d = driver(max_seqs=30, num_blocks=30_000, max_step_tokens=128, chunk_tokens=64, max_rows=64)
    talking = d.submit("talking", prompt(5), max_tokens=1000)[0]
    d.step()
    d.submit("long", prompt(10_000, 1), max_tokens=1)
    d.step()
    short = [d.submit(f"s{i}", prompt(10, 2 + i % 9), max_tokens=2)[0] for i in range(20)]
    for _ in range(12):
        plan = d.step()
        assert talking in {chunk.request_id for chunk in plan.chunks}
        assert plan.tokens - sum(c.samples for c in plan.chunks if c.count == 1) <= 64
    assert all(d.tokens(name) for name in short), "20 x 10 tokens at 32 a step"
    assert d.computed("long#0") >= 12 * 32, "it isn't held up either"


def test_one_that_does_not_fit_is_passed_a_bounded_number_of_times() -> None:  # bug: 56
    d = driver(num_blocks=40, max_seqs=8, max_step_tokens=64)
    d.submit("first", prompt(110), max_tokens=30)
    d.step()
    big = d.submit("big", prompt(100, 1), max_tokens=1)[0]
    passed = 0
    for i in range(200):
        d.submit(f"small{i}", prompt(4, 2 + i % 9), max_tokens=4)
        plan = d.step()
        if big in plan.admitted:
            break
        passed += bool(plan.admitted)
    assert 0 < passed <= MAX_SKIPS, "small ones pass, for a while"
    assert d.scheduler.requests[big].seat >= 0
    assert d.scheduler.requests[big].skips == 0, "it starts anew if it is preempted"


class Flood(Driver):
    """Interactive requests never stop coming: always more than there are seats."""

    def planned(self, plan: StepPlan) -> None:
        while self.scheduler.counts().waiting[INTERACTIVE] < 20:
            number = len(self.events)
            self.submit(f"i{number}", prompt(12, number % VOCAB), max_tokens=6, seed=number)


def flooded(**limits: Any) -> Flood:
    d = Flood(make_limits(**({"num_blocks": 60, "max_step_tokens": 32, "chunk_tokens": 16} | limits)))
    for _ in range(10):
        d.step()
    return d


def test_bulk_keeps_its_share_under_saturating_interactive_load() -> None:  # bug: 59
    d = flooded()
    start = len(d.plans)
    bulk = [d.submit(f"b{i}", prompt(12, i), pool=BULK, max_tokens=6)[0] for i in range(200)]
    for _ in range(150):
        d.step()
    done = [name for name in bulk if d.events[name] and d.events[name][-1].finish]
    interactive = sum(c.count for p in d.plans[start:] for c in p.chunks if c.request_id.startswith("i"))
    share = d.computed(*bulk) / (d.computed(*bulk) + interactive)
    assert len(done) >= 10
    assert 0.1 <= share <= 0.35


def test_bulk_decodes_rest_at_most_twice_in_a_row_and_in_half_of_the_steps() -> None:
    d = driver(max_seqs=8, max_step_tokens=32, chunk_tokens=4, num_blocks=100, max_rows=16)
    bulk = d.submit("b", prompt(4), pool=BULK, max_tokens=40)[0]
    d.step()
    d.submit("i", prompt(150, 1), max_tokens=1)
    served = ["b" if any(c.request_id == bulk for c in d.step().chunks) else "-" for _ in range(12)]
    assert "".join(served) == "--b-b-b-b-b-"


def test_one_seat_is_no_reason_to_starve(monkeypatch: pytest.MonkeyPatch) -> None:  # bug: 59
    monkeypatch.setattr(order, "MAX_SKIPS_BELOW", 10)
    d = flooded(max_seqs=1)
    bulk = d.submit("b", prompt(12), pool=BULK, max_tokens=6)[0]
    for _ in range(10 * 40):
        d.step()
        if d.events[bulk] and d.events[bulk][-1].finish:
            break
    assert d.tokens(bulk) == d.expected[bulk].tokens


def test_interactive_requests_hardly_wait_while_bulk_saturates() -> None:
    d = driver(max_seqs=8, max_step_tokens=32, chunk_tokens=16, num_blocks=100, max_rows=16)
    for i in range(50):
        d.submit(f"b{i}", prompt(30, i % VOCAB), pool=BULK, max_tokens=30)
    for _ in range(30):
        d.step()
    name = d.submit("i", prompt(8, 3), max_tokens=5)[0]
    assert name in d.step().admitted, "a seat is taken back at once"
    for _ in range(5):
        d.step()
    assert d.tokens(name) == d.expected[name].tokens, "and it has a token in every step"
