"""The scheduler at work: a request's way in, through and out. Blocks have 4 tokens."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest

from minserve import prefix
from minserve.batch import ChunkResult, StepResult
from minserve.policy import room
from minserve.policy.limits import Limits
from minserve.policy.room import MAX_SKIPS
from minserve.policy.schedule import plan_step
from minserve.request import FinishReason, RequestError, SamplingParams, StepPlan, Submission, View
from minserve.scheduler import Scheduler
from tests.driver import Driver
from tests.fake_program import VOCAB
from tests.policy.plans import BULK, INTERACTIVE, make_limits, pools


def prompt(length: int, start: int = 0) -> list[int]:
    """No two starts below VOCAB have a block in common."""
    return [(start + 5 * i * (start + 1)) % VOCAB for i in range(length)]


def driver(**limits: Any) -> Driver:
    return Driver(make_limits(**limits))


# -- the way through


def test_a_request_from_submit_to_end() -> None:
    d = driver()
    (name,) = d.submit("r", prompt(10), max_tokens=5)
    d.run()
    assert name == "r#0"
    assert d.chunks(name) == [(0, 10), (10, 1), (11, 1), (12, 1), (13, 1)]
    assert d.tokens(name) == d.expected[name].tokens
    assert [event.index for event in d.events[name]] == [0, 1, 2, 3, 4]
    end = d.end(name)
    assert end.finish is FinishReason.LENGTH
    assert end.usage is not None
    assert (end.usage.prompt, end.usage.cached, end.usage.completion) == (10, 0, 5)
    d.check_idle()


def test_a_stop_token_ends_it_and_is_counted() -> None:
    d = driver()
    free = d.submit("free", prompt(6), max_tokens=8)[0]
    d.run()
    tokens = d.tokens(free)
    stop = tokens[3]
    first = tokens.index(stop)
    stopped, later = (
        d.submit(str(least), prompt(6), max_tokens=8, stop_token_ids=frozenset({stop}), min_tokens=least)[0]
        for least in (0, 8)
    )
    d.run()
    assert d.tokens(stopped) == tokens[: first + 1]
    assert d.end(stopped).finish is FinishReason.STOP
    assert d.end(stopped).usage.completion == first + 1  # type: ignore[union-attr]
    assert (len(d.tokens(later)), d.end(later).finish) == (8, FinishReason.LENGTH)
    assert stop not in d.tokens(later), "min_tokens bans the stop token"


def test_chunks_before_the_last_emit_nothing() -> None:  # bug: 31
    d = driver(max_step_tokens=16, chunk_tokens=16)
    (name,) = d.submit("r", prompt(40), max_tokens=1)
    for _ in range(2):
        d.step()
        assert d.events[name] == []
    d.step()
    assert d.tokens(name) == d.expected[name].tokens


@pytest.mark.parametrize("chunk", [1, 3, 4, 5, 64])
@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 9, 21])
def test_chunk_size_changes_nothing(chunk: int, length: int) -> None:  # bug: 30
    d = driver(max_seqs=3, max_step_tokens=max(3, chunk), chunk_tokens=chunk, max_rows=8)
    mate = d.submit("mate", prompt(5, 1), max_tokens=40)[0]
    d.step()
    name = d.submit("r", prompt(length), temperature=1.0, prompt_logprobs=0, logprobs=0)[0]
    d.run()
    for request in (mate, name):
        assert d.tokens(request) == d.expected[request].tokens
    assert [e.logprob for e in d.events[name]] == d.expected[name].logprobs
    assert list(d.events[name][0].prompt_logprobs) == d.expected[name].prompt_logprobs


def test_no_output_wanted_scores_the_prompt_and_ends() -> None:
    d = driver()
    name = d.submit("r", prompt(9), max_tokens=0, prompt_logprobs=0)[0]
    d.run()
    (event,) = d.events[name]
    assert (event.token_id, event.finish) == (-1, FinishReason.LENGTH)
    assert list(event.prompt_logprobs) == d.expected[name].prompt_logprobs
    assert event.usage is not None
    assert event.usage.completion == 0


def test_a_seeded_request_gets_the_same_tokens_in_any_company() -> None:  # bug: 32
    def tokens(mates: int, late: int) -> list[int]:
        d = driver(max_step_tokens=20, chunk_tokens=7)
        for i in range(mates):
            d.submit(f"mate{i}", prompt(3 + i, 1 + i), temperature=1.0, seed=1000 + i, max_tokens=6)
        name = d.submit("r", prompt(9), temperature=1.0, seed=42, max_tokens=12)[0]
        for _ in range(4):
            d.step()
        for i in range(late):
            d.submit(f"late{i}", prompt(8, 4 + i), temperature=0.0, max_tokens=6)
        d.run()
        return d.tokens(name)

    alone = tokens(0, 0)
    assert all(tokens(mates, late) == alone for mates, late in [(3, 0), (0, 3), (3, 4)])


def test_no_valid_token_ends_that_request_alone_with_an_error() -> None:  # bug: 36
    d = driver()
    only_five, mate = frozenset({5}), d.submit("mate", prompt(6))[0]
    name = d.submit("r", prompt(6, 1), allowed_token_ids=only_five, banned_token_ids=only_five)[0]
    d.run()
    (event,) = d.events[name]
    assert (event.token_id, event.finish) == (-1, FinishReason.ERROR)
    assert event.error is not None
    assert (event.error.code, event.error.status) == ("no_valid_token", 500)
    assert d.tokens(mate) == d.expected[mate].tokens
    d.check_idle()


# -- the way out, in every state


def test_queued_requests_whose_clients_left_are_never_computed() -> None:  # bug: 15
    d = driver(max_seqs=2, max_rows=8)
    running = d.submit("a", prompt(5)) + d.submit("b", prompt(5, 1))
    d.step()
    queued = [d.submit(f"q{i}", prompt(6, 2))[0] for i in range(20)]
    d.step()
    for name in queued:
        assert d.finish(name).usage.completion == 0  # type: ignore[union-attr]
    d.run()
    assert all(d.chunks(name) == [] for name in queued)
    assert all(d.tokens(name) == d.expected[name].tokens for name in running)
    d.check_idle()


def test_an_abort_while_reading_the_prompt_stops_at_the_next_chunk() -> None:  # bug: 16
    d = driver(max_step_tokens=16, chunk_tokens=16)
    name = d.submit("long", prompt(200))[0]
    d.step()
    d.step()
    assert d.scheduler.counts().blocks_free == 1000 - 8
    d.finish(name)
    assert d.computed() == 32
    d.check_idle()


@pytest.mark.parametrize("steps", range(8))
def test_finish_works_in_every_state_and_gives_everything_back(steps: int) -> None:
    """n = 4 on 3 seats, so one sibling stays behind; the prompt takes 3 chunks."""
    for victim in range(4):
        d = driver(max_seqs=3, max_step_tokens=6, chunk_tokens=4, max_rows=8)
        names = d.submit("r", prompt(14), n=4, max_tokens=4, temperature=1.0)
        for _ in range(steps):
            d.step()
        if names[victim] in d.scheduler.requests:
            d.finish(names[victim])
        d.run()
        for i, name in enumerate(names):
            assert d.tokens(name) == d.expected[name].tokens[: None if i != victim else len(d.tokens(name))]
        d.check_idle()


def test_an_end_above_the_scheduler_reports_usage() -> None:
    d = driver()
    name = d.submit("r", prompt(8), max_tokens=50)[0]
    for _ in range(3):
        d.step()
    event = d.finish(name, FinishReason.STOP)
    assert (event.index, event.token_id, event.finish) == (3, -1, FinishReason.STOP)
    assert event.usage is not None
    assert event.usage.completion == 3


def test_a_request_that_ends_while_its_step_runs_is_passed_over() -> None:
    class Impatient(Driver):
        def running(self, plan: StepPlan) -> None:
            if gone in self.scheduler.requests:
                self.finish(gone)

    d = Impatient(make_limits())
    gone, stays = d.submit("a", prompt(5))[0], d.submit("b", prompt(5, 1))[0]
    d.run()
    assert d.tokens(gone) == []
    assert d.tokens(stays) == d.expected[stays].tokens
    d.check_idle()


def test_a_failed_step_ends_exactly_the_requests_it_computed() -> None:
    d = driver(max_seqs=3, max_rows=8)
    names = d.submit("a", prompt(6), n=2) + d.submit("b", prompt(6, 1))
    waits = d.submit("waits", prompt(6, 2))[0]
    plan = d.step(fail=True)
    assert set(plan.admitted) == set(names)
    for name in names:
        assert d.end(name).finish is FinishReason.ERROR
        assert d.end(name).error is not None
        assert d.end(name).error.code == "engine_error"  # type: ignore[union-attr]
    d.run()
    assert d.tokens(waits) == d.expected[waits].tokens
    d.check_idle()


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


def test_an_id_in_use_is_refused() -> None:
    d = driver()
    name = d.submit("r", prompt(5))[0]
    with pytest.raises(RequestError, match="not finished") as error:
        d.scheduler.submit(Submission("r", (1,), SamplingParams(max_tokens=1)), 0, 0.0)
    assert error.value.status == 409
    d.run()
    assert d.tokens(name) == d.expected[name].tokens
    d.submit("r", prompt(5))


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
    monkeypatch.setattr(room, "MAX_SKIPS_BELOW", 10)
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


# -- prefixes


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


# -- groups


def test_choices_compute_their_prompt_once_and_share_its_blocks() -> None:
    d = driver(max_seqs=8, max_rows=16)
    names = d.submit("r", prompt(14), n=4, max_tokens=6, temperature=1.0)
    plan = d.step()
    assert plan.chunks[0].forks == tuple(names[1:])
    counts = d.scheduler.counts()
    assert counts.blocks_total - counts.blocks_free == 4 + 3, "three full blocks shared, four partial ones"
    assert all(len(d.tokens(name)) == 1 for name in names)
    d.run()
    assert d.computed() == 14 + 4 * 5
    assert all(d.tokens(name) == d.expected[name].tokens for name in names)
    assert len({tuple(d.tokens(name)) for name in names}) > 1


def test_siblings_without_a_seat_come_later_with_a_prefix_hit() -> None:
    d = driver(max_seqs=2, max_rows=8)
    names = d.submit("r", prompt(14), n=5, max_tokens=4, temperature=1.0)
    plan = d.step()
    assert plan.chunks[0].forks == (names[1],)
    assert plan.waits == {"group": 3}
    d.run()
    assert all(d.tokens(name) == d.expected[name].tokens for name in names)
    assert d.chunks(names[2])[0] == (12, 2)
    assert [d.end(name).usage.cached for name in names] == [0, 14, 12, 14, 12]  # type: ignore[union-attr]
    d.check_idle()


def test_when_the_leader_goes_the_next_sibling_leads() -> None:
    d = driver(max_step_tokens=10, chunk_tokens=8, max_seqs=10)
    names = d.submit("r", prompt(30), n=3, max_tokens=4)
    d.step()
    d.finish(names[0])
    plan = d.step()
    assert plan.admitted == (names[1],)
    assert plan.chunks[0].start == 8, "what the first one computed is found"
    d.run()
    assert all(d.tokens(name) == d.expected[name].tokens for name in names[1:])


def test_every_choice_gets_the_prompts_log_probabilities_and_they_are_computed_once() -> None:
    d = driver(max_seqs=2, max_step_tokens=10, chunk_tokens=10, max_rows=10)
    names = d.submit("r", prompt(20), n=4, max_tokens=3, prompt_logprobs=0)
    d.run()
    for name in names:
        assert list(d.events[name][0].prompt_logprobs) == d.expected[name].prompt_logprobs
        assert not any(event.prompt_logprobs for event in d.events[name][1:])
    assert sum(chunk.scored for plan in d.plans for chunk in plan.chunks) == 19


def test_a_copy_that_a_failed_step_may_not_have_made_is_made_up_for() -> None:
    """The fork does not run in the step that fails, but its copy was in that step's batch."""

    def plan(step: int, running: Sequence[View], waiting: Sequence[View], free: int, limits: Limits) -> StepPlan:
        held_back = [view for view in running if step != 1 or view.id != "r#1"]
        return plan_step(step, held_back, waiting, free, limits)

    d = Driver(make_limits(), plan=plan)
    names = d.submit("r", prompt(14), n=2, max_tokens=6, temperature=1.0)
    d.step()
    d.step(fail=True)
    assert d.end(names[0]).finish is FinishReason.ERROR
    d.run()
    assert d.chunks(names[1])[0] == (12, 3)
    assert d.tokens(names[1]) == d.expected[names[1]].tokens
    d.check_idle()


def test_a_copy_waits_for_a_step_that_runs() -> None:
    """Two steps compute nothing: the copy of the partial block is still made before the fork's next row."""

    def plan(step: int, running: Sequence[View], waiting: Sequence[View], free: int, limits: Limits) -> StepPlan:
        return StepPlan(step) if step in (1, 2) else plan_step(step, running, waiting, free, limits)

    d = Driver(make_limits(), plan=plan)
    names = d.submit("r", prompt(14), n=2, max_tokens=6, temperature=1.0)
    d.run()
    assert [len(p.chunks) for p in d.plans[:4]] == [1, 0, 0, 2]
    assert all(d.tokens(name) == d.expected[name].tokens for name in names)


# -- drafts


def drafting(*proposals: tuple[int, ...]) -> Any:
    """A policy that is told of these drafts, one after the other, once the prompt is computed."""
    left = list(proposals)

    def plan(step: int, running: Sequence[View], waiting: Sequence[View], free: int, limits: Limits) -> StepPlan:
        views = [view._replace(draft=left.pop(0)) if left else view for view in running]
        return plan_step(step, views, waiting, free, limits)

    return plan


def test_accepted_drafts_are_tokens_and_rejected_ones_leave_no_trace() -> None:
    right = Driver(make_limits())
    tokens = right.expected[right.submit("r", prompt(6), max_tokens=12)[0]].tokens
    wrong = (tokens[5] + 1) % VOCAB
    d = Driver(make_limits(), plan=drafting(tuple(tokens[1:4]), (wrong, 0, 0), tuple(tokens[6:8])))
    name = d.submit("r", prompt(6), max_tokens=12)[0]
    d.run()
    assert d.chunks(name)[:4] == [(0, 6), (6, 4), (10, 4), (11, 3)]
    assert d.tokens(name) == tokens
    again = d.submit("again", prompt(6) + tokens, max_tokens=1)[0]
    d.run()
    assert d.tokens(again) == d.expected[again].tokens, "only blocks full of accepted tokens are in the index"


def test_accepted_drafts_behind_a_stop_token_are_dropped() -> None:
    right = Driver(make_limits())
    tokens = right.expected[right.submit("r", prompt(6), max_tokens=12)[0]].tokens
    d = Driver(make_limits(), plan=drafting(tuple(tokens[1:6])))
    stop = next(token for token in tokens[2:] if token not in tokens[:2])
    name = d.submit("r", prompt(6), max_tokens=12, stop_token_ids=frozenset({stop}))[0]
    d.run()
    assert d.tokens(name) == tokens[: tokens.index(stop) + 1]
    assert d.end(name).finish is FinishReason.STOP
    assert d.scheduler.counts().blocks_cached == (6 + tokens.index(stop)) // 4, "nor are their rows in the index"
    d.check_idle()


# -- a result that says more or less than asked


def test_log_probabilities_may_be_missing_from_a_result() -> None:
    scheduler = Scheduler(make_limits(), weights_id=b"w")
    scheduler.submit(Submission("r", (1, 2, 3), SamplingParams(max_tokens=1), n=2), 0, 0.0)
    plan = scheduler.plan()
    events = scheduler.commit(plan, StepResult((ChunkResult(tokens=(4,), fork_tokens=(5,)),)))
    assert {(event.request_id, event.token_id, event.logprob) for event in events} == {
        ("r#0", 4, None),
        ("r#1", 5, None),
    }


def test_a_stop_token_before_min_tokens_does_not_end_a_request_even_if_it_is_drawn() -> None:
    scheduler = Scheduler(make_limits(), weights_id=b"w")
    params = SamplingParams(max_tokens=9, min_tokens=2, stop_token_ids=frozenset({4}))
    scheduler.submit(Submission("r", (1, 2, 3), params), 0, 0.0)
    ends = []
    for _ in range(3):
        (event,) = scheduler.commit(scheduler.plan(), StepResult((ChunkResult(tokens=(4,)),)))
        ends.append(event.finish)
    assert ends == [None, None, FinishReason.STOP]


def test_limits_may_change_between_steps() -> None:
    d = driver()
    names = [d.submit(f"r{i}", prompt(40, i), max_tokens=9)[0] for i in range(4)]
    d.step()
    d.scheduler.limits = make_limits(max_seqs=2, chunk_tokens=4)
    d.run()
    assert all(d.tokens(name) == d.expected[name].tokens for name in names)
    assert all(len(plan.admitted) <= 2 for plan in d.plans[1:])
