"""Several choices of one prompt: computed once, shared, forked. Blocks have 4 tokens."""

from __future__ import annotations

from collections.abc import Sequence

from minserve.policy.limits import Limits
from minserve.policy.schedule import plan_step
from minserve.request import FinishReason, StepPlan, View
from tests.driver import Driver, driver, prompt
from tests.policy.plans import make_limits


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
    assert d.chunks(names[1])[:2] == [(12, 2), (14, 1)]
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
