"""Checks of attention: decode and prefill, apart and in one step, over contexts, groups, windows and page sizes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from minserve.backend.base import Heads
from minserve.backend.cuda_backend.attention import Attention, Scratch
from tests.simt import reference
from tests.simt.kit import Check, Kit, normal, step_of

NEVER = 1 << 20  # a block id that must not be read


@dataclass(frozen=True)
class Case:
    """counts: new tokens of each request. contexts: its tokens in the cache, those included; 0 = padding."""

    heads: Heads
    counts: Sequence[int]
    contexts: Sequence[int]
    block_size: int = 16
    sms: int = 4
    max_model_len: int = 512
    size: float = 1.0  # of keys and values; queries are smaller by as much
    steps: int = 1  # the same one again, as a graph replays it


def attention(kit: Kit, case: Case) -> None:
    h, tokens = case.heads, sum(case.counts)
    m = kit.machine(sms=case.sms, block_size=case.block_size, max_model_len=case.max_model_len)
    needed = [-(-context // case.block_size) for context in case.contexts]
    ids = np.random.default_rng(1).permutation(sum(needed) + 1).astype(np.int32)
    ends = np.cumsum(needed)
    # What no request owns is NaN, so that a key read from there would show.
    pages = np.full((len(ids), h.kv, 2, case.block_size, h.dim), np.nan, np.float32)
    for end, count, context in zip(ends, needed, case.contexts, strict=True):
        values = case.size * normal(context, context, h.kv, 2, h.dim)
        for token in range(context):
            pages[ids[end - count + token // case.block_size], :, :, token % case.block_size] = values[token]
    cache, qkv = kit.array(pages), kit.buffer(normal(2, tokens, h.cols) / case.size)
    out = kit.result(tokens, h.q * h.dim)
    inputs = {
        "block_tables": kit.ints(np.append(ids[: ends[-1]], NEVER)),
        "table_starts": kit.ints(ends - needed),
        "context_lens": kit.ints(case.contexts),
        "query_starts": kit.ints(np.cumsum([0, *case.counts])),
    }
    instruction = Attention(m, out, qkv, h, cache, Scratch.make(m, [h], len(case.counts)))
    for _ in range(case.steps):
        out.array.fill(np.nan if kit.compute == "half" else 0x7FC0)
        kit.run(m, instruction, step_of(tokens, inputs=inputs, counts=case.counts))

    q, held = kit.host(qkv.array)[:, : h.q * h.dim].reshape(tokens, h.q, h.dim), kit.host(cache)
    want, start = np.zeros((tokens, h.q * h.dim)), 0
    for end, blocks, count, context in zip(ends, needed, case.counts, case.contexts, strict=True):
        if context:
            k, v = reference.gather(held, ids[end - blocks : end], context)
            result = reference.attention(q[start : start + count], k, v, h.scale, h.window, h.softcap)
            want[start : start + count] = result.reshape(count, -1)
        start += count
    kit.compare(out.array, want)


def heads(q: int, kv: int, dim: int, window: int | None = None, softcap: float | None = None) -> Heads:
    return Heads(q, kv, dim, 2 * dim**-0.5, window, softcap)  # sharper than usual, so that a wrong key shows


SHARP = Heads(4, 2, 64, 5.0)  # scores of hundreds: exp2 of one that isn't the maximum's distance overflows
DECODE = {
    "D=64, four to one": Case(heads(8, 2, 64), [1] * 4, [300, 1, 64, 17]),
    "D=80, alone": Case(heads(1, 1, 80), [1], [65], sms=1),
    "D=96, no groups": Case(heads(3, 3, 96), [1] * 2, [16, 33]),
    "D=128, eight to one": Case(heads(16, 2, 128), [1] * 2, [129, 128]),
    "D=256, sixteen to one": Case(heads(16, 1, 256), [1] * 2, [31, 97]),
    "D=16, seven to one": Case(heads(7, 1, 16), [1] * 3, [15, 48, 500]),
    **{f"D=16, {g} to one": Case(heads(2 * g, 2, 16), [1] * 2, [37, 6]) for g in (3, 5, 6, *range(9, 16))},
    "padding": Case(heads(4, 2, 64), [1] * 4, [5, 0, 70, 0]),
    "padding, one split": Case(heads(4, 2, 64), [1] * 4, [5, 0, 70, 0], sms=1),
    "many splits": Case(heads(2, 1, 64), [1], [509], sms=40),
    "splits, step after step": Case(heads(4, 2, 64), [1] * 3, [300, 20, 130], steps=3),
    "more splits than tokens": Case(heads(2, 1, 64), [1], [3], sms=40),
    "small blocks": Case(heads(4, 2, 32), [1] * 2, [37, 130], block_size=8),
    "odd blocks": Case(heads(4, 2, 32), [1] * 2, [37, 130], block_size=5),
    "large blocks": Case(heads(4, 2, 32), [1] * 2, [37, 130], block_size=64),
    "window": Case(heads(4, 2, 64, window=40), [1] * 4, [300, 39, 40, 41]),
    "window of one": Case(heads(4, 2, 64, window=1), [1] * 2, [33, 1]),
    "softcap": Case(heads(4, 1, 64, softcap=3.0), [1] * 2, [100, 7]),
    "window and softcap, D=80, six to one": Case(heads(6, 1, 80, window=33, softcap=2.0), [1] * 2, [100, 7]),
    "window and softcap, D=96, twelve to one": Case(heads(12, 1, 96, window=33, softcap=2.0), [1] * 2, [100, 7], sms=1),
    "window and softcap, D=256": Case(heads(4, 1, 256, window=33, softcap=2.0), [1] * 2, [100, 7]),
    "large scores": Case(SHARP, [1] * 2, [300, 77], sms=1),
    "large scores, splits": Case(SHARP, [1] * 2, [300, 77]),
    "enormous scores, splits": Case(Heads(16, 1, 64, 500.0), [1], [300]),  # no head's maximum will do for another
    "large keys": Case(heads(4, 2, 64), [1], [300], sms=1, size=32.0),  # seen as a float, two of them are enormous
}
PREFILL = {
    "whole prompts, D=64": Case(heads(8, 2, 64), [70, 2, 33], [70, 2, 33]),
    "chunks on a prefix, D=128": Case(heads(8, 2, 128), [40, 3], [200, 35]),
    "D=80, one to one": Case(heads(2, 2, 80), [150], [150]),
    "D=96, three to one": Case(heads(3, 1, 96), [50], [129]),
    "D=256, four to one": Case(heads(4, 1, 256), [20, 5], [20, 69]),
    "D=16, sixteen to one": Case(heads(16, 1, 16), [9, 16], [9, 48]),
    "D=32, five to one": Case(heads(10, 2, 32), [31], [64]),
    "small blocks": Case(heads(4, 2, 32), [37], [130], block_size=8),
    "odd blocks": Case(heads(4, 2, 32), [37], [130], block_size=5),
    "large blocks": Case(heads(4, 2, 32), [37], [130], block_size=64),
    "window": Case(heads(4, 2, 64, window=40), [150, 30], [150, 90]),
    "window that ends a tile before a last row": Case(heads(4, 2, 64, window=31), [150], [150]),
    "window that begins with a tile for a warp's last row": Case(heads(1, 1, 64, window=63), [32], [96]),
    "a warp with one row": Case(heads(1, 1, 64), [33], [33]),
    "large scores": Case(SHARP, [40], [90]),
    "window of one": Case(heads(2, 2, 64, window=1), [70], [70]),
    "softcap": Case(heads(4, 2, 64, softcap=3.0), [70], [70]),
    "D=16, eleven to one": Case(heads(22, 2, 16), [13], [40]),
    "window and softcap, D=80, six to one": Case(heads(6, 1, 80, window=33, softcap=2.0), [30], [75]),
    "window and softcap, D=96, twelve to one": Case(heads(12, 1, 96, window=33, softcap=2.0), [20], [75]),
    "window and softcap, D=256": Case(heads(4, 1, 256, window=33, softcap=2.0), [40], [75]),
    "beside decodes": Case(heads(4, 2, 64), [1, 40, 1, 2, 1], [90, 40, 1, 70, 17]),
    "beside decodes, one split": Case(heads(4, 2, 64), [1, 40, 1, 2, 1], [90, 40, 1, 70, 17], sms=1),
}
CHECKS: dict[str, Check] = {
    **{f"decode attention: {name}": partial(attention, case=case) for name, case in DECODE.items()},
    **{f"prefill attention: {name}": partial(attention, case=case) for name, case in PREFILL.items()},
}
