"""Compile every kernel for real GPUs without having one, and say what ptxas made of it.

Owns NVRTC (a wheel, no driver needed) and what an SM can hold of a kernel. Results are cached next to the emulator's
libraries, since they depend on nothing but the sources and NVRTC's version.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib.util
import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from minserve.backend.cuda_backend.attention import decode_launch, prefill_launch
from minserve.backend.cuda_backend.kernels import flatten
from tests.simt.build import cache_folder

MISSING = "NVRTC is not installed: `pip install -e '.[cuda-dev]'`"


@dataclass(frozen=True, slots=True)
class Architecture:
    """What an SM has. shared: bytes for all its blocks, each of which takes 1 KiB more than it asks for."""

    name: str
    warps: int
    blocks: int
    shared: int
    registers: int = 65536


ARCHITECTURES = (
    Architecture("sm_80", 64, 32, 164 << 10),  # A100
    Architecture("sm_90", 64, 32, 228 << 10),  # H100, H200
    Architecture("sm_120", 48, 24, 100 << 10),  # RTX 50 series
)


@dataclass(frozen=True, slots=True)
class Usage:
    """Of one kernel: registers a thread; bytes of spilled registers, of stack, of static shared memory."""

    registers: int
    spill: int
    stack: int
    shared: int


def wheel_folder(name: str) -> Path | None:
    """Where a wheel of NVIDIA's put its files: nvidia/NAME (12), nvidia/cu13."""
    for package in (f"nvidia.{name}", "nvidia.cu13"):
        try:
            spec = importlib.util.find_spec(package)
        except ModuleNotFoundError:
            continue
        if spec is not None and spec.submodule_search_locations:
            return Path(next(iter(spec.submodule_search_locations)))
    return None


@functools.cache
def library() -> Any:
    """NVRTC, or None where its wheel is not installed."""
    folder = wheel_folder("cuda_nvrtc")
    found = (
        [p for p in sorted(folder.glob("**/*nvrtc*")) if re.search(r"nvrtc(\.so|64_\d+_0\.dll)", p.name)]
        if folder
        else []
    )
    return ctypes.CDLL(str(found[0])) if found and wheel_folder("cuda_runtime") else None


def version() -> str:
    major, minor = ctypes.c_int(), ctypes.c_int()
    library().nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    return f"{major.value}.{minor.value}"


def compile_file(file: str, names: Sequence[str], architecture: str) -> dict[str, Usage]:
    """What each instantiation uses. RuntimeError with the compiler's messages."""
    source = flatten(f"{file}.cu")
    key = hashlib.sha256(repr((source, list(names), architecture, version())).encode()).hexdigest()[:24]
    cached = cache_folder() / f"{key}.json"
    if cached.exists():
        return {name: Usage(**numbers) for name, numbers in json.loads(cached.read_text()).items()}
    report = _compile(source, names, architecture)
    cached.parent.mkdir(parents=True, exist_ok=True)
    cached.write_text(json.dumps({name: asdict(usage) for name, usage in report.items()}))
    return report


def _compile(source: str, names: Sequence[str], architecture: str) -> dict[str, Usage]:
    nvrtc, program, size = library(), ctypes.c_void_p(), ctypes.c_size_t()
    nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"kernel.cu", 0, None, None)
    for name in names:
        nvrtc.nvrtcAddNameExpression(program, name.encode())
    # CuPy's own options, and ptxas's report.
    flags = [f"--gpu-architecture={architecture}", "-std=c++17", "-ftz=true", "--ptxas-options=-v"]
    flags.append(f"-I{wheel_folder('cuda_runtime')}/include")
    failed = nvrtc.nvrtcCompileProgram(program, len(flags), (ctypes.c_char_p * len(flags))(*map(str.encode, flags)))
    nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    buffer = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetProgramLog(program, buffer)
    log = buffer.value.decode()
    if failed:
        raise RuntimeError(f"{architecture}: {log}")
    report, lowered = {}, ctypes.c_char_p()
    for name in names:
        nvrtc.nvrtcGetLoweredName(program, name.encode(), ctypes.byref(lowered))
        report[name] = _usage(log, (lowered.value or b"").decode())
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    return report


def _usage(log: str, symbol: str) -> Usage:
    part = log.split(f"entry function '{symbol}'")[1].split("Compiling entry")[0]

    def number(pattern: str) -> int:
        match = re.search(pattern, part)
        return int(match[1]) if match else 0

    return Usage(
        registers=number(r"Used (\d+) registers"),
        spill=number(r"(\d+) bytes spill stores"),
        stack=number(r"(\d+) bytes stack frame"),
        shared=number(r"(\d+) bytes smem"),
    )


# ---- occupancy ---------------------------------------------------------------------
def launch_shape(file: str, name: str) -> tuple[int, int]:
    """Threads of a block, and its dynamic shared memory (for norms: of 4096 columns)."""
    parameters = name[name.find("<") + 1 : -1].split(",")
    if file == "decode_attention":
        return decode_launch(int(parameters[1]))
    if file == "prefill_attention":
        return 128, prefill_launch(int(parameters[1]))[1]
    if file in ("rope_kv", "embed"):
        return 128, 0
    return (1024, 0) if file in ("sampling", "logprobs", "seats") else (256, 4 * 4096 if file == "rms_norm" else 0)


def occupancy(usage: Usage, threads: int, dynamic: int, sm: Architecture) -> int:
    """Warps of this kernel that an SM holds at once. Registers are handed out to warps in units of 256."""
    warps = threads // 32 or 1
    registers = -(-usage.registers * 32 // 256) * 256 * warps
    shared = usage.shared + dynamic + 1024
    blocks = min(sm.warps // warps, sm.blocks, sm.registers // registers, sm.shared // shared)
    return blocks * warps
