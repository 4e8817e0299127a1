"""Rows of logits, sampled with the fields that a test is about."""

from __future__ import annotations

from typing import Any

import numpy as np

from minserve.backend.sampling import Seats, sample
from minserve.batch import Sampled, SeatReset
from tests.helpers import make_sampling

NO_SEATS = Seats(1)


def sample_rows(logits: Any, counts: Seats = NO_SEATS, **fields: Any) -> Sampled:
    array = np.atleast_2d(np.asarray(logits, np.float32))
    return sample(array, make_sampling(len(array), **fields), counts)


def tokens(logits: Any, counts: Seats = NO_SEATS, **fields: Any) -> list[int]:
    return [int(token) for token in sample_rows(logits, counts, **fields).tokens]


def reset(seat: int, prompt: list[int], output: list[int]) -> SeatReset:
    return SeatReset(seat, np.array(prompt, np.int32), np.array(output, np.int32))
