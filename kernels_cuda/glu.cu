// glu.cu — out = activation(gate) * up for x = [gate | up] in each row.
//
// Bytes that must move: 2 * width numbers read and width written per row.  Both
// activations are x * sigmoid(z): SiLU with z = x (Elfwing et al. 2017), GELU in its
// tanh form with z = 2 * sqrt(2 / pi) * (x + 0.044715 x^3) (Hendrycks, Gimpel 2016).
#include "activation.cuh"

template <typename T, bool kGelu>
__global__ void glu(T* __restrict__ out, const T* __restrict__ x, int rows, int width) {
  const long long i = ((long long)blockIdx.x * blockDim.x + threadIdx.x) * 8;
  if (i >= (long long)rows * width) return;
  const long long row = i / width, column = i % width;
  float gate[8], up[8];
  load8(gate, x + row * 2 * width + column);
  load8(up, x + row * 2 * width + width + column);
#pragma unroll
  for (int j = 0; j < 8; ++j) gate[j] = activate<kGelu>(gate[j]) * up[j];
  store8(out + i, gate);
}
