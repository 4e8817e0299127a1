// rope_kv.cu — between the projection and attention: bias, per-head norms, rotation, and k and v into the cache.
//
// qkv is [T][H heads of q | KV of k | KV of v][kDim].  Queries are changed in place;
// keys and values go to the paged cache, [blocks][KV][2: k, v][kBlockSize][kDim]: the
// rows of one head lie together, so that attention reads whole pages.  slot = block *
// kBlockSize + offset says where a token goes; a negative slot marks padding.
//
// The rotation pairs dimension i with i + half for the first 2 * half dimensions (Su et
// al. 2021, NeoX order); the rest passes.  cos and sin are tables [positions][half].
// bias [all columns], q_norm and k_norm [kDim] (RMSNorm weights, for each head) may be
// null.
//
// Bytes that must move: qkv once in and out.  At decode that is a few kilobytes, so
// this is about latency: a warp per head, no barrier but the warp's own.  Tokens are
// counted along x, since a grid has at most 65,535 blocks along y.
#include "common.cuh"

template <typename T, int kDim, int kBlockSize>
__global__ void __launch_bounds__(128)
rope_kv(T* __restrict__ qkv, T* __restrict__ cache, const float* __restrict__ bias,
        const float* __restrict__ q_norm, const float* __restrict__ k_norm, const float* __restrict__ cosines,
        const float* __restrict__ sines, const int* __restrict__ positions, const int* __restrict__ slots, int q_heads,
        int kv_heads, int half_dims, float eps) {
  constexpr int kWarps = 4;
  __shared__ float rows[kWarps][kDim];
  const int token = blockIdx.x, head = blockIdx.y * kWarps + threadIdx.x / 32, lane = threadIdx.x % 32;
  const int heads = q_heads + 2 * kv_heads, slot = slots[token];
  if (slot < 0 || head >= heads) return;                          // the same for the whole warp
  float* x = rows[threadIdx.x / 32];
  T* source = qkv + ((long long)token * heads + head) * kDim;
  const bool is_query = head < q_heads, is_value = head >= q_heads + kv_heads;

  float squares = 0;
  for (int d = lane; d < kDim; d += 32) {
    x[d] = to_float(source[d]) + (bias ? bias[head * kDim + d] : 0.0f);
    squares += x[d] * x[d];
  }
  const float* norm = is_query ? q_norm : is_value ? nullptr : k_norm;
  if (norm) {
    const float scale = rsqrtf(warp_sum(squares) / kDim + eps);
    for (int d = lane; d < kDim; d += 32) x[d] *= scale * norm[d];
  }
  __syncwarp();                                                   // below, lanes read what others wrote

  T* target = source;
  if (!is_query) {
    const int kv_head = is_value ? head - q_heads - kv_heads : head - q_heads;
    const long long plane = ((long long)(slot / kBlockSize) * kv_heads + kv_head) * 2 + is_value;
    target = cache + (plane * kBlockSize + slot % kBlockSize) * kDim;
  }
  const float* c = cosines + (long long)positions[token] * half_dims;
  const float* s = sines + (long long)positions[token] * half_dims;
  for (int d = lane; d < kDim; d += 32) {
    float y = x[d];
    if (!is_value && d < half_dims) y = x[d] * c[d] - x[d + half_dims] * s[d];
    else if (!is_value && d < 2 * half_dims) y = x[d] * c[d - half_dims] + x[d - half_dims] * s[d - half_dims];
    target[d] = from_float<T>(y);
  }
}
