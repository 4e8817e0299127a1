"""Kernels written where they are tested: their body, and a launch."""

from __future__ import annotations

from functools import cache
from typing import Any

from tests.simt.emulator import SimKernel, SimRawModule


@cache
def kernel(body: str, parameters: str = "float* p") -> SimKernel:
    function: SimKernel = SimRawModule(code=f"__global__ void f({parameters}) {{\n{body}\n}}").get_function("f")
    return function


def run(body: str, block: int, *args: Any, grid: int = 1, shared_mem: int = 0, parameters: str = "float* p") -> None:
    kernel(body, parameters)((grid,), (block,), args, shared_mem=shared_mem)
