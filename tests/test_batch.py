"""The random numbers of a batch."""

import statistics

import numpy as np
import pytest

from minserve.batch import _mix, uniform


@pytest.mark.parametrize(
    ("seed", "choice", "index", "value"),
    [(0, 0, 0, 0.13870936632156372), (1, 0, 0, 0.6935120820999146), (2**63 - 1, 3, 1000, 0.5815371870994568)],
)
def test_a_token_keeps_its_number_in_every_version(seed: int, choice: int, index: int, value: float) -> None:
    """A stored seed must give the same text tomorrow: these values are part of the contract."""
    assert uniform(seed, choice, index) == value


def test_mixing_is_splitmix64() -> None:
    """The generator's published first outputs for seed 0."""
    golden = 0x9E3779B97F4A7C15
    outputs = [_mix(i * golden % 2**64) for i in range(3)]
    assert outputs == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]


def test_numbers_lie_below_one_and_are_exact_in_float32() -> None:
    numbers = [uniform(seed, choice, index) for seed in range(20) for choice in range(5) for index in range(100)]
    assert all(0 <= number < 1 for number in numbers)
    assert all(float(np.float32(number)) == number for number in numbers)
    assert statistics.fmean(numbers) == pytest.approx(0.5, abs=0.01)
    assert statistics.pstdev(numbers) == pytest.approx(12**-0.5, abs=0.01)
    assert len(set(numbers)) > 9900


def test_seed_choice_and_index_are_not_interchangeable() -> None:
    assert len({uniform(*key) for key in [(1, 2, 3), (1, 3, 2), (2, 1, 3), (2, 3, 1), (3, 1, 2), (3, 2, 1)]}) == 6
    assert uniform(-1, 0, 0) == uniform(2**64 - 1, 0, 0), "any integer is a seed"
