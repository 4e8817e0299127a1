"""Mutants that no check can notice, with the reason: they change nothing that a caller could see."""

_SKIP = (
    "prefill_attention.cu: if (first_row + warp_row > last_row || begin > warp_last || "
    "end <= warp_first - window + 1) continue;"
)
_EDGES = "decode_attention.cu: scale, softcap, token0 < first_key || token0 + kKeys > end,"

SURVIVORS: dict[str, str] = {
    f"{_SKIP} | at 64: <= -> <": "a tile that could be skipped is computed, and masked",
    f"{_EDGES} | at 23: < -> <=": "a tile that needs no mask is masked",
    f"{_EDGES} | at 53: > -> >=": "a tile that needs no mask is masked",
    "prefill_attention.cu: scale, softcap, end > warp_first + 1 || begin <= warp_last - window, "
    "[&](int m, int h, int key) { | at 20: > -> >=": "a tile that needs no mask is masked",
    "prefill_attention.cu: if (first_row >= rows || count == 1) return;         // the same for the whole block"
    " | at 14: >= -> >": "a block without rows works on the last row's copies and writes none of them",
    "decode_attention.cu: if (token0 < end) | at 11: < -> <=": "fetches a tile that nobody reads, from valid rows",
}
