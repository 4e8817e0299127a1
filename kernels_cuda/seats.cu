// seats.cu — a seat's counts anew, from the tokens that its request knows.
//
// Launched when a penalised request is admitted, again after preemption; from then on
// sample() counts what it draws.  Bytes that must move: 2 * V per reset, and the tokens.
#include "seats.cuh"

__global__ void reset_seat(u16* __restrict__ counts,         // the seat's
                           const int* __restrict__ tokens,   // prompt, then output
                           int prompt_len, int len, int vocab) {
  for (int i = threadIdx.x; i < vocab; i += blockDim.x) counts[i] = 0;
  __syncthreads();
  for (int i = threadIdx.x; i < prompt_len; i += blockDim.x) counts[tokens[i]] = kInPrompt;
  __syncthreads();
  for (int i = prompt_len + threadIdx.x; i < len; i += blockDim.x) count_token(counts + tokens[i]);
}
