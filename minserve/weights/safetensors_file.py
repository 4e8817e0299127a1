"""safetensors files, single and sharded: views of memory-mapped weights, nothing believed before it is checked.

Owns the byte format: 8 bytes of header length, a JSON header, then the tensors' bytes without a gap. It must not know
models. The checks are those of the reference crate (huggingface/safetensors, `Metadata::validate`): every tensor's
offsets match its shape and dtype, they don't overlap, and together cover the data exactly.

Written here, because the safetensors package copies every tensor and has no bfloat16 for NumPy.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterable, Mapping
from pathlib import Path, PureWindowsPath
from typing import Any

import numpy as np

from minserve.backend.base import CheckpointError
from minserve.backend.tensor import BLOCKS, Encoding, HostTensor
from minserve.weights.files import map_file, parse_json, read_json

_HEADER_LIMIT = 100_000_000
_MAX_DIMS = 8
_SIZES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E5M2": 1, "F8_E4M3": 1, "F8_E8M0": 1, "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4, "U64": 8, "I64": 8, "F64": 8, "C64": 8,
}  # fmt: skip
_ENCODINGS = {"F32": Encoding.F32, "F16": Encoding.F16, "BF16": Encoding.BF16}


class SafetensorsFile:
    """One file. Its tensors are views of the map; those of a dtype that no weight has are refused when asked for."""

    def __init__(self, path: Path) -> None:
        self.path = path
        data = map_file(path)
        try:
            self.header = _header(data)
            self._infos = _infos(parse_json(self.header, "the header"), len(data) - 8 - len(self.header))
        except CheckpointError as error:
            raise CheckpointError(f"{path.name}: {error}") from error
        self._bytes = np.frombuffer(data, np.uint8)[8 + len(self.header) :]

    def names(self) -> Iterable[str]:
        return self._infos.keys()

    def tensor(self, name: str) -> HostTensor:
        if name not in self._infos:
            raise CheckpointError(f"{self.path.name} has no tensor {name!r}")
        dtype, shape, begin, end = self._infos[name]
        encoding = _ENCODINGS.get(dtype)
        if encoding is None:
            raise CheckpointError(f"tensor {name!r} is stored as {dtype}; readable are {', '.join(_ENCODINGS)}")
        if not 1 <= len(shape) <= 2:
            raise CheckpointError(f"tensor {name!r} has {len(shape)} dimensions; a weight has one or two")
        row = max(1, shape[-1] * BLOCKS[encoding].nbytes)
        return HostTensor(name, shape, encoding, self._bytes[begin:end].reshape(-1, row))


_Info = tuple[str, tuple[int, ...], int, int]  # dtype, shape, begin, end


def _header(data: mmap.mmap) -> bytes:
    if len(data) < 8:
        raise CheckpointError("shorter than the 8 bytes that give the header's length")
    length = int.from_bytes(data[:8], "little")
    if not 2 <= length <= _HEADER_LIMIT:
        raise CheckpointError(f"a header of {length} bytes (2 to {_HEADER_LIMIT} are possible)")
    if 8 + length > len(data):
        raise CheckpointError(f"a header of {length} bytes in a file of {len(data)}")
    header = data[8 : 8 + length]
    if not header.startswith(b"{"):
        raise CheckpointError("the header is not a JSON object")
    return header


def _infos(header: dict[str, Any], size: int) -> dict[str, _Info]:
    """Name -> (dtype, shape, begin, end), checked against the `size` bytes that follow the header."""
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise CheckpointError("__metadata__ is not an object of strings")
    infos = {name: _info(name, entry) for name, entry in header.items()}
    position = 0
    for name, (_, _, begin, end) in sorted(infos.items(), key=lambda item: item[1][2:]):
        if begin != position:
            fault = (
                "overlaps another one" if begin < position else f"leaves a hole of {begin - position} bytes before it"
            )
            raise CheckpointError(f"tensor {name!r} {fault}")
        position = end
    if position != size:
        raise CheckpointError(
            f"the header describes {position} bytes of tensors, the file has {size}: cut off, or lying"
        )
    return infos


def _info(name: str, entry: Any) -> _Info:
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise CheckpointError(f"tensor {name!r} needs exactly dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _SIZES:
        raise CheckpointError(f"tensor {name!r} has the unknown dtype {dtype!r:.40}")
    if not _naturals(shape) or len(shape) > _MAX_DIMS:
        raise CheckpointError(f"tensor {name!r}: the shape must be up to {_MAX_DIMS} whole numbers, none negative")
    if not _naturals(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise CheckpointError(f"tensor {name!r}: data_offsets must be two whole numbers, begin <= end")
    begin, end = offsets
    needed = math.prod(shape) * _SIZES[dtype]
    if end - begin != needed:
        raise CheckpointError(f"tensor {name!r}: {dtype} {shape} takes {needed} bytes, its offsets span {end - begin}")
    return dtype, tuple(shape), begin, end


def _naturals(value: Any) -> bool:
    """A list of whole numbers that a 64-bit file can mean (bool is not a number here)."""
    return isinstance(value, list) and all(type(item) is int and 0 <= item < 1 << 63 for item in value)


class SafetensorsCheckpoint:
    """A Checkpoint (the protocol of backend.base) over a folder: model.safetensors, or the shards of its index."""

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        self.config = config
        single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
        if single.is_file():
            self.files = [SafetensorsFile(single)]
            self._where = dict.fromkeys(self.files[0].names(), self.files[0])
        elif index.is_file():
            weight_map = _weight_map(read_json(index).get("weight_map"), folder)
            shards = {shard: SafetensorsFile(folder / shard) for shard in sorted(set(weight_map.values()))}
            self.files = list(shards.values())
            self._where = {name: shards[shard] for name, shard in weight_map.items()}
            for name, file in self._where.items():
                if name not in file.names():
                    raise CheckpointError(f"{index.name} says that {file.path.name} holds {name!r}, but it doesn't")
        else:
            raise CheckpointError(f"{folder} has neither model.safetensors nor model.safetensors.index.json")

    def names(self) -> Iterable[str]:
        return self._where.keys()

    def tensor(self, name: str) -> HostTensor:
        if name not in self._where:
            raise CheckpointError(f"the checkpoint has no tensor {name!r}")
        return self._where[name].tensor(name)


def _weight_map(weight_map: Any, folder: Path) -> dict[str, str]:
    """The index's name -> shard, whose shards are files of the folder itself and no path that leads out of it."""
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError("model.safetensors.index.json has no weight_map")
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or not shard.endswith(".safetensors") or PureWindowsPath(shard).name != shard:
            raise CheckpointError(
                f"the index's file for {name!r} is not the name of a .safetensors file: {shard!r:.80}"
            )
    missing = sorted({shard for shard in weight_map.values() if not (folder / shard).is_file()})
    if missing:
        raise CheckpointError(f"{folder} lacks {len(missing)} shard(s) that the index names: {', '.join(missing[:3])}")
    return weight_map
