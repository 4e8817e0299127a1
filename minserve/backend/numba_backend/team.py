"""The team: threads that replay a tape together, and the interpreter that walks it.

Owns the threads and their barrier. It must not know what a tape computes. The leader is whoever calls `run`; it works
like the others. All of them run the same rows (SPMD), each doing its share, and meet at spin barriers.

Between steps workers spin a little, since the next step of a busy server follows within a millisecond, and then park
in a semaphore of Python's, which costs no CPU; waking one takes up to a millisecond, since it needs the GIL. Parking: a
worker sets its flag, then looks at the step number again; the leader raises the number, then clears the flags. Whoever
reads a set flag from its swap owns the wake-up, so none is lost and none is given twice.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc"

from __future__ import annotations

import ctypes
import sys
import threading

import llvmlite.binding as llvm
import numpy as np
from llvmlite import ir
from numba import types

from minserve.backend.numba_backend.arena import aligned
from minserve.backend.numba_backend.jit import entry, inlined
from minserve.backend.numba_backend.layout import S_ROWS, T_ROWS
from minserve.backend.numba_backend.simd_memory import i64, prefetch, set_i64
from minserve.backend.numba_backend.simd_types import I32, I64, call, op, pointer
from minserve.backend.numba_backend.tape import HEAD, WIDTH, Tape

SPINS_BEFORE_YIELD = 100  # polls of a barrier before the core is offered to others: a shared machine must not stall
SPINS_BEFORE_PARKING = 200_000  # about 5 ms: longer than a busy server needs between two steps
LINE_WORDS = 16  # int64 words from one thread's flag to the next: no two share a cache line
STEP, STOP, PARKED = 1, 2, 3  # lines of the board; line 0 is the barrier's counter, PARKED + t the flag of worker t


def _yield_address() -> int:
    """The C function that gives the rest of a time slice away."""
    if sys.platform == "win32":
        return ctypes.cast(ctypes.windll.kernel32.SwitchToThread, ctypes.c_void_p).value or 0
    return ctypes.cast(ctypes.CDLL(None).sched_yield, ctypes.c_void_p).value or 0


llvm.add_symbol("minserve_yield", _yield_address())


@op(types.int64, types.int64, types.int64, types.int64)
def atomic_add(b, p, i, v):
    return b.atomic_rmw("add", pointer(b, p, i, I64), v, "seq_cst")


@op(types.int64, types.int64, types.int64, types.int64)
def atomic_swap(b, p, i, v):
    return b.atomic_rmw("xchg", pointer(b, p, i, I64), v, "seq_cst")


@op(types.int64, types.int64, types.int64)
def atomic_load(b, p, i):
    return b.load_atomic(pointer(b, p, i, I64), "seq_cst", 8)


@op(types.void)
def pause(b):
    """Tell the core that this is a spin loop."""
    if llvm.get_process_triple().startswith("x86_64"):
        call(b, "llvm.x86.sse2.pause", ir.VoidType())


@op(types.void)
def give_way(b):
    call(b, "minserve_yield", I32)


@op(types.void, types.int64, types.int64, types.int64, types.int64, types.int64)
def call_kernel(b, kernel, tid, threads, rows, params):
    signature = ir.FunctionType(ir.VoidType(), [I64] * 4)
    b.call(b.inttoptr(kernel, signature.as_pointer()), [tid, threads, rows, params])


@inlined
def meet(board, threads, phase):
    """Barrier number `phase`. The counter only grows: a reset would race with a thread that still spins."""
    if threads > 1:
        atomic_add(board, 0, 1)
        spins = 0
        while atomic_load(board, 0) < threads * phase:
            pause()
            spins += 1
            if spins == SPINS_BEFORE_YIELD:
                give_way()
                spins = 0
    return phase + 1


@inlined
def walk(tid, threads, tape, n, header, board, phases):
    """Replay the tape once. phases: the number of the next barrier, per thread."""
    kind = (1 if i64(header, T_ROWS) > 1 else 0) + (2 if i64(header, S_ROWS) > 1 else 0)
    phase = i64(phases, tid * LINE_WORDS)
    for i in range(n):
        row = tape + i * WIDTH * 8
        prefetch(row + WIDTH * 8)  # the weights push the tape out of the caches in every step
        prefetch(row + WIDTH * 8 + 64)
        prefetch(row + WIDTH * 8 + 128)
        if (i64(row, 1) >> kind) & 1:
            phase = meet(board, threads, phase)
        rows = i64(header, i64(row, 2))
        if rows > 0:  # without rows the kernel is skipped, never the barrier
            call_kernel(i64(row, 0), tid, threads, rows, row + HEAD * 8)
    set_i64(phases, tid * LINE_WORDS, meet(board, threads, phase))


@entry()
def replay(tid, threads, tape, n, header, board, phases):
    walk(tid, threads, tape, n, header, board, phases)


@entry(types.int64)
def announce(board, threads):
    """Start a step for all spinning workers; returns a bit per parked one, which needs a wake-up."""
    atomic_add(board, STEP * LINE_WORDS, 1)
    parked = 0
    for t in range(1, threads):
        if atomic_swap(board, (PARKED + t) * LINE_WORDS, 0) == 1:
            parked |= 1 << t
    return parked


@entry(types.int64)
def follow(tid, threads, step, spins, tape, n, header, board, phases):
    """A worker's loop: replay each announced step, park after `spins` idle polls; returns the last step seen."""
    while True:
        idle = 0
        while atomic_load(board, STEP * LINE_WORDS) == step:
            pause()
            idle += 1
            if idle % SPINS_BEFORE_YIELD == 0:
                give_way()
            if idle == spins:
                flag = (PARKED + tid) * LINE_WORDS
                atomic_swap(board, flag, 1)
                unchanged = atomic_load(board, STEP * LINE_WORDS) == step
                if unchanged or atomic_swap(board, flag, 0) == 0:  # parked, or a wake-up is already on its way
                    return step
        step += 1
        if atomic_load(board, STOP * LINE_WORDS) != 0:
            return -1
        walk(tid, threads, tape, n, header, board, phases)


class Team:
    """`threads` threads for one tape: the caller of run and threads - 1 workers."""

    def __init__(self, threads: int, tape: Tape, header: np.ndarray) -> None:
        self.threads = threads
        self._tape, self._header = tape, header
        self._board = aligned((PARKED + threads) * LINE_WORDS * 8).view(np.int64)
        self._phases = aligned(threads * LINE_WORDS * 8).view(np.int64)
        self._phases[::LINE_WORDS] = 1
        self._arguments = (
            tape.rows.ctypes.data,
            len(tape.instructions),
            header.ctypes.data,
            self._board.ctypes.data,
            self._phases.ctypes.data,
        )
        for function in (replay, announce, follow):
            function.compile()
        self._wake = [threading.Semaphore(0) for _ in range(threads)]
        self._workers = [
            threading.Thread(target=self._work, args=(t,), name=f"minserve-worker-{t}", daemon=True)
            for t in range(1, threads)
        ]
        for t, worker in enumerate(self._workers, 1):
            self._board[(PARKED + t) * LINE_WORDS] = 1
            worker.start()

    def _work(self, tid: int) -> None:
        step = 0
        while step >= 0:
            self._wake[tid].acquire()
            step = follow(tid, self.threads, step, SPINS_BEFORE_PARKING, *self._arguments)

    def run(self) -> None:
        """Replay the tape once; returns when every thread is done."""
        self._announce()
        replay(0, self.threads, *self._arguments)

    def _announce(self) -> None:
        parked = announce(self._board.ctypes.data, self.threads)
        for t in range(1, self.threads):
            if parked >> t & 1:
                self._wake[t].release()

    def close(self) -> None:
        """End the workers. Idempotent; not while a step runs."""
        if not self._workers:
            return
        self._board[STOP * LINE_WORDS] = 1
        self._announce()
        for worker in self._workers:
            worker.join()
        self._workers = []
