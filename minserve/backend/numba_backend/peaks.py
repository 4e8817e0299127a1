"""What this machine can do at most: bytes read per second, and dot products, by all threads together.

Owns two small kernels and their timing. Utilization is measured against them.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc"

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from minserve.backend.numba_backend.amx import HAS_AMX, add_bf16_products, end_matrices, load_matrix, store_matrix
from minserve.backend.numba_backend.arena import PAGE, Bytes, aligned
from minserve.backend.numba_backend.dot import bf16_tile, dot_tile
from minserve.backend.numba_backend.jit import entry, inlined, kernel
from minserve.backend.numba_backend.linear_bf16 import TOKENS, WEIGHTS, begin_bf16
from minserve.backend.numba_backend.simd_memory import i64, load_f32, load_u8, store_f32, store_i32
from minserve.backend.numba_backend.tile import zeros_f32, zeros_i32
from minserve.backend.numba_backend.unpack import nibbles

READ_BYTES = 64 << 20  # beyond the caches of the machines this runs on
OUT = 1024  # bytes that a thread writes at most
DOT_LOOPS = 400_000  # some milliseconds: threads start a tenth of one apart


@inlined
def read(p, nbytes, out):
    """Four streams within each 256 bytes, nbytes a multiple of 256."""
    a, b, c, d = load_f32(p, 0), load_f32(p, 16), load_f32(p, 32), load_f32(p, 48)
    for i in range(64, nbytes // 4, 64):
        a, b = a + load_f32(p, i), b + load_f32(p, i + 16)
        c, d = c + load_f32(p, i + 32), d + load_f32(p, i + 48)
    store_f32(out, 0, a + b + c + d)


@entry()
def read_memory(p, nbytes, out):
    read(p, nbytes, out)


@kernel("data nbytes out")
def read_share(tid, threads, rows, p):
    """The same as a tape operation: this thread's share of the bytes. out: 64 bytes a thread."""
    part = i64(p, 1) // threads // 256 * 256
    read(i64(p, 0) + tid * part, part, i64(p, 2) + tid * 64)


@entry()
def int8_rate(loops, p, out):
    """64 dot products of 16 rows x 4 k a loop: weights of 4 bits, operands in registers and the L1 cache. Not twice the
    same in a row: where products and sums are two instructions, the products would be made only once."""
    w, t = nibbles(p)[:4], zeros_i32(16)
    for i in range(loops):
        t = dot_tile(t, w, p + (i & 7) * 32, 256, 16)
    for r in (t[0] + t[1] + t[2] + t[3] + t[4] + t[5] + t[6] + t[7],):
        store_i32(out, 0, r + t[8] + t[9] + t[10] + t[11] + t[12] + t[13] + t[14] + t[15])


@entry()
def bf16_rate(loops, p, out):
    """16 dot products of 16 rows x 2 k a loop."""
    w, t = load_u8(p, 0), zeros_f32(16)
    for _ in range(loops):
        t = bf16_tile(t, w, p, 64, 1)
    store_f32(out, 0, t[0] + t[1] + t[2] + t[3] + t[4] + t[5] + t[6] + t[7])
    store_f32(out, 16, t[8] + t[9] + t[10] + t[11] + t[12] + t[13] + t[14] + t[15])


@entry()
def bf16_matrix_rate(loops, p, out):
    """4 products of 16 tokens x 16 rows x 32 k a loop, in the matrix unit."""
    begin_bf16(16)
    for _ in range(loops):
        load_matrix(TOKENS, p, 64)
        load_matrix(WEIGHTS, p, 64)
        add_bf16_products(0, TOKENS, WEIGHTS)
        add_bf16_products(1, TOKENS, WEIGHTS)
        add_bf16_products(2, TOKENS, WEIGHTS)
        add_bf16_products(3, TOKENS, WEIGHTS)
    store_matrix(0, out, 64)
    end_matrices()


def fastest(work: Callable[[int], None], threads: int, repeats: int = 5) -> float:
    """Seconds of the quickest of some runs of work(thread) by all threads, from the first start to the last end.

    The threads live through all runs: a new one may share a core with its parent for milliseconds.
    """
    together = threading.Barrier(threads)
    spans = [[(0.0, 0.0)] * threads for _ in range(repeats)]

    def run(t: int) -> None:
        for span in spans:
            together.wait()
            start = time.perf_counter()
            work(t)
            span[t] = start, time.perf_counter()

    others = [threading.Thread(target=run, args=(t,)) for t in range(1, threads)]
    for other in others:
        other.start()
    run(0)
    for other in others:
        other.join()
    return min(max(end for _, end in span) - min(start for start, _ in span) for span in spans)


def bandwidth(threads: int, loaded: Sequence[Bytes] = ()) -> float:
    """Bytes per second that all threads read together: of what is loaded, if no cache holds it, else of fresh memory,
    which takes time to come by."""
    pieces = list(loaded)
    if sum(piece.nbytes for piece in pieces) < READ_BYTES:
        pieces = [aligned(READ_BYTES, PAGE)]
        pieces[0][:] = 1
    out = aligned(threads * 64)
    shares = [(piece.ctypes.data, piece.nbytes // threads // 256 * 256) for piece in pieces]
    read_memory.compile()

    def work(t: int) -> None:
        for address, part in shares:
            read_memory(address + t * part, part, out.ctypes.data + 64 * t)

    return sum(part for _, part in shares) * threads / fastest(work, threads)


def dot_rate(threads: int, *, bf16: bool) -> float:
    """Multiplications and additions per second, of bfloat16 or of 8-bit integers, by all threads. Those of integers are
    the vector units', also where there is a matrix unit: scaling them is what takes the time then."""
    if not bf16:
        kernel, loops, operations = int8_rate, DOT_LOOPS // 4, 64 * 128
    elif HAS_AMX:
        kernel, loops, operations = bf16_matrix_rate, DOT_LOOPS // 4, 4 * 16 * 16 * 64
    else:
        kernel, loops, operations = bf16_rate, DOT_LOOPS, 16 * 64
    memory, out = aligned(4096), aligned(threads * OUT)
    kernel.compile()

    def work(t: int) -> None:
        kernel(loops, memory.ctypes.data, out.ctypes.data + OUT * t)

    return loops * operations * threads / fastest(work, threads)
