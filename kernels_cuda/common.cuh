// common.cuh — what every kernel shares: number types, 16-byte vectors, reductions.
#pragma once
#include <cuda_fp16.h>
#include <cuda_bf16.h>

#ifdef __CUDACC_RTC__                    // NVRTC comes without <cmath>
#define INFINITY __int_as_float(0x7f800000)
#endif

typedef __nv_bfloat16 bf16;
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(half x) { return __half2float(x); }
__device__ __forceinline__ float to_float(bf16 x) { return __bfloat162float(x); }

template <typename T> __device__ __forceinline__ T from_float(float x);
template <> __device__ __forceinline__ float from_float<float>(float x) { return x; }
template <> __device__ __forceinline__ half from_float<half>(float x) { return __float2half_rn(x); }
template <> __device__ __forceinline__ bf16 from_float<bf16>(float x) { return __float2bfloat16_rn(x); }

template <typename T> constexpr bool kIsHalf = false;
template <> constexpr bool kIsHalf<half> = true;

// N numbers that move in one load or store.  A GPU moves at most 16 bytes per
// thread and instruction, and needs the address aligned to the size moved.
template <typename T, int N> struct __align__(sizeof(T) * N) Vec { T v[N]; };

template <typename T, int N> __device__ __forceinline__ Vec<T, N> load_vec(const T* p) {
  return *reinterpret_cast<const Vec<T, N>*>(p);
}
template <typename T, int N> __device__ __forceinline__ void store_vec(T* p, const Vec<T, N>& x) {
  *reinterpret_cast<Vec<T, N>*>(p) = x;
}

// Eight numbers as floats: one 16-byte access of a 16-bit type, two of floats.
// Rows are multiples of 8 numbers, so that every such access is aligned.
template <typename T> __device__ __forceinline__ void load8(float (&x)[8], const T* p) {
  constexpr int N = 16 / sizeof(T);
#pragma unroll
  for (int i = 0; i < 8; i += N) {
    const Vec<T, N> part = load_vec<T, N>(p + i);
#pragma unroll
    for (int j = 0; j < N; ++j) x[i + j] = to_float(part.v[j]);
  }
}
template <typename T> __device__ __forceinline__ void store8(T* p, const float (&x)[8]) {
  constexpr int N = 16 / sizeof(T);
#pragma unroll
  for (int i = 0; i < 8; i += N) {
    Vec<T, N> part;
#pragma unroll
    for (int j = 0; j < N; ++j) part.v[j] = from_float<T>(x[i + j]);
    store_vec<T, N>(p + i, part);
  }
}

// Two 16-bit numbers in a register, the first one low.
template <typename T> __device__ __forceinline__ u32 pack2(float low, float high) {
  Vec<T, 2> pair;
  pair.v[0] = from_float<T>(low), pair.v[1] = from_float<T>(high);
  return *reinterpret_cast<u32*>(&pair);
}
template <typename T> __device__ __forceinline__ float2 unpack2(u32 bits) {
  const Vec<T, 2> pair = *reinterpret_cast<Vec<T, 2>*>(&bits);
  return make_float2(to_float(pair.v[0]), to_float(pair.v[1]));
}

const u32 kAllLanes = 0xffffffffu;

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(kAllLanes, x, step);
  return x;
}

// Sum over a block of kWarps warps; every thread gets the result.
template <int kWarps> __device__ __forceinline__ float block_sum(float x) {
  __shared__ float partial[kWarps];
  x = warp_sum(x);
  __syncthreads();                       // an earlier call may still be reading
  if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = x;
  __syncthreads();
  x = 0;
#pragma unroll
  for (int i = 0; i < kWarps; ++i) x += partial[i];
  return x;
}
