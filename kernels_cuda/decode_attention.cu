// decode_attention.cu — one query token per request against the paged cache.
//
// Decoding is bound by reading the cache once: context * kv_heads * 2 * kDim * 2 bytes per
// request.  Hence the shape:
//  * the query heads of one kv head (up to 16) are the rows of one mma tile, so that K
//    and V are read once, not once per head; tensor cores, because for large groups the
//    arithmetic would not hide behind the reads otherwise;
//  * the context is cut into gridDim.x splits, each a block of its own, so that a
//    few long requests still fill the GPU.  Their number is fixed (it is part of a
//    CUDA graph), their length follows the context, and those past its end have
//    nothing to do;
//  * in a block each warp walks its own 16 tokens at a time, through its own two
//    buffers: cp.async fills one while the warp works on the other.  No barrier but
//    the warp's own until the warps join their results;
//  * each split leaves (maximum, sum, unnormalised output), and the block that is done
//    last joins those: the online softmax works across splits as it does inside one.
//    A kernel of its own for that would cost a launch in every layer.
//
// Requests with more than one new token are left to prefill_attention.cu.
#include "attention.cuh"

template <int kDim> constexpr int kWarps = kDim <= 128 ? 4 : 2;
constexpr int kKeys = 16;

// out[group][kDim] from the first `used` of part_out[group][splits][kDim] and their (maximum, sum).  Other SMs wrote
// those, so they are read past this one's L1 cache.  stats: shared memory for group * used pairs.
template <typename T, int kDim>
__device__ __forceinline__ void join_splits(T* out, const float* part_out, const float2* part_max_sum, float2* stats,
                                            int group, int splits, int used) {
  for (int i = threadIdx.x; i < group * used; i += kWarps<kDim> * 32)
    stats[i] = __ldcg(part_max_sum + i / used * splits + i % used);
  __syncthreads();
  for (int i = threadIdx.x * 4; i < group * kDim; i += kWarps<kDim> * 32 * 4) {
    const float2* stat = stats + i / kDim * used;
    const float* part = part_out + (long long)(i / kDim) * splits * kDim + i % kDim;
    float top = -INFINITY, sum = 0, value[4] = {0, 0, 0, 0};
    for (int s = 0; s < used; ++s) top = fmaxf(top, stat[s].x);
#pragma unroll 8                                        // as many loads under way
    for (int s = 0; s < used; ++s) {
      const float4 x = __ldcg(reinterpret_cast<const float4*>(part + s * kDim));
      const float weight = exp2f(stat[s].x - top);
      sum += weight * stat[s].y;
      value[0] += weight * x.x, value[1] += weight * x.y, value[2] += weight * x.z, value[3] += weight * x.w;
    }
    Vec<T, 4> y;
#pragma unroll
    for (int j = 0; j < 4; ++j) y.v[j] = from_float<T>(value[j] / sum);
    store_vec<T, 4>(out + i, y);
  }
}

// At least 3 blocks on an SM: without a number ptxas may spill registers to fit in one more.
template <typename T, int kDim, int kBlockSize, bool kSoftcap>
__global__ void __launch_bounds__(kWarps<kDim> * 32, 3)
decode_attention(T* __restrict__ out,                   // [T][q_heads][kDim]
                 float* __restrict__ part_out,          // [requests][q_heads][splits][kDim]
                 float2* __restrict__ part_max_sum,     // [requests][q_heads][splits]
                 u32* __restrict__ tickets,             // [requests][kv_heads]: 0 before and after
                 const T* __restrict__ q,               // [T][q_stride], heads first
                 const T* __restrict__ cache, const int* __restrict__ block_tables,
                 const int* __restrict__ table_starts, const int* __restrict__ context_lens,
                 const int* __restrict__ query_starts, int q_stride, int group, int kv_heads, int window, float scale,
                 float softcap) {
  constexpr int N = 8, kPieces = kDim / N, kTileSize = kKeys * kPitch<kDim>, kJoinPitch = kDim + 8;
  constexpr int kStep = kKeys * kWarps<kDim>;           // tokens that the block takes in at once
  extern __shared__ __align__(16) unsigned char shared[];
  const int split = blockIdx.x, kv_head = blockIdx.y, request = blockIdx.z, splits = gridDim.x;
  const int start = query_starts[request];
  if (query_starts[request + 1] - start != 1) return;   // the same for the whole block
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  T* k_tiles = reinterpret_cast<T*>(shared) + warp * 4 * kTileSize;  // [2][kKeys][pitch]
  T* v_tiles = k_tiles + 2 * kTileSize;                              // [2][kKeys][pitch]

  const int context = context_lens[request], first_key = max(0, context - window);
  const int whole = context - first_key / kKeys * kKeys;            // tokens from the first tile on
  const int length = max(1, (whole + splits * kStep - 1) / (splits * kStep)) * kStep;
  const int used = max(1, (whole + length - 1) / length);           // splits that have something to do
  if (split >= used) return;                                        // the same for the whole block
  const int begin = first_key / kKeys * kKeys + split * length, end = min(context, begin + length);
  const int* table = block_tables + table_starts[request];
  const T* head_cache = cache + kv_head * 2 * kBlockSize * kDim;

  auto fetch = [&](int token0, int stage) {
    if (token0 < end)
      for (int i = lane; i < kKeys * kPieces; i += 32) {
        const int row = i / kPieces, column = i % kPieces * N;
        const int token = min(token0 + row, end - 1);               // past the end: any valid row, it is masked
        const int target = stage * kTileSize + row * kPitch<kDim> + column;
        fetch_kv<kDim, kBlockSize>(k_tiles + target, v_tiles + target, head_cache, table, kv_heads, token, column);
      }
    cp_async_commit();
  };
  const int first = begin + warp * kKeys;
  fetch(first, 0);

  u32 query[kDim / 16][4];                              // the group's heads, straight from global memory
  const T* q_rows = q + (long long)start * q_stride + kv_head * group * kDim;
#pragma unroll
  for (int k = 0; k < kDim / 16; ++k)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = g + i % 2 * 8;
      query[k][i] = row < group ? *reinterpret_cast<const u32*>(q_rows + row * kDim + k * 16 + i / 2 * 8 + 2 * t) : 0;
    }

  Attention<T, kDim, kKeys, 1> attention;
  attention.clear();
  int stage = 0;
  for (int token0 = first; token0 < end; token0 += kStep, stage ^= 1) {
    fetch(token0 + kStep, stage ^ 1);
    cp_async_wait<1>();
    __syncwarp();                                       // every lane's part of the tile is here
    attention.scores(k_tiles + stage * kTileSize, [&](u32 (&a)[4], int, int k) {
#pragma unroll
      for (int i = 0; i < 4; ++i) a[i] = query[k][i];
    });
    attention.template softmax<kSoftcap>(
        scale, softcap, token0 < first_key || token0 + kKeys > end,
        [&](int, int, int key) { return token0 + key >= first_key && token0 + key < end; });
    attention.add_values(v_tiles + stage * kTileSize);
    __syncwarp();                                       // before this stage is filled again
  }
  cp_async_wait<0>();

  // Join the warps, in the memory of their tiles.
  float* joined = reinterpret_cast<float*>(shared);     // [warps][16][kJoinPitch]: output, then maximum and sum
  __syncthreads();                                      // all are done with their tiles
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const float sum = attention.row_sum(0, h);
    float* row = joined + (warp * 16 + g + h * 8) * kJoinPitch;
#pragma unroll
    for (int n = 0; n < kDim / 8; ++n)
      row[n * 8 + 2 * t] = attention.acc[0][n][2 * h], row[n * 8 + 2 * t + 1] = attention.acc[0][n][2 * h + 1];
    if (t == 0) row[kDim] = attention.top[0][h], row[kDim + 1] = sum;
  }
  __syncthreads();
  const int q_head = kv_head * group;                   // the group's first
  const long long part = ((long long)request * kv_heads * group + q_head) * splits;                 // its first
  T* target = out + ((long long)start * kv_heads * group + q_head) * kDim;
  for (int i = threadIdx.x; i < group * kDim; i += kWarps<kDim> * 32) {
    const int head = i / kDim, d = i % kDim;
    const float* row = joined + head * kJoinPitch;
    float top = -INFINITY, sum = 0, value = 0;
#pragma unroll
    for (int w = 0; w < kWarps<kDim>; ++w) top = fmaxf(top, row[w * 16 * kJoinPitch + kDim]);
#pragma unroll
    for (int w = 0; w < kWarps<kDim>; ++w) {
      const float* other = row + w * 16 * kJoinPitch;
      const float weight = other[kDim + 1] > 0 ? exp2f(other[kDim] - top) : 0;   // 0: a warp that saw no token
      sum += weight * other[kDim + 1];
      value += weight * other[d];
    }
    if (used == 1) {
      target[i] = from_float<T>(sum == 0 ? 0.0f : value / sum);     // 0: padding, which has no token at all
    } else {
      part_out[(part + head * splits + split) * kDim + d] = value;
      if (d == 0) part_max_sum[part + head * splits + split] = make_float2(top, sum);
    }
  }
  if (used == 1) return;

  // The block that draws the last ticket joins the splits (as in the CUDA samples' threadFenceReduction).
  __shared__ bool last;
  __syncthreads();                                      // the block's part is written
  if (threadIdx.x == 0) {
    __threadfence();                                    // before its ticket is seen
    last = atomicInc(&tickets[request * kv_heads + kv_head], used - 1) == used - 1;     // the last one makes it 0 again
    __threadfence();                                    // nothing is read before the ticket is drawn
  }
  __syncthreads();
  if (last)
    join_splits<T, kDim>(target, part_out + part * kDim, part_max_sum + part, reinterpret_cast<float2*>(shared), group,
                         splits, used);
}
