// attention.cuh — what both attention kernels do with a tile of keys and values: FlashAttention's inner step.
//
// A warp owns kTiles x 16 query rows.  Their scores against kKeys keys, the running
// maximum and sum of the online softmax (Milakov, Gimelshein 2018; Dao et al. 2022) and
// the output stay in registers, in the layout of mma operands: lane (g, t) holds rows
// g and g + 8 of each 16, columns 2t and 2t + 1 of each 8.  The layout of the scores
// is, register for register, that of the next product's operand A.
//
// Scores are kept times log2(e), since exp(x) = exp2(x * log2(e)) and the hardware has
// exp2.
#pragma once
#include "mma.cuh"

constexpr float kLog2e = 1.44269504f;

template <int kDim> constexpr int kPitch = kDim + 8;   // rows of tiles in shared memory: 16 bytes more, so that the
                                                       // 8 rows of an ldmatrix lie in different banks

template <typename T, int kDim, int kKeys, int kTiles> struct Attention {
  float acc[kTiles][kDim / 8][4];
  float top[kTiles][2], sum[kTiles][2];                // of rows g and g + 8; sum is this lane's part
  float s[kTiles][kKeys / 8][4];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int m = 0; m < kTiles; ++m) {
#pragma unroll
      for (int n = 0; n < kDim / 8; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) acc[m][n][i] = 0;
      top[m][0] = top[m][1] = -INFINITY, sum[m][0] = sum[m][1] = 0;
    }
  }

  // s = Q K^T.  query(m, k) gives columns 16k .. 16k + 15 of row tile m as operand A;
  // the rows of `keys` are the columns of operand B.
  template <typename Query> __device__ __forceinline__ void scores(const T* keys, Query query) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int m = 0; m < kTiles; ++m)
#pragma unroll
      for (int n = 0; n < kKeys / 8; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) s[m][n][i] = 0;
#pragma unroll
    for (int k = 0; k < kDim / 16; ++k) {
      u32 a[kTiles][4];
#pragma unroll
      for (int m = 0; m < kTiles; ++m) query(a[m], m, k);
#pragma unroll
      for (int n = 0; n < kKeys / 8; n += 2) {
        u32 b[4];                                      // two groups of 8 keys, two halves of k each
        const int row = n * 8 + lane / 16 * 8 + lane % 8, column = k * 16 + lane / 8 % 2 * 8;
        ldmatrix_x4(b, keys + row * kPitch<kDim> + column);
#pragma unroll
        for (int m = 0; m < kTiles; ++m) {
          mma_16x8x16<T>(s[m][n], a[m], b[0], b[1]);
          mma_16x8x16<T>(s[m][n + 1], a[m], b[2], b[3]);
        }
      }
    }
  }

  // Scale, cap, mask, and turn scores into exp2(score - running maximum).  visible(m, h, key)
  // says whether row g + 8h of tile m sees key number `key` of the tile; it's asked only if `masked`.
  // __fdividef is right to 2 units in the last place, and takes fewer registers than the exact division.
  template <bool kSoftcap, typename Visible>
  __device__ __forceinline__ void softmax(float scale, float softcap, bool masked, Visible visible) {
    const int t = threadIdx.x % 4;
#pragma unroll
    for (int m = 0; m < kTiles; ++m)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float best = top[m][h];
#pragma unroll
        for (int n = 0; n < kKeys / 8; ++n)
#pragma unroll
          for (int j = 0; j < 2; ++j) {
            float& x = s[m][n][2 * h + j];
            x = kSoftcap ? softcap * kLog2e * tanhf(__fdividef(x * scale, softcap)) : x * (scale * kLog2e);
            if (masked && !visible(m, h, n * 8 + 2 * t + j)) x = -INFINITY;
            best = fmaxf(best, x);
          }
        best = fmaxf(best, __shfl_xor_sync(kAllLanes, best, 1));    // the four lanes that share a row
        best = fmaxf(best, __shfl_xor_sync(kAllLanes, best, 2));
        const float base = best == -INFINITY ? 0 : best;            // a row that has seen no key yet
        const float rescale = exp2f(top[m][h] - base);
        top[m][h] = best;
        sum[m][h] *= rescale;
#pragma unroll
        for (int n = 0; n < kKeys / 8; ++n)
#pragma unroll
          for (int j = 0; j < 2; ++j) {
            float& x = s[m][n][2 * h + j];
            x = exp2f(x - base);
            sum[m][h] += x;
          }
#pragma unroll
        for (int n = 0; n < kDim / 8; ++n) acc[m][n][2 * h] *= rescale, acc[m][n][2 * h + 1] *= rescale;
      }
  }

  // acc += P V.  V's rows are operand B's rows, so its 8 x 8 matrices are loaded transposed.
  __device__ __forceinline__ void add_values(const T* values) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int k = 0; k < kKeys / 16; ++k) {
      u32 p[kTiles][4];
#pragma unroll
      for (int m = 0; m < kTiles; ++m)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float* pair = &s[m][2 * k + i / 2][i % 2 * 2];
          p[m][i] = pack2<T>(pair[0], pair[1]);
        }
#pragma unroll
      for (int n = 0; n < kDim / 8; n += 2) {
        u32 b[4];
        const int row = k * 16 + lane % 16, column = n * 8 + lane / 16 * 8;
        ldmatrix_x4<true>(b, values + row * kPitch<kDim> + column);
#pragma unroll
        for (int m = 0; m < kTiles; ++m) {
          mma_16x8x16<T>(acc[m][n], p[m], b[0], b[1]);
          mma_16x8x16<T>(acc[m][n + 1], p[m], b[2], b[3]);
        }
      }
    }
  }

  // The whole row's sum, in each of the four lanes that share it.
  __device__ __forceinline__ float row_sum(int m, int h) const {
    float x = sum[m][h];
    x += __shfl_xor_sync(kAllLanes, x, 1);
    return x + __shfl_xor_sync(kAllLanes, x, 2);
  }
};

// Start fetching 16 bytes of a token's key and value, from column `column` on.  The cache is [blocks][kv_heads][2: k, v]
// [kBlockSize][kDim]; `cache` points at the kv head's part of block 0, `table` lists the request's blocks.
template <int kDim, int kBlockSize, typename T>
__device__ __forceinline__ void fetch_kv(T* key, T* value, const T* cache, const int* table, int kv_heads, int token,
                                         int column) {
  constexpr int kPlane = kBlockSize * kDim;
  const T* source = cache + (long long)table[token / kBlockSize] * (kv_heads * 2 * kPlane) +
                    token % kBlockSize * kDim + column;
  cp_async_16(key, source);
  cp_async_16(value, source + kPlane);
}
