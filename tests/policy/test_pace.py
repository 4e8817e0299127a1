"""The chunk size follows measured step times."""

from minserve.policy.pace import Pace


def feed(pace: Pace, base: float, per_token: float, steps: int = 60) -> None:
    """Steps of a machine that costs `base + per_token * prompt tokens`."""
    for _ in range(steps):
        pace.observe(8, 0, base)
        chunk = pace.chunk_tokens(8)
        pace.observe(8, chunk, base + per_token * chunk)


def test_chunks_fill_the_time_that_decoding_leaves() -> None:
    pace = Pace(target=0.040, quantum=16, ceiling=512)
    feed(pace, base=0.010, per_token=0.00025)
    assert pace.chunk_tokens(8) in (119, 120)  # (40 - 10) ms / 0.25 ms, less a rest of the first steps' error


def test_a_slow_machine_still_advances_prompts_and_a_fast_one_stops_at_the_ceiling() -> None:
    slow = Pace(target=0.040, quantum=16, ceiling=512)
    feed(slow, base=0.100, per_token=0.01)
    assert slow.chunk_tokens(8) == 16
    fast = Pace(target=0.040, quantum=16, ceiling=512)
    feed(fast, base=0.001, per_token=0.00001)
    assert fast.chunk_tokens(8) == 512


def test_before_anything_is_known_chunks_are_cautious() -> None:
    assert Pace(target=0.040, quantum=16, ceiling=512).chunk_tokens(8) == 128
    assert Pace(target=0.040, quantum=16, ceiling=8).chunk_tokens(8) == 8


def test_a_step_with_fewer_decodes_has_room_for_more_prompt_tokens() -> None:
    pace = Pace(target=0.040, quantum=16, ceiling=512)
    for step in range(300):
        decodes = 4 + step % 12
        chunk = 0 if step % 2 else 32
        pace.observe(decodes, chunk, 0.002 + 0.001 * decodes + 0.0005 * chunk)
    assert abs(pace.decodes.predict(4) - 0.006) < 0.0005
    assert abs(pace.decodes.predict(24) - 0.026) < 0.002
    assert 40 <= pace.chunk_tokens(16) <= 46  # (40 - 18) ms / 0.5 ms
    assert 62 <= pace.chunk_tokens(4) <= 70


def test_with_one_count_of_decodes_the_cost_is_proportional() -> None:
    pace = Pace(target=0.040, quantum=16, ceiling=512)
    feed(pace, base=0.010, per_token=0.00025)
    assert abs(pace.decodes.predict(16) - 0.020) < 0.001


def test_where_predictions_miss_a_step_keeps_its_distance() -> None:
    """Steps that take now a fifth less, now a fifth more than they should."""
    pace = Pace(target=0.040, quantum=16, ceiling=512)
    for step in range(200):
        pace.observe(8, 0, 0.010)
        chunk = pace.chunk_tokens(8)
        pace.observe(8, chunk, (0.010 + 0.00025 * chunk) * (1.2 if step % 2 else 0.8))
    assert 70 < pace.chunk_tokens(8) < 110


def test_what_large_prompts_cost_alone_does_not_make_mixed_steps_long() -> None:
    pace = Pace(target=0.040, quantum=16, ceiling=512)
    for _ in range(5):
        pace.observe(0, 512, 0.128)  # 0.25 ms a token
        for _ in range(20):
            pace.observe(1, 0, 0.004)
    assert pace.chunk_tokens(2) <= 70
    pace.observe(2, 64, 0.008 + 0.0005 * 64)
    before = pace.chunk_tokens(2)
    pace.observe(0, 512, 0.128)
    assert pace.chunk_tokens(2) == before
