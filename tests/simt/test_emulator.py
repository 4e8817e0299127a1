"""The emulator itself: what it computes, and what it refuses."""

from __future__ import annotations

import os
import re
import sys
import time
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minserve.backend.cuda_backend.kernels import flatten
from tests.simt import emulator, fakecupy
from tests.simt.emulator import ORDERS, KernelError, SimKernel, SimRawModule, plain_kernels, rewrite_shared

pytestmark = pytest.mark.simt


@cache
def kernel(body: str, parameters: str = "float* p") -> SimKernel:
    function: SimKernel = SimRawModule(code=f"__global__ void f({parameters}) {{\n{body}\n}}").get_function("f")
    return function


def run(body: str, block: int, *args: Any, grid: int = 1, shared_mem: int = 0, parameters: str = "float* p") -> None:
    kernel(body, parameters)((grid,), (block,), args, shared_mem=shared_mem)


class TestWhatItComputes:
    def test_indices_and_shared_memory(self) -> None:
        out = np.zeros(96, np.int32)
        body = """__shared__ int s[32];
                  s[threadIdx.x] = threadIdx.x;
                  __syncthreads();
                  out[blockIdx.x * blockDim.x + threadIdx.x] = s[31 - threadIdx.x] + 100 * blockIdx.x;"""
        run(body, 32, out, grid=3, parameters="int* out")
        assert (out.reshape(3, 32) == np.arange(32)[::-1] + 100 * np.arange(3)[:, None]).all()

    def test_warp_collectives(self) -> None:
        out = np.zeros((6, 64), np.int32)
        body = """int i = threadIdx.x, lane = i % 32;
                  out[i] = __shfl_xor_sync(~0u, i, 5);
                  out[64 + i] = __shfl_down_sync(~0u, i, 3, 8);
                  out[128 + i] = __ballot_sync(~0u, lane % 3 == 0);
                  out[192 + i] = __reduce_max_sync(~0u, i * 7 % 32);
                  if (lane < 16) out[256 + i] = __shfl_sync(0xffffu, i, 2);      // two halves diverge
                  else out[256 + i] = __shfl_sync(0xffff0000u, i, 20);
                  out[320 + i] = __popc(__match_any_sync(~0u, lane / 4));"""
        run(body, 64, out, parameters="int* out")
        i = np.arange(64)
        assert (out[0] == (i ^ 5)).all()
        assert (out[1] == np.where(i % 8 + 3 < 8, i + 3, i)).all()
        assert (out[2].view(np.uint32) == sum(1 << lane for lane in range(0, 32, 3))).all()
        assert (out[3] == np.repeat([(i[:32] * 7 % 32).max(), (i[32:] * 7 % 32).max()], 32)).all()
        assert (out[4] == i // 32 * 32 + np.where(i % 32 < 16, 2, 20)).all()
        assert (out[5] == 4).all()

    def test_byte_permutation(self) -> None:
        out = np.zeros(2, np.uint32)
        body = "p[0] = __byte_perm(0x33221100, 0x77665544, 0x7160); p[1] = __byte_perm(0x33221100, 0x77665544, 0x5432);"
        run(body, 1, out, parameters="unsigned* p")
        assert [hex(v) for v in out] == ["0x77116600", "0x55443322"]

    def test_block_votes(self) -> None:
        out = np.zeros(3, np.int32)
        body = """int n = __syncthreads_count(threadIdx.x < 5), any = __syncthreads_or(threadIdx.x == 9);
                  int all = __syncthreads_and(threadIdx.x < 40);
                  if (threadIdx.x == 0) out[0] = n, out[1] = any, out[2] = all;"""
        run(body, 40, out, parameters="int* out")
        assert out.tolist() == [5, 1, 1]

    def test_last_block_reduces(self, order: str) -> None:
        assert last_block(LAST_BLOCK) == 8 * 28

    def test_every_block_runs_once_and_each_schedule_has_an_order_of_its_own(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for blocks in (1, 2, 7, 30):
            seen = []
            for schedule in ORDERS:
                monkeypatch.setattr(SimRawModule, "order", schedule)
                out, count = np.zeros(blocks, np.int32), np.zeros(1, np.int32)
                body, parameters = "out[atomicAdd(count, 1)] = blockIdx.x;", "int* out, int* count"
                run(body, 1, out, count, grid=blocks, parameters=parameters)
                seen.append(out.tolist())
            assert all(sorted(order) == list(range(blocks)) for order in seen)
            assert blocks < 7 or len(set(map(tuple, seen))) == 3

    @pytest.mark.parametrize("type", ["half", "__nv_bfloat16"])
    def test_16_bit_numbers_round_as_numpy_does(self, type: str) -> None:
        """Every upper half of a float32, with both kinds of tails: bit for bit as ml_dtypes and NumPy."""
        ml_dtypes = pytest.importorskip("ml_dtypes")
        bits = np.arange(1 << 16, dtype=np.uint32) << 16
        values = np.concatenate([bits, bits | 0x8000, bits | 0x8001, bits | 0x1FFF]).view(np.float32)
        values = values[~np.isnan(values)]
        out = np.zeros(len(values), np.uint16)
        dtype = np.dtype(np.float16 if type == "half" else ml_dtypes.bfloat16)
        body = f"""for (int i = threadIdx.x; i < n; i += blockDim.x) {{
                     {type} x = {type}(in[i]); p[i] = *(unsigned short*)&x;
                     if (float(x) != float({type}(float(x)))) p[i] = 0xdead; }}"""
        run(body, 32, out, values, np.int32(len(values)), parameters="unsigned short* p, const float* in, int n")
        with np.errstate(over="ignore"):
            assert (out == values.astype(dtype).view(np.uint16)).all()


BAD = {
    "exit before a barrier": ("if (threadIdx.x == 7) return; __syncthreads();", "barrier divergence"),
    "exit while others wait": ("if (threadIdx.x != 7) __syncthreads();", "barrier divergence"),
    "two barriers": ("if (threadIdx.x < 9)\n __syncthreads();\n else\n __syncthreads();", "barrier divergence"),
    "lane missing": (
        "if (threadIdx.x < 16) p[0] = __shfl_xor_sync(~0u, p[0], 1);",
        "exits while other lanes wait|exited",
    ),
    "two collectives": (
        "if (threadIdx.x < 16) p[0] = __shfl_xor_sync(~0u, p[0], 1);\n else __syncwarp();",
        "warp divergence",
    ),
    "not in its mask": ("p[0] = __shfl_sync(0xffu, p[0], 1);", "does not name the calling lane"),
    "overlapping masks": (
        "if (threadIdx.x < 16) __syncwarp(0x1ffff); else __syncwarp(0xffff0000);",
        "exits while|deadlock",
    ),
    "null pointer": ("*(volatile float*)nullptr = 1;", "illegal memory access"),
    "misaligned": ("*(float4*)(p + 1) = make_float4(0, 0, 0, 0);", "misaligned"),
    "static index": (
        "__shared__ float s[8]; s[threadIdx.x] = 1; p[threadIdx.x % 8] = s[threadIdx.x];",
        "out of bounds",
    ),
    "dynamic index": ("extern __shared__ float s[]; s[threadIdx.x] = 1;", "illegal memory access"),
    "before the start": ("extern __shared__ float s[]; s[-5 - (int)threadIdx.x] = 1;", "before the start"),
    "division by zero": ("volatile int zero = 0; p[0] = 1 / zero;", "division fault|sanitizer trap"),
    "too deep": ("volatile float a[100000]; a[0] = 1; p[0] = a[99999];", "illegal memory access"),
    "too much static shared memory": ("__shared__ float s[13000]; s[threadIdx.x] = 1;", "exceeds 48 KiB"),
    "deadlock": (
        "if (threadIdx.x < 16) __syncwarp(0xffff); if (threadIdx.x < 31) __syncwarp(0x7fffffff);\n"
        " else\n __syncthreads();\nif (threadIdx.x == 0) __syncwarp(3);",
        "deadlock|exits while",
    ),
}


@cache
def bad_kernels() -> SimRawModule:
    """All of them in one module: compiling each alone takes a minute."""
    code = "\n".join(f"__global__ void bad_{i}(float* p) {{\n{body}\n}}" for i, (body, _) in enumerate(BAD.values()))
    return SimRawModule(code=code)


class TestWhatItRefuses:
    @pytest.mark.parametrize("case", BAD)
    def test_error_names_kernel_and_thread(self, case: str) -> None:
        name, message = f"bad_{list(BAD).index(case)}", BAD[case][1]
        with pytest.raises(KernelError, match=message) as caught:
            bad_kernels().get_function(name)((1,), (32,), (np.zeros(8, np.float32),), shared_mem=64)
        assert f"{name}: block (0,0,0) thread (" in str(caught.value)

    def test_error_names_file_and_line(self) -> None:
        with pytest.raises(KernelError, match=r"kernel\.cu:3"):
            run("int i = threadIdx.x;\n*(volatile float*)nullptr = i;", 1, np.zeros(1, np.float32))

    def test_a_read_past_the_end_of_an_array(self) -> None:
        """An array that ends at a guard page: fakecupy allocates all of them like this."""
        with pytest.raises(KernelError, match="illegal memory access"):
            run("p[threadIdx.x] = 1;", 64, fakecupy.zeros(32, np.float32))

    def test_the_next_launch_works(self) -> None:
        out = np.zeros(1, np.float32)
        with pytest.raises(KernelError):
            run("if (threadIdx.x == 7) return; __syncthreads();", 32, out)
        run("p[0] = 1;", 1, out)
        assert out[0] == 1

    @pytest.mark.parametrize(
        ("args", "message"),
        [
            ((np.zeros(4, np.float64), np.int32(1), np.float32(1)), "dtype float64"),
            ((np.zeros(4, np.float32), np.int32(1), 1.0), "wrap it"),  # CuPy would pass a double
            ((np.zeros(4, np.float32), 1, np.float32(1)), "wrap it"),  # and here 8 bytes
            ((np.zeros(4, np.float32), np.float32(1), np.float32(1)), "parameter is i4"),
            ((np.zeros(4, np.float32), True, np.float32(1)), "bool"),
            ((np.zeros(4, np.float32), np.int32(1)), "2 arguments"),
            ((1.0, np.int32(1), np.float32(1)), "pointer"),
            ((None, np.int32(1), np.float32(1)), "NoneType"),  # no null pointer in CuPy
            ((np.uint64(64), np.int32(1), np.float32(1)), "pointer"),
            ((np.zeros((4, 4), np.float32)[:, :2], np.int32(1), np.float32(1)), "contiguous"),
        ],
    )
    def test_arguments_that_cupy_would_pass_wrongly(self, args: tuple[Any, ...], message: str) -> None:
        with pytest.raises(KernelError, match=message):
            run("", 1, *args, parameters="float* p, int n, float x")

    @pytest.mark.parametrize(
        ("grid", "block", "shared", "message"),
        [
            ((1,), (1025,), 0, "invalid block"),
            ((1,), (0,), 0, "invalid block"),
            ((1,), (2, 2, 65), 0, "invalid block"),
            ((0,), (1,), 0, "invalid grid"),
            ((1, 65536), (1,), 0, "invalid grid"),
            ((1,), (1,), 49 * 1024, "max_dynamic_shared_size_bytes"),
        ],
    )
    def test_launches_that_a_gpu_refuses(self, grid: Any, block: Any, shared: int, message: str) -> None:
        with pytest.raises(KernelError, match=message):
            kernel("")(grid, block, (np.zeros(1, np.float32),), shared_mem=shared)

    def test_a_null_pointer_is_a_zero_of_eight_bytes(self) -> None:
        out = np.zeros(1, np.int32)
        run("*out = p == nullptr;", 1, np.uint64(0), out, parameters="float* p, int* out")
        assert out[0] == 1

    def test_more_shared_memory_after_opting_in(self) -> None:
        function = kernel("extern __shared__ float s[]; s[threadIdx.x + 24000] = 1; p[0] = 2;")
        function.max_dynamic_shared_size_bytes = 98 * 1024
        out = np.zeros(1, np.float32)
        function((1,), (1,), (out,), shared_mem=98 * 1024)
        assert out[0] == 2
        function.max_dynamic_shared_size_bytes = 200 * 1024
        with pytest.raises(KernelError, match="at most"):
            function((1,), (1,), (out,), shared_mem=100 * 1024)

    def test_unknown_kernel_and_code_that_does_not_compile(self) -> None:
        with pytest.raises(KernelError, match="name expressions"):
            SimRawModule(code="__global__ void f() {}").get_function("g")
        with pytest.raises(KernelError, match="not_a_thing"):
            SimRawModule(code="__global__ void f() { not_a_thing; }")


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
        with pytest.raises(KernelError, match="uninitialized"):
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


@pytest.mark.parametrize(
    "dropped", ["__syncthreads();", "__threadfence();  // releases", "__threadfence();  // acquires"]
)
def test_blocks_that_read_each_others_results_need_fences(dropped: str, order: str) -> None:
    assert dropped in LAST_BLOCK
    with pytest.raises(
        KernelError, match=r"thread \(1,0,0\): read of what another block has written, without the fences"
    ):
        last_block(LAST_BLOCK.replace(dropped, "", 1))


class TestSources:
    def test_shared_declarations_become_macros(self) -> None:
        assert rewrite_shared("__shared__ float x[4][kN];") == "SIMT_SHARED(SIMT_TYPE(float [4][kN]), x);"
        dynamic = "extern __shared__ __align__(16) unsigned char x[];"
        assert rewrite_shared(dynamic) == "SIMT_DYNAMIC_SHARED(unsigned char, x);"
        with pytest.raises(ValueError, match="one __shared__ variable per statement"):
            rewrite_shared("__shared__ float x[4], y[4];")

    def test_kernels_that_are_no_templates_need_no_name_expression(self) -> None:
        source = "template <int N> __global__ void a() {} // __global__ void b()\n"
        source += "__global__ void __launch_bounds__(8) c() {}"
        assert plain_kernels(source) == ["c"]


class TestCache:
    def test_a_library_is_compiled_once_and_pruned_when_unused(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("MINSERVE_SIMT_CACHE", str(tmp_path))
        code = "__global__ void f() {}"
        first = emulator.compile_library(code, (), ["f"])
        made = first.stat().st_ino
        assert emulator.compile_library(code, (), ["f"]).stat().st_ino == made
        long_ago = time.time() - (emulator.UNUSED_DAYS + 1) * 86400
        os.utime(first, (long_ago, long_ago))
        second = emulator.compile_library(code + "\n", (), ["f"])
        assert second.exists()
        assert not first.exists()
        assert {path.suffix for path in tmp_path.iterdir()} == {".so", ".lock"}

    def test_it_lies_outside_the_tree(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("MINSERVE_SIMT_CACHE", raising=False)
        monkeypatch.delenv("MINSERVE_CACHE", raising=False)
        monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
        assert emulator.cache_folder() == Path("/somewhere/minserve/simt")
        monkeypatch.setenv("MINSERVE_CACHE", "/elsewhere")
        assert emulator.cache_folder() == Path("/elsewhere/simt")


class TestWhereItCannotRun:
    def test_a_missing_compiler_is_named(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(emulator, "CXX", "no-such-g++")
        assert "no-such-g++, which is not installed" in (emulator.missing() or "")

    def test_so_is_a_system_it_does_not_know(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sys, "platform", "darwin")
        assert "darwin" in (emulator.missing() or "")
