"""How data lies in memory: the sizes that kernels, packing and the recorder agree on.

Owns the constants and the few formulas, for Python and for jitted code alike. It must not know what is computed.

KV cache     [run of blocks][layer][kv head][K, V][RUN blocks] of 2 * BLOCK * D bytes, bfloat16: K [D/2][BLOCK
             tokens][2 dims], V [BLOCK/2 token pairs][D][2 tokens]. Both orders make a 64-byte load feed 16 lanes of
             vdpbf16ps: tokens for the scores, dims for the sum of values. A run is as long as the chunk that attention
             reads at once, first its keys, then its values, then those of the next head: where a request's chunks are
             runs, a layer's heads are one stream, which the processor itself fetches ahead at the full rate of memory.
             Longer runs would make longer streams, but all layers touch a new run together, and huge pages take time
             to come by.
Activations  as a linear layer reads them, in tiles of TILE tokens (the last one shorter, n tokens):
             integers p: bytes q [K/32][n][mode] that stand for them, then per group and token [K/32][n]: scale
             (float32), scale * sum of p (float32), -sum of p, -sum of the first 16 p (int32). bfloat16: [K/32][n][32].
Float rows   [rows][width] float32, width a multiple of 64; columns beyond the logical ones hold zeros.
"""

from __future__ import annotations

from minserve.backend.numba_backend.jit import inlined

BLOCK = 16  # tokens of a KV block: one vector of scores
TILE = 64  # tokens that pass a block of 16 weight rows together: their accumulators stay in the L1 cache
STRIPE = 512  # the same where weights first become bfloat16 operands, which takes as long as 64 tokens do
GROUP = 32  # weights, and activations, that share a scale
PAIR = 2 * GROUP  # packed weights come in pairs of groups
CHUNK = 16  # KV blocks (256 keys) that one softmax pass covers; partial results merge in this order always
RUN = CHUNK  # KV blocks of a head that can be adjacent
SLACK = 4096  # bytes behind a buffer that may be read: by tiles that are not full, by the group after the last
LINE = 128  # alignment: a cache line and the one the prefetcher brings along

# words of the step's header: tokens, requests, logit rows; of the tokens, those generated, then those of prompts
T_ROWS, REQUESTS, S_ROWS, G_ROWS, P_ROWS = range(5)
# words of the batch block: addresses of int32 arrays that are refilled before each step, but for the last two. PLACES:
# where the batch's tokens went, for whoever fills the others.
TOKEN_IDS, POSITIONS, SLOTS, STARTS, LENGTHS, TABLES, LOGIT_ROWS, REQUEST_OF, PLACES, TABLE_WIDTH, HEADER = range(11)

# Activation modes; those of integers say how many bytes stand for the 32 of a group:
#   int8: p; int16: p = 256 p1 + p2; int12: three bytes for two integers, for weights of 4 bits only
#   (see linear_groups.py).
AS_BF16, AS_INT8, AS_INT12, AS_INT16 = 0, 32, 48, 64
AS_FLOATS = -1  # not rounded


def width(cols: int) -> int:
    """Floats per row of a buffer with this many columns."""
    return -(-cols // PAIR) * PAIR


def activation_bytes(cols: int, mode: int) -> int:
    """Bytes per token of an activation block; cols a multiple of 64."""
    return cols * 2 if mode == AS_BF16 else cols // GROUP * (mode + 16)


padded_width, row_bytes = inlined(width), inlined(activation_bytes)  # the same for jitted code


def block_words(dim: int) -> int:
    """16-bit words of the keys, or of the values, of one KV block of one head."""
    return BLOCK * dim
