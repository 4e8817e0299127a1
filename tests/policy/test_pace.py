"""The chunk size follows measured step times."""

from minserve.policy.pace import Pace


def feed(pace: Pace, base: float, per_token: float, steps: int = 60) -> None:
    """Steps of a machine that costs `base + per_token * prompt tokens`."""
    for _ in range(steps):
        pace.observe(8, 0, base)
        chunk = pace.chunk_tokens()
        pace.observe(8, chunk, base + per_token * chunk)


def test_chunks_fill_the_time_that_decoding_leaves() -> None:
    pace = Pace(target=0.040, quantum=16, ceiling=512)
    feed(pace, base=0.010, per_token=0.00025)
    assert pace.chunk_tokens() == 112  # (40 - 10) ms / 0.25 ms = 120, in whole blocks


def test_a_slow_machine_still_advances_prompts_and_a_fast_one_stops_at_the_ceiling() -> None:
    slow = Pace(target=0.040, quantum=16, ceiling=512)
    feed(slow, base=0.100, per_token=0.01)
    assert slow.chunk_tokens() == 16
    fast = Pace(target=0.040, quantum=16, ceiling=512)
    feed(fast, base=0.001, per_token=0.00001)
    assert fast.chunk_tokens() == 512


def test_before_anything_is_known_chunks_are_cautious() -> None:
    assert Pace(target=0.040, quantum=16, ceiling=512).chunk_tokens() == 128
    assert Pace(target=0.040, quantum=16, ceiling=8).chunk_tokens() == 8
