"""The synchronous engine on a real (tiny, random) model: what a stream gets does not depend on how steps were cut."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from minserve.engine import Engine
from minserve.policy.schedule import plan_step
from minserve.request import FinishReason, Pool, RequestError, StepPlan, View
from tests.engines import PROMPT, Collected, Delayed, Records, run, submission, tiny


@pytest.fixture(scope="module")
def alone() -> dict[str, list[int]]:
    """What prompts give alone, in an engine with room for everything."""
    engine = tiny(num_blocks=256, max_num_batched_tokens=128, prefix_caching=False).engine
    greedy = run(engine, submission(PROMPT, max_tokens=24, ignore_eos=True)).tokens["r", 0]
    seeded = run(engine, submission(PROMPT, max_tokens=24, temperature=1.0, seed=7)).tokens["r", 0]
    assert len(greedy) == 24
    assert len(set(seeded)) > 4
    return {"greedy": greedy, "seeded": seeded}


@pytest.mark.parametrize("budget", [4, 5, 7, 12, 64])
def test_chunk_size_does_not_change_the_text(alone: dict[str, list[int]], budget: int) -> None:
    engine = tiny(max_num_batched_tokens=budget).engine
    assert run(engine, submission(PROMPT, max_tokens=24)).tokens["r", 0] == alone["greedy"]
    assert run(engine, submission(PROMPT, max_tokens=24, temperature=1.0, seed=7)).tokens["r", 0] == alone["seeded"]


# bug: 32
def test_batch_mates_preemption_and_prefix_hits_do_not_change_the_text(alone: dict[str, list[int]]) -> None:
    records = Records()
    engine = tiny(num_blocks=20, max_num_seqs=4, observers=[records]).engine  # 80 tokens of cache for 4 x 36
    mates = [submission([i + 1, *PROMPT], f"m{i}", max_tokens=20, temperature=0.9, seed=i) for i in range(2)]
    plain = submission(PROMPT, "greedy", max_tokens=24)
    seeded = submission(PROMPT, "seeded", max_tokens=24, temperature=1.0, seed=7)
    unseeded = submission(PROMPT, "unseeded", max_tokens=24, temperature=1.0)
    got = run(engine, mates[0], plain, mates[1], seeded, unseeded)
    preempted = sum(step.preempted for step in records.steps)
    assert sum(outcome.preemptions for outcome in records.outcomes) == preempted > 0
    assert got.tokens["greedy", 0] == alone["greedy"]
    assert got.tokens["seeded", 0] == alone["seeded"]
    counts = engine.scheduler.counts()
    assert counts.blocks_free + counts.blocks_cached == counts.blocks_total
    again = run(engine, submission(PROMPT, "again", max_tokens=24))
    assert again.tokens["again", 0] == alone["greedy"]
    assert again.outcomes["again", 0].usage.cached > 0


def test_a_steps_record_has_the_prefix_lookups_of_that_step() -> None:
    records = Records()
    engine = tiny(observers=[records]).engine
    for name in ("first", "again"):
        outcome = run(engine, submission(PROMPT, name, max_tokens=8, ignore_eos=True)).outcomes[name, 0]
    assert sum(step.prefix_queries for step in records.steps) == 2 * len(PROMPT)
    assert sum(step.prefix_hits for step in records.steps) == outcome.usage.cached > 0


def test_n_choices_share_one_prefill_and_equal_choices_of_their_own_seed(alone: dict[str, list[int]]) -> None:
    records = Records()
    engine = tiny(num_blocks=128, max_num_seqs=8, max_num_batched_tokens=64, observers=[records]).engine
    got = run(engine, submission(PROMPT, n=8, max_tokens=24, temperature=1.0, seed=7))
    assert sum(step.prefill_tokens for step in records.steps) == len(PROMPT)
    assert got.tokens["r", 0] == alone["seeded"]
    assert len({tuple(got.tokens["r", k]) for k in range(8)}) == 8
    assert all(got.outcomes["r", k].usage.prompt == len(PROMPT) for k in range(8))


def test_a_stop_string_ends_the_text_before_it_and_the_request_before_the_next_step() -> None:
    engine = tiny().engine
    whole = run(engine, submission(PROMPT, max_tokens=24)).text["r", 0]
    stop = whole[6:9]
    got = run(engine, submission(PROMPT, "s", max_tokens=24, stop=(stop,)))
    assert got.text["s", 0] == whole[: whole.index(stop)]
    assert (got.last["s", 0].finish, got.last["s", 0].stop_reason) == (FinishReason.STOP, stop)
    usage = got.outcomes["s", 0].usage
    assert usage.completion == len(got.tokens["s", 0])
    included = run(engine, submission(PROMPT, "i", max_tokens=24, stop=(stop,), include_stop=True))
    assert included.text["i", 0] == whole[: whole.index(stop) + 3]


@pytest.mark.parametrize("most", [6, 24])
def test_what_a_step_brings_behind_a_stop_string_is_neither_shown_nor_counted(most: int) -> None:
    """Several tokens of one step, the last of which ends the request by length, or not."""
    plain = run(tiny().engine, submission(PROMPT, max_tokens=6)).tokens["r", 0]
    engine = tiny().engine

    def drafting(step: int, running: Sequence[View], *rest: Any) -> StepPlan:
        return plan_step(step, [view._replace(draft=tuple(plain[1:6])) for view in running], *rest)

    engine.scheduler._policy = drafting
    stop = engine.tokenizer.decode([plain[2]])
    got = run(engine, submission(PROMPT, "s", max_tokens=most, stop=(stop,)))
    assert got.tokens["s", 0] == plain[:3]
    assert (got.last["s", 0].stop_reason, got.last["s", 0].usage.completion) == (stop, 3)
    assert got.outcomes["s", 0].usage.completion == 3


# bug: 8
def test_text_held_back_for_a_stop_string_is_flushed_at_the_length_limit() -> None:
    engine = tiny().engine
    whole = run(engine, submission(PROMPT, max_tokens=12)).text["r", 0]
    got = run(engine, submission(PROMPT, "s", max_tokens=12, stop=(whole[-2:] + "never",)))
    assert got.text["s", 0] == whole
    assert got.last["s", 0].finish is FinishReason.LENGTH


def test_a_stop_token_of_the_caller_ends_without_its_text_and_is_named() -> None:
    engine = tiny().engine
    tokens = run(engine, submission(PROMPT, max_tokens=12)).tokens["r", 0]
    at = next(i for i in range(3, 12) if tokens[i] not in tokens[:i])
    got = run(engine, submission(PROMPT, "s", max_tokens=12, stop_token_ids=frozenset({tokens[at]})))
    assert got.tokens["s", 0] == tokens[: at + 1]
    assert got.outcomes["s", 0].usage.completion == at + 1
    assert got.last["s", 0].stop_reason == tokens[at]
    assert got.text["s", 0] == engine.tokenizer.decode(tokens[:at])


def test_every_token_has_a_log_probability_when_asked() -> None:
    got = Collected()
    engine = tiny().engine
    engine.submit(submission(PROMPT, max_tokens=6, logprobs=3))
    seen = []
    while engine.has_work:
        deliveries = engine.step()
        got.add(deliveries)
        seen += [lp for d in deliveries for lp in d.delta.logprobs]
    assert [lp.token_id for lp in seen] == got.tokens["r", 0]
    assert all(len(lp.top) == 3 and lp.top[0][0] == lp.token_id and lp.logprob <= 0 for lp in seen)


# bug: 30
@pytest.mark.parametrize("budget", [4, 5, 64])
def test_prompt_log_probabilities_are_whole_for_every_chunk_size(budget: int) -> None:
    def scores(**engine_options: Any) -> list[float]:
        engine = tiny(**engine_options).engine
        run(engine, submission(PROMPT, "warm"))  # leaves a prefix that must not be used
        engine.submit(submission(PROMPT, max_tokens=2, prompt_logprobs=0))
        out = []
        while engine.has_work:
            for d in engine.step():
                out += list(d.delta.prompt_logprobs)
        assert [lp.token_id for lp in out] == PROMPT[1:]
        return [lp.logprob for lp in out]

    assert scores(max_num_batched_tokens=budget) == pytest.approx(scores(max_num_batched_tokens=128), abs=1e-5)


def failing(engine: Engine, *at: int) -> Engine:
    engine.runner = Delayed(engine.runner, fail=set(at))  # type: ignore[assignment]
    return engine


# bug: 50
def test_a_failed_step_ends_only_its_own_requests() -> None:
    records = Records()
    engine = failing(tiny(max_num_seqs=1, observers=[records]).engine, 2)
    got = run(engine, submission(PROMPT, "a"), submission(PROMPT, "b"))
    error = got.last["a", 0].error
    assert isinstance(error, RequestError)
    assert (error.status, error.code) == (500, "engine_error")
    assert "secret" not in error.message
    assert got.outcomes["a", 0].finish is FinishReason.ERROR
    assert got.outcomes["b", 0].finish is FinishReason.LENGTH
    assert [step.failed is not None for step in records.steps].count(True) == 1


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_an_abort_in_any_state_frees_everything(steps: int) -> None:
    engine = tiny(max_num_batched_tokens=4).engine
    engine.submit(submission(PROMPT, "a", n=2))
    engine.submit(submission(PROMPT, "b"))
    for _ in range(steps):
        engine.step()
    ends = engine.abort("a")
    assert {d.delta.choice for d in ends if d.outcome} == {0, 1}
    assert engine.abort("a") == []
    got = run(engine)
    assert got.outcomes["b", 0].finish is FinishReason.LENGTH
    counts = engine.scheduler.counts()
    assert counts.blocks_free + counts.blocks_cached == counts.blocks_total
    assert not any(counts.running.values())


# bug: 60
def test_every_request_has_exactly_one_outcome_and_sums_agree() -> None:
    records = Records()
    engine = tiny(observers=[records]).engine
    for i in range(6):
        engine.submit(submission([i, *PROMPT], f"r{i}", n=1 + i % 2, pool=Pool.BULK if i % 3 else Pool.INTERACTIVE))
    delivered = 0
    for step in range(200):
        if not engine.has_work:
            break
        if step == 4:
            engine.abort("r1")
        delivered += sum(len(d.delta.token_ids) for d in engine.step())
    assert len(records.outcomes) == len({o.id for o in records.outcomes}) == 9
    assert sum(o.usage.completion for o in records.outcomes) == delivered
    assert sum(len(s.ttfts) + len(s.gaps) for s in records.steps) == delivered


def test_progress_tells_what_a_reader_waits_for() -> None:
    engine = tiny(max_num_seqs=1, max_num_batched_tokens=4).engine
    engine.submit(submission(PROMPT, "a"))
    engine.submit(submission(PROMPT, "b"))
    assert engine.progress("a").phase == "queued"
    engine.step()
    assert engine.progress("a") == type(engine.progress("a"))("prefill", 4, 12, 0)
    assert (engine.progress("b").phase, engine.progress("b").ahead) == ("queued", 0)
    engine.step()
    engine.step()
    assert engine.progress("a").phase == "decode"
    engine.abort("a")
    assert engine.progress("a").phase == "done"


def test_who_waits_ahead_is_counted_in_the_order_of_the_line() -> None:
    engine = tiny(max_num_seqs=1).engine
    engine.submit(submission(PROMPT, "runs"))
    engine.step()
    engine.submit(replace(submission(PROMPT, "patient", n=12), priority=1))
    engine.submit(submission(PROMPT, "first"))
    engine.submit(submission(PROMPT, "second"))
    assert [engine.progress(name).ahead for name in ("first", "second", "patient")] == [0, 1, 2]


def test_an_observer_that_raises_stops_nothing(caplog: pytest.LogCaptureFixture) -> None:
    def broken(_: Any) -> None:
        raise RuntimeError("observer")

    engine = tiny(observers=[broken]).engine
    got = run(engine, submission(PROMPT))
    assert got.outcomes["r", 0].finish is FinishReason.LENGTH
    assert "observer failed" in caplog.text


def test_lower_priority_goes_first() -> None:
    engine = tiny(max_num_seqs=1).engine
    waiting = [submission([i, *PROMPT], f"p{priority}") for i, priority in enumerate((3, 0, 7, -2))]
    waiting = [replace(s, priority=int(s.id[1:])) for s in waiting]
    got = run(engine, *waiting)
    arrived = {o.group: o.arrival + o.queue for o in got.outcomes.values()}
    assert sorted(arrived, key=arrived.__getitem__) == ["p-2", "p0", "p3", "p7"]
    assert {o.finish for o in got.outcomes.values()} == {FinishReason.LENGTH}
