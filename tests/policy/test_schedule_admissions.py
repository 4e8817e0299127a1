"""Who comes in, who must wait and who makes room for it: rules 4, 5 and 8. Blocks have 4 tokens."""

import pytest

from minserve.policy.order import MAX_SKIPS, MAX_SKIPS_BELOW
from tests.policy.plans import BULK, counts, decode, make_limits, plan, pools, view

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
