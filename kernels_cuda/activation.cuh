// activation.cuh — the gate's activation, shared by glu.cu and the epilogue of skinny_gemm.cu.
#pragma once
#include "common.cuh"

template <bool kGelu> __device__ __forceinline__ float activate(float x) {
  const float z = kGelu ? 1.595769122f * (x + 0.044715f * x * x * x) : x;
  return x / (1.0f + __expf(-z));
}
