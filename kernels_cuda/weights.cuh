// weights.cuh — how matrices lie in memory: 16-bit numbers, or integers of 8, 6, 5 or 4 bits in groups of 32.
//
// A quantized weight is  w = scale * q  or  w = scale * q + minimum,  with a half-precision
// scale for kGroup neighbours along a row and a minimum for 32.  The integers q are those
// of a GGUF file; bits are a weight's, with its share of scale and minimum:
//   Int4     4.5  Q4_0
//   Int4Min  5    Q4_1, Q4_K
//   Int5Min  6    Q5_1, Q5_K, also beside Q4_1 or Q4_K
//   Int6Min  7.5  Q5_0, Q6_K, and any of up to 6 bits that are read as one
//   Int8     8.5  Q8_0, also beside Q4_0 or Q5_0
//   Int8Min  9.5  Q8_0 beside any other
// Q6_K has scales for 16 and no minimum, Q5_K minima beside scales for 32.  Int6Min has
// room for both: minima of 0 for the one, each scale twice for the other, whose 0 .. 31
// are among -32 .. 31.
//
// A row is cut into chunks, which four neighbouring lanes read with 16 bytes each.  Lane t
// of the four always gets eight numbers of a group of 32, a unit: of one group (16 bits),
// of two (8 bits) or of four (fewer), one after the other.  A unit holds numbers
// 8t .. 8t + 7, for 16-bit numbers the usual order of a row; where scales are for 16,
// 4t .. 4t + 3 of each half, so that a product over 16 numbers has one scale.  Integers
// are stored with kOffset added and so are unsigned.  Within the four bytes of eight
// 4-bit numbers, number 2i is nibble i and number 2i + 1 nibble i + 4: see unpack().
//
// Of 5- and 6-bit numbers such nibbles are the lower part.  Behind those of the four lanes
// there are words with the upper bits, one for each lane, of 6 bits two.  A word has those
// of four units, of two if a number has two: one unit after the other, number 2i at
// place i in the lower half of the word, number 2i + 1 at place i in the upper half.
#pragma once
#include "common.cuh"

template <int bits, int offset, int group, bool scaled, bool minimum> struct Layout {
  static constexpr int kBits = bits, kOffset = offset, kGroup = group;
  static constexpr bool kScaled = scaled, kMinimum = minimum;
};
struct Dense : Layout<16, 0, 32, false, false> {};
struct Int8 : Layout<8, 128, 32, true, false> {};
struct Int8Min : Layout<8, 128, 16, true, true> {};
struct Int5Min : Layout<5, 0, 32, true, true> {};
struct Int6Min : Layout<6, 32, 16, true, true> {};
struct Int4 : Layout<4, 8, 32, true, false> {};
struct Int4Min : Layout<4, 0, 32, true, true> {};

template <typename W> constexpr int kUpper = W::kBits == 5 || W::kBits == 6 ? W::kBits - 4 : 0;   // bits beside a nibble
template <typename W> constexpr int kPerWord = kUpper<W> == 1 ? 4 : 2;           // units whose upper bits share a word
template <typename W> constexpr int kUnitBytes = kUpper<W> ? 4 : W::kBits;       // without the upper bits: 16, 8, 4
template <typename W> constexpr int kGroups = 16 / kUnitBytes<W>;                // groups of 32 in a chunk: 1, 2, 4
template <typename W> constexpr int kChunkBytes = 4 * kGroups<W> * W::kBits;     // 64, of 5 bits 80, of 6 96
template <typename W> constexpr int kScales = 32 / W::kGroup;                    // of a group of 32

// Which number of a row is number i of a unit; unit t + 4 * g is lane t's of group g.
template <typename W> __device__ __forceinline__ int unit_column(int unit, int i) {
  return W::kGroup == 32 ? unit * 8 + i : unit / 4 * 32 + i / 4 * 16 + unit % 4 * 4 + i % 4;
}

template <typename T> __device__ __forceinline__ u32 subtract2(u32 a, u32 b);
template <> __device__ __forceinline__ u32 subtract2<half>(u32 a, u32 b) {
  const half2 d = __hsub2(*reinterpret_cast<half2*>(&a), *reinterpret_cast<half2*>(&b));
  return *reinterpret_cast<const u32*>(&d);
}
template <> __device__ __forceinline__ u32 subtract2<bf16>(u32 a, u32 b) {
  const __nv_bfloat162 d = __hsub2(*reinterpret_cast<__nv_bfloat162*>(&a), *reinterpret_cast<__nv_bfloat162*>(&b));
  return *reinterpret_cast<const u32*>(&d);
}

// The numbers of a unit as four pairs of T, from their kUnitBytes bytes in `words` and the
// word with their upper bits, shifted so that the unit's come first.  Integers come out exactly,
// without their scale.  Integer-to-float conversions are slow, so integers are put
// into the low bits of a float's mantissa instead: 1024 + q is the half 0x6400 | q,
// 128 + q the bfloat16 0x4300 | q, 2^23 + q the float 0x4B000000 | q.  Subtracting
// the constant (with the offset) leaves q.
template <typename W, typename T> __device__ __forceinline__ void unpack(u32 (&pairs)[4], const u32* words, u32 upper) {
  if constexpr (W::kBits == 16) {
#pragma unroll
    for (int i = 0; i < 4; ++i) pairs[i] = words[i];
  } else if constexpr (W::kBits < 8) {
    constexpr u32 kMagic = kIsHalf<T> ? 0x64006400 : 0x43004300;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      u32 q = words[0] >> 4 * i & 0x000f000f;
      if (kUpper<W>) q |= (upper >> kUpper<W> * i & 0x00010001 * ((1 << kUpper<W>) - 1)) << 4;
      pairs[i] = subtract2<T>(q | kMagic, kMagic | W::kOffset * 0x00010001);
    }
  } else if constexpr (kIsHalf<T>) {
#pragma unroll
    for (int i = 0; i < 4; ++i)          // bytes q0, 0x64, q1, 0x64; 0x6480 = 1024 + 128
      pairs[i] = subtract2<T>(__byte_perm(words[i / 2], 0x64646464, i % 2 ? 0x4342 : 0x4140), 0x64806480);
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) {        // a bfloat16 has no room for 128 + 255; -128 .. 127 fit, as upper halves of floats
      float q[2];
#pragma unroll
      for (int j = 0; j < 2; ++j)
        q[j] = __uint_as_float(__byte_perm(words[i / 2], 0x4B000000, 0x7440 + i % 2 * 2 + j)) - 8388736.0f;
      pairs[i] = __byte_perm(__float_as_uint(q[0]), __float_as_uint(q[1]), 0x7632);
    }
  }
}

// What a lane reads of a chunk.
struct Packed {
  Vec<u32, 4> numbers;
  Vec<u32, 2> upper;
};
template <typename W> __device__ __forceinline__ Packed load_packed(const u8* chunk, int t) {
  Packed packed{load_vec<u32, 4>(reinterpret_cast<const u32*>(chunk + t * 16)), {0, 0}};
  const u32* upper = reinterpret_cast<const u32*>(chunk + 64) + t * kUpper<W>;
  if (kUpper<W> == 1) packed.upper.v[0] = *upper;
  if (kUpper<W> == 2) packed.upper = load_vec<u32, 2>(upper);
  return packed;
}

// A matrix [n][k] on the device.  Scales are [n][chunks * kGroups * kScales], minima [n][chunks * kGroups].
template <typename W> struct Matrix {
  const u8* data;
  const half* scales;
  const half* minima;
  int k;
  __device__ __forceinline__ int chunks() const { return (k + 32 * kGroups<W> - 1) / (32 * kGroups<W>); }
  __device__ __forceinline__ long long row_bytes() const {
    return W::kScaled ? (long long)chunks() * kChunkBytes<W> : k * 2ll;
  }
  __device__ __forceinline__ long long groups() const { return (long long)chunks() * kGroups<W>; }
};

// The numbers of a unit as floats, scaled.
template <typename W, typename T>
__device__ __forceinline__ void load_unit(float (&w)[8], const Matrix<W>& m, long long row, int unit) {
  constexpr int kWords = kUnitBytes<W> / 4;
  const int group = unit / 4, t = unit % 4, in_chunk = group % kGroups<W>;
  const u8* chunk = m.data + row * m.row_bytes() + group / kGroups<W> * kChunkBytes<W>;
  const Vec<u32, kWords> packed =
      load_vec<u32, kWords>(reinterpret_cast<const u32*>(chunk + t * 16 + in_chunk * kUnitBytes<W>));
  u32 upper = 0, pairs[4];
  if (kUpper<W>) {
    const u32* word = reinterpret_cast<const u32*>(chunk + 64) + t * kUpper<W> + in_chunk / kPerWord<W>;
    upper = *word >> in_chunk % kPerWord<W> * 4 * kUpper<W>;
  }
  unpack<W, T>(pairs, packed.v, upper);
  const long long at = row * m.groups() + group;
  const float minimum = W::kMinimum ? to_float(m.minima[at]) : 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float scale = W::kScaled ? to_float(m.scales[at * kScales<W> + i * kScales<W> / 4]) : 1;
    const float2 pair = unpack2<T>(pairs[i]);
    w[2 * i] = pair.x, w[2 * i + 1] = pair.y;
    if (W::kScaled) w[2 * i] = w[2 * i] * scale + minimum, w[2 * i + 1] = w[2 * i + 1] * scale + minimum;
  }
}

// The numbers of a unit in a row of plain numbers, as they lie there.
template <typename W, typename T> __device__ __forceinline__ void store_unit(T* row, int unit, const float (&x)[8]) {
  if constexpr (W::kGroup == 32) {
    store8(row + unit * 8, x);
  } else {
#pragma unroll
    for (int i = 0; i < 8; i += 4) {
      Vec<T, 4> part;
#pragma unroll
      for (int j = 0; j < 4; ++j) part.v[j] = from_float<T>(x[i + j]);
      store_vec<T, 4>(row + unit_column<W>(unit, i), part);
    }
  }
}
template <typename W, typename T> __device__ __forceinline__ Vec<u32, 4> load_unit_pairs(const T* row, int unit) {
  if constexpr (W::kGroup == 32) {
    return load_vec<u32, 4>(reinterpret_cast<const u32*>(row + unit * 8));
  } else {
    const Vec<u32, 2> low = load_vec<u32, 2>(reinterpret_cast<const u32*>(row + unit_column<W>(unit, 0)));
    const Vec<u32, 2> high = load_vec<u32, 2>(reinterpret_cast<const u32*>(row + unit_column<W>(unit, 4)));
    return {low.v[0], low.v[1], high.v[0], high.v[1]};
  }
}
