// sampling.cu — from logits to tokens: top-k, top-p, min-p and the draw, one block per row, no sort.
//
// The specification is minserve/backend/sampling.py; the step numbers below are its.
// Two ideas.  Weights exp((logit - max) / temperature) become fixed-point integers:
// sums do not depend on the order of the additions, so the same uniform number always
// gives the same token.  And the k-th largest is found by radix select: a histogram
// over the leading bits says in which bin it lies, the next bits are looked at in
// that bin only.  Top-p is the same with weights in place of counts.
//
// Bytes: a row of V floats is read once for the maximum, once for the draw and three
// times each for top-k and top-p, out of the L2 cache; steps that are off cost nothing.
#include "sampling.cuh"
#include "seats.cuh"

// Distance from the best logit over the temperature, >= 0.  Its bits sort like it, best first.
struct Distance {
  float top, temperature;
  __device__ __forceinline__ u32 operator()(float logit) const {
    return __float_as_uint(__fdiv_rn(top - logit, temperature)) & 0x7fffffffu;
  }
};

// exp(-distance) in units of 2^-31.
__device__ __forceinline__ u32 weight(u32 distance) { return (u32)(expf(-__uint_as_float(distance)) * 2147483648.0f); }

constexpr int kBins = 4096;              // of 12 bits, then 10, then 9: 31 bits of a distance

// The smallest limit such that the measures of all distances <= limit sum to enough(their total).
// Distances > ceiling don't count.  A bin's sum takes two words: there is no fast 64-bit atomic on shared memory.
template <int kThreads, typename Measure, typename Enough>
__device__ u32 select(u32* low, u32* high, const float* logits, int vocab, Distance distance, u32 ceiling,
                      Measure measure, Enough enough) {
  __shared__ u64 remaining;
  __shared__ u32 found;
  u32 prefix = 0;
  for (int level = 0; level < 3; ++level) {
    const int bits = 12 - level - (level > 0), shift = level == 0 ? 19 : level == 1 ? 9 : 0, bins = 1 << bits;
    __syncthreads();                     // the level before has been read
    for (int i = threadIdx.x; i < bins; i += kThreads) low[i] = high[i] = 0;
    __syncthreads();
    for (int i = threadIdx.x; i < vocab; i += kThreads) {
      const u32 key = distance(logits[i]);
      if (key > ceiling || key >> (shift + bits) != prefix) continue;
      const u32 bin = key >> shift & (bins - 1), amount = measure(key), old = atomicAdd(&low[bin], amount);
      if (old + amount < old) atomicAdd(&high[bin], 1u);
    }
    __syncthreads();
    // Each thread adds up its bins; the one in whose share the sum is reached looks closer.
    constexpr int kShare = kBins / kThreads;
    const int share = level == 0 ? kShare : 1, first = threadIdx.x * share;
    u64 own = 0, total;
    for (int i = first; i < min(first + share, bins); ++i) own += (u64)high[i] << 32 | low[i];
    u64 before = block_scan<kThreads / 32>(own, total);
    const u64 wanted = level == 0 ? enough(total) : remaining;
    __syncthreads();                     // all have read `remaining`
    if (before < wanted && wanted <= before + own)
      for (int i = first;; ++i) {
        const u64 bin = (u64)high[i] << 32 | low[i];
        if (wanted <= before + bin) {
          found = i, remaining = wanted - before;
          break;
        }
        before += bin;
      }
    __syncthreads();
    prefix = prefix << bits | found;
  }
  return prefix;
}

template <int kThreads>
__global__ void __launch_bounds__(kThreads, 1)       // one block an SM: without a number ptxas may spill to fit two
sample(int* __restrict__ tokens,                        // [S]
       const float* __restrict__ raw,                   // [S][V]
       const float* __restrict__ adjusted, const int* __restrict__ is_adjusted,  // see adjust()
       u16* __restrict__ counts,                        // [seats][V], see seats.cuh
       const float* __restrict__ temperatures, const int* __restrict__ top_ks, const float* __restrict__ top_ps,
       const float* __restrict__ min_ps, const float* __restrict__ uniforms, const int* __restrict__ targets,
       const int* __restrict__ seats, int vocab, int first_row) {
  constexpr int kWarps = kThreads / 32;
  __shared__ u32 low[kBins];                            // for select(): once, not once for each of its instances
  __shared__ u32 high[kBins];
  __shared__ u64 segments[kWarps];                      // kept weight of each warp's part of the row
  const int s = first_row + blockIdx.x, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const float* logits = is_adjusted[s] ? adjusted + (long long)blockIdx.x * vocab : raw + (long long)s * vocab;
  if (targets[s] >= 0) {                                // only scored
    if (threadIdx.x == 0) tokens[s] = targets[s];
    return;
  }
  auto accept = [&](int token) {
    tokens[s] = token;
    if (seats[s] >= 0) count_token(counts + (long long)seats[s] * vocab + token);
  };

  // Steps 3 and 4: the largest logit, the lowest id among equals; none if it isn't finite.
  u64 best = 0;
  for (int i = threadIdx.x; i < vocab; i += kThreads) {
    const u64 other = candidate(ordered(logits[i]), i);
    best = max(best, other);
  }
  best = block_max<kWarps>(best);
  const u32 top_key = best >> 32;
  if (!is_finite(top_key) || temperatures[s] <= 0) {
    if (threadIdx.x == 0) {
      if (is_finite(top_key)) accept(~(u32)best);
      else tokens[s] = -1;
    }
    return;
  }

  // Steps 5 to 7: a limit on the distance from the best.
  const Distance distance{from_ordered(top_key), temperatures[s]};
  const int top_k = top_ks[s];
  const float top_p = top_ps[s], min_p = min_ps[s];
  u32 limit = 0x7fffffffu;
  if (top_k > 0 && top_k < vocab)
    limit = select<kThreads>(low, high, logits, vocab, distance, limit, [](u32) { return 1u; },
                             [=](u64) { return (u64)top_k; });
  if (top_p < 1)
    limit = select<kThreads>(low, high, logits, vocab, distance, limit, [](u32 key) { return weight(key); },
                             [=](u64 total) { return max((u64)ceil((double)top_p * total), (u64)1); });
  auto kept = [=](float logit) {
    const u32 key = distance(logit);
    return key <= limit && expf(-__uint_as_float(key)) >= min_p ? weight(key) : 0;
  };

  // Step 8: each warp weighs a contiguous part of the row; one of them then finds the token in its part.
  const int length = (vocab + kWarps - 1) / kWarps, begin = warp * length, end = min(vocab, begin + length);
  u64 mine = 0;
  for (int i = begin + lane; i < end; i += 32) mine += kept(logits[i]);
  const u64 segment = warp_scan(mine);
  if (lane == 31) segments[warp] = segment;
  __syncthreads();
  u64 before = 0, total = 0;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) {
    if (w < warp) before += segments[w];
    total += segments[w];
  }
  const u64 wanted = (u64)((double)uniforms[s] * total);
  if (wanted < before || wanted >= before + segments[warp]) return;
  for (int tile = begin;; tile += 32) {
    const int i = tile + lane;
    const u64 own = i < end ? kept(logits[i]) : 0, through = before + warp_scan(own);
    if (through - own <= wanted && wanted < through) accept(i);
    before = __shfl_sync(kAllLanes, through, 31);
    if (wanted < before) return;
  }
}

// Steps 1 to 3 for the rows that have any of them: into `adjusted`, since log probabilities need the raw row.
// Row first_row + i goes to row i of `adjusted`, which holds a few rows only.
template <int kThreads>
__global__ void __launch_bounds__(kThreads)
adjust(float* __restrict__ adjusted, const float* __restrict__ raw, const int* __restrict__ is_adjusted,
       const u16* __restrict__ counts, const float* __restrict__ penalties,      // [S][3] presence, frequency, repetition
       const int* __restrict__ seats, const int* __restrict__ bias_starts, const int* __restrict__ bias_ids,
       const float* __restrict__ bias_values, const u32* __restrict__ masks,     // [S][ceil(V / 32)] or null
       int vocab, int first_row) {
  const int s = first_row + blockIdx.x;
  if (!is_adjusted[s]) return;
  const float presence = penalties[3 * s], frequency = penalties[3 * s + 1], repetition = penalties[3 * s + 2];
  const u16* count = seats[s] >= 0 ? counts + (long long)seats[s] * vocab : nullptr;
  const u32* mask = masks ? masks + (long long)s * ((vocab + 31) / 32) : nullptr;
  const float* source = raw + (long long)s * vocab;
  float* target = adjusted + (long long)blockIdx.x * vocab;
  for (int i = threadIdx.x; i < vocab; i += kThreads) {
    float x = source[i];
    const int known = count ? count[i] : 0, made = known & kMostMade;
    // One rounding per operation, as the specification has it: no fused multiply-add.
    if (known) x = x > 0 ? __fdiv_rn(x, repetition) : __fmul_rn(x, repetition);
    if (made) x = __fsub_rn(__fsub_rn(x, __fmul_rn(frequency, made)), presence);
    target[i] = x;
  }
  __syncthreads();
  for (int i = bias_starts[s] + threadIdx.x; i < bias_starts[s + 1]; i += kThreads)
    atomicAdd(&target[bias_ids[i]], bias_values[i]);
  __syncthreads();
  if (mask)
    for (int i = threadIdx.x; i < vocab; i += kThreads)
      if (!(mask[i / 32] >> i % 32 & 1)) target[i] = -INFINITY;
}
