// seats.cu — what penalties remember between steps: how often a seat's request has made each token.
//
// counts is [seats][stride] of 16 bits: bit 15 says that the token is in the prompt,
// the rest counts it in the output.  A seat is rebuilt from its known tokens when a
// penalised request is admitted, again after preemption; sample() counts what it draws.
// Bytes that must move: 2 * V per reset, and the tokens.
#include "common.cuh"

__global__ void reset_seat(u32* __restrict__ row,            // the seat's counts, two to a word
                                      const int* __restrict__ tokens,   // prompt, then output
                                      int prompt_len, int len, int words) {
  for (int i = threadIdx.x; i < words; i += blockDim.x) row[i] = 0;
  __syncthreads();
  for (int i = threadIdx.x; i < len; i += blockDim.x) {
    const int token = tokens[i], shift = token % 2 * 16;
    if (i < prompt_len) atomicOr(&row[token / 2], 0x8000u << shift);
    else atomicAdd(&row[token / 2], 1u << shift);
  }
}
