// logprobs.cu — log probabilities of the drawn token and of the k best, for the rows that want them.
//
// log softmax of the raw row, clamped to -9999 (step 0 of minserve/backend/sampling.py).
// One block per row: V floats are read twice, and once more for each of the k best; k is
// at most a few dozen and few rows want any, so simple wins over fast.
#include "sampling.cuh"

template <int kThreads>
__global__ void __launch_bounds__(kThreads)
logprobs(float* __restrict__ token_logprobs,            // [S]
         int* __restrict__ best_ids, float* __restrict__ best_logprobs,          // [S][k_max]
         const float* __restrict__ raw, const int* __restrict__ tokens, const int* __restrict__ targets,
         const int* __restrict__ wanted,                // [S] how many of the best, -1 none and no log probability
         int vocab, int k_max) {
  constexpr int kWarps = kThreads / 32;
  constexpr float kLowest = -9999;
  const int s = blockIdx.x, token = tokens[s];
  if (token < 0 || (wanted[s] < 0 && targets[s] < 0)) return;
  const float* logits = raw + (long long)s * vocab;

  u64 best = 0;
  for (int i = threadIdx.x; i < vocab; i += kThreads) {
    const u64 other = candidate(ordered(logits[i]), i);
    best = max(best, other);
  }
  const u32 top_key = block_max<kWarps>(best) >> 32;
  const bool sane = is_finite(top_key);                 // a row without a finite maximum has no softmax
  const float top = from_ordered(top_key);
  float sum = 0;
  for (int i = threadIdx.x; i < vocab; i += kThreads) sum += sane ? expf(logits[i] - top) : 0;
  const float log_sum = logf(block_sum<kWarps>(sum));
  auto logprob = [=](float x) { return sane ? fmaxf(x - top - log_sum, kLowest) : kLowest; };
  if (threadIdx.x == 0) token_logprobs[s] = logprob(logits[token]);

  // The best, then the best below that one, and so on.  All clamped ones count as equal.
  u64 previous = ~0ull;
  for (int rank = 0; rank < min(wanted[s], vocab); ++rank) {
    best = 0;
    for (int i = threadIdx.x; i < vocab; i += kThreads) {
      const bool clamped = logprob(logits[i]) == kLowest;
      const u64 other = candidate(clamped ? 0 : ordered(logits[i]), i);
      best = other < previous ? max(best, other) : best;
    }
    previous = best = block_max<kWarps>(best);
    if (threadIdx.x == 0) {
      const int id = ~(u32)best;
      best_ids[(long long)s * k_max + rank] = id;
      best_logprobs[(long long)s * k_max + rank] = logprob(logits[id]);
    }
  }
}
