"""One step planned by hand, rule by rule: order, decodes, prompts. Blocks have 4 tokens."""

import pytest

from minserve.policy.order import AGE_STEPS
from minserve.policy.steady import steady
from minserve.policy.turns import MAX_RESTS
from minserve.request import Chunk, View
from tests.policy.plans import BULK, counts, decode, make_limits, plan, pools, view

# -- nothing to decide


def test_where_everybody_decodes_everybody_gets_a_token_without_deliberation() -> None:
    running = [decode("late", 9, arrival=1.0), decode("early", 8)]
    chunks = steady(running, 1, make_limits())
    assert chunks == (Chunk("early", 7, 1, 1), Chunk("late", 8, 1, 1))
    assert plan(running, []).chunks == chunks
    assert steady(running, 0, make_limits()) is None  # "late" begins a block
    assert steady([*running, view("reads", 9, 4)], 9, make_limits()) is None


# -- 1. order


def test_interactive_before_bulk_and_decodes_before_prompts() -> None:
    running = [decode("bulk", 9, pool=BULK), view("reading", 20, 8), decode("talking", 9)]
    waiting = [view("bulk new", 4, pool=BULK), view("new", 4, arrival=1.0)]
    assert list(counts(plan(running, waiting))) == ["talking", "reading", "new", "bulk new"]
    running[0] = decode("bulk", 9, pool=BULK, skips=MAX_RESTS)
    assert list(counts(plan(running, waiting))) == ["talking", "reading", "new", "bulk", "bulk new"]


@pytest.mark.parametrize(
    ("views", "first"),
    [
        ([view("late", 4, arrival=2.0), view("early", 4, arrival=1.0)], "early"),
        ([view("early", 4, arrival=1.0), view("urgent", 4, arrival=2.0, priority=-1)], "urgent"),
        ([view("old", 4, age=AGE_STEPS + 1), view("urgent", 4, priority=-1)], "old"),
        ([view("old", 4, age=AGE_STEPS - 1), view("urgent", 4, priority=-1)], "urgent"),
        ([view("b", 4), view("a", 4)], "a"),
    ],
)
def test_one_seat_goes_to_the_first_in_order(views: list[View], first: str) -> None:
    planned = plan([], views, limits=make_limits(max_seqs=1))
    assert planned.admitted == (first,)
    assert planned.waits == {"seats": 1}


# -- 2. decodes


def test_everybody_who_decodes_gets_a_token_whatever_waits() -> None:
    running = [decode(f"i{i}", 9 + i) for i in range(4)]
    waiting = [view("long", 1000), view("bulk long", 1000, pool=BULK)]
    planned = plan(running, waiting, max_step_tokens=10, chunk_tokens=10)
    assert all(counts(planned)[v.id] == 1 for v in running)
    assert all(chunk.samples == 1 for chunk in planned.chunks if chunk.request_id.startswith("i"))
    assert planned.tokens == 10


BULK_DECODES = [decode(f"b{i}", 9 + i, arrival=float(i), pool=BULK) for i in range(4)]


def test_bulk_rests_in_a_step_that_reads_an_interactive_prompt() -> None:
    """Its decodes, whose time is room for the prompt; its own prompts get their share, here 0.2 * 8 tokens."""
    running, waiting = [decode("i", 9), *BULK_DECODES], [view("new", 1000), view("bulk new", 9, pool=BULK)]
    limits = make_limits(chunk_tokens=2, max_step_tokens=32, decode_worth=1.5)
    planned = plan(running, waiting, step=1, limits=limits)
    assert counts(planned) == {"i": 1, "new": 2 + 6 - 2, "bulk new": 2}
    assert counts(plan([view("reading", 1000, 8), *BULK_DECODES], [], step=1, limits=limits)) == {"reading": 8}


def test_a_resting_pool_leaves_no_more_than_a_step_holds() -> None:
    limits = make_limits(chunk_tokens=2, max_step_tokens=10, max_seqs=10, decode_worth=9.0)
    assert plan([decode("i", 9), *BULK_DECODES], [view("new", 1000)], step=1, limits=limits).tokens == 10


def test_bulk_rests_for_nobody_who_cannot_come_in() -> None:
    blocked = [view("no seat", 100), view("same prefix", 100, blocked=True)]
    limits = make_limits(max_seqs=5, chunk_tokens=2, pools=pools(max_seqs=(1, 10)))
    planned = plan([decode("i", 9), *BULK_DECODES], [*blocked, view("b", 9, pool=BULK)], step=1, limits=limits)
    assert all(v.id in counts(planned) for v in BULK_DECODES)


def test_bulk_decodes_rest_for_no_other_bulk_work() -> None:
    planned = plan([*BULK_DECODES], [view("new", 100, pool=BULK)], step=1, chunk_tokens=2)
    assert counts(planned) == {"b0": 1, "b1": 1, "b2": 1, "b3": 1, "new": 2}


NAMES = tuple(view.id for view in BULK_DECODES)


def test_bulk_rests_no_more_before_it_has_made_up_for_two_rests() -> None:
    """However much the other pool has to read. Who rests is said to be skipped, so that the next plan knows."""
    for rests in range(MAX_RESTS):
        planned = plan([v._replace(skips=rests) for v in BULK_DECODES], [view("long", 1000)], chunk_tokens=2)
        assert (counts(planned), planned.skipped) == ({"long": 6}, NAMES)
    planned = plan([v._replace(skips=MAX_RESTS) for v in BULK_DECODES], [view("long", 1000)], chunk_tokens=2)
    assert (counts(planned), planned.skipped) == ({"long": 2} | dict.fromkeys(NAMES, 1), ())


def test_bulk_reads_in_odd_steps_and_decodes_in_even_ones_while_interactive_decodes() -> None:
    """So its steps are short. The time of decodes that rest is room for prompts."""
    running = [*BULK_DECODES, view("reading", 1000, 8, pool=BULK)]
    assert counts(plan([decode("i", 9), *running], [], step=1, chunk_tokens=8)) == {"i": 1, "reading": 6}
    assert counts(plan([decode("i", 9), *running], [], step=2, chunk_tokens=8)) == {"i": 1} | dict.fromkeys(NAMES, 1)
    assert len(counts(plan(running, [], step=1, chunk_tokens=8))) == 5, "alone it does both"


def test_bulk_decodes_in_every_step_if_it_has_nothing_to_read() -> None:
    stuck = view("stuck", 1000, pool=BULK)
    planned = plan([decode("i", 9), *BULK_DECODES], [stuck], free=2, step=1, chunk_tokens=8)
    assert counts(planned) == {"i": 1} | dict.fromkeys(NAMES, 1)


def test_bulk_prompts_fill_half_of_a_step_while_interactive_decodes() -> None:
    assert counts(plan([decode("i", 9)], [view("b", 1000, pool=BULK)], chunk_tokens=32))["b"] == 16
    assert counts(plan([decode("b2", 9, pool=BULK)], [view("b", 1000, pool=BULK)], chunk_tokens=32))["b"] == 32


@pytest.mark.parametrize(("running", "tokens"), [([], 64), ([decode("talking", 9)], 32)])
def test_prompt_tokens_are_capped_only_while_somebody_decodes(running: list[View], tokens: int) -> None:
    planned = plan(running, [view("long", 1000)])
    assert counts(planned)["long"] == tokens


def test_a_chunk_is_sampled_only_where_it_reaches_the_end_of_the_known_tokens() -> None:  # bug: 31
    planned = plan([view("first", 200, 40), view("middle", 1000, 40, arrival=1.0)], [])
    assert [(c.request_id, c.start, c.count, c.samples) for c in planned.chunks] == [
        ("first", 40, 32, 0),
        ("middle", 40, 32, 0),
    ]
    planned = plan([view("last piece", 100, 40), view("behind", 1000, 40, arrival=1.0)], [])
    assert [(c.count, c.samples) for c in planned.chunks] == [(60, 1), (4, 0)]  # nobody is kept who can end
    planned = plan([view("last piece", 50, 40)], [])
    assert [(c.start, c.count, c.samples) for c in planned.chunks] == [(40, 10, 1)]


def test_what_a_preempted_request_generated_is_not_in_one_chunk_with_its_prompt() -> None:
    (prompt,) = plan([], [view("again", 14, prompt_len=10)]).chunks
    (rest,) = plan([view("again", 14, 10, prompt_len=10)], []).chunks
    assert (prompt.start, prompt.count, prompt.samples) == (0, 10, 0)
    assert (rest.start, rest.count, rest.samples) == (10, 4, 1)


def test_nothing_is_sampled_when_no_output_is_wanted() -> None:
    planned = plan([], [view("scored", 8, limit=8, scored=(0, 7))])
    assert [(c.count, c.scored, c.samples) for c in planned.chunks] == [(8, 7, 0)]


# -- 3. prompts share


def test_a_long_prompt_leaves_half_of_what_is_left_to_those_behind_it() -> None:  # bug: 57
    waiting = [view("long", 100_000)] + [view(f"short{i}", 10, arrival=1.0 + i) for i in range(20)]
    planned = plan([], waiting, num_blocks=30_000, free=30_000, max_seqs=21, max_step_tokens=512)
    got = counts(planned)
    assert got["long"] >= 256
    assert all(got[f"short{i}"] == 10 for i in range(20))
    assert planned.tokens == 512


def test_what_nobody_else_takes_goes_to_the_first() -> None:
    planned = plan([], [view("long", 1000), view("short", 5, arrival=1.0)])
    assert counts(planned) == {"long": 59, "short": 5}


def test_two_long_prompts_are_read_in_order_not_in_turns() -> None:
    planned = plan([view("first", 1000, 4), view("second", 1000, 4, arrival=1.0)], [])
    assert counts(planned) == {"first": 32, "second": 32}
    waiting = [view(f"p{i}", 400, arrival=float(i)) for i in range(5)]
    assert list(counts(plan([], waiting)).values()) == [32, 16, 8, 4, 4]


# -- why requests wait


@pytest.mark.parametrize(
    ("waiting", "limits", "reason"),
    [
        (view("w", 4), make_limits(max_seqs=1), "seats"),
        (view("w", 4), make_limits(watermark_blocks=1000), "blocks"),
        (view("w", 4, blocked=True), make_limits(), "prefix"),
        (view("w", 4), make_limits(max_step_tokens=10, max_seqs=1, pools=pools(max_seqs=(1, 1))), "seats"),
        (view("w", 4), make_limits(pools=pools(max_seqs=(1, 10))), "seats"),
    ],
)
def test_a_refusal_has_a_reason(waiting: View, limits: object, reason: str) -> None:
    planned = plan([decode("talking", 5)], [waiting], limits=limits)
    assert (planned.admitted, planned.waits) == ((), {reason: 1})


def test_no_tokens_left_is_a_reason() -> None:
    running = [decode("talking", 5), view("reading", 1000, 4)]
    planned = plan(running, [view("w", 4)], chunk_tokens=4)
    assert planned.waits == {"step_budget": 1}


def test_a_plan_depends_on_nothing_but_its_arguments() -> None:
    running = [decode("a", 9), view("b", 100, 8, arrival=1.0), decode("c", 30, pool=BULK)]
    waiting = [view("d", 50), view("e", 7, pool=BULK)]
    before = list(running), list(waiting)
    first = plan(running, waiting, free=20)
    assert plan(running[::-1], waiting[::-1], free=20) == first
    assert (running, waiting) == before
