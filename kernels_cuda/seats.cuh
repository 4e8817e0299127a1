// seats.cuh — what penalties remember between steps: how often a seat's request has made each token.
//
// counts is [seats][vocab] of 16 bits: bit 15 says that the token is in the prompt, the
// rest counts it in the output and stays at its most.
#pragma once
#include "common.cuh"

constexpr u16 kInPrompt = 0x8000, kMostMade = 0x7fff;

// Others may count the same token at the same time.
__device__ __forceinline__ void count_token(u16* count) {
  u16 old, seen = *count;
  do old = seen;
  while ((old & kMostMade) < kMostMade && (seen = atomicCAS(count, old, u16(old + 1))) != old);
}
