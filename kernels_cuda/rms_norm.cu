// rms_norm.cu — the residual stream takes in a branch and is normalised for the next one.
//
//   x   = residual + branch                          (kAdd)
//   x   = residual + rms_norm(branch) * post_weight  (kPost: norms after a branch, as in Gemma)
//   out = x / sqrt(mean(x^2) + eps) * weight         (Zhang, Sennrich 2019)
//
// The residual stream is float: it is a sum over all layers, and its rounding would
// otherwise be the largest error of the whole model.  Branches and `out` are T.
//
// Bytes that must move per row: residual read and written (8 * cols), branch read and
// out written (4 * cols).  So: one block per row, and the row stays on the chip
// between the sum of squares and the scaling.
//
// With `rows`, block i works on row rows[i] (the rows to be sampled, at the end of a
// step) and the residual isn't written back: nobody reads it any more.
#include "common.cuh"

template <typename T, typename X, int kThreads, bool kAdd, bool kPost>
__global__ void __launch_bounds__(kThreads)
rms_norm(T* __restrict__ out, X* __restrict__ residual, const T* __restrict__ branch,
         const float* __restrict__ post_weight, const float* __restrict__ weight, const int* __restrict__ rows, int cols,
         float eps, float post_eps) {
  extern __shared__ float line[];        // cols floats; a thread reads back only what it wrote
  constexpr int kWarps = kThreads / 32;
  const long long start = (long long)(rows ? rows[blockIdx.x] : blockIdx.x) * cols;

  float branch_scale = 1;
  if (kPost) {
    float squares = 0;
    for (int i = threadIdx.x * 8; i < cols; i += kThreads * 8) {
      float b[8];
      load8(b, branch + start + i);
#pragma unroll
      for (int j = 0; j < 8; ++j) line[i + j] = b[j], squares += b[j] * b[j];
    }
    branch_scale = rsqrtf(block_sum<kWarps>(squares) / cols + post_eps);
  }

  float squares = 0;
  for (int i = threadIdx.x * 8; i < cols; i += kThreads * 8) {
    float x[8], b[8];
    load8(x, residual + start + i);
    if (kAdd && !kPost) load8(b, branch + start + i);
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      if (kPost) x[j] += line[i + j] * branch_scale * post_weight[i + j];
      else if (kAdd) x[j] += b[j];
      line[i + j] = x[j];
      squares += x[j] * x[j];
    }
    if ((kAdd || kPost) && !rows) store8(residual + start + i, x);
  }
  const float scale = rsqrtf(block_sum<kWarps>(squares) / cols + eps);

  for (int i = threadIdx.x * 8; i < cols; i += kThreads * 8) {
    float y[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) y[j] = line[i + j] * scale * weight[i + j];
    store8(out + (long long)blockIdx.x * cols + i, y);
  }
}
