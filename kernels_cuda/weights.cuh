// weights.cuh — how matrices lie in memory: 16-bit numbers, or integers of 8 or 4 bits in groups of 32.
//
// A quantized weight is  w = scale * q  or  w = scale * q + minimum,  with one
// half-precision scale (and minimum) for 32 neighbours along a row: what GGUF's
// Q8_0 and Q5_0 (Int8), Q4_0 (Int4) and Q4_1 (Int4Min) hold, bit for bit.
//
// A row is cut into chunks of 64 bytes, which four neighbouring lanes read with 16
// bytes each.  Lane t of the four always gets numbers 8t .. 8t + 7 of a group of
// 32: of one group (16 bits), of two (8 bits) or of four (4 bits), one after the
// other.  For 16-bit numbers that is the usual order of a row.  Integers are
// stored with an offset (128 or 8) and so are unsigned; those of Int4Min as they
// are.  Within the four bytes of eight 4-bit numbers, number 2i is nibble i and
// number 2i + 1 nibble i + 4: see unpack().
#pragma once
#include "common.cuh"

struct Dense { static constexpr int kBits = 16; static constexpr bool kScaled = false, kMinimum = false; };
struct Int8 { static constexpr int kBits = 8; static constexpr bool kScaled = true, kMinimum = false; };
struct Int4 { static constexpr int kBits = 4; static constexpr bool kScaled = true, kMinimum = false; };
struct Int4Min { static constexpr int kBits = 4; static constexpr bool kScaled = true, kMinimum = true; };

template <typename W> constexpr int kGroups = 16 / W::kBits;            // groups of 32 in a chunk: 1, 2, 4
template <typename W> constexpr int kUnitBytes = W::kBits;              // bytes of 8 numbers: 16, 8, 4

// Where number `column` (a multiple of 8) of a row lies, in bytes from the row's start.
template <typename W> __device__ __forceinline__ int unit_offset(int column) {
  const int group = column / 32;
  return group / kGroups<W> * 64 + column % 32 / 8 * 16 + group % kGroups<W> * kUnitBytes<W>;
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

// Eight numbers of a group as four pairs of T, from their kUnitBytes bytes in `words`.  Integers come out exactly,
// without their scale.  Integer-to-float conversions are slow, so integers are put
// into the low bits of a float's mantissa instead: 1024 + q is the half 0x6400 | q,
// 128 + q the bfloat16 0x4300 | q, 2^23 + q the float 0x4B000000 | q.  Subtracting
// the constant (with the offset) leaves q.
template <typename W, typename T> __device__ __forceinline__ void unpack(u32 (&pairs)[4], const u32* words) {
  if constexpr (W::kBits == 16) {
#pragma unroll
    for (int i = 0; i < 4; ++i) pairs[i] = words[i];
  } else if constexpr (W::kBits == 4) {
    constexpr u32 kMagic = kIsHalf<T> ? 0x64006400 : 0x43004300;
    constexpr u32 kOffset = W::kMinimum ? 0 : 0x00080008;
#pragma unroll
    for (int i = 0; i < 4; ++i) pairs[i] = subtract2<T>((words[0] >> 4 * i & 0x000f000f) | kMagic, kMagic | kOffset);
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

// A matrix [n][k] on the device.  Scales and minima are [n][chunks * kGroups].
template <typename W> struct Matrix {
  const u8* data;
  const half* scales;
  const half* minima;
  int k;
  __device__ __forceinline__ int chunks() const { return (k + 32 * kGroups<W> - 1) / (32 * kGroups<W>); }
  __device__ __forceinline__ long long row_bytes() const { return W::kScaled ? chunks() * 64ll : k * 2ll; }
  __device__ __forceinline__ long long groups() const { return (long long)chunks() * kGroups<W>; }
};

// Eight weights as floats, scaled.
template <typename W, typename T>
__device__ __forceinline__ void load_weights8(float (&w)[8], const Matrix<W>& m, long long row, int column) {
  constexpr int kWords = kUnitBytes<W> / 4;
  const Vec<u32, kWords> packed = load_vec<u32, kWords>(
      reinterpret_cast<const u32*>(m.data + row * m.row_bytes() + unit_offset<W>(column)));
  u32 pairs[4];
  unpack<W, T>(pairs, packed.v);
  const long long group = row * m.groups() + column / 32;
  const float scale = W::kScaled ? to_float(m.scales[group]) : 1, minimum = W::kMinimum ? to_float(m.minima[group]) : 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 pair = unpack2<T>(pairs[i]);
    w[2 * i] = pair.x, w[2 * i + 1] = pair.y;
    if (W::kScaled) w[2 * i] = w[2 * i] * scale + minimum, w[2 * i + 1] = w[2 * i + 1] * scale + minimum;
  }
}
