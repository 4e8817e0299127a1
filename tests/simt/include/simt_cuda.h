// simt_cuda.h — CUDA's built-in names for code that runs under simt.h.
#pragma once

#define threadIdx (simt::self->tid)
#define blockIdx (simt::block.idx)
#define blockDim (simt::block.dim)
#define gridDim (simt::block.grid)
#define SIMT_LINE int line = __builtin_LINE()

// ---- vector types ----
#define SIMT_VECTORS(T, name)                                                       \
  struct alignas(2 * sizeof(T)) name##2 { T x, y; };                                \
  struct alignas(sizeof(T) == 8 ? 16 : 4 * sizeof(T)) name##4 { T x, y, z, w; };    \
  inline name##2 make_##name##2(T x, T y) { return {x, y}; }                        \
  inline name##4 make_##name##4(T x, T y, T z, T w) { return {x, y, z, w}; }
using uchar = unsigned char; using ushort = unsigned short; using uint = unsigned int;
struct float3 { float x, y, z; }; struct int3 { int x, y, z; };
SIMT_VECTORS(uint, uint) SIMT_VECTORS(float, float) SIMT_VECTORS(double, double) SIMT_VECTORS(int, int)
SIMT_VECTORS(short, short) SIMT_VECTORS(signed char, char) SIMT_VECTORS(uchar, uchar) SIMT_VECTORS(ushort, ushort)

// ---- barriers and fences ----
inline void __syncthreads(SIMT_LINE) { simt::barrier("__syncthreads", line); }
inline int __syncthreads_count(int p, SIMT_LINE) {
  if (p) ++simt::block.vote;
  simt::barrier("__syncthreads_count", line);
  int n = simt::block.vote;
  simt::barrier("__syncthreads_count", line);
  simt::block.vote = 0;
  simt::barrier("__syncthreads_count", line);
  return n;
}
inline int __syncthreads_or(int p, SIMT_LINE) { return __syncthreads_count(p, line) != 0; }
inline int __syncthreads_and(int p, SIMT_LINE) { return __syncthreads_count(!p, line) == 0; }
inline void __threadfence() { simt::fence(); }
inline void __threadfence_block() {}

// ---- warp collectives ----
namespace simt {
struct Shuffle { const void* value; void* result; int source; };
template <class T> SIMT_UNCHECKED T shuffle(unsigned mask, T value, int source, const char* what, int line) {
  T result;
  Shuffle mine{&value, &result, source};
  collective(mask, mine, what, line, [](Shuffle** io, unsigned m) SIMT_UNCHECKED {
    for (int i = 0; i < 32; ++i)
      if (m >> i & 1) {
        int from = io[i]->source;   // reading a lane outside the mask is undefined on a GPU: 0xFF here
        if (m >> from & 1) memcpy(io[i]->result, io[from]->value, sizeof(T));
        else memset(io[i]->result, 0xFF, sizeof(T));
      }
  });
  return result;
}
struct Vote { unsigned value, result; };
template <class F> unsigned vote(unsigned mask, unsigned value, const char* what, int line, F reduce) {
  Vote mine{value, 0};
  collective(mask, mine, what, line, [reduce](Vote** io, unsigned m) SIMT_UNCHECKED { reduce(io, m); });
  return mine.result;
}
template <class F> unsigned reduce(unsigned mask, unsigned value, const char* what, int line, F join) {
  return vote(mask, value, what, line, [join](Vote** io, unsigned m) SIMT_UNCHECKED {
    unsigned all = io[__builtin_ctz(m)]->value;
    for (int i = __builtin_ctz(m) + 1; i < 32; ++i) if (m >> i & 1) all = join(all, io[i]->value);
    for (int i = 0; i < 32; ++i) if (m >> i & 1) io[i]->result = all;
  });
}
}  // namespace simt

inline void __syncwarp(unsigned mask = ~0u, SIMT_LINE) {
  char none = 0;
  simt::collective(mask, none, "__syncwarp", line, [](char**, unsigned) { ++simt::self->warp->syncs; });
}
template <class T> T __shfl_sync(unsigned mask, T v, int source, int width = 32, SIMT_LINE) {
  int lane = simt::self->lane;
  return simt::shuffle(mask, v, (lane & ~(width - 1)) | (source & (width - 1)), "__shfl_sync", line);
}
template <class T> T __shfl_xor_sync(unsigned mask, T v, int bits, int width = 32, SIMT_LINE) {
  int lane = simt::self->lane, source = lane ^ bits;   // a higher segment: keep your own
  return simt::shuffle(mask, v, source / width > lane / width ? lane : source, "__shfl_xor_sync", line);
}
template <class T> T __shfl_down_sync(unsigned mask, T v, unsigned delta, int width = 32, SIMT_LINE) {
  int lane = simt::self->lane, source = lane + int(delta);
  return simt::shuffle(mask, v, source / width != lane / width ? lane : source, "__shfl_down_sync", line);
}
template <class T> T __shfl_up_sync(unsigned mask, T v, unsigned delta, int width = 32, SIMT_LINE) {
  int lane = simt::self->lane, source = lane - int(delta);
  return simt::shuffle(mask, v, source < (lane & ~(width - 1)) ? lane : source, "__shfl_up_sync", line);
}
inline unsigned __ballot_sync(unsigned mask, int p, SIMT_LINE) {
  return simt::reduce(mask, p ? 1u << simt::self->lane : 0u, "__ballot_sync", line, [](unsigned a, unsigned b) { return a | b; });
}
inline int __any_sync(unsigned mask, int p, SIMT_LINE) { return __ballot_sync(mask, p, line) != 0; }
inline int __all_sync(unsigned mask, int p, SIMT_LINE) { return __ballot_sync(mask, !p, line) == 0; }
#define SIMT_REDUCE(name, T, expr)                                                              \
  inline T name(unsigned mask, T v, SIMT_LINE) {                                                \
    return simt::reduce(mask, v, #name, line, [](unsigned ua, unsigned ub) { T a = ua, b = ub; return unsigned(expr); }); \
  }
SIMT_REDUCE(__reduce_add_sync, unsigned, a + b) SIMT_REDUCE(__reduce_add_sync, int, a + b)
SIMT_REDUCE(__reduce_max_sync, unsigned, a > b ? a : b) SIMT_REDUCE(__reduce_max_sync, int, a > b ? a : b)
SIMT_REDUCE(__reduce_min_sync, unsigned, a < b ? a : b) SIMT_REDUCE(__reduce_min_sync, int, a < b ? a : b)
inline unsigned __match_any_sync(unsigned mask, unsigned v, SIMT_LINE) {
  return simt::vote(mask, v, "__match_any_sync", line, [](simt::Vote** io, unsigned m) SIMT_UNCHECKED {
    for (int i = 0; i < 32; ++i) if (m >> i & 1)
      for (int j = 0; j < 32; ++j) if (m >> j & 1 && io[i]->value == io[j]->value) io[i]->result |= 1u << j;
  });
}
inline unsigned __activemask() { return simt::self->warp->live; }

// ---- atomics (one OS thread: plain reads and writes) ----
#define SIMT_ATOMIC(name, expr)                                                                   \
  template <class T, class U> SIMT_UNCHECKED __noinline__ T name(T* p, U u) {                                  \
    simt::access(p, sizeof(T), simt::kAtomic, __builtin_return_address(0));                       \
    T old = *p, v = T(u); (void)v; *p = (expr); return old;                                       \
  }
SIMT_ATOMIC(atomicAdd, old + v) SIMT_ATOMIC(atomicSub, old - v) SIMT_ATOMIC(atomicExch, v)
SIMT_ATOMIC(atomicMax, old > v ? old : v) SIMT_ATOMIC(atomicMin, old < v ? old : v)
SIMT_ATOMIC(atomicOr, old | v) SIMT_ATOMIC(atomicAnd, old & v) SIMT_ATOMIC(atomicInc, old >= v ? 0 : old + 1)
template <class T> SIMT_UNCHECKED __noinline__ T atomicCAS(T* p, T compare, T v) {
  simt::access(p, sizeof(T), simt::kAtomic, __builtin_return_address(0));
  T old = *p; if (old == compare) *p = v; return old;
}

// ---- loads, bit casts, integer intrinsics ----
template <class T> T __ldg(const T* p) { return *p; }
template <class T> T __ldcs(const T* p) { return *p; }
template <class T> T __ldcg(const T* p) { return *p; }
template <class T> void __stcs(T* p, T v) { *p = v; }
template <class To, class From> To simt_bits(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to; memcpy(&to, &from, sizeof to); return to;
}
inline float __uint_as_float(unsigned v) { return simt_bits<float>(v); }
inline unsigned __float_as_uint(float v) { return simt_bits<unsigned>(v); }
inline float __int_as_float(int v) { return simt_bits<float>(v); }
inline int __float_as_int(float v) { return simt_bits<int>(v); }
inline int __popc(unsigned v) { return __builtin_popcount(v); }
inline int __clz(int v) { return v ? __builtin_clz(v) : 32; }
inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) {   // prmt: four bytes out of the eight of y:x
  const uint64_t bytes = uint64_t(y) << 32 | x;
  unsigned result = 0;
  for (int i = 0; i < 4; ++i) result |= unsigned(bytes >> (selector >> 4 * i & 7) * 8 & 255) << 8 * i;
  return result;
}
inline int __ffs(int v) { return __builtin_ffs(v); }
inline int __dp4a(int a, int b, int c) {
  for (int i = 0; i < 4; ++i) c += int(int8_t(a >> 8 * i)) * int(int8_t(b >> 8 * i));
  return c;
}
template <class T, class U> constexpr std::common_type_t<T, U> min(T a, U b) { return b < a ? b : a; }
template <class T, class U> constexpr std::common_type_t<T, U> max(T a, U b) { return a < b ? b : a; }
inline size_t __cvta_generic_to_shared(const void* p) { return reinterpret_cast<size_t>(p); }

// ---- float intrinsics (fast-math variants are computed exactly) ----
using std::isinf; using std::isnan; using std::isfinite;
inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
inline float __expf(float x) { return expf(x); }
inline float __logf(float x) { return logf(x); }
inline float __exp2f(float x) { return exp2f(x); }
inline float __log2f(float x) { return log2f(x); }
inline float __powf(float x, float y) { return powf(x, y); }
inline float __sinf(float x) { return sinf(x); }
inline float __cosf(float x) { return cosf(x); }
inline float __fdividef(float x, float y) { return x / y; }
inline float __frcp_rn(float x) { return 1.0f / x; }
inline float __fadd_rn(float x, float y) { return x + y; }
inline float __fsub_rn(float x, float y) { return x - y; }
inline float __fmul_rn(float x, float y) { return x * y; }
inline float __fdiv_rn(float x, float y) { return x / y; }
inline float __fmaf_rn(float x, float y, float z) { return fmaf(x, y, z); }
inline float __saturatef(float x) { return fminf(fmaxf(x, 0.0f), 1.0f); }
inline int __float2int_rn(float x) { return int(nearbyintf(x)); }

#include "simt_half.h"
