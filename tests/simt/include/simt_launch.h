// simt_launch.h — run a grid block by block, and the C interface that emulator.py calls.
#pragma once

namespace simt {

inline void fiber_main() {
  block.kernel(block.args);
  Fiber& f = *self;
  for (Rendezvous& r : f.warp->pending)
    if (r.mask >> f.lane & 1) die("thread exits while other lanes wait for it in %s at line %d", r.what, r.line);
  if (block.at_barrier) die("barrier divergence: thread exits while %u threads wait at a barrier", block.at_barrier);
  set_state(f, State::kExited);
  f.warp->live &= ~(1u << f.lane);
  --block.live;
  park();
  __builtin_unreachable();
}

SIMT_UNCHECKED inline void shuffle(unsigned short* order, unsigned n, unsigned seed) {    // Fisher-Yates on an LCG (Knuth's MMIX)
  uint64_t state = seed;
  for (unsigned i = n - 1; i > 0; --i) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    std::swap(order[i], order[(state >> 33) % (i + 1)]);
  }
}

SIMT_UNCHECKED inline void run_block(int order, unsigned seed) {
  Block& b = block;
  unsigned n = b.threads;
  b.live = n, b.at_barrier = 0, b.vote = 0, b.static_used = 0, b.greedy = order != 0, ++b.epoch, b.began = ++b.barriers, b.acquired = 0, b.fenced = false;
  for (Warp& w : b.warps) w = Warp{};
  for (unsigned i = 0; i < n; ++i) {
    Fiber& f = b.fibers[i];
    f.tid = {i % b.dim.x, i / b.dim.x % b.dim.y, i / b.dim.x / b.dim.y};
    f.lane = i % 32, f.warp = &b.warps[i / 32], f.what = "", f.line = 0;
    f.copies.clear(), f.copy_group = 0, f.drew = f.acquired = false;
    f.warp->exists |= 1u << f.lane, f.warp->live = f.warp->exists;
    f.sp = new_stack(stacks + (i + 1) * kStackBytes, fiber_main);
    b.order[i] = order == 1 ? n - 1 - i : i;
  }
  if (order == 2) shuffle(b.order, n, seed + b.epoch);
  for (unsigned i = 0; i < n; ++i) b.position[b.order[i]] = i;
  memset(b.ready, 0, sizeof b.ready);
  for (unsigned i = 0; i < n; ++i) set_state(b.fibers[i], State::kReady);
  self = &b.fibers[b.order[0]];
  simt_switch(&main_sp, self->sp);
  self = nullptr;
}

// The k-th block to run.  A step that shares no factor with their number reaches each once.
inline size_t block_at(size_t k, size_t blocks, int order, unsigned seed) {
  size_t step = blocks / 3 + seed % blocks + 1;
  while (std::gcd(step, blocks) != 1) ++step;
  return order == 0 ? k : order == 1 ? blocks - 1 - k : (k * step + seed) % blocks;
}

// order: 0 in turn, 1 by priority from the last thread, 2 by random priority; blocks run from the first, from the last,
// criss-cross.  copies: see Block.  Returns 0, or 1 with a message in `error`.
inline int launch(void (*kernel)(void**), const unsigned* dims, size_t shared, void** args, int order,
                  unsigned seed, bool copies, char* error) {
  Block& b = block;
  if (!stacks) {
    stacks = guarded(kStackBytes * kMaxThreads) - kStackBytes * kMaxThreads;
    for (size_t i = 0; i < kMaxThreads; ++i) mprotect(stacks + i * kStackBytes, kPage, PROT_NONE);
    b.static_shared = guarded(48 << 10) - (48 << 10);
    dynamic_end = guarded(kMaxShared);
    shadow = static_cast<Shadow*>(mmap(nullptr, (kMaxShared + (48 << 10)) * sizeof(Shadow), PROT_READ | PROT_WRITE,
                                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
  }
  static char signal_stack[64 << 10];
  stack_t alternate{}, old_stack;
  alternate.ss_sp = signal_stack, alternate.ss_size = sizeof signal_stack;
  sigaltstack(&alternate, &old_stack);
  const int signals[] = {SIGSEGV, SIGBUS, SIGILL, SIGFPE};
  struct sigaction action{}, old[4];
  action.sa_sigaction = on_fault, action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
  for (int i = 0; i < 4; ++i) sigaction(signals[i], &action, &old[i]);

  b.grid = dim3(dims[0], dims[1], dims[2]), b.dim = dim3(dims[3], dims[4], dims[5]);
  b.threads = b.dim.x * b.dim.y * b.dim.z;
  b.kernel = kernel, b.args = args, b.copies = copies;
  b.dynamic_shared = dynamic_end - (shared + 15) / 16 * 16;
  error_text = error, failed = false;
  size_t blocks = size_t(b.grid.x) * b.grid.y * b.grid.z;
  for (size_t k = 0; k < blocks && !failed; ++k) {
    size_t i = block_at(k, blocks, order, seed);
    b.idx = dim3(i % b.grid.x, i / b.grid.x % b.grid.y, i / b.grid.x / b.grid.y);
    run_block(order, seed);
    end_of_block();
  }
  end_of_launch();
  for (int i = 0; i < 4; ++i) sigaction(signals[i], &old[i], nullptr);
  sigaltstack(&old_stack, nullptr);
  return failed;
}

// ---- kernel table: signatures are read off the C++ types, nothing is parsed ----
template <class T, class = void> struct Code { static std::string get() { return "s" + std::to_string(sizeof(T)); } };
template <class T> struct Code<T, std::void_t<decltype(T::simt_code)>> { static std::string get() { return T::simt_code; } };
template <class T> std::string type_code() {
  if constexpr (std::is_pointer_v<T>) return "*" + type_code<std::remove_cv_t<std::remove_pointer_t<T>>>();
  else if constexpr (std::is_void_v<T>) return "v";
  else if constexpr (std::is_floating_point_v<T>) return "f" + std::to_string(sizeof(T));
  else if constexpr (std::is_integral_v<T>) return (std::is_signed_v<T> ? "i" : "u") + std::to_string(sizeof(T));
  else return Code<T>::get();
}

template <class... A> std::string signature(void (*)(A...)) {
  std::string s;
  ((s += type_code<A>() + ","), ...);
  return s;
}

template <class... A, size_t... I>
void call(void (*kernel)(A...), void** args, std::index_sequence<I...>) { kernel(*static_cast<A*>(args[I])...); }
template <class... A>
void call(void (*kernel)(A...), void** args) { call(kernel, args, std::index_sequence_for<A...>{}); }

struct Entry { const char* name; std::string signature; void (*thunk)(void**); };
#define SIMT_ENTRY(name, ...) \
  simt::Entry { name, simt::signature(&__VA_ARGS__), [](void** a) { simt::call(&__VA_ARGS__, a); } }

}  // namespace simt

// The library's C interface, for the entries listed after the kernel source.
#define SIMT_MODULE(...)                                                                                     \
  static const simt::Entry simt_entries[] = {__VA_ARGS__};                                                   \
  extern "C" const char* simt_signature(unsigned i) { return simt_entries[i].signature.c_str(); }            \
  extern "C" void simt_device(char* memory, size_t span) { simt::device = memory, simt::device_span = span; } \
  extern "C" int simt_launch(unsigned i, const unsigned* dims, size_t shared, void** args, int order,        \
                             unsigned seed, int copies, char* error) {                                       \
    return simt::launch(simt_entries[i].thunk, dims, shared, args, order, seed, copies, error);              \
  }

