// mma.cuh — the warp-level instructions of Ampere (sm_80) and later, one function each.
//
// On a GPU each is a line of PTX.  Under the emulator (__SIMT__) the same
// function spells out what the hardware does, so the lane layouts below are
// tested documentation.  In all of them  g = lane / 4  and  t = lane % 4.
#pragma once
#include "common.cuh"

// Copy 16 bytes from global to shared memory without passing through registers.
__device__ __forceinline__ void cp_async_16(void* shared, const void* global) {
#ifdef __SIMT__
  // The copy may land at any time from here on; it's done here when waited for.
  for (const auto& copy : simt::self->copies)
    if (copy.dst == shared) simt::die("two copies under way to one address");
  simt::access(global, 16, simt::kRead);
  simt::access(shared, 16, simt::kCopy);
  simt::self->copies.push_back({shared, global, simt::self->copy_group});
#else
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"((u32)__cvta_generic_to_shared(shared)), "l"(global) : "memory");
#endif
}
__device__ __forceinline__ void cp_async_commit() {
#ifdef __SIMT__
  ++simt::self->copy_group;
#else
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}
// Wait until at most kPending of the committed groups are still under way.
template <int kPending> __device__ __forceinline__ void cp_async_wait() {
#ifdef __SIMT__
  auto& copies = simt::self->copies;
  size_t done = 0;
  for (; done < copies.size() && copies[done].group < simt::self->copy_group - kPending; ++done) {
    simt::access(copies[done].dst, 16, simt::kWrite);
    memcpy(copies[done].dst, copies[done].src, 16);
  }
  copies.erase(copies.begin(), copies.begin() + done);
#else
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
#endif
}

// Load four 8x8 matrices of 16-bit numbers.  Lane i passes the address of row
// i % 8 of matrix i / 8.  Lane gets numbers (g, 2t) and (g, 2t + 1) of each
// matrix; with kTranspose, numbers (2t, g) and (2t + 1, g).
template <bool kTranspose = false>
__device__ __forceinline__ void ldmatrix_x4(u32 (&r)[4], const void* shared_row) {
#ifdef __SIMT__
  struct Io { const void* row; u32* r; } mine{shared_row, r};
  simt::access(shared_row, 16, simt::kRead);
  simt::collective(kAllLanes, mine, "ldmatrix", __LINE__, [](Io** io, unsigned) SIMT_UNCHECKED {
    for (int lane = 0; lane < 32; ++lane)
      for (int m = 0; m < 4; ++m) {
        const int g = lane / 4, t = lane % 4;
        auto at = [&](int i, int j) SIMT_UNCHECKED { return u32(static_cast<const unsigned short*>(io[m * 8 + i]->row)[j]); };
        io[lane]->r[m] = kTranspose ? at(2 * t, g) | at(2 * t + 1, g) << 16 : at(g, 2 * t) | at(g, 2 * t + 1) << 16;
      }
  });
#else
  const u32 address = (u32)__cvta_generic_to_shared(shared_row);
  if (kTranspose)
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address) : "memory");
  else
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address) : "memory");
#endif
}

// d[16x8] += a[16x16] * b[16x8], with two 16-bit numbers per register:
//   a[0] = (g, 2t..)  a[1] = (g + 8, 2t..)  a[2] = (g, 2t + 8..)  a[3] = (g + 8, 2t + 8..)
//   b[0] = rows 2t, 2t + 1 of column g      b[1] = rows 2t + 8, 2t + 9 of column g
//   d[0], d[1] = (g, 2t), (g, 2t + 1)       d[2], d[3] = (g + 8, 2t), (g + 8, 2t + 1)
template <typename T>
__device__ __forceinline__ void mma_16x8x16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
#ifdef __SIMT__
  struct Io { float* d; const u32* a; u32 b[2]; } mine{d, a, {b0, b1}};
  simt::collective(kAllLanes, mine, "mma", __LINE__, [](Io** io, unsigned) SIMT_UNCHECKED {
    float a[16][16], b[16][8];
    auto number = [](u32 pair, int half) SIMT_UNCHECKED {
      unsigned short bits = pair >> 16 * half;
      return to_float(simt_bits<T>(bits));
    };
    for (int lane = 0; lane < 32; ++lane)
      for (int h = 0; h < 2; ++h) {
        const int g = lane / 4, t = lane % 4;
        for (int i = 0; i < 4; ++i) a[g + i % 2 * 8][2 * t + i / 2 * 8 + h] = number(io[lane]->a[i], h);
        for (int i = 0; i < 2; ++i) b[2 * t + i * 8 + h][g] = number(io[lane]->b[i], h);
      }
    for (int lane = 0; lane < 32; ++lane)
      for (int i = 0; i < 4; ++i)
        for (int k = 0; k < 16; ++k) io[lane]->d[i] += a[lane / 4 + i / 2 * 8][k] * b[k][lane % 4 * 2 + i % 2];
  });
#else
  if constexpr (kIsHalf<T>)
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  else
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#endif
}
