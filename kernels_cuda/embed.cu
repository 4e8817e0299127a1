// embed.cu — rows picked by an index: token embeddings at the start of a step, the rows to be sampled at its end.
//
//   embed:  out[i] = table[ids[i]] * scale      table [V][cols] in any weight format
//   take:   out[i] = x[rows[i]]                 x [T][cols]
//
// Bytes that must move: a row read, a row written.  At decode that is nothing, so
// the time is that of a launch; one block per row.
#include "weights.cuh"

template <typename T, typename W>
__global__ void embed(float* __restrict__ out, const u8* __restrict__ data, const half* __restrict__ scales,
                      const half* __restrict__ minima, const int* __restrict__ ids, int cols, float scale) {
  const Matrix<W> table{data, scales, minima, cols};
  const int id = ids[blockIdx.x];
  for (int unit = threadIdx.x; unit < cols / 8; unit += blockDim.x) {
    float x[8];
    load_unit<W, T>(x, table, id, unit);
#pragma unroll
    for (int j = 0; j < 8; ++j) x[j] *= scale;
    store_unit<W>(out + (long long)blockIdx.x * cols, unit, x);
  }
}

template <typename X>
__global__ void take(X* __restrict__ out, const X* __restrict__ x, const int* __restrict__ rows, int cols) {
  const X* row = x + (long long)rows[blockIdx.x] * cols;
  for (int i = threadIdx.x * 8; i < cols; i += blockDim.x * 8) {
    float v[8];
    load8(v, row + i);
    store8(out + (long long)blockIdx.x * cols + i, v);
  }
}
