"""The KV cache's memory: where a block of each layer and head lies.

Owns the one allocation. It must not know requests: block ids come from the batch. Kernels address the keys of a head's
blocks by their distance from its first ones, and its values likewise, so ids are turned into such distances (`place`)
when a step's buffers are filled.
"""

from __future__ import annotations

import ctypes
import sys
import threading
import time
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from minserve.backend.base import BackendError, KVSpec
from minserve.backend.numba_backend.arena import PAGE, aligned
from minserve.backend.numba_backend.jit import inlined
from minserve.backend.numba_backend.layout import BLOCK, RUN, block_words
from minserve.backend.numba_backend.recorder import LayerCache
from minserve.batch import Int32

SPARE = 128 << 20  # bytes behind what is in use that the system is asked for
PAUSE = 0.02  # seconds between two looks whether a step is over
POPULATE_WRITE = 23  # MADV_POPULATE_WRITE of Linux 5.14

Ids = npt.NDArray[np.integer]


@inlined
def place(block, run, jump):  # type: ignore[no-untyped-def]
    """How many blocks of keys (or values) would fit between a head's first ones and this one's; the same for slots,
    with a run and a jump in slots. run, jump: KVMemory's."""
    return block + block // run * jump


class KVMemory:
    """layers: the cache of each. run: blocks of a head that are adjacent. jump: blocks between one run and the next.

    Pages cost memory only once they are taken, and then time: as much as a step for one of 2 MiB, where a virtual
    machine gets it from its host, and a prompt fills several. So a thread takes SPARE bytes beside the
    first step, which warms the server up, and when half of them are used, more between steps (`touch_ahead` is called
    before a step, `step_over` after it). If there is no time between, each step touches one page of the run behind the
    last one in use.
    """

    def __init__(self, kv: Sequence[KVSpec], num_blocks: int) -> None:
        heads = sum(layer.kv_heads for layer in kv)
        sizes = {block_words(layer.head_dim) for layer in kv}
        # Runs interleave heads of one size only, and places must fit int32.
        short = len(sizes) == 1 and 2 * num_blocks * heads * BLOCK < 1 << 31
        self.run = RUN if short else max(1, num_blocks)
        runs = -(-num_blocks // self.run)
        self.jump = self.run * (2 * heads - 1) if short else 0
        counts = [runs * layer.kv_heads * 2 * self.run * block_words(layer.head_dim) for layer in kv]
        try:
            words: npt.NDArray[np.uint16] = aligned(2 * sum(counts), PAGE).view(np.uint16)
        except MemoryError as error:
            raise BackendError(f"no memory for a KV cache of {num_blocks} blocks; ask for fewer") from error
        self._bytes = words.view(np.uint8)
        self._run_bytes = self._bytes.nbytes // max(1, runs) if short else 0
        self._last = -1  # the last block in use, ever
        self._touched = 0  # bytes from the start
        self._taking = False  # whether a thread asks for pages now
        self._given = sys.platform == "linux"  # whether the system gives pages that nobody writes to
        self._stepping = False
        self.layers: list[LayerCache] = []
        first, at = 0, 0
        for layer, count in zip(kv, counts, strict=True):
            if short:
                whole = words.reshape(runs, heads, 2, self.run, -1)
                self.layers.append(LayerCache(whole[:, first : first + layer.kv_heads]))
            else:
                self.layers.append(LayerCache(words[at : at + count].reshape(1, layer.kv_heads, 2, self.run, -1)))
            first, at = first + layer.kv_heads, at + count

    def touch_ahead(self, slots: Int32) -> None:
        """Before a step that writes to these slots, as they come from the batch."""
        self._stepping = True
        if slots.size:
            self._last = max(self._last, int(slots.max()) // BLOCK)
        behind = (self._last // self.run + 1) * self._run_bytes
        if self._touched < min(behind + SPARE // 2, self._bytes.nbytes):
            self._take(min(behind + SPARE, self._bytes.nbytes))
        start, end = max(self._touched, behind), min(behind + self._run_bytes, self._bytes.nbytes)
        if slots.size and start < end:
            self._touched = min(start + PAGE, end)
            self._bytes[start : self._touched : 4096] = 0  # nobody has written behind the last run

    def step_over(self) -> None:
        """After a step, until the next `touch_ahead`."""
        self._stepping = False

    def _take(self, end: int) -> None:
        """Have the system give the pages up to here, on a thread that ends by itself. It writes nothing, so steps may
        run beside it."""
        if self._given and not self._taking:
            self._taking = True
            start = self._touched // PAGE * PAGE
            threading.Thread(target=self._populate, args=(start, end), name="minserve-pages", daemon=True).start()

    def _populate(self, start: int, end: int) -> None:
        madvise = ctypes.CDLL(None).madvise
        madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        for page in range(start, end, PAGE):
            while self._stepping and start:
                time.sleep(PAUSE)
            if madvise(self._bytes.ctypes.data + page, min(PAGE, end - page), POPULATE_WRITE) != 0:
                self._given = False
                break
            self._touched = max(self._touched, min(page + PAGE, end))
        self._taking = False

    def copy(self, source: Ids, destination: Ids) -> None:
        """Whole blocks, in all layers."""
        if not destination.size:
            return
        self._last = max(self._last, int(destination.max()))
        for layer in self.layers:
            taken = layer.words[source // self.run, :, :, source % self.run]
            layer.words[destination // self.run, :, :, destination % self.run] = taken
