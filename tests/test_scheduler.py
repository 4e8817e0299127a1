"""The scheduler at work: a request's way in, through and out. Blocks have 4 tokens."""

from __future__ import annotations

import pytest

from minserve.request import FinishReason, RequestError, SamplingParams, StepPlan, Submission
from tests.driver import Driver, driver, prompt
from tests.policy.plans import make_limits

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


def test_an_id_in_use_is_refused() -> None:
    d = driver()
    name = d.submit("r", prompt(5))[0]
    with pytest.raises(RequestError, match="not finished") as error:
        d.scheduler.submit(Submission("r", (1,), SamplingParams(max_tokens=1)), 0, 0.0)
    assert error.value.status == 409
    d.run()
    assert d.tokens(name) == d.expected[name].tokens
    d.submit("r", prompt(5))


def test_limits_may_change_between_steps() -> None:
    d = driver()
    names = [d.submit(f"r{i}", prompt(40, i), max_tokens=9)[0] for i in range(4)]
    d.step()
    d.scheduler.limits = make_limits(max_seqs=2, chunk_tokens=4)
    d.run()
    assert all(d.tokens(name) == d.expected[name].tokens for name in names)
    assert all(len(plan.admitted) <= 2 for plan in d.plans[1:])


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
