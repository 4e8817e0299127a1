"""What running requests get when blocks or rows are short: rules 6 and 7. Blocks have 4 tokens."""

import pytest

from minserve.policy.order import MAX_PREEMPTIONS
from tests.policy.plans import BULK, counts, decode, make_limits, plan, pools, view

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
