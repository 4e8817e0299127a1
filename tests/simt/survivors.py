"""Mutants that no check can notice, with the reason: on the emulator they change nothing that a caller could see."""

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
    "prefill_attention.cu: if (tile < last_tile) fetch(tile + 1); | at 9: < -> <=": (
        "fetches a tile that nobody reads, from valid rows"
    ),
    "decode_attention.cu: cp_async_wait<0>(); | at 0: cp_async_wait<0>(); -> ;": (
        "the loop has waited for every copy, only an empty group can be under way"
    ),
    "decode_attention.cu: template <int kDim> constexpr int kWarps = kDim <= 128 ? 4 : 2; | at 48: <= -> <": (
        "a head of 128 gets two warps: slower, the same numbers"
    ),
    "decode_attention.cu: query[k][i] = row < group ? *reinterpret_cast<const u32*>(q_rows + row * kDim + k * 16 + "
    "i / 2 * 8 + 2 * t) : 0; | at 18: < -> <=": "one row more is computed, from valid memory, and not written",
    "decode_attention.cu: if (d == 0) part_max_sum[part + head * splits + split] = make_float2(top, sum); "
    "| at 6: == -> !=": ("the other threads write the same two numbers"),
    "skinny_gemm.cu: constexpr int kBlocks = !W::kScaled ? 4 : W::kMinimum && (W::kBits == 8 || (W::kBits == 5 && "
    "kTiles == 1)) ? 2 : 0; | at 67: == -> !=": "registers are given out otherwise, the numbers stay the same",
    "skinny_gemm.cu: constexpr int kBlocks = !W::kScaled ? 4 : W::kMinimum && (W::kBits == 8 || (W::kBits == 5 && "
    "kTiles == 1)) ? 2 : 0; | at 85: == -> !=": "registers are given out otherwise, the numbers stay the same",
    "skinny_gemm.cu: constexpr int kBlocks = !W::kScaled ? 4 : W::kMinimum && (W::kBits == 8 || (W::kBits == 5 && "
    "kTiles == 1)) ? 2 : 0; | at 100: == -> !=": "registers are given out otherwise, the numbers stay the same",
    "skinny_gemm.cu: for (int base = warp; base < chunks; base += kWarps * kAhead) { | at 27: < -> <=": (
        "a round that loads nothing and breaks off"
    ),
    "skinny_gemm.cu: if (chunk < chunks && chunk * 32 * kGroups<W> + t * 8 < k) | at 10: < -> <=": (
        "the other condition keeps that chunk out as well"
    ),
    "sampling.cu: __syncthreads();                     // the level before has been read "
    "| at 0: __syncthreads(); -> ;": ("the barrier before it already orders these reads and writes"),
    "sampling.cu: __syncthreads(); | at 0: __syncthreads(); -> ; (6 of 6)": (
        "adjust's second one: a masked token is -infinity whether its bias comes before or after"
    ),
    "sampling.cu: for (int i = threadIdx.x; i < bins; i += kThreads) low[i] = high[i] = 0; | at 28: < -> <=": (
        "the word behind each array holds nothing yet"
    ),
    "sampling.cu: if (threadIdx.x == 0) tokens[s] = targets[s]; | at 16: == -> !=": (
        "the other threads write the same number"
    ),
    "seats.cuh: while ((old & kMostMade) < kMostMade && (seen = atomicCAS(count, old, u16(old + 1))) != old); "
    "| at 85: != -> ==": "a try that failed is not repeated: no try fails where block follows block",
    "sampling.cu: if (top_k > 0 && top_k < vocab) | at 23: < -> <=": "the limit that keeps all tokens keeps all",
    "sampling.cu: if (top_p < 1) | at 10: < -> <=": "the limit that keeps the whole weight drops what has none",
    "sampling.cu: if (known) x = x > 0 ? __fdiv_rn(x, repetition) : __fmul_rn(x, repetition); | at 17: > -> >=": (
        "0 stays 0 either way"
    ),
    "sampling.cuh: __syncthreads(); | at 0: __syncthreads(); -> ; (2 of 3)": (
        "of block_scan's two the first: its only caller waits between two calls anyway"
    ),
    "sampling.cuh: for (int step = 1; step < 32; step *= 2) { | at 24: < -> <=": "a round more, in which no lane adds",
    "logprobs.cu: if (threadIdx.x == 0) token_logprobs[s] = logprob(logits[token]); | at 16: == -> !=": (
        "the other threads write the same number"
    ),
    "logprobs.cu: if (threadIdx.x == 0) { | at 16: == -> !=": "the other threads write the same numbers",
}
