"""safetensors files, single and sharded: views of memory-mapped weights, in a file that the library has checked.

Owns where a tensor's bytes are. That a header tells the truth (sizes that match shapes, no overlap, no hole, the whole
file covered) is checked by the safetensors library, which allocates nothing for what a header only claims. Its own
tensors are copies, and its NumPy ones have no bfloat16: the views are made here. It must not know models.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path, PureWindowsPath
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from minserve.backend.base import CheckpointError
from minserve.backend.tensor import BLOCKS, Encoding, HostTensor
from minserve.weights.files import map_file, parse_json, read_json

_ENCODINGS = {"F32": Encoding.F32, "F16": Encoding.F16, "BF16": Encoding.BF16}


class SafetensorsFile:
    """One file. Its tensors are views of the map; those of a dtype that no weight has are refused when asked for."""

    def __init__(self, path: Path) -> None:
        self.path = path
        data = map_file(path)
        try:
            with safe_open(path, framework="numpy"):
                begin = 8 + int.from_bytes(data[:8], "little")
            self.header = data[8:begin]
            if not self.header.startswith(b"{"):
                raise CheckpointError("the header does not begin with {")
            self._infos = parse_json(self.header, "the header")
        except (SafetensorError, CheckpointError) as error:
            raise CheckpointError(f"{path.name}: {error}") from error
        self._infos.pop("__metadata__", None)
        self._bytes = np.frombuffer(data, np.uint8)[begin:]

    def names(self) -> Iterable[str]:
        return self._infos.keys()

    def tensor(self, name: str) -> HostTensor:
        if name not in self._infos:
            raise CheckpointError(f"{self.path.name} has no tensor {name!r}")
        info = self._infos[name]
        dtype, shape, (begin, end) = info["dtype"], tuple(info["shape"]), info["data_offsets"]
        encoding = _ENCODINGS.get(dtype)
        if encoding is None:
            raise CheckpointError(f"tensor {name!r} is stored as {dtype}; readable are {', '.join(_ENCODINGS)}")
        if not 1 <= len(shape) <= 2:
            raise CheckpointError(f"tensor {name!r} has {len(shape)} dimensions; a weight has one or two")
        row = max(1, shape[-1] * BLOCKS[encoding].nbytes)
        return HostTensor(name, shape, encoding, self._bytes[begin:end].reshape(-1, row))


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
