// simt_shared.h — shared memory between guard pages; races on it, and reads of what nobody has written.
#pragma once

#define SIMT_DYNAMIC_SHARED(type, name) \
  auto* name = reinterpret_cast<std::remove_reference_t<type>*>(simt::block.dynamic_shared)

extern "C" __attribute__((visibility("hidden"))) void* __dso_handle;    // in this library

namespace simt {

template <class T>
struct SharedVariable {             // one `static` of these per __shared__ declaration
  T* address = nullptr;
  unsigned epoch = 0;
  T& get() {
    if (epoch != block.epoch) {     // first use in this block: allocate
      size_t at = (block.static_used + 15) & ~size_t(15);
      if (at + sizeof(T) > (48 << 10)) die("static shared memory exceeds 48 KiB");
      block.static_used = at + sizeof(T);
      address = reinterpret_cast<T*>(block.static_shared + at);
      epoch = block.epoch;
    }
    return *address;
  }
};
#define SIMT_SHARED(type, name) \
  static simt::SharedVariable<type> name##_; auto& name = name##_.get()

inline char* guarded(size_t bytes) {    // pages that end at an inaccessible one
  bytes = (bytes + kPage - 1) / kPage * kPage;
  char* p = static_cast<char*>(mmap(nullptr, bytes + kPage, PROT_READ | PROT_WRITE,
                                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
  mprotect(p + bytes, kPage, PROT_NONE);
  return p + bytes;
}

// ---- every load and store ----------------------------------------------------
// The kernel is compiled with -fsanitize=thread but linked without its runtime:
// g++ calls the __tsan_ functions below at every load and store.
//
// Races on shared memory: two accesses to a byte by different threads, one of them a
// write, must have a __syncthreads() between them, or a __syncwarp() if the threads
// share a warp.  (Shuffles do not order memory.)  This does not depend on the schedule.
//
// Uninitialised memory: a byte of shared memory must have been written in this block, by
// a copy that has been waited for if by a copy, and a byte of an array on the device since
// the array was allocated.
//
// Blocks of one launch: what one wrote, another may read only after a __threadfence() and
// an atomic of the writer (its ticket), and an atomic and a __threadfence() of the reader.
// Where a single thread does that, a __syncthreads() orders it and what the others do.
enum Use { kRead, kWrite, kAtomic, kCopy };     // kCopy: a cp.async begins; it ends with a kWrite

struct Access { unsigned barriers, syncs; int32_t pc; uint16_t thread; bool copy; };    // pc: behind __dso_handle
struct Shadow { Access write, atomic, read, read_by_another_warp; };
static_assert(sizeof(Shadow) == 64);    // a cache line: most of the emulator's time goes into missing these
inline Shadow* shadow;              // for each byte: dynamic shared memory, then static

SIMT_UNCHECKED inline bool unordered(const Access& before) {
  Fiber& other = block.fibers[before.thread];
  return before.barriers == block.barriers && &other != self &&
         !(other.warp == self->warp && before.syncs != self->warp->syncs);
}

// fakecupy's arrays lie in a range of addresses.  At the same place of the range behind it
// stands whether, and by whom, a byte has been written.
inline char* device;
inline size_t device_span;
enum Origin : char { kNever, kBefore, kThisBlock, kOtherBlock, kReleased };     // kBefore: this launch, or by an atomic

struct Written { char* origin; size_t size; unsigned barriers; Fiber* thread; bool fenced, released; };
inline std::vector<Written> by_block, by_launch;

SIMT_UNCHECKED inline void fence() {
  block.fenced = true;
  for (Written& w : by_block) w.fenced |= w.thread == self || w.barriers < block.barriers;
  if (self->drew) self->acquired = true, block.acquired = block.barriers;
}
SIMT_UNCHECKED inline void draw() {                     // an atomic on device memory
  self->drew = true;
  if (block.fenced) for (Written& w : by_block) w.released |= w.fenced;
}
SIMT_UNCHECKED inline void end_of_block() {
  for (Written& w : by_block) memset(w.origin, w.released ? kReleased : kOtherBlock, w.size);
  by_launch.insert(by_launch.end(), by_block.begin(), by_block.end());
  by_block.clear();
}
SIMT_UNCHECKED inline void end_of_launch() {
  for (Written& w : by_launch) memset(w.origin, kBefore, w.size);
  by_launch.clear();
}

SIMT_UNCHECKED inline void device_access(const char* p, size_t size, Use use, void* pc) {
  char* written = const_cast<char*>(p) + device_span;
  if (block.copies && size <= sizeof self->copied) {    // what it moves is as written there as here
    memcpy(use == kRead ? self->copied : written, use == kRead ? written : self->copied, size);
    return;
  }
  const bool acquired = self->acquired || (block.acquired && block.barriers > block.acquired);
  for (size_t i = 0; i < size; ++i) {
    if (use != kWrite && written[i] == kNever) die("read of device memory that nobody has written, pc %p", pc);
    if (use == kRead && written[i] >= kOtherBlock && !(acquired && written[i] == kReleased))
      die("read of what another block has written, without the fences that it needs, pc %p", pc);
    if (use != kRead) written[i] = use == kWrite ? kThisBlock : kBefore;
  }
  if (use == kWrite) by_block.push_back({written, size, block.barriers, self, false, false});
  if (use == kAtomic) draw();
}

SIMT_UNCHECKED inline void access(const void* address, size_t size, Use use, void* pc) {
  const char* p = static_cast<const char*>(address);
  Shadow* cell;
  if (!self) return;
  if (size_t(p - (dynamic_end - kMaxShared)) < kMaxShared) {
    if (p < block.dynamic_shared) die("access before the start of dynamic shared memory, pc %p", pc);
    cell = shadow + (p - (dynamic_end - kMaxShared));
  } else if (size_t(p - block.static_shared) < (48 << 10)) {
    if (p + size > block.static_shared + block.static_used) die("access past static shared memory, pc %p", pc);
    cell = shadow + kMaxShared + (p - block.static_shared);
  } else {
    if (size_t(p - device) < device_span) device_access(p, size, use, pc);
    return;
  }
  char* base = reinterpret_cast<char*>(&__dso_handle);
  Access now{block.barriers, self->warp->syncs, int32_t(static_cast<char*>(pc) - base), uint16_t(self - block.fibers), use == kCopy};
  for (; size--; ++cell) {
    const char* what = nullptr;
    const Access* before = nullptr;
    if (unordered(cell->write)) before = &cell->write, what = "write";
    if (use != kAtomic && unordered(cell->atomic)) before = &cell->atomic, what = "atomic";
    if (use != kRead && unordered(cell->read)) before = &cell->read, what = "read";
    if (use != kRead && unordered(cell->read_by_another_warp)) before = &cell->read_by_another_warp, what = "read";
    if (before)
      die("race on shared memory: %s, pc %p; earlier %s by thread %u, pc %p",
          use == kRead ? "read" : use == kAtomic ? "atomic" : "write", pc, what, before->thread, base + before->pc);
    if (use == kRead || use == kAtomic) {
      if (cell->write.barriers < block.began) die("read of shared memory that nobody has written, pc %p", pc);
      if (cell->write.copy) die("read of shared memory that a copy is under way to, pc %p", pc);
    }
    if (use == kWrite || use == kCopy) cell->write = now;
    else if (use == kAtomic) cell->atomic = now;
    else {
      if (block.fibers[cell->read.thread].warp != self->warp) cell->read_by_another_warp = cell->read;
      cell->read = now;
    }
  }
}

SIMT_UNCHECKED __noinline__ inline void access(const void* address, size_t size, Use use) {
  access(address, size, use, __builtin_return_address(0));
}

}  // namespace simt

#define SIMT_HOOK(name, use, bytes)                                                                    \
  extern "C" SIMT_UNCHECKED __attribute__((visibility("hidden"))) void __tsan_##name(void* p) {                       \
    simt::access(p, bytes, simt::use, __builtin_return_address(0));                                    \
  }
#define SIMT_HOOKS(n)                                                                                  \
  SIMT_HOOK(read##n, kRead, n) SIMT_HOOK(write##n, kWrite, n)                                          \
  SIMT_HOOK(unaligned_read##n, kRead, n) SIMT_HOOK(unaligned_write##n, kWrite, n)
SIMT_HOOKS(1) SIMT_HOOKS(2) SIMT_HOOKS(4) SIMT_HOOKS(8) SIMT_HOOKS(16)
#define SIMT_RANGE_HOOK(name, use)                                                                     \
  extern "C" SIMT_UNCHECKED __attribute__((visibility("hidden"))) void __tsan_##name(void* p, size_t bytes) {         \
    simt::access(p, bytes, simt::use, __builtin_return_address(0));                                    \
  }
SIMT_RANGE_HOOK(read_range, kRead) SIMT_RANGE_HOOK(write_range, kWrite)
extern "C" __attribute__((visibility("hidden"))) void __tsan_init() {}

