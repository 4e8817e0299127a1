// simt_half.h — half and bfloat16: storage types, arithmetic in float, one rounding per operation.
#pragma once

struct __half {
  static constexpr const char* simt_code = "f2";
  _Float16 v;
  __half() = default;
  __half(float f) : v(f) {}
  __half(double f) : v(f) {}
  __half(int i) : v(float(i)) {}
  operator float() const { return v; }
};
struct __nv_bfloat16 {
  static constexpr const char* simt_code = "bf2";
  uint16_t bits;
  __nv_bfloat16() = default;
  __nv_bfloat16(float f) {          // round to nearest, ties to even
    uint32_t u = simt_bits<uint32_t>(f);
    bits = f != f ? 0x7FFF : (u + 0x7FFF + (u >> 16 & 1)) >> 16;
  }
  __nv_bfloat16(double f) : __nv_bfloat16(float(f)) {}
  __nv_bfloat16(int i) : __nv_bfloat16(float(i)) {}
  operator float() const { return simt_bits<float>(uint32_t(bits) << 16); }
};
struct alignas(4) __half2 { static constexpr const char* simt_code = "f2"; __half x, y; };
struct alignas(4) __nv_bfloat162 { static constexpr const char* simt_code = "bf2"; __nv_bfloat16 x, y; };
using half = __half; using half2 = __half2;
using nv_bfloat16 = __nv_bfloat16; using nv_bfloat162 = __nv_bfloat162;

inline float __half2float(__half h) { return h; }
inline __half __float2half(float f) { return f; }
inline __half __float2half_rn(float f) { return f; }
inline float __bfloat162float(__nv_bfloat16 h) { return h; }
inline __nv_bfloat16 __float2bfloat16(float f) { return f; }
inline __nv_bfloat16 __float2bfloat16_rn(float f) { return f; }
inline __half2 __floats2half2_rn(float x, float y) { return {x, y}; }
inline __nv_bfloat162 __floats2bfloat162_rn(float x, float y) { return {x, y}; }
inline float2 __half22float2(__half2 h) { return {h.x, h.y}; }
inline float2 __bfloat1622float2(__nv_bfloat162 h) { return {h.x, h.y}; }
#define SIMT_HALF(T, T2)                                                                          \
  inline T operator+(T a, T b) { return float(a) + float(b); }                                    \
  inline T operator-(T a, T b) { return float(a) - float(b); }                                    \
  inline T operator*(T a, T b) { return float(a) * float(b); }                                    \
  inline T operator/(T a, T b) { return float(a) / float(b); }                                    \
  inline T __hadd(T a, T b) { return a + b; }   inline T __hsub(T a, T b) { return a - b; }       \
  inline T __hmul(T a, T b) { return a * b; }   inline T __hdiv(T a, T b) { return a / b; }       \
  inline T __hfma(T a, T b, T c) { return fmaf(a, b, c); }                                        \
  inline T __hmax(T a, T b) { return fmaxf(a, b); } inline T __hmin(T a, T b) { return fminf(a, b); } \
  inline T2 __hadd2(T2 a, T2 b) { return {a.x + b.x, a.y + b.y}; }                                \
  inline T2 __hsub2(T2 a, T2 b) { return {a.x - b.x, a.y - b.y}; }                                \
  inline T2 __hmul2(T2 a, T2 b) { return {a.x * b.x, a.y * b.y}; }                                \
  inline T2 __hfma2(T2 a, T2 b, T2 c) { return {__hfma(a.x, b.x, c.x), __hfma(a.y, b.y, c.y)}; }
SIMT_HALF(__half, __half2) SIMT_HALF(__nv_bfloat16, __nv_bfloat162)
