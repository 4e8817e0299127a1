// prefill_attention.cu — causal attention of chunks of new tokens over the paged cache.
//
// FlashAttention-2 (Dao 2023) on mma.sync.  The floor is arithmetic: 4 * kDim FLOPs for
// each visible (query head, key) pair.  Hence the shape:
//  * a block owns kRows query rows, a warp 16 * kTiles of them: one fragment of K or V
//    read from shared memory feeds kTiles products, else shared memory would be as
//    busy as the tensor cores;
//  * a row is a (token, query head) pair, all heads of one kv head side by side, so
//    that K and V are fetched once for the whole group;
//  * K and V come in tiles of kKeys tokens through two buffers: while the warps
//    work on one, cp.async fills the other, and one barrier a tile keeps order;
//  * only tiles that cross a row's causal edge or its window are masked; tiles that
//    no row of a warp can see are skipped by it.
//
// The chunk's own keys are in the cache already: row i of a chunk sits at position
// context - count + i / group and sees keys up to it.  Blocks start with the last rows,
// which have most to do.  Requests with a single new token are left to
// decode_attention.cu.
#include "attention.cuh"

template <int kDim> constexpr int kTiles = kDim <= 128 ? 2 : 1;     // more would not fit into 255 registers
template <int kDim> constexpr int kRows = 64 * kTiles<kDim>;
constexpr int kKeys = 32;

// At least 2 blocks on an SM: without a number ptxas may spill registers to fit in one more.
template <typename T, int kDim, int kBlockSize, bool kSoftcap>
__global__ void __launch_bounds__(128, 2)
prefill_attention(T* __restrict__ out,                  // [T][q_heads][kDim]
                  const T* __restrict__ q,              // [T][q_stride], heads first
                  const T* __restrict__ cache, const int* __restrict__ block_tables,
                  const int* __restrict__ table_starts, const int* __restrict__ context_lens,
                  const int* __restrict__ query_starts, int q_stride, int group, int kv_heads, int window, float scale,
                  float softcap) {
  constexpr int N = 8, kPieces = kDim / N;              // 16-byte pieces of a row
  constexpr int kTileSize = kKeys * kPitch<kDim>;
  extern __shared__ __align__(16) unsigned char shared[];
  T* q_tile = reinterpret_cast<T*>(shared);             // [kRows][pitch]
  T* k_tiles = q_tile + kRows<kDim> * kPitch<kDim>;     // [2][kKeys][pitch]
  T* v_tiles = k_tiles + 2 * kTileSize;                 // [2][kKeys][pitch]

  const int request = blockIdx.z, kv_head = blockIdx.y;
  const int start = query_starts[request], count = query_starts[request + 1] - start, rows = count * group;
  const int first_row = (gridDim.x - 1 - blockIdx.x) * kRows<kDim>;
  if (first_row >= rows || count == 1) return;         // the same for the whole block
  const int context = context_lens[request], offset = context - count;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int* table = block_tables + table_starts[request];
  const T* head_cache = cache + kv_head * 2 * kBlockSize * kDim;

  const int last_row = min(first_row + kRows<kDim>, rows) - 1;
  const int last_key = offset + last_row / group, first_key = max(0, offset + first_row / group - window + 1);
  const int first_tile = first_key / kKeys, last_tile = last_key / kKeys;

  auto fetch = [&](int tile) {
    const int stage = tile % 2 * kTileSize;
    for (int i = threadIdx.x; i < kKeys * kPieces; i += 128) {
      const int row = i / kPieces, column = i % kPieces * N;
      const int token = min(tile * kKeys + row, last_key);          // past the end: any valid row, it is masked
      const int target = stage + row * kPitch<kDim> + column;
      fetch_kv<kDim, kBlockSize>(k_tiles + target, v_tiles + target, head_cache, table, kv_heads, token, column);
    }
  };
  for (int i = threadIdx.x; i < kRows<kDim> * kPieces; i += 128) {
    const int row = min(first_row + i / kPieces, last_row), column = i % kPieces * N;   // likewise
    const T* source = q + (long long)(start + row / group) * q_stride + (kv_head * group + row % group) * kDim + column;
    cp_async_16(q_tile + i / kPieces * kPitch<kDim> + column, source);
  }
  fetch(first_tile);
  cp_async_commit();

  const int warp_row = warp * 16 * kTiles<kDim>;                    // the warp's first row in the block
  const int warp_first = offset + min(first_row + warp_row, last_row) / group;                    // positions of its
  const int warp_last = offset + min(first_row + warp_row + 16 * kTiles<kDim> - 1, last_row) / group;  // rows
  auto query = [&](u32 (&a)[4], int m, int k) {
    ldmatrix_x4(a, q_tile + (warp_row + m * 16 + lane % 16) * kPitch<kDim> + k * 16 + lane / 16 * 8);
  };

  int position[kTiles<kDim>][2];                        // of rows g and g + 8 of each row tile
#pragma unroll
  for (int m = 0; m < kTiles<kDim>; ++m)
#pragma unroll
    for (int h = 0; h < 2; ++h) position[m][h] = offset + (first_row + warp_row + m * 16 + g + h * 8) / group;

  Attention<T, kDim, kKeys, kTiles<kDim>> attention;
  attention.clear();
  for (int tile = first_tile; tile <= last_tile; ++tile) {
    cp_async_wait<0>();
    __syncthreads();                                    // this tile is here, and all are done with the one before
    if (tile < last_tile) fetch(tile + 1);
    cp_async_commit();
    const int begin = tile * kKeys, end = begin + kKeys;            // keys of the tile
    if (first_row + warp_row > last_row || begin > warp_last || end <= warp_first - window + 1) continue;
    const int stage = tile % 2 * kTileSize;
    attention.scores(k_tiles + stage, query);
    attention.template softmax<kSoftcap>(
        scale, softcap, end > warp_first + 1 || begin <= warp_last - window, [&](int m, int h, int key) {
          return begin + key <= position[m][h] && begin + key > position[m][h] - window;
        });
    attention.add_values(v_tiles + stage);
  }

#pragma unroll
  for (int m = 0; m < kTiles<kDim>; ++m)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float inverse = 1 / attention.row_sum(m, h);
      const int row = first_row + warp_row + m * 16 + g + h * 8;
      if (row >= rows) continue;
      T* target = out + ((long long)(start + row / group) * kv_heads * group + kv_head * group + row % group) * kDim;
#pragma unroll
      for (int n = 0; n < kDim / 8; ++n)
        *reinterpret_cast<u32*>(target + n * 8 + 2 * t) =
            pack2<T>(attention.acc[m][n][2 * h] * inverse, attention.acc[m][n][2 * h + 1] * inverse);
    }
}
