// add.cu — elementwise work that no other kernel could absorb.
//
//   add:       out = a + b          (the residual stream is float, a branch T)
//   add_bias:  x[row] += bias       in place, for linear layers that have one
//   cast:      out = x as T         for a linear layer right on the residual stream
//
// Bytes that must move: what is read and written, once.  Every thread takes 8
// numbers, 16 bytes an access.
#include "common.cuh"

template <typename A, typename T>
__global__ void add(float* __restrict__ out, const A* __restrict__ a, const T* __restrict__ b, long long n) {
  const long long i = ((long long)blockIdx.x * blockDim.x + threadIdx.x) * 8;
  if (i >= n) return;
  float x[8], y[8];
  load8(x, a + i);
  load8(y, b + i);
#pragma unroll
  for (int j = 0; j < 8; ++j) x[j] += y[j];
  store8(out + i, x);
}

template <typename T>
__global__ void add_bias(T* __restrict__ x, const float* __restrict__ bias, int cols, long long n) {
  const long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) x[i] = from_float<T>(to_float(x[i]) + bias[i % cols]);
}

template <typename T>
__global__ void cast(T* __restrict__ out, const float* __restrict__ x, long long n) {
  const long long i = ((long long)blockIdx.x * blockDim.x + threadIdx.x) * 8;
  if (i >= n) return;
  float v[8];
  load8(v, x + i);
  store8(out + i, v);
}
