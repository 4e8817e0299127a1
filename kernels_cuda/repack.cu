// repack.cu — blocks of a GGUF file into the layout of weights.cuh, on the GPU, when a model is loaded.
//
// A block of ggml (ggml-common.h) holds 32 weights: a half-precision scale, in Q4_1
// also a minimum, then the integers; number i < 16 is the low nibble of byte i, number
// 16 + i its high nibble.  Q5_0 keeps the fifth bits before them, bit i of a word for
// number i; on the device its integers are of 8 bits.  Nothing is rounded: integers,
// scales and minima are the file's.  A Q4_0 or Q5_0 matrix may join a Q8_0 one (its
// integers fit), a Q4_0 one a Q4_1 one (its minimum is -8 times the scale).  One
// thread per block.
#include "weights.cuh"

struct Q8_0 { static constexpr int kBytes = 34, kNumbers = 2, kOffset = 128; };
struct Q4_0 { static constexpr int kBytes = 18, kNumbers = 2, kOffset = 8; };
struct Q5_0 { static constexpr int kBytes = 22, kNumbers = 6, kOffset = 16; };
struct Q4_1 { static constexpr int kBytes = 20, kNumbers = 4, kOffset = 0; };

template <typename Source> __device__ __forceinline__ int number(const u8* block, int i) {   // with kOffset added
  const u8* numbers = block + Source::kNumbers;
  if (Source::kOffset == 128) return numbers[i] ^ 0x80;
  const int low = numbers[i % 16] >> i / 16 * 4 & 15;
  return Source::kOffset == 16 ? low | (block[2 + i / 8] >> i % 8 & 1) << 4 : low;
}

template <typename Source, typename W>
__global__ void repack(u8* __restrict__ data, half* __restrict__ scales, half* __restrict__ minima,
                       const u8* __restrict__ blocks, int first_row, int rows, int k) {
  const Matrix<W> matrix{data, scales, minima, k};
  const int groups = k / 32;
  const long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= (long long)rows * groups) return;
  const long long row = first_row + i / groups, group = i % groups;
  const u8* block = blocks + i * Source::kBytes;

  const half scale = *reinterpret_cast<const half*>(block);
  scales[row * matrix.groups() + group] = scale;
  if (W::kMinimum)
    minima[row * matrix.groups() + group] =
        Source::kOffset ? __float2half_rn(-Source::kOffset * to_float(scale)) : *reinterpret_cast<const half*>(block + 2);
  for (int t = 0; t < 4; ++t) {
    u8* unit = data + row * matrix.row_bytes() + unit_offset<W>(group * 32 + t * 8);
    if (W::kBits == 8) {
      for (int j = 0; j < 8; ++j) unit[j] = number<Source>(block, t * 8 + j) - Source::kOffset + 128;
    } else {
      u32 word = 0;
      for (int j = 0; j < 8; ++j) word |= number<Source>(block, t * 8 + j) << (j / 2 + j % 2 * 4) * 4;
      *reinterpret_cast<u32*>(unit) = word;
    }
  }
}
