"""One step planned by hand, rule by rule. Blocks have 4 tokens unless a test says otherwise."""

import pytest

from minserve.policy.room import AGE_STEPS, MAX_PREEMPTIONS, MAX_SKIPS, MAX_SKIPS_BELOW
from minserve.policy.turns import MAX_RESTS
from minserve.request import View
from tests.policy.plans import BULK, INTERACTIVE, counts, decode, make_limits, plan, pools, view

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


# -- 4. who doesn't fit


def test_smaller_requests_pass_one_that_does_not_fit() -> None:  # bug: 56
    waiting = [view("big", 400), view("small", 8, arrival=1.0), view("tiny", 4, arrival=2.0)]
    planned = plan([decode("talking", 5)], waiting, free=30)
    assert planned.admitted == ("small", "tiny")
    assert planned.skipped == ("big",)
    assert planned.waits == {"blocks": 1}


def test_after_enough_steps_nobody_passes_it() -> None:  # bug: 56
    waiting = [view("big", 400, skips=MAX_SKIPS), view("small", 8, arrival=1.0)]
    planned = plan([decode("talking", 5)], waiting, free=30)
    assert planned.admitted == ()
    assert planned.waits == {"blocks": 2}
    assert plan([decode("talking", 5)], waiting, free=102).admitted[0] == "big"


def test_an_admission_leaves_free_what_running_prompts_still_need_and_the_watermark() -> None:
    reading = view("reading", 40, 4)  # 9 blocks to come
    assert plan([reading], [view("new", 8)], free=13, watermark_blocks=2).admitted == ("new",)
    assert plan([reading], [view("new", 8)], free=12, watermark_blocks=2).admitted == ()


def test_an_empty_cache_takes_whatever_was_accepted() -> None:
    planned = plan([], [view("whole cache", 399)], free=100, num_blocks=100, watermark_blocks=10)
    assert planned.admitted == ("whole cache",)


def test_found_blocks_cost_only_what_nobody_holds() -> None:
    talking = decode("talking", 6)  # has room for its next row
    shared = view("shared", 41, 40, own_blocks=0)
    assert plan([talking], [shared._replace(free_hits=0)], free=1).admitted == ("shared",)
    assert plan([talking], [shared._replace(free_hits=10)], free=10).admitted == ()
    assert plan([talking], [shared._replace(free_hits=10)], free=11).admitted == ("shared",)


def test_nobody_gets_a_seat_that_an_earlier_one_was_refused() -> None:
    """The second was overtaken often, so promises don't hold it back; but the first comes first."""
    running = [decode(f"i{i}", 5) for i in range(4)] + [decode("b", 5, pool=BULK)]
    waiting = [view("first", 4), view("second", 4, arrival=1.0, skips=MAX_SKIPS)]
    limits = make_limits(max_seqs=5)
    assert plan(running, waiting, limits=limits).admitted == ()
    assert plan(running, waiting[1:], limits=limits).preempted == ("b",)


def test_who_was_passed_is_told_even_if_it_lacks_something_else_in_the_end() -> None:
    """`passed` lacks blocks when `small` comes in, which then has the last seat."""
    waiting = [
        view("leader", 4, limit=5),
        view("passed", 24, arrival=1.0),
        view("small", 4, arrival=2.0),
        view("bulk", 80, pool=BULK),
    ]
    limits = make_limits(
        num_blocks=20, max_seqs=3, pools=pools(max_seqs=(2, 1), kv_share=(0.1, 0.9)), max_step_tokens=12, chunk_tokens=1
    )
    planned = plan([], waiting, free=20, limits=limits)
    assert planned.admitted[:2] == ("leader", "small")
    assert "passed" in planned.skipped


# -- 5. pools


@pytest.mark.parametrize(("bulk_waits", "admitted"), [(0, 9), (1, 8), (5, 7)])
def test_seats_are_lent_until_the_other_pool_wants_them(bulk_waits: int, admitted: int) -> None:
    """Ten seats, two of them promised to bulk, one is taken."""
    waiting = [view(f"i{i}", 4, arrival=float(i)) for i in range(12)]
    waiting += [view(f"b{i}", 4, pool=BULK) for i in range(bulk_waits)]
    planned = plan([decode("talking", 5)], waiting, max_step_tokens=200, chunk_tokens=200)
    assert sum(name.startswith("i") for name in planned.admitted) == admitted
    assert sum(name.startswith("b") for name in planned.admitted) == min(bulk_waits, 2)


def test_an_interactive_request_takes_back_a_lent_seat_from_the_last_of_bulk() -> None:
    running = [decode(f"b{i}", 5, pool=BULK, arrival=float(i)) for i in range(10)]
    planned = plan(running, [view("new", 4, arrival=99.0)])
    assert planned.preempted == ("b9",)
    assert planned.admitted == ("new",)
    assert "b9" not in counts(planned)


def test_promised_seats_are_not_taken_back() -> None:
    running = [decode(f"i{i}", 5) for i in range(8)] + [decode(f"b{i}", 5, pool=BULK) for i in range(2)]
    planned = plan(running, [view("new", 4)])
    assert (planned.preempted, planned.admitted, planned.waits) == ((), (), {"seats": 1})


def test_what_the_first_newcomer_took_back_is_not_lent_to_the_second() -> None:
    """A hundred blocks, 30 promised to bulk, which holds 40: ten may go."""
    running = [decode("i", 240)] + [decode(f"b{i}", 40, pool=BULK, arrival=float(i)) for i in range(4)]
    waiting = [view(f"new{i}", 36, arrival=float(i)) for i in range(2)]
    planned = plan(running, waiting, free=0, num_blocks=100)
    assert (planned.preempted, planned.admitted) == (("b3",), ("new0",))


def test_who_was_overtaken_too_often_takes_promised_seats_and_blocks_too() -> None:
    running = [decode("i", 5), decode("b", 40, pool=BULK)]
    big = view("big", 300)  # 75 of 100 blocks
    limits = make_limits(num_blocks=100)
    assert plan(running, [big], free=70, limits=limits).admitted == ()
    planned = plan(running, [big._replace(skips=MAX_SKIPS)], free=70, limits=limits)
    assert (planned.preempted, planned.admitted) == (("b",), ("big",))


def test_a_pool_never_has_more_seats_than_its_own_limit() -> None:
    waiting = [view(f"b{i}", 4, pool=BULK, arrival=float(i)) for i in range(5)]
    planned = plan([], waiting, pools=pools(max_seqs=(10, 3)))
    assert planned.admitted == ("b0", "b1", "b2")
    assert planned.waits == {"seats": 2}


def test_blocks_are_lent_until_the_other_pool_wants_them() -> None:
    """A hundred blocks, 30 promised to bulk, which holds 10; interactive holds 60."""
    running = [decode("i", 240), decode("b", 40, pool=BULK)]
    new = view("new", 100)  # 25 blocks
    limits = make_limits(num_blocks=100)
    assert plan(running, [new], free=30, limits=limits).admitted == ("new",)
    planned = plan(running, [new, view("bulk", 80, pool=BULK)], free=30, step=1, limits=limits)
    assert planned.admitted == ("bulk",)
    assert planned.waits == {"pool_share": 1}


def test_an_interactive_request_takes_back_lent_blocks_but_not_promised_ones() -> None:
    running = [decode(f"b{i}", 40, pool=BULK, arrival=float(i)) for i in range(9)]
    limits = make_limits(num_blocks=100)
    planned = plan(running, [view("new", 100)], free=10, limits=limits)
    assert (planned.preempted, planned.admitted) == (("b8", "b7"), ("new",))
    planned = plan(running, [view("huge", 300)], free=10, limits=limits)
    assert (planned.preempted, planned.admitted, planned.waits) == ((), (), {"blocks": 1})


def test_bulk_gets_its_share_of_prompt_tokens_under_interactive_pressure() -> None:  # bug: 59
    running = [decode("talking", 5), view("reading", 10_000, 40), view("bulk reading", 10_000, 40, pool=BULK)]
    got = [counts(plan(running, [], step=step))["bulk reading"] for step in range(100)]
    assert sum(got) == pytest.approx(0.2 * 32 * 100, abs=1)
    assert set(got) == {6, 7}


def test_a_share_below_one_token_still_comes_round() -> None:
    running = [decode("talking", 5), view("reading", 10_000, 40), view("bulk reading", 10_000, 40, pool=BULK)]
    got = [counts(plan(running, [], step=step, chunk_tokens=1)).get("bulk reading", 0) for step in range(50)]
    assert sum(got) == 10


def test_tokens_kept_for_bulk_in_vain_go_back_to_interactive() -> None:
    """Bulk waits but has no seat: its part of the tokens is not lost."""
    running = [decode("talking", 5), view("reading", 10_000, 40)]
    planned = plan(running, [view("b", 100, pool=BULK)], pools=pools(max_seqs=(10, 1)), max_seqs=2)
    assert counts(planned)["reading"] == 32


def test_a_pool_with_nothing_running_is_not_overtaken_for_ever() -> None:  # bug: 59
    """One seat can't be promised to two pools; age decides."""
    limits = make_limits(max_seqs=1)
    bulk = view("b", 4, pool=BULK)
    planned = plan([], [view("i", 4), bulk], limits=limits)
    assert (planned.admitted, planned.skipped) == (("i",), ("b",))
    planned = plan([], [view("i", 4), bulk._replace(skips=MAX_SKIPS_BELOW)], limits=limits)
    assert planned.admitted == ("b",)
    assert planned.waits == {"pool_share": 1}


def test_a_pool_with_something_running_holds_nobody_above_it_up() -> None:
    running = [decode("b0", 5, pool=BULK)]
    waiting = [view("i", 4), view("b1", 100, pool=BULK, skips=MAX_SKIPS_BELOW)]
    assert plan(running, waiting, free=20, num_blocks=30).admitted == ("i",)
    assert plan([decode("i0", 5)], waiting, free=20, num_blocks=30).admitted == ()


# -- 6. no block left


def test_growth_preempts_the_last_in_order_that_has_no_chunk_yet() -> None:
    running = [decode(f"r{i}", 9, arrival=float(i)) for i in range(3)]  # all need their third block
    planned = plan(running, [], free=0)
    assert planned.preempted == ("r2",)
    assert counts(planned) == {"r0": 1, "r1": 1}  # r2 gave two


def test_growth_takes_lent_blocks_of_bulk_first() -> None:
    running = [decode("i0", 9), decode("i1", 9, arrival=1.0), decode("b0", 280, pool=BULK)]
    assert plan(running, [], free=0, num_blocks=74).preempted == ("b0",)


def test_growth_leaves_promised_blocks_to_bulk() -> None:
    running = [decode("i0", 9), decode("i1", 9, arrival=1.0), decode("b0", 9, pool=BULK)]
    limits = make_limits(num_blocks=20)
    planned = plan([decode("i", 9, arrival=-1.0, blocks=3), *running], [], free=0, limits=limits)
    assert planned.preempted == ("i1",)


def test_the_first_of_a_plan_gets_its_block_whatever_was_promised() -> None:
    running = [decode("i0", 9), decode("b0", 9, pool=BULK)]
    assert plan(running, [], free=0, num_blocks=20).preempted == ("b0",)


def test_who_finds_no_victim_waits_with_its_blocks() -> None:
    running = [decode("first", 8), decode("stuck", 9, arrival=1.0)]
    planned = plan(running, [], free=0)
    assert (counts(planned), planned.preempted, planned.exhausted) == ({"first": 1}, (), ())


@pytest.mark.parametrize("free", [0, 1])
def test_alone_and_without_a_block_it_ends(free: int) -> None:  # bug: 22
    planned = plan([decode("alone", 9)], [view("waits", 4)], free=free, num_blocks=2)
    assert planned.exhausted == (("alone",) if free == 0 else ())


def test_known_tokens_beyond_all_blocks_end_it_even_while_it_waits() -> None:  # bug: 22
    assert plan([decode("i", 5)], [view("preempted", 9)], free=1, num_blocks=2).exhausted == ("preempted",)


def test_a_prompt_gets_a_shorter_chunk_where_blocks_are_short() -> None:
    assert counts(plan([view("reading", 100, 38)], [], free=3)) == {"reading": 14}


def test_after_some_preemptions_it_comes_back_only_with_room_for_all_it_may_need() -> None:
    talking, needs = decode("talking", 6), view("back", 8, limit=41)  # 40 rows at most: the last token needs none
    assert plan([talking], [needs], free=2).admitted == ("back",)
    again = needs._replace(preemptions=MAX_PREEMPTIONS)
    assert plan([talking], [again], free=9).admitted == ()
    assert plan([talking], [again], free=10).admitted == ("back",)


def test_admissions_do_not_preempt_the_same_request_for_ever() -> None:
    running = [decode(f"b{i}", 5, pool=BULK, preemptions=MAX_PREEMPTIONS) for i in range(10)]
    planned = plan(running, [view("new", 4)])
    assert (planned.preempted, planned.waits) == ((), {"seats": 1})


def test_blocks_that_an_admission_shares_with_a_victim_are_not_counted_twice() -> None:
    """The newcomer's found blocks are the victim's: they are not freed."""
    victim = decode("b0", 61, pool=BULK)  # 15 blocks
    running = [victim, decode("b1", 5, pool=BULK, arrival=-1.0)]
    new = view("new", 81, 60, own_blocks=0)  # found: 15 of its 21 blocks
    limits = make_limits(num_blocks=20, pools=pools(kv_share=(1.0, 0.0)))
    assert plan(running, [new], free=3, limits=limits).admitted == ()


def test_a_victims_blocks_that_an_admission_of_this_plan_shares_are_not_freed() -> None:
    """The first newcomer found the blocks of `b0`; so preempting `b0` gives the second one nothing."""
    limits = make_limits(num_blocks=30, pools=pools(kv_share=(1.0, 0.0)))
    waiting = [view("shares", 81, 60, own_blocks=0), view("needs", 40, arrival=1.0)]
    planned = plan([decode("b0", 61, pool=BULK)], waiting, free=7, limits=limits)
    assert (planned.admitted, planned.preempted) == (("shares",), ())
    assert plan([decode("b0", 61, pool=BULK)], waiting[1:], free=7, limits=limits).preempted == ("b0",)


# -- 7. rows, forks, drafts


def test_scored_rows_stay_within_the_rows_that_seats_leave() -> None:
    running = [decode("talking", 5)]
    planned = plan(running, [view("scored", 40, scored=(0, 39))], max_rows=20, max_seqs=4)
    chunk = planned.chunks[1]
    assert (chunk.count, chunk.scored) == (19, 19)
    planned = plan(running, [view("scored", 40, scored=(0, 39))], max_rows=2, max_seqs=2)
    assert (planned.chunks[1].count, planned.chunks[1].scored) == (1, 1)


def test_rows_that_were_scored_before_are_not_scored_again() -> None:
    planned = plan([], [view("again", 20, scored=(12, 19))])
    assert [(c.count, c.scored, c.samples) for c in planned.chunks] == [(20, 7, 1)]


def test_a_second_scored_prompt_waits_for_rows() -> None:
    waiting = [view("a", 40, scored=(0, 39)), view("b", 40, scored=(0, 39), arrival=1.0), view("c", 4, arrival=2.0)]
    planned = plan([], waiting, max_rows=20)
    assert planned.admitted == ("a", "c")
    assert planned.waits == {"rows": 1}


@pytest.mark.parametrize(
    ("known", "free", "seats", "forks"),
    [(6, 10, 4, 3), (6, 10, 3, 2), (6, 4, 4, 2), (6, 2, 4, 0), (8, 2, 4, 3)],
)
def test_siblings_start_from_the_leaders_last_row_as_seats_and_blocks_allow(
    known: int, free: int, seats: int, forks: int
) -> None:
    """A sibling needs a seat, and a block if the prompt's last one is not full."""
    leader = view("r#0", known, forks=("r#1", "r#2", "r#3"))
    planned = plan([], [leader], free=free, max_seqs=seats, num_blocks=10)
    assert planned.chunks[0].forks == ("r#1", "r#2", "r#3")[:forks]
    assert planned.admitted == ("r#0", *planned.chunks[0].forks)


def test_no_fork_before_the_end_of_the_prompt() -> None:
    assert plan([], [view("r#0", 100, forks=("r#1",))]).chunks[0].forks == ()


@pytest.mark.parametrize(
    ("fields", "accepted"),
    [({}, 3), ({"max_step_tokens": 10, "chunk_tokens": 8}, 1), ({"max_rows": 3, "max_seqs": 2}, 1), ({"limit": 11}, 1)],
)
def test_drafts_get_what_is_left(fields: dict[str, int], accepted: int) -> None:
    talking = decode("talking", 9, draft=(1, 2, 3), limit=fields.pop("limit", 100))
    planned = plan([talking], [view("long", 1000)], **fields)
    chunk = planned.chunks[0]
    assert (chunk.count, chunk.samples, chunk.draft) == (1 + accepted, 1 + accepted, (1, 2, 3)[:accepted])


def test_drafts_preempt_nobody() -> None:
    running = [decode("a", 8, draft=(1, 2, 3)), decode("b", 8, arrival=1.0)]
    planned = plan(running, [], free=0)
    assert (counts(planned), planned.preempted) == ({"a": 1, "b": 1}, ())


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
    assert INTERACTIVE is not BULK


# -- 8. pauses

PAUSED = make_limits(num_blocks=20, max_seqs=4, paused=frozenset([BULK]))


def test_a_paused_pool_gets_nothing_and_keeps_what_nobody_needs() -> None:
    running = [decode("talking", 9), decode("bulk", 9, pool=BULK), view("bulk reading", 20, 8, pool=BULK)]
    planned = plan(running, [view("bulk new", 4, pool=BULK)], free=10, limits=PAUSED)
    assert list(counts(planned)) == ["talking"]
    assert planned.preempted == ()
    assert planned.waits == {"paused": 1}


def test_promises_to_a_paused_pool_do_not_count() -> None:
    running = [decode(f"bulk{i}", 17, pool=BULK) for i in range(4)]
    waiting = [view(f"new{i}", 16, skips=1) for i in range(4)]
    planned = plan(running, waiting, free=0, limits=PAUSED)
    assert set(planned.admitted) == {"new0", "new1", "new2", "new3"}
    assert set(planned.preempted) == {f"bulk{i}" for i in range(4)}


def test_a_paused_pool_is_not_overtaken() -> None:
    waiting = [view("bulk", 4, pool=BULK, skips=MAX_SKIPS_BELOW), view("new", 4)]
    planned = plan([decode("talking", 9)], waiting, limits=PAUSED)
    assert planned.admitted == ("new",)
    assert planned.skipped == ()
