"""Every instantiation of every kernel that a supported model can ask for, and those that only tests use.

The compile report covers the first kind; the emulator compiles both kinds of a file at once, since most of g++'s time
goes into what they share. test_engine.py checks that programs ask for nothing else.
"""

from __future__ import annotations

from itertools import product

from minserve.backend.cuda_backend.weights import LAYOUTS

TYPES = ("half", "bf16")
DIMS = (64, 80, 96, 128, 256)
FORMATS = ("Dense", *LAYOUTS)
FLAGS = ("false", "true")


def _attention(dims: tuple[int, ...], block_size: int, types: tuple[str, ...] = TYPES) -> dict[str, list[str]]:
    """rope_kv, decode and prefill attention for these head sizes."""
    pages = [f"<{t},{d},{block_size}" for t, d in product(types, dims)]
    softcaps = [f"{page},{softcap}>" for page, softcap in product(pages, FLAGS)]
    return {
        "rope_kv": [f"rope_kv{page}>" for page in pages],
        "decode_attention": [f"decode_attention{parameters}" for parameters in softcaps],
        "prefill_attention": [f"prefill_attention{parameters}" for parameters in softcaps],
    }


def _skinny() -> list[str]:
    names = []
    for t, w in product(TYPES, FORMATS):
        for tiles in (1,) if w == "Dense" else (1, 2):
            names += [f"skinny_gemm<{t},{t},{w},{tiles},{glu}>" for glu in ("kNone", "kSilu", "kGelu")]
            names += [f"skinny_gemm<{t},float,{w},{tiles},kNone>"]
    return names


INSTANCES: dict[str, list[str]] = {
    "embed": [f"embed<{t},{w}>" for t, w in product(TYPES, FORMATS)] + [f"take<{t}>" for t in ("float", *TYPES)],
    "rms_norm": [
        f"rms_norm<{t},{x},256,{flags}>"
        for t in TYPES
        for x, flags in (("float", "false,false"), (t, "false,false"), ("float", "true,false"), ("float", "true,true"))
    ],
    **_attention(DIMS, 16),
    "glu": [f"glu<{t},{gelu}>" for t, gelu in product(TYPES, FLAGS)],
    "add": [f"add<{a},{t}>" for t in TYPES for a in ("float", t)]
    + [f"add_bias<{t}>" for t in ("float", *TYPES)]
    + [f"cast<{t}>" for t in TYPES],
    "skinny_gemm": _skinny(),
    "dequantize": [f"dequantize<{t},{w}>" for t, w in product(TYPES, FORMATS[1:])],
    "repack": [f"repack<{e},{format}>" for format, layout in LAYOUTS.items() for e in sorted(layout.holds)],
    "sampling": ["sample<1024>", "adjust<1024>"],
    "logprobs": ["logprobs<1024>"],
    "seats": ["reset_seat"],
    "copy_blocks": ["copy_blocks"],
}


def _test_only() -> dict[str, list[str]]:
    """Small heads keep models tiny; other block sizes show that nothing is tied to 16."""
    out: dict[str, list[str]] = {}
    for dims, block_size in (((16, 32), 16), ((16, 32), 8), ((32,), 5), ((32,), 64), ((80,), 32)):
        for file, names in _attention(dims, block_size).items():
            out.setdefault(file, []).extend(name for name in names if name not in out[file])
    return out


TEST_ONLY = _test_only()
