// skinny_gemm.cu — out[m][n] = sum_k x[m][k] * weight[n][k] for a handful of rows m, weights in any format.
//
// A step of decoding reads every weight once, so the floor is their bytes: n * k *
// bits / 8 and, quantized, 2 bytes a scale or minimum.  Hence the shape:
//  * a block makes 16 columns of `out`; its 8 warps share the chunks of k, each with
//    several 16-byte loads under way, and add up at the end;
//  * products run on tensor cores, with 16 weight rows as operand A and 8 rows of x as
//    operand B: even for one row the arithmetic then hides behind the reads, and
//    for 8 rows it costs the same;
//  * the order of k within a group of 32 is free, as long as both operands agree: lane
//    t of a row takes numbers 8t .. 8t + 7 of both, 16 contiguous bytes of x, and where
//    scales are for 16 numbers twice 8 bytes, so that each product has one scale;
//  * integers go into the product unscaled, where 16-bit floats hold them exactly.
//    The scale is applied to the sum, in float.  A minimum needs the sum of x over the
//    group: a product with ones.
//
// With kGlu the 16 weight rows are 8 gate rows and the 8 up rows that belong to them,
// and out = activation(gate) * up: the wide intermediate never reaches memory.
#include "activation.cuh"
#include "mma.cuh"
#include "weights.cuh"

enum Glu { kNone, kSilu, kGelu };

// Blocks on an SM: 0 leaves it to ptxas, which without a number would spill the others to fit in one more.
template <typename W, int kTiles>
constexpr int kBlocks = !W::kScaled ? 4 : W::kMinimum && (W::kBits == 8 || (W::kBits == 5 && kTiles == 1)) ? 2 : 0;

template <typename T, typename Out, typename W, int kTiles, int kGlu>
__global__ void __launch_bounds__(256, kBlocks<W, kTiles>)
skinny_gemm(Out* __restrict__ out,             // [rows][n]
            const T* __restrict__ x,           // [rows][k], rows <= 8 * kTiles
            const u8* __restrict__ data, const half* __restrict__ scales, const half* __restrict__ minima, int rows, int n,
            int k) {                           // n: columns of out; the weight has twice as many rows with kGlu
  constexpr int kWarps = 8, kAhead = 2, kColumns = kGlu ? 8 : 16;
  constexpr int kUnitWords = kUnitBytes<W> / 4, kPairs = 4 / kScales<W>;   // of a unit, for one scale
  __shared__ float partial[kWarps][16][8 * kTiles];
  const Matrix<W> weight{data, scales, minima, k};
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int column = blockIdx.x * kColumns, chunks = weight.chunks();
  // Weight rows g and g + 8 of the block's 16; past the end the last one, which is then not written.
  const int row_ids[2] = {min(column + g, n - 1), kGlu ? n + min(column + g, n - 1) : min(column + g + 8, n - 1)};

  float acc[kTiles][4];
#pragma unroll
  for (int m = 0; m < kTiles; ++m) acc[m][0] = acc[m][1] = acc[m][2] = acc[m][3] = 0;

  for (int base = warp; base < chunks; base += kWarps * kAhead) {
    Packed packed[kAhead][2];
#pragma unroll
    for (int a = 0; a < kAhead; ++a)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int chunk = base + a * kWarps;
        packed[a][i] = Packed{};
        if (chunk < chunks && chunk * 32 * kGroups<W> + t * 8 < k)
          packed[a][i] = load_packed<W>(data + row_ids[i] * weight.row_bytes() + chunk * kChunkBytes<W>, t);
      }
#pragma unroll
    for (int a = 0; a < kAhead; ++a) {
      const int chunk = base + a * kWarps;
      if (chunk >= chunks) break;
#pragma unroll
      for (int j = 0; j < kGroups<W>; ++j) {
        const int group = chunk * kGroups<W> + j, unit = group * 4 + t;
        u32 w[2][4];
        Vec<half, kScales<W>> scale[2];
        float minimum[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const long long at = row_ids[i] * weight.groups() + group;
          const u32 upper = packed[a][i].upper.v[j / kPerWord<W>] >> j % kPerWord<W> * 4 * kUpper<W>;
          unpack<W, T>(w[i], &packed[a][i].numbers.v[j * kUnitWords], upper);
          if (W::kScaled) scale[i] = load_vec<half, kScales<W>>(scales + at * kScales<W>);
          minimum[i] = W::kMinimum ? to_float(minima[at]) : 0;
        }
#pragma unroll
        for (int m = 0; m < kTiles; ++m) {
          Vec<u32, 4> b{0, 0, 0, 0};
          if (m * 8 + g < rows && unit * 8 < k) b = load_unit_pairs<W>(x + (long long)(m * 8 + g) * k, unit);
#pragma unroll
          for (int s = 0; s < kScales<W>; ++s) {
            float sum[4] = {0, 0, 0, 0};
            float(&target)[4] = W::kScaled ? sum : acc[m];
#pragma unroll
            for (int i = s * kPairs; i < (s + 1) * kPairs; i += 2) {
              const u32 operand[4] = {w[0][i], w[1][i], w[0][i + 1], w[1][i + 1]};
              mma_16x8x16<T>(target, operand, b.v[i], b.v[i + 1]);
            }
            if (W::kScaled)
#pragma unroll
              for (int i = 0; i < 4; ++i) acc[m][i] += to_float(scale[i / 2].v[s]) * sum[i];
          }
          if (W::kMinimum) {
            const u32 one = pack2<T>(1, 1), ones[4] = {one, one, one, one};
            float total[4] = {0, 0, 0, 0};
#pragma unroll
            for (int i = 0; i < 4; i += 2) mma_16x8x16<T>(total, ones, b.v[i], b.v[i + 1]);
#pragma unroll
            for (int i = 0; i < 4; ++i) acc[m][i] += minimum[i / 2] * total[i];
          }
        }
      }
    }
  }

#pragma unroll
  for (int m = 0; m < kTiles; ++m)
#pragma unroll
    for (int i = 0; i < 4; ++i) partial[warp][g + i / 2 * 8][m * 8 + 2 * t + i % 2] = acc[m][i];
  __syncthreads();
  for (int i = threadIdx.x; i < kColumns * rows; i += kWarps * 32) {
    const int m = i / kColumns, c = i % kColumns;
    if (column + c >= n) continue;
    float value = 0, up = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      value += partial[w][c][m];
      if (kGlu) up += partial[w][c + 8][m];
    }
    if (kGlu) value = activate<kGlu == kGelu>(value) * up;
    out[(long long)m * n + column + c] = from_float<Out>(value);
  }
}
