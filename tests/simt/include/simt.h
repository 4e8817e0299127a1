// simt.h — run CUDA C++ kernels on the CPU, one fiber per CUDA thread.
//
// A kernel source is compiled by g++ behind this header.  Blocks run one after
// the other; inside a block every CUDA thread is a fiber with a stack of its
// own, so __syncthreads() and warp collectives are plain context switches.
// The program is single-threaded and therefore deterministic.
//
// Reported as errors: races on shared memory, reads of shared or device memory that
// nobody has written, or another block without a fence, barrier divergence (different call sites, or a thread that exits
// while others wait), divergent or ill-masked warp collectives, deadlock, faulting memory
// accesses (guard pages; traps from -fsanitize=alignment,bounds).  The order in which
// fibers run can be changed.
//
// Reading order: simt_fiber.h (threads), simt_schedule.h (barriers, collectives),
// simt_shared.h (shared memory, what is checked at every access), simt_launch.h, simt_cuda.h (CUDA's names).
#pragma once
#include <cmath>
#include <csignal>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <numeric>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

#define __SIMT__ 1
#define __global__
#define __device__
#define __host__
#define __constant__ static
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __align__(n) __attribute__((aligned(n)))
#define __launch_bounds__(...)
#define __grid_constant__
// Not to be seen by the race detector:
#define SIMT_UNCHECKED __attribute__((no_sanitize("thread")))
// __shared__ is rewritten before compilation (see build.py):
//   __shared__ T x[N];         ->  SIMT_SHARED(SIMT_TYPE(T [N]), x);
//   extern __shared__ T x[];   ->  SIMT_DYNAMIC_SHARED(T, x);
#define SIMT_TYPE(...) __VA_ARGS__

#include "simt_fiber.h"
#include "simt_schedule.h"
#include "simt_shared.h"
#include "simt_launch.h"
#include "simt_cuda.h"
