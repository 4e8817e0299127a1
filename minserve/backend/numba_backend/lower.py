"""From recorded values to kernel calls: which kernel computes what, and what is fused into its neighbour.

The fusion rules are nothing but use counts: a value with one user is computed by that user where a kernel can. This
module and the three it dispatches to must not know where buffers lie or how threads meet (tape.py). Fused are
    norm, or the merge of attention's partial results, into the rounding of a linear layer's input
    bias, residual and gate into the linear layer
    post-norms into the addition of the residual
    take into the norm that follows it
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from minserve.backend.base import StepLimits
from minserve.backend.numba_backend import lower_attention, lower_linear, lower_rows, sampling
from minserve.backend.numba_backend.emitter import Emitter
from minserve.backend.numba_backend.instruction import SCRATCH_WORDS, Access, by_rows
from minserve.backend.numba_backend.layout import width
from minserve.backend.numba_backend.recorder import Value

RULES = {  # by the operations of recorder.py
    "embed": lower_rows.embed,
    "take": lower_rows.take,
    "norm": lower_rows.norm,
    "add": lower_rows.add,
    "linear": lower_linear.linear,
    "glu": lower_linear.glu,
    "rope": lower_attention.rope,
    "attention": lower_attention.attention,
}


def lower(values: Sequence[Value], limits: StepLimits, batch: npt.NDArray[np.int64], accurate: bool) -> Emitter:
    """Instructions, in order, for a list of recorded values, of which the last one is the result."""
    emitter = Emitter(values[-1], limits, batch, accurate)
    emitter.need_scratch(max(width(v.cols) for v in values) * 4)
    for value in values:
        RULES[value.op](emitter, value)
    return emitter


def lower_sampling(e: Emitter, vocab: int, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
    """Draw a token from each row of the result. arrays: the fields of sample_rows that the host fills."""
    padded = width(vocab)
    e.need_scratch(sampling.scratch_bytes(padded))
    words: dict[str, Any] = {"logits": e.out, "vocab": vocab, "padded": padded, **arrays, **SCRATCH_WORDS}
    pattern = by_rows(e.result.rows)
    access = Access(e.out, pattern), Access(e.out, pattern, write=True)
    e.emit(sampling.sample_rows, e.result.rows, words, *access)
