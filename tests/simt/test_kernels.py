"""Every kernel against float64 NumPy on the emulator, whatever the order in which threads take turns."""

from __future__ import annotations

from functools import cache

import pytest

from minserve.backend.cuda_backend.blas import Blas
from tests.simt import checks_attention, checks_linear, checks_rows, fakecupy
from tests.simt.fakeblas import FakeBlas
from tests.simt.kit import Kit

pytestmark = pytest.mark.simt
CHECKS = checks_rows.CHECKS | checks_linear.CHECKS | checks_attention.CHECKS


@cache
def kit(compute: str) -> Kit:
    return Kit(fakecupy, Blas(fakecupy, FakeBlas()), compute)


@pytest.mark.parametrize("compute", ["half", "bf16"])
@pytest.mark.parametrize("name", CHECKS)
def test_kernel(name: str, compute: str, order: str) -> None:
    CHECKS[name](kit(compute))
