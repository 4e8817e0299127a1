// sampling.cuh — integers in place of floats: keys that sort like logits, and sums that do not depend on their order.
#pragma once
#include "common.cuh"

// a < b  <=>  ordered(a) < ordered(b), and NaN above everything.
__device__ __forceinline__ u32 ordered(float x) {
  if (x != x) return 0xffffffffu;
  const u32 bits = __float_as_uint(x + 0.0f);      // makes 0 of -0, which are equal
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
__device__ __forceinline__ float from_ordered(u32 key) {
  return __uint_as_float(key & 0x80000000u ? key & 0x7fffffffu : ~key);
}
__device__ __forceinline__ bool is_finite(u32 key) { return key > 0x007fffffu && key < 0xff800000u; }

// The larger value wins, among equals the lower id: both in one integer.
__device__ __forceinline__ u64 candidate(u32 key, int id) { return (u64)key << 32 | (u32)~id; }

// Reductions and scans of a block of kWarps = 32 warps at most; every thread gets the result.
template <int kWarps> __device__ __forceinline__ u64 block_max(u64 x) {
  __shared__ u64 best[kWarps];
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    const u64 other = __shfl_xor_sync(kAllLanes, x, step);
    x = max(x, other);
  }
  __syncthreads();                       // an earlier call may still be reading
  if (threadIdx.x % 32 == 0) best[threadIdx.x / 32] = x;
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kWarps; ++i) x = max(x, best[i]);
  return x;
}

// In each lane the sum of its own and all earlier lanes.
__device__ __forceinline__ u64 warp_scan(u64 x) {
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const u64 other = __shfl_up_sync(kAllLanes, x, step);
    if (threadIdx.x % 32 >= step) x += other;
  }
  return x;
}

// What stands before this thread's x, and the sum of all.
template <int kWarps> __device__ __forceinline__ u64 block_scan(u64 x, u64& total) {
  __shared__ u64 sums[kWarps];
  const u64 through = warp_scan(x);
  __syncthreads();
  if (threadIdx.x % 32 == 31) sums[threadIdx.x / 32] = through;
  __syncthreads();
  u64 before = through - x;
  total = 0;
#pragma unroll
  for (int i = 0; i < kWarps; ++i) {
    if (i < threadIdx.x / 32) before += sums[i];
    total += sums[i];
  }
  return before;
}
