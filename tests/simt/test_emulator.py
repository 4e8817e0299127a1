"""The emulator itself: what it computes, and what it refuses of kernels and of launches."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest

from tests.simt import fakecupy
from tests.simt.build import CompilationError
from tests.simt.emulator import ORDERS, KernelError, SimRawModule
from tests.simt.inline import kernel, run

pytestmark = pytest.mark.simt


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
        with pytest.raises(CompilationError, match="not_a_thing"):
            SimRawModule(code="__global__ void f() { not_a_thing; }")
