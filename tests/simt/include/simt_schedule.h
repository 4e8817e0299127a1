// simt_schedule.h — which fiber runs next, and the places where fibers wait for each other.
#pragma once

namespace simt {

SIMT_UNCHECKED inline void switch_to(Fiber& next) {
  Fiber* old = self;
  if (&next == old) return;
  self = &next;
  simt_switch(&old->sp, next.sp);
}

SIMT_UNCHECKED inline void set_state(Fiber& f, State state) {
  unsigned at = block.position[&f - block.fibers];
  uint64_t bit = uint64_t(1) << at % 64;
  f.state = state;
  block.ready[at / 64] = state == State::kReady ? block.ready[at / 64] | bit : block.ready[at / 64] & ~bit;
}

SIMT_UNCHECKED inline Fiber* next_ready(unsigned at) {     // the first in the order from place `at` on, then from 0
  constexpr unsigned n = kMaxThreads / 64;
  uint64_t word = block.ready[at / 64] & ~uint64_t(0) << at % 64;
  for (unsigned k = 0, i = at / 64; k <= n; ++k, i = (i + 1) % n, word = block.ready[i])
    if (word) return &block.fibers[block.order[i * 64 + __builtin_ctzll(word)]];
  return nullptr;
}

SIMT_UNCHECKED inline void park() {                // run somebody else until this fiber is ready again
  // Forward: in turn.  Otherwise the order is one of priority: whoever comes first
  // and can run does, so some warps race ahead as far as the barriers let them.
  unsigned n = block.threads, own = block.position[self - block.fibers];
  if (Fiber* next = next_ready(block.greedy || own + 1 == n ? 0 : own + 1)) return switch_to(*next);
  if (block.live == 0) leave();
  std::string who;                  // nobody can run: say where everyone waits
  for (unsigned i = 0; i < n && who.size() < 600; ++i) {
    Fiber &f = block.fibers[i], &before = block.fibers[i ? i - 1 : 0];
    if (f.state == State::kExited || (i && f.line == before.line && f.state == before.state)) continue;
    who += " thread " + std::to_string(i) + " waits in " + f.what + " at line " + std::to_string(f.line) + ";";
  }
  die("deadlock:%s", who.c_str());
}

SIMT_UNCHECKED inline void release_barrier() {
  for (unsigned i = 0; i < block.threads; ++i)
    if (block.fibers[i].state == State::kAtBarrier) set_state(block.fibers[i], State::kReady);
  block.at_barrier = 0;
  ++block.barriers;
}

SIMT_UNCHECKED inline void barrier(const char* what, int line) {
  if (block.live != block.threads)
    die("barrier divergence: %s at line %d, but %u threads have exited", what, line, block.threads - block.live);
  if (block.at_barrier) {
    Fiber& f = *block.waiting;
    if (f.line != line || strcmp(f.what, what))
      die("barrier divergence: %s at line %d, but thread %u waits in %s at line %d", what, line,
          unsigned(&f - block.fibers), f.what, f.line);
  }
  self->what = what, self->line = line;
  set_state(*self, State::kAtBarrier);
  block.waiting = self;
  if (++block.at_barrier == block.threads) return release_barrier();
  park();
}

// Lanes named in `mask` meet; the last one to arrive runs complete(io, mask) for all.
template <class IO, class F>
SIMT_UNCHECKED inline void collective(unsigned mask, IO& mine, const char* what, int line, F complete) {
  Warp& warp = *self->warp;
  unsigned bit = 1u << self->lane;
  mask &= warp.exists;              // the last warp of a block may be partial
  if (!(mask & bit)) die("%s at line %d: the mask does not name the calling lane", what, line);
  if (mask & ~warp.live) die("%s at line %d: the mask names a lane that has exited", what, line);
  Rendezvous *meet = nullptr, *free = nullptr;
  for (Rendezvous& r : warp.pending) {
    if (!r.mask) { if (!free) free = &r; continue; }
    if (r.mask == mask) meet = &r;
  }
  if (!meet) {
    if (!(meet = free)) die("%s at line %d: more than 8 subwarps", what, line);
    meet->mask = mask, meet->arrived = 0, meet->what = what, meet->line = line;
  }
  if (meet->line != line || strcmp(meet->what, what))
    die("warp divergence: %s at line %d, but other lanes are in %s at line %d", what, line, meet->what, meet->line);
  meet->io[self->lane] = &mine;
  meet->arrived |= bit;
  if (meet->arrived == mask) {
    meet->mask = 0;
    complete(reinterpret_cast<IO**>(meet->io), mask);
    Fiber* base = self - self->lane;
    for (int i = 0; i < 32; ++i)
      if (mask >> i & 1) set_state(base[i], State::kReady);
  } else {
    self->what = what, self->line = line;
    set_state(*self, State::kInWarp);
    park();
  }
}

}  // namespace simt
