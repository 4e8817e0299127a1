// copy_blocks.cu — copy KV blocks, all layers at once: a request that forks gets its own copy of the last block.
//
// pools[i] is the address of layer i's cache, block_bytes[i] the size of a block in
// it.  Bytes that must move: each block once in and once out.
#include "common.cuh"

__global__ void copy_blocks(const u64* __restrict__ pools, const int* __restrict__ block_bytes,
                                       const int* __restrict__ pairs) {           // [copies][source, destination]
  char* pool = reinterpret_cast<char*>(pools[blockIdx.y]);
  const long long bytes = block_bytes[blockIdx.y];
  const char* source = pool + pairs[2 * blockIdx.x] * bytes;
  char* target = pool + pairs[2 * blockIdx.x + 1] * bytes;
  for (int i = threadIdx.x * 16; i < bytes; i += blockDim.x * 16)
    store_vec<char, 16>(target + i, load_vec<char, 16>(source + i));
}
