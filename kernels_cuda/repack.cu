// repack.cu — blocks of a GGUF file into the layouts of weights.cuh, on the GPU, when a model is loaded.
//
// A block of ggml (ggml-common.h) holds 32 weights: a half-precision scale, in Q4_1
// and Q5_1 also a minimum, then the integers; number i < 16 is the low nibble of byte
// i, number 16 + i its high nibble.  Fifth bits stand before them, bit i of a word for
// number i.  A block of the K encodings holds 256: its scales and minima are small
// integers, times a half for the block.  These products are rounded to half precision,
// by at most 2^-11 of themselves; everything else is the file's.  One thread per 32
// weights; those whose upper bits share a word add them to what was 0.
#include "weights.cuh"

__device__ __forceinline__ float half_at(const u8* p) { return to_float(*reinterpret_cast<const half*>(p)); }

// Number i of a block, and the scale and minimum that it has.
struct Q8_0 {
  static constexpr int kWeights = 32, kBytes = 34;
  static __device__ int number(const u8* block, int i) { return (signed char)block[2 + i]; }
  static __device__ float scale(const u8* block, int) { return half_at(block); }
  static __device__ float minimum(const u8*, int) { return 0; }
};
__device__ __forceinline__ int nibble(const u8* numbers, int i) { return numbers[i % 16] >> i / 16 * 4 & 15; }
__device__ __forceinline__ int fifth(const u8* bits, int i) { return (bits[i / 8] >> i % 8 & 1) << 4; }
struct Q4_0 : Q8_0 {
  static constexpr int kBytes = 18;
  static __device__ int number(const u8* block, int i) { return nibble(block + 2, i) - 8; }
};
struct Q5_0 : Q8_0 {
  static constexpr int kBytes = 22;
  static __device__ int number(const u8* block, int i) { return (nibble(block + 6, i) | fifth(block + 2, i)) - 16; }
};
struct Q4_1 : Q8_0 {
  static constexpr int kBytes = 20;
  static __device__ int number(const u8* block, int i) { return nibble(block + 4, i); }
  static __device__ float minimum(const u8* block, int) { return half_at(block + 2); }
};
struct Q5_1 : Q4_1 {
  static constexpr int kBytes = 24;
  static __device__ int number(const u8* block, int i) { return nibble(block + 8, i) | fifth(block + 4, i); }
};

// Q4_K: halves for scales and minima, 12 bytes with 6 bits of each of 8 groups, nibbles: 32 bytes hold two groups.
// The first four groups have the low 6 bits of a byte; the others 4 bits of a byte and the upper 2 of one of the first.
__device__ __forceinline__ int six_bits(const u8* first, const u8* nibbles, int high, int group) {
  if (group < 4) return first[group] & 63;
  return (nibbles[group - 4] >> high & 15) | first[group - 4] >> 6 << 4;
}
struct Q4_K {
  static constexpr int kWeights = 256, kBytes = 144;
  static __device__ int nibble(const u8* numbers, int i) { return numbers[i / 64 * 32 + i % 32] >> i / 32 % 2 * 4 & 15; }
  static __device__ int number(const u8* block, int i) { return nibble(block + 16, i); }
  static __device__ float scale(const u8* block, int i) {
    return half_at(block) * six_bits(block + 4, block + 12, 0, i / 32);
  }
  static __device__ float minimum(const u8* block, int i) {
    return -half_at(block + 2) * six_bits(block + 8, block + 12, 4, i / 32);
  }
};
struct Q5_K : Q4_K {                     // bit g of 32 bytes is the fifth bit of their numbers of group g
  static constexpr int kBytes = 176;
  static __device__ int number(const u8* block, int i) {
    return nibble(block + 48, i) | (block[16 + i % 32] >> i / 32 & 1) << 4;
  }
};
struct Q6_K {                            // low nibbles, pairs of upper bits, 16 scales of 8 bits, their half
  static constexpr int kWeights = 256, kBytes = 210;
  static __device__ int number(const u8* block, int i) {
    const int low = block[i / 128 * 64 + i % 64] >> i / 64 % 2 * 4 & 15;
    return (low | (block[128 + i / 128 * 32 + i % 32] >> i / 32 % 4 * 2 & 3) << 4) - 32;
  }
  static __device__ float scale(const u8* block, int i) { return half_at(block + 208) * (signed char)block[192 + i / 16]; }
  static __device__ float minimum(const u8*, int) { return 0; }
};

template <typename Source, typename W>
__global__ void repack(u8* __restrict__ data, half* __restrict__ scales, half* __restrict__ minima,
                       const u8* __restrict__ blocks, int first_row, int rows, int k) {
  const Matrix<W> matrix{data, scales, minima, k};
  const int groups = k / 32, in_block = Source::kWeights / 32;
  const long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= (long long)rows * groups) return;
  const u8* block = blocks + i / in_block * Source::kBytes;
  const int first = i % in_block * 32, group = i % groups;   // number in the block, group in the row
  const long long row = first_row + i / groups, at = row * matrix.groups() + group;
  for (int s = 0; s < kScales<W>; ++s)
    scales[at * kScales<W> + s] = __float2half_rn(Source::scale(block, first + s * W::kGroup));
  if (W::kMinimum) minima[at] = __float2half_rn(Source::minimum(block, first));

  for (int t = 0; t < 4; ++t) {
    u8* lane = data + row * matrix.row_bytes() + group / kGroups<W> * kChunkBytes<W> + t * 16;
    u8* unit = lane + group % kGroups<W> * kUnitBytes<W>;
    u32 low = 0, upper = 0;
    for (int j = 0; j < 8; ++j) {
      const u32 q = Source::number(block, first + unit_column<W>(t, j)) + W::kOffset;
      if (W::kBits == 8) {
        unit[j] = q;
      } else {
        low |= (q & 15) << (j / 2 + j % 2 * 4) * 4;
        upper |= (q >> 4) << j % 2 * 16 + j / 2 * kUpper<W>;
      }
    }
    if (W::kBits == 8) continue;
    *reinterpret_cast<u32*>(unit) = low;
    if (kUpper<W>) {
      u32* word = reinterpret_cast<u32*>(lane - t * 16 + 64) + t * kUpper<W> + group % 4 / kPerWord<W>;
      atomicOr(word, upper << group % kPerWord<W> * 4 * kUpper<W>);
    }
  }
}
