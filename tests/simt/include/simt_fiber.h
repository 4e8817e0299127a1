// simt_fiber.h — a block's threads as fibers: their state, the switch between them, and how errors leave one.
#pragma once

struct uint3 { unsigned x, y, z; };
struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
inline constexpr int warpSize = 32;

namespace simt {

constexpr size_t kStackBytes = 128 << 10, kMaxThreads = 1024, kPage = 4096;
constexpr size_t kMaxShared = 228 << 10;

enum class State : uint8_t { kReady, kAtBarrier, kInWarp, kExited };

struct AsyncCopy { void* dst; const void* src; int group; };   // 16 bytes

struct Rendezvous {                 // one warp collective that lanes are joining
  unsigned mask = 0, arrived = 0;
  const char* what = "";
  int line = 0;
  void* io[32];
};

struct Warp {
  unsigned exists = 0, live = 0, syncs = 0;
  Rendezvous pending[8];
};

struct Fiber {
  void* sp;
  uint3 tid;
  int lane, line;
  State state;
  Warp* warp;
  const char* what;                 // where it waits, for error messages
  int copy_group;
  std::vector<AsyncCopy> copies;    // cp.async not yet waited for
  bool drew, acquired;              // made an atomic on device memory; and a fence after that
  char copied[16];                  // whether the bytes that it read last have been written, see Block::copies
};

struct Block {
  dim3 grid, dim, idx;              // gridDim, blockDim, blockIdx
  unsigned threads, live, at_barrier, epoch;
  unsigned barriers;                // passed so far, all blocks: what lies between two counts is ordered
  unsigned began, acquired;         // how many when this block began; when a thread of it acquired, or 0
  bool fenced;                      // whether there was a __threadfence()
  int vote;
  bool greedy, copies;              // copies: the kernel moves memory as it is, initialised or not
  char *dynamic_shared, *static_shared;
  size_t static_used;
  Fiber fibers[kMaxThreads];
  Warp warps[kMaxThreads / 32];
  unsigned short order[kMaxThreads], position[kMaxThreads];
  uint64_t ready[kMaxThreads / 64]; // a bit per place in the order: whether the fiber there is kReady
  Fiber* waiting;                   // one that is at the barrier, if any is
  void (*kernel)(void**);
  void** args;
};

inline Block block;
inline Fiber* self = nullptr;       // the running fiber
inline void* main_sp;
inline char* stacks;
inline char* dynamic_end;           // where dynamic shared memory ends, at a guard page
inline char* error_text;            // the caller's buffer of 1024 bytes
inline bool failed;

// ---- context switch ------------------------------------------------------
// Saves the callee-saved registers on the old stack, restores them from the new.
extern "C" void simt_switch(void** save_sp, void* load_sp) __attribute__((visibility("hidden")));
#if defined(__x86_64__)
asm(R"(
.text
.hidden simt_switch
.globl simt_switch
.type simt_switch,@function
simt_switch:
  pushq %rbp; pushq %rbx; pushq %r12; pushq %r13; pushq %r14; pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15; popq %r14; popq %r13; popq %r12; popq %rbx; popq %rbp
  ret
.size simt_switch,.-simt_switch
)");
inline void* new_stack(char* top, void (*entry)()) {
  void** sp = reinterpret_cast<void**>(top);
  *--sp = nullptr;                                  // entry's return address
  *--sp = reinterpret_cast<void*>(entry);
  for (int i = 0; i < 6; ++i) *--sp = nullptr;      // rbp rbx r12..r15
  return sp;
}
#elif defined(__aarch64__)
asm(R"(
.text
.hidden simt_switch
.globl simt_switch
.type simt_switch,%function
simt_switch:
  sub sp, sp, #160
  stp x19, x20, [sp, #0];  stp x21, x22, [sp, #16]; stp x23, x24, [sp, #32]
  stp x25, x26, [sp, #48]; stp x27, x28, [sp, #64]; stp x29, x30, [sp, #80]
  stp d8, d9, [sp, #96];   stp d10, d11, [sp, #112]; stp d12, d13, [sp, #128]; stp d14, d15, [sp, #144]
  mov x9, sp
  str x9, [x0]
  mov sp, x1
  ldp x19, x20, [sp, #0];  ldp x21, x22, [sp, #16]; ldp x23, x24, [sp, #32]
  ldp x25, x26, [sp, #48]; ldp x27, x28, [sp, #64]; ldp x29, x30, [sp, #80]
  ldp d8, d9, [sp, #96];   ldp d10, d11, [sp, #112]; ldp d12, d13, [sp, #128]; ldp d14, d15, [sp, #144]
  add sp, sp, #160
  ret
)");
inline void* new_stack(char* top, void (*entry)()) {
  void** sp = reinterpret_cast<void**>(top) - 20;
  memset(sp, 0, 20 * sizeof *sp);
  sp[11] = reinterpret_cast<void*>(entry);          // x30
  return sp;
}
#endif

// ---- errors --------------------------------------------------------------
[[noreturn]] inline void leave() {                  // abandon the block
  void* unused;
  simt_switch(&unused, main_sp);
  __builtin_unreachable();
}

[[noreturn]] __attribute__((format(printf, 1, 2))) inline void die(const char* format, ...) {
  failed = true;
  int n = 0;
  if (self)
    n = snprintf(error_text, 1024, "block (%u,%u,%u) thread (%u,%u,%u): ", block.idx.x, block.idx.y,
                 block.idx.z, self->tid.x, self->tid.y, self->tid.z);
  va_list list;
  va_start(list, format);
  vsnprintf(error_text + n, 1024 - n, format, list);
  va_end(list);
  leave();
}

inline int fault_signal;
inline void *fault_address, *fault_pc;
inline char fault_stack[64 << 10] __attribute__((aligned(16)));

[[noreturn]] inline void report_fault() {
  const char* what = fault_signal == SIGILL ? "misaligned access or array index out of bounds (sanitizer trap)"
                   : fault_signal == SIGFPE ? "integer division fault" : "illegal memory access";
  die("%s at address %p, pc %p", what, fault_address, fault_pc);
}

inline void on_fault(int sig, siginfo_t* info, void* context) {
  if (!self) { signal(sig, SIG_DFL); return; }      // not ours: let it kill the process
  fault_signal = sig;
  fault_address = info->si_addr;
  auto* machine = &static_cast<ucontext_t*>(context)->uc_mcontext;
  char* top = fault_stack + sizeof fault_stack;     // continue in report_fault()
#if defined(__x86_64__)
  fault_pc = reinterpret_cast<void*>(machine->gregs[REG_RIP]);
  machine->gregs[REG_RIP] = reinterpret_cast<greg_t>(&report_fault);
  machine->gregs[REG_RSP] = reinterpret_cast<greg_t>(top - 8);
#elif defined(__aarch64__)
  fault_pc = reinterpret_cast<void*>(machine->pc);
  machine->pc = reinterpret_cast<uintptr_t>(&report_fault);
  machine->sp = reinterpret_cast<uintptr_t>(top);
#endif
}

}  // namespace simt
