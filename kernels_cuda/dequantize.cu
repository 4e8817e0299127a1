// dequantize.cu — some rows of a quantized matrix as T, for products with many rows of x (cuBLAS).
//
// Bytes that must move: the packed rows once, 2 bytes a weight out.  The caller works
// in slabs of a few megabytes, so that cuBLAS still finds them in the L2 cache.
#include "weights.cuh"

template <typename T, typename W>
__global__ void dequantize(T* __restrict__ out, const u8* __restrict__ data, const half* __restrict__ scales,
                           const half* __restrict__ minima, int first_row, int rows, int k) {
  const Matrix<W> weight{data, scales, minima, k};
  const long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
  const int units = k / 8, unit = i % units;
  const long long row = i / units;
  if (row >= rows) return;
  float w[8];
  load_unit<W, T>(w, weight, first_row + row, unit);
  store_unit<W>(out + row * k, unit, w);
}
