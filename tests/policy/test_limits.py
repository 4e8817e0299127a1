"""What a step may use, and what pools are promised."""

from typing import Any

import pytest

from minserve.policy.limits import Limits
from tests.policy.plans import BULK, INTERACTIVE, make_limits, pools


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"block_size": 0}, "block_size"),
        ({"num_blocks": 0}, "num_blocks"),
        ({"max_seqs": 0}, "max_seqs"),
        ({"chunk_tokens": 0}, "chunk_tokens"),
        ({"max_seqs": 10, "max_step_tokens": 9, "chunk_tokens": 1}, "max_step_tokens"),
        ({"max_seqs": 10, "max_rows": 9}, "max_rows"),
        ({"chunk_tokens": 65}, "chunk_tokens"),
        ({"watermark_blocks": -1}, "watermark_blocks"),
        ({"pools": {}}, "pools lacks bulk, interactive"),
        ({"pools": pools(max_seqs=(1, 0))}, "max_seqs of pool bulk"),
    ],
)
def test_limits_that_contradict_each_other_are_refused_by_name(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        make_limits(**fields)


@pytest.mark.parametrize(
    ("seats", "shares", "promised"),
    [
        (10, (0.8, 0.2), (8, 2)),
        (32, (0.8, 0.2), (25, 6)),
        (2, (0.9, 0.1), (1, 1)),
        (3, (0.99, 0.01), (2, 1)),
        (1, (0.8, 0.2), (0, 0)),
        (10, (1.0, 1.0), (5, 5)),
        (10, (1.0, 0.0), (10, 0)),
        (10, (0.3, 0.1), (3, 1)),
    ],
)
def test_promised_seats_never_exceed_all_seats(
    seats: int, shares: tuple[float, float], promised: tuple[int, int]
) -> None:
    limits = make_limits(max_seqs=seats, pools=pools(token_share=shares))
    assert (limits.promised_seats(INTERACTIVE), limits.promised_seats(BULK)) == promised
    assert sum(promised) <= seats


def test_a_promise_is_never_more_than_the_pools_own_limit() -> None:
    assert make_limits(pools=pools(max_seqs=(3, 10))).promised_seats(INTERACTIVE) == 3


@pytest.mark.parametrize(("shares", "promised"), [((0.7, 0.3), 300), ((1.0, 1.0), 500), ((0.0, 0.0), 0)])
def test_promised_blocks(shares: tuple[float, float], promised: int) -> None:
    assert make_limits(pools=pools(kv_share=shares)).promised_blocks(BULK) == promised


@pytest.mark.parametrize("budget", [1, 3, 16, 100])
@pytest.mark.parametrize("share", [0.05, 0.2, 0.33])
def test_promised_tokens_add_up_to_the_share_over_any_stretch_of_steps(budget: int, share: float) -> None:
    limits: Limits = make_limits(pools=pools(token_share=(1 - share, share)))
    got = [limits.promised_tokens(BULK, budget, step) for step in range(1000)]
    for start in (0, 17, 500):
        stretch = sum(got[start : start + 200])
        assert abs(stretch - 200 * budget * share) <= 1
    assert max(got) - min(got) <= 1
