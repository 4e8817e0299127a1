"""Who is let into the queue."""

import pytest

from minserve.policy.admission import MAX_RETRY, MIN_RETRY, Load, Reject, admit
from minserve.policy.limits import Limits
from minserve.request import SamplingParams, Submission
from tests.policy.plans import make_limits

IDLE = Load(queued=0, max_queue=4)


def submission(prompt_tokens: int, max_tokens: int = 16) -> Submission:
    return Submission("r", tuple(range(prompt_tokens)), SamplingParams(max_tokens=max_tokens))


def blocks(count: int) -> Limits:
    return make_limits(block_size=16, num_blocks=count)


@pytest.mark.parametrize(
    ("prompt_blocks", "max_tokens", "fits"),
    [(51, 1, False), (50, 1, False), (49, 1, True), (40, 20 * 16, True), (40, 10**9, True)],
)
def test_what_the_block_pool_can_never_hold_is_refused(prompt_blocks: int, max_tokens: int, fits: bool) -> None:
    # bug: 22
    verdict = admit(submission(prompt_blocks * 16, max_tokens), blocks(50), IDLE)
    assert (verdict is None) is fits
    if isinstance(verdict, Reject):
        assert (verdict.status, verdict.code) == (400, "context_length_exceeded")
        assert "holds 800 tokens (50 blocks of 16)" in verdict.message
        assert verdict.error().param == "prompt"
        assert f"your prompt has {prompt_blocks * 16} tokens" in verdict.message


@pytest.mark.parametrize(("wait", "retry"), [(30.0, 30.0), (0.01, MIN_RETRY), (10**9, MAX_RETRY), (0.0, MIN_RETRY)])
def test_a_full_queue_says_when_to_come_back(wait: float, retry: float) -> None:  # bug: 59
    load = Load(queued=4, max_queue=4, wait=wait)
    verdict = admit(submission(10), blocks(50), load)
    assert isinstance(verdict, Reject)
    error = verdict.error()
    assert (error.status, error.code, error.kind, error.retry_after) == (503, "queue_full", "server_error", retry)


def test_a_queue_with_room_accepts() -> None:
    assert admit(submission(10), blocks(50), Load(3, 4, 10**9)) is None


def test_what_can_never_run_is_told_so_even_when_the_queue_is_full() -> None:
    verdict = admit(submission(10**4), blocks(50), Load(4, 4))
    assert isinstance(verdict, Reject)
    assert verdict.status == 400
