"""What the emulator knows of memory: races, reads of what nobody has written, blocks that read each other's results."""

from __future__ import annotations

import re
from functools import cache

import numpy as np
import pytest

from minserve.backend.cuda_backend.kernels import flatten
from tests.simt import fakecupy
from tests.simt.build import CompilationError
from tests.simt.emulator import KernelError, SimKernel, SimRawModule
from tests.simt.inline import run

pytestmark = pytest.mark.simt

RACES = {
    "read after write": ("s[i] = i; p[0] = s[63 - i];", True),
    "with a barrier": ("s[i] = i; __syncthreads(); p[0] = s[63 - i];", False),
    "write after read": ("if (i == 0) s[0] = 1; __syncthreads(); p[0] = s[0]; if (i == 9) s[0] = 2;", True),
    "in one warp": ("s[i] = i; p[0] = s[i ^ 1];", True),
    "a shuffle is no fence": ("s[i] = i; __shfl_sync(~0u, i, 0); p[0] = s[i ^ 1];", True),
    "with __syncwarp": ("s[i] = i; __syncwarp(); p[0] = s[i ^ 1];", False),
    "__syncwarp across warps": ("s[i] = i; __syncwarp(); p[0] = s[63 - i];", True),
    "two writes": ("s[i / 2] = 1;", True),
    "atomics": ("if (i == 0) s[0] = 0; __syncthreads(); atomicAdd(&s[0], 1.0f);", False),
    "atomic and plain": ("if (i == 0) s[0] = 0; __syncthreads(); atomicAdd(&s[0], 1.0f); p[0] = s[0];", True),
}


@cache
def racing_kernels() -> SimRawModule:
    head = "(volatile float* p) {\n__shared__ float s[64];\nint i = threadIdx.x;\ns[i] = 0;\n__syncthreads();\n"
    return SimRawModule(
        code="\n".join(f"__global__ void race_{i}{head}{body}\n}}" for i, (body, _) in enumerate(RACES.values()))
    )


@pytest.mark.parametrize("case", RACES)
def test_races_on_shared_memory_are_found_in_every_order(case: str, order: str) -> None:
    function, arguments = racing_kernels().get_function(f"race_{list(RACES).index(case)}"), (np.zeros(1, np.float32),)
    if RACES[case][1]:
        with pytest.raises(KernelError, match="race on shared memory"):
            function((1,), (64,), arguments)
    else:
        function((1,), (64,), arguments)


UNWRITTEN = {
    "shared memory": ("p[i] = s[i];", "shared memory that nobody has written"),
    "dynamic shared memory": ("p[i] = dynamic[i];", "shared memory that nobody has written"),
    "a number with a byte missing": (
        "char* b = (char*)&s[i]; b[0] = b[1] = b[3] = 0; p[i] = s[i];",
        "shared memory that nobody has written",
    ),
    "what another block wrote": (
        "if (blockIdx.x) s[i] = 1; else p[i] = s[i];",
        "shared memory that nobody has written",
    ),
    "an atomic": ("atomicAdd(&s[i], 1.0f);", "shared memory that nobody has written"),
    "a copy before its wait": ("cp_async_16(s + 4 * i, p + 4 * i); p[i] = s[4 * i];", "a copy is under way to"),
    "another thread's copy before its wait": (
        "if (i == 0) cp_async_16(s, p); __syncthreads(); if (i == 1) p[1] = s[0];",
        "a copy is under way to",
    ),
    "device memory": ("p[i] = fresh[i];", "device memory that nobody has written"),
    "device memory, for a copy": ("cp_async_16(s + 4 * i, fresh + 4 * i);", "device memory that nobody has written"),
    "device memory, in an atomic": ("atomicAdd(fresh + i, 1.0f);", "device memory that nobody has written"),
}


@cache
def reading_kernels() -> SimRawModule:
    head = "(float* p, float* fresh) {{ __shared__ __align__(16) float s[128]; extern __shared__ float dynamic[];"
    kernels = (
        f'#line 1 "case_{n}.cu"\n__global__ void unwritten_{n}{head.format()} int i = threadIdx.x;\n{body}\n}}'
        for n, (body, _) in enumerate(UNWRITTEN.values())
    )
    return SimRawModule(code="\n".join([flatten("mma.cuh"), *kernels]))


class TestMemoryThatNobodyWrote:
    @pytest.mark.parametrize("case", UNWRITTEN)
    def test_reading_it_is_an_error_that_names_kernel_line_and_thread(self, case: str, order: str) -> None:
        n, message = list(UNWRITTEN).index(case), UNWRITTEN[case][1]
        p, fresh = (make(128, np.float32) for make in (fakecupy.zeros, fakecupy.empty))
        fakecupy.Device().synchronize()
        function = SimKernel(reading_kernels(), f"unwritten_{n}")
        with pytest.raises(KernelError, match=message) as caught:
            function((2,), (32,), (p, fresh), shared_mem=512)
        assert re.match(
            rf"unwritten_{n}: block \(\d,0,0\) thread \(\d+,0,0\): .* in .*case_{n}\.cu:2", str(caught.value)
        )

    def test_a_copy_that_was_waited_for_may_be_read(self, order: str) -> None:
        body = """__shared__ __align__(16) float s[128]; const int i = threadIdx.x;
                  cp_async_16(s + 4 * i, p + 4 * i); cp_async_commit(); cp_async_wait<0>(); p[i] = s[4 * i];"""
        p = np.ones(128, np.float32)
        code = f"{flatten('mma.cuh')}\n__global__ void f(float* p) {{ {body} }}"
        SimRawModule(code=code).get_function("f")((1,), (32,), (p,))
        assert (p == 1).all()

    def test_what_one_kernel_wrote_another_may_read(self, order: str) -> None:
        write, read = "if (threadIdx.x < 3) p[threadIdx.x] = 1;", "p[threadIdx.x] += 1;"
        array = fakecupy.empty(4, np.float32)
        run(write, 32, array)
        run(read, 3, array)
        with pytest.raises(KernelError, match=r"thread \(3,0,0\): read of device memory that nobody has written"):
            run(read, 4, array)

    def test_a_variable_of_a_thread_is_refused_by_the_compiler(self) -> None:
        with pytest.raises(CompilationError, match="uninitialized"):
            run("float x; p[0] = x;", 1, np.zeros(1, np.float32))


# Each block writes its number 8 times; the last to draw a ticket adds them all up.
LAST_BLOCK = """__shared__ bool last;
  if (threadIdx.x < 8) part[8 * blockIdx.x + threadIdx.x] = blockIdx.x;
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();  // releases
    last = atomicAdd(count, 1u) == gridDim.x - 1;
    __threadfence();  // acquires
  }
  __syncthreads();
  if (last && threadIdx.x == 1) for (int i = 0; i < 8 * gridDim.x; ++i) *out += part[i];"""


def last_block(body: str) -> float:
    part, count, out = (fakecupy.empty(64, np.float32), fakecupy.zeros(1, np.uint32), fakecupy.zeros(1, np.float32))
    fakecupy.Device().synchronize()
    run(body, 32, part, count, out, grid=8, parameters="float* part, unsigned* count, float* out")
    return float(out.get()[0])


def test_the_last_block_reduces(order: str) -> None:
    assert last_block(LAST_BLOCK) == 8 * 28


@pytest.mark.parametrize(
    "dropped", ["__syncthreads();", "__threadfence();  // releases", "__threadfence();  // acquires"]
)
def test_blocks_that_read_each_others_results_need_fences(dropped: str, order: str) -> None:
    assert dropped in LAST_BLOCK
    with pytest.raises(
        KernelError, match=r"thread \(1,0,0\): read of what another block has written, without the fences"
    ):
        last_block(LAST_BLOCK.replace(dropped, "", 1))
