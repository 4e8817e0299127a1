"""Sampling on the device against its specification, whatever the order in which threads take turns."""

from __future__ import annotations

import pytest

from minserve.backend.cuda_backend.blas import Blas
from tests.simt import checks_sampling, fakecupy
from tests.simt.fakeblas import FakeBlas
from tests.simt.kit import Kit

pytestmark = pytest.mark.simt


@pytest.mark.parametrize("name", checks_sampling.CHECKS)
def test_sampling(name: str, order: str) -> None:
    checks_sampling.CHECKS[name](Kit(fakecupy, Blas(fakecupy, FakeBlas()), "half"))
