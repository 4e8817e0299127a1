"""The matrix unit gives the very bits that the vector units give, and is left alone where the system says no."""

from __future__ import annotations

import ctypes
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from minserve.backend.numba_backend import amx, jit, linear, linear_matrix, linear_unit
from minserve.backend.numba_backend.arena import aligned
from minserve.backend.numba_backend.jit import Kernel, variant
from minserve.backend.numba_backend.layout import AS_BF16, AS_FLOATS, AS_INT16, BLOCK, SLACK, TILE, activation_bytes
from minserve.backend.numba_backend.linear import LINEAR
from minserve.backend.numba_backend.linear_blocks import FORMS
from minserve.backend.numba_backend.linear_matrix import MANY
from minserve.backend.numba_backend.linear_unit import modes
from minserve.backend.numba_backend.packing import FORMATS, pack
from minserve.backend.numba_backend.quantize import quantize
from minserve.backend.tensor import Encoding
from tests.backend.numba.programs import tensor

needs_amx = pytest.mark.skipif(not amx.HAS_AMX, reason="this processor has no matrix unit")
BY_FORM = {form.name: encoding for encoding, form in FORMATS.items() if form.name in FORMS}
ROWS = 48
COUNTS = [*range(MANY - 1, 34), 63, 64, 65, 64 + MANY, 130]


def by_vectors(form: str, mode: int, monkeypatch: pytest.MonkeyPatch) -> Kernel:
    """The same kernel without the matrix unit."""
    with monkeypatch.context() as patch:
        patch.setattr(linear_unit, "HAS_AMX", False)
        unit = linear_unit.unit(form, mode)
    return variant(linear.linear, linear.FIELDS, f"linear_{form}_{mode}_by_vectors", **unit)


def call(kernel: Kernel, rows: int, **words: Any) -> None:
    scratch = aligned(1 << 18)
    known = dict.fromkeys(kernel.fields, 0) | {"scratch": scratch, "out_mode": AS_FLOATS}
    values = [known[name] if name not in words else words[name] for name in kernel.fields]
    address = [v.ctypes.data if isinstance(v, np.ndarray) else v for v in values]
    params = np.array(address, np.int64)
    ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 4)(kernel.address)(0, 1, rows, params.ctypes.data)


def rounded(x: npt.NDArray[np.float32], mode: int) -> npt.NDArray[np.uint8]:
    rows, cols = x.shape
    out = aligned(rows * activation_bytes(cols, mode) + SLACK)
    out[:] = 0xFF  # what lies behind the last token is not a number
    copy = aligned(x.nbytes).view(np.float32).reshape(x.shape)
    copy[:] = x
    call(quantize, rows, out=out, own=out, x=copy, padded=cols, cols=cols, mode=mode, halves=1)
    return out


@needs_amx
@pytest.mark.parametrize(("form", "mode"), [(form, mode) for form in FORMS for mode in modes(form)])
def test_matrix_unit_and_vector_units_agree_to_the_bit(form: str, mode: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Panels that are full, not full, and several; tiles of 16 and of 8 tokens, the last ones not full."""
    rng = np.random.default_rng(mode)
    kernels = LINEAR[form, mode], by_vectors(form, mode, monkeypatch)
    for cols in (256, 1280):
        layout = FORMATS[BY_FORM[form]]
        weights = aligned(ROWS // 16 * layout.block_bytes(cols))
        pack(tensor(rng, ROWS, cols, Encoding(BY_FORM[form]).value), layout, weights.reshape(ROWS // 16, -1))
        for n in COUNTS:
            x = rounded(rng.normal(0, 3, (n, cols)).astype(np.float32), mode)
            outs = [aligned(n * ROWS * 4).view(np.uint32).reshape(n, ROWS) for _ in kernels]
            for kernel, out in zip(kernels, outs, strict=True):
                words = {"out": out, "x": x, "mode": mode, "weights": weights, "block_bytes": layout.block_bytes(cols)}
                words |= {"blocks": ROWS // 16, "units": ROWS // 16, "unit": 1, "cols": cols, "stride": ROWS}
                call(kernel, n, **words)
            assert np.isfinite(outs[0].view(np.float32)).all()
            np.testing.assert_array_equal(outs[0], outs[1], err_msg=f"{cols} columns, {n} tokens")


@needs_amx
def test_tokens_in_bfloat16_get_the_same_bits_alone_and_in_any_company() -> None:
    """The unit adds up in an order of its own, so it does so for one token too."""
    rng, cols, most = np.random.default_rng(1), 192, 130
    weights = aligned(ROWS * cols * 2)
    pack(tensor(rng, ROWS, cols, "BF16"), FORMATS[Encoding.BF16], weights.reshape(ROWS // 16, -1))
    x = rng.normal(0, 3, (most, cols)).astype(np.float32)
    bits = {}
    for n in (1, 2, 15, 16, 17, 33, 48, 49, 64, 65, most):
        out = aligned(n * ROWS * 4).view(np.float32).reshape(n, ROWS)
        words = {"out": out, "x": rounded(x[:n], AS_BF16), "mode": AS_BF16, "weights": weights, "stride": ROWS}
        words |= {"block_bytes": cols * 32, "blocks": ROWS // 16, "units": ROWS // 16, "unit": 1, "cols": cols}
        call(LINEAR["bf16", AS_BF16], n, **words)
        bits[n] = out.view(np.uint32)
    for n in bits:
        np.testing.assert_array_equal(bits[n], bits[most][:n], err_msg=f"{n} tokens")


@needs_amx
@pytest.mark.parametrize("form", FORMS)
def test_weights_of_integers_as_bfloat16(form: str) -> None:
    """Each is rounded once, to the nearest; tokens get the same bits alone and in any company, in several stripes."""
    rng, cols, most = np.random.default_rng(2), 2560, 600
    layout, weights = FORMATS[BY_FORM[form]], tensor(rng, ROWS, cols, Encoding(BY_FORM[form]).value)
    packed = aligned(ROWS // 16 * layout.block_bytes(cols))
    pack(weights, layout, packed.reshape(ROWS // 16, -1))
    x = rng.normal(0, 3, (most, cols)).astype(np.float32)
    found = {}
    for n in (1, 2, 16, 17, 33, 64, 65, 448, 449, most):
        out = aligned(n * ROWS * 4).view(np.float32).reshape(n, ROWS)
        words = {"out": out, "x": rounded(x[:n], AS_BF16), "mode": AS_BF16, "weights": packed, "stride": ROWS}
        words |= {"block_bytes": layout.block_bytes(cols), "blocks": ROWS // 16, "units": ROWS // 16, "unit": 1}
        call(LINEAR[form, AS_BF16], n, **words, cols=cols)
        found[n] = out
    expected = as_bf16(x).astype(np.float64) @ as_bf16(weights.float32()).T
    np.testing.assert_allclose(found[most], expected, rtol=1e-3, atol=1e-3 * np.abs(expected).mean())
    for n, out in found.items():
        np.testing.assert_array_equal(out, found[most][:n], err_msg=f"{n} tokens")


def as_bf16(x: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    return ((x.view(np.uint32) + 0x8000) & 0xFFFF0000).astype(np.uint32).view(np.float32)


def test_room_for_tiles_that_are_not_full() -> None:
    """Tokens are read, and sums written, up to the next multiple of 16, tokens of the group after the last too."""
    assert TILE % BLOCK == 0
    assert TILE * AS_INT16 <= SLACK
    assert linear_matrix.PANEL >= (linear_matrix.ENTRIES + 1) * linear_matrix.ENTRY


def test_unit_is_left_alone_where_the_system_refuses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """And code compiled with it is not taken for code without."""
    asked: list[tuple[int, ...]] = []

    def refuse(*arguments: int) -> int:
        asked.append(arguments)
        return -1

    monkeypatch.setattr(jit, "machine", lambda: "x86_64")
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace(syscall=refuse))
    assert not jit.may_use_amx.__wrapped__()
    assert asked == [(158, 0x1023, 18)]
    names = set()
    for allowed in (True, False):
        monkeypatch.setattr(jit, "may_use_amx", lambda allowed=allowed: allowed)
        names.add(jit.fingerprint.__wrapped__())
    assert len(names) == 2
