"""The GGUF container: metadata and tensors of a memory-mapped file, nothing in it believed before it is checked.

Owns the byte format (versions 2 and 3, little-endian). It must not know what keys or tensor names mean: `gguf_model`
does. Every count, length, shape and offset is held against the bytes that are there before anything is allocated, so
a lying file of 200 bytes costs 200 bytes.

Source: ggml/docs/gguf.md. The numbers of types are the gguf package's. Its reader is not used: it trusts the file
(counts of 2^63, products that wrap) and takes seconds for a 50,000-token vocabulary.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType
from gguf import GGUFValueType as Kind

from minserve.backend.base import CheckpointError
from minserve.backend.tensor import BLOCKS, Encoding, HostTensor
from minserve.weights.files import map_file

Value: TypeAlias = "int | float | bool | str | list[str] | npt.NDArray[np.generic]"

_SCALARS = {
    Kind.UINT8: "<u1",
    Kind.INT8: "<i1",
    Kind.UINT16: "<u2",
    Kind.INT16: "<i2",
    Kind.UINT32: "<u4",
    Kind.INT32: "<i4",
    Kind.FLOAT32: "<f4",
    Kind.BOOL: "|b1",
    Kind.UINT64: "<u8",
    Kind.INT64: "<i8",
    Kind.FLOAT64: "<f8",
}
_MAX_DIMS = 4
_DEFAULT_ALIGNMENT = 32

_ENCODINGS = {GGMLQuantizationType[encoding]: encoding for encoding in Encoding}


@dataclass(frozen=True, slots=True)
class GgufFile:
    """metadata: key -> value (an array of numbers is a view of the file). tensors: by the names in the file.

    header: the bytes before the tensor data, which identify the file together with its size.
    """

    metadata: Mapping[str, Value]
    tensors: Mapping[str, HostTensor]
    header: bytes


def read_gguf(path: Path) -> GgufFile:
    """Map the file and read its header. CheckpointError for whatever is wrong with it."""
    data = map_file(path)
    try:
        return _read(data)
    except CheckpointError as error:
        raise CheckpointError(f"{path.name}: {error}") from error


def _read(data: mmap.mmap) -> GgufFile:
    at = _Cursor(data)
    if at.take(4) != b"GGUF":
        raise CheckpointError("not a GGUF file")
    version = at.u32()
    if version & 0xFFFF == 0:
        raise CheckpointError("big-endian GGUF files can't be read")
    if version not in (2, 3):
        raise CheckpointError(f"GGUF version {version}; versions 2 and 3 can be read")
    tensor_count, key_count = at.u64(), at.u64()
    at.need(tensor_count, 24, "tensors")  # the least bytes that a tensor's description takes
    at.need(key_count, 13, "metadata keys")
    metadata: dict[str, Value] = {}
    alignment = _DEFAULT_ALIGNMENT
    for _ in range(key_count):
        key = at.string()
        if key in metadata:
            raise CheckpointError(f"the metadata key {key!r} appears twice")
        kind = at.u32()
        metadata[key] = at.value(key, kind)
        if key == "general.alignment":
            alignment = _alignment(kind, metadata[key])
    infos = [_tensor_info(at) for _ in range(tensor_count)]
    start = at.position + -at.position % alignment
    if infos and start > len(data):
        raise CheckpointError(f"the tensor data should start at byte {start}, past the end of the file ({len(data)})")
    tensors = _tensors(data, infos, start, alignment)
    return GgufFile(metadata, tensors, data[: at.position])


def _alignment(kind: int, value: Value) -> int:
    if kind != Kind.UINT32 or not isinstance(value, int) or value < 1 or value & (value - 1):
        raise CheckpointError(f"general.alignment must be a power of two in a UINT32, not {value!r} (type {kind})")
    return value


@dataclass(frozen=True, slots=True)
class _TensorInfo:
    name: str
    shape: tuple[int, ...]  # rows first, as NumPy has it; the file lists the columns first
    encoding: Encoding
    offset: int
    nbytes: int


def _tensor_info(at: _Cursor) -> _TensorInfo:
    name = at.string()
    dims = at.u32()
    if not 1 <= dims <= _MAX_DIMS:
        raise CheckpointError(f"tensor {name!r} has {dims} dimensions; 1 to {_MAX_DIMS} are allowed")
    shape = tuple(at.u64() for _ in range(dims))[::-1]
    kind = at.u32()
    offset = at.u64()
    encoding = _ENCODINGS.get(kind)
    if encoding is None:
        readable = ", ".join(_ENCODINGS.values())
        raise CheckpointError(f"tensor {name!r} is stored as {_type_name(kind)}; readable are {readable}")
    block = BLOCKS[encoding]
    if shape[-1] % block.weights:
        raise CheckpointError(
            f"tensor {name!r}: {encoding} needs rows of a multiple of {block.weights}, not {shape[-1]}"
        )
    return _TensorInfo(name, shape, encoding, offset, math.prod(shape) // block.weights * block.nbytes)


def _type_name(kind: int) -> str:
    try:
        return str(GGMLQuantizationType(kind).name)
    except ValueError:
        return f"type {kind}"


def _tensors(data: mmap.mmap, infos: list[_TensorInfo], start: int, alignment: int) -> dict[str, HostTensor]:
    """Views of the tensors' bytes, after checking that they lie in the file, aligned and apart from each other."""
    everything = np.frombuffer(data, np.uint8)
    tensors: dict[str, HostTensor] = {}
    end = 0
    for info in sorted(infos, key=lambda info: (info.offset, info.nbytes)):
        if info.name in tensors:
            raise CheckpointError(f"the tensor {info.name!r} appears twice")
        if info.offset % alignment:
            raise CheckpointError(f"tensor {info.name!r}: its offset {info.offset} is not a multiple of {alignment}")
        if info.offset < end:
            raise CheckpointError(f"tensor {info.name!r} overlaps another one")
        end = info.offset + info.nbytes
        if start + end > len(data):
            missing = start + end - len(data)
            raise CheckpointError(
                f"tensor {info.name!r} ends {missing} bytes past the end of the file: it is cut off, or lies"
            )
        block = BLOCKS[info.encoding]
        row = max(1, info.shape[-1] // block.weights * block.nbytes)
        view = everything[start + info.offset : start + end].reshape(-1, row)
        tensors[info.name] = HostTensor(info.name, info.shape, info.encoding, view)
    return tensors


class _Cursor:
    """Reads little-endian values one after the other, and never past the end of the data."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data = data
        self.position = 0

    def take(self, nbytes: int) -> bytes:
        self.need(nbytes, 1, "bytes")
        self.position += nbytes
        return self.data[self.position - nbytes : self.position]

    def need(self, count: int, size: int, what: str) -> None:
        """CheckpointError unless `count` things of at least `size` bytes can still be in the file."""
        left = len(self.data) - self.position
        if count * size > left:
            raise CheckpointError(f"{count} {what} at byte {self.position} can't fit in the {left} bytes that are left")

    def u32(self) -> int:
        return int.from_bytes(self.take(4), "little")

    def u64(self) -> int:
        return int.from_bytes(self.take(8), "little")

    def string(self) -> str:
        return self.strings(1)[0]

    def strings(self, count: int) -> list[str]:
        """A vocabulary has hundreds of thousands: one tight loop."""
        self.need(count, 8, "strings")
        data, position, end = self.data, self.position, len(self.data)
        unpack: Callable[[mmap.mmap, int], tuple[int]] = struct.Struct("<Q").unpack_from
        out: list[str] = []
        try:
            for _ in range(count):
                (length,) = unpack(data, position)
                position += 8 + length
                if position > end:
                    raise CheckpointError(f"a string of {length} bytes ends past the end of the file")
                out.append(data[position - length : position].decode())
        except (struct.error, UnicodeDecodeError) as error:
            raise CheckpointError(f"a string near byte {position} is cut off or not UTF-8") from error
        self.position = position
        return out

    def value(self, key: str, kind: int) -> Value:
        if kind == Kind.STRING:
            return self.string()
        if kind == Kind.ARRAY:
            return self.array(key)
        return self.numbers(key, kind, 1)[0].item()  # type: ignore[no-any-return]

    def array(self, key: str) -> Value:
        kind, count = self.u32(), self.u64()
        if kind == Kind.STRING:
            return self.strings(count)
        if kind == Kind.ARRAY:
            raise CheckpointError(f"the metadata key {key!r} holds arrays in an array, which no known file has")
        return self.numbers(key, kind, count)

    def numbers(self, key: str, kind: int, count: int) -> npt.NDArray[np.generic]:
        if kind not in _SCALARS:
            raise CheckpointError(f"the metadata key {key!r} has the unknown type {kind}")
        dtype = np.dtype(_SCALARS[kind])
        self.need(count, dtype.itemsize, f"values of {key!r}")
        self.position += count * dtype.itemsize
        return np.frombuffer(self.data, dtype, count, self.position - count * dtype.itemsize)
