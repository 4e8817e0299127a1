"""Every encoding against the gguf package's own dequantization, byte for byte, on random blocks."""

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from gguf.quants import dequantize

from minserve.backend.tensor import BLOCKS, Encoding, HostTensor, bfloat16_to_float32, float32_to_bfloat16

QUANTIZED = [e for e in Encoding if e not in (Encoding.F32, Encoding.F16, Encoding.BF16)]


def random_blocks(encoding: Encoding, rows: int, blocks: int) -> np.ndarray:
    """Random integers, but small finite scales (random float16 bits would be NaN now and then)."""
    rng = np.random.default_rng(7)
    nbytes = BLOCKS[encoding].nbytes
    data = rng.integers(0, 256, (rows, blocks, nbytes), dtype=np.uint8)
    halves = {Encoding.Q8_0: [0], Encoding.Q4_0: [0], Encoding.Q5_0: [0], Encoding.Q6_K: [208]}.get(encoding, [0, 2])
    for at in halves:
        scale = (rng.random((rows, blocks, 1)) - 0.5).astype(np.float16)
        data[..., at : at + 2] = scale.view(np.uint8)
    return data.reshape(rows, -1)


@pytest.mark.parametrize("encoding", QUANTIZED)
def test_quantized_encodings_equal_ggufs_own_dequantization(encoding: Encoding) -> None:
    data = random_blocks(encoding, 3, 4)
    cols = 4 * BLOCKS[encoding].weights
    ours = HostTensor("w", (3, cols), encoding, data).float32()
    theirs = dequantize(data, GGMLQuantizationType[encoding.value])
    np.testing.assert_allclose(ours, theirs, rtol=2e-7, atol=1e-9)


@pytest.mark.parametrize("encoding", QUANTIZED)
def test_rows_move_as_bytes(encoding: Encoding) -> None:
    tensor = HostTensor("w", (4, 512), encoding, random_blocks(encoding, 4, 512 // BLOCKS[encoding].weights))
    order = np.array([2, 0, 3, 1])
    np.testing.assert_array_equal(tensor.take_rows(order).float32(), tensor.float32()[order])


def test_bfloat16_widens_exactly_and_rounds_to_nearest_even() -> None:
    bits = np.arange(1 << 16, dtype=np.uint16)
    wide = bfloat16_to_float32(bits)
    finite = ~np.isnan(wide)
    np.testing.assert_array_equal(float32_to_bfloat16(wide)[finite], bits[finite])
    assert np.isnan(bfloat16_to_float32(float32_to_bfloat16(wide[~finite]))).all()
    half_way = np.array([0x3F808000, 0x3F818000, 0x3F808001, 0x7F7FFFFF], np.uint32).view(np.float32)
    assert float32_to_bfloat16(half_way).tolist() == [0x3F80, 0x3F82, 0x3F81, 0x7F80]


def test_a_float_tensor_has_no_groups() -> None:
    with pytest.raises(ValueError, match="not a quantized encoding"):
        HostTensor.from_array("w", np.ones((2, 4), np.float32)).groups()
