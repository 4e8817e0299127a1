"""From counted bytes and FLOPs to times: the predictions in kernels_cuda/README.md, until a GPU measures them.

Owns the published numbers of GPUs, the estimates of what kernels reach of them, and the generated tables. It must not
know how anything is counted: paper.py does that.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from minserve.backend.cuda_backend.attention import prefill_launch
from minserve.backend.tensor import Encoding
from tests.gpu.paper import Load, PaperProgram, Stored, Work, q4_k_m, sampling


@dataclass(frozen=True, slots=True)
class Gpu:
    """Published: bytes/s, dense bfloat16 FLOP/s, the latter also of an SM and clock; float32 lanes of an SM.

    mma: the part of the dense rate that mma.sync reaches; the rest needs Hopper's wgmma.
    """

    name: str
    bandwidth: float
    flops: float
    flops_per_clock: int
    lanes: int
    mma: float


A100 = Gpu("A100 SXM", 2.04e12, 312e12, 2048, 64, 1.0)
H100 = Gpu("H100 SXM", 3.35e12, 989e12, 4096, 128, 0.62)
H200 = Gpu("H200", 4.8e12, 989e12, 4096, 128, 0.62)
GPUS = (H100, H200)
# Estimates until measured.
COPY = 0.91  # of the published bandwidth that a plain copy reaches (88 - 93 %)
LATENCY = 2.0e-6  # of a kernel that has next to nothing to do, as a node of a graph, start to start
JOIN = 1.0e-6  # of the last block of a split context: a fence, a ticket, two reads that depend on it, all from L2
REACHED = {"skinny_gemm": 0.92, "decode_attention": 0.88, "cuBLAS": 0.90}  # of a copy, where bytes bind; else 0.7
RATE = {"cuBLAS": 0.70, "skinny_gemm": 0.30, "decode_attention": 0.30}  # of the dense rate; else that of float32 lanes
EDGES = 0.92  # of prefill attention's loop: half-seen tiles at the diagonal, first loads, the last wave
CONTEXT, LONG, BATCHES, PROMPT = 1024, 8192, (1, 8, 64), 2048


def floor(work: Work, gpu: Gpu) -> float:
    """Seconds that the published peaks allow at best."""
    return max(work.bytes / gpu.bandwidth, work.flops / gpu.flops)


def predicted(work: Work, gpu: Gpu) -> float:
    reached = gpu.bandwidth * COPY * REACHED.get(work.name, 0.7)
    prefill = work.name == "prefill_attention"
    rate = EDGES * Tile(gpu).share if prefill else RATE.get(work.name, 2 * gpu.lanes / gpu.flops_per_clock)
    return max(work.bytes / reached, work.flops / (gpu.flops * rate)) + work.kernels * LATENCY + work.joins * JOIN


class Tile:
    """Clocks of an SM for what prefill_attention.cu does in a block of 4 warps with a tile of 32 keys."""

    def __init__(self, gpu: Gpu, dim: int = 128) -> None:
        keys, rows = 32, prefill_launch(dim)[0]  # rows of all warps
        scores = rows * keys
        self.dense = 4 * scores * dim / gpu.flops_per_clock
        self.tensor = self.dense / gpu.mma
        # Each warp reads the tile's keys and values and its own queries; the tile is written once. 128 bytes a clock.
        self.shared = 2 * dim * (4 * 2 * keys + rows + 2 * keys) / 128
        self.exponentials = scores / 16
        # A score is scaled, compared, shifted, summed and rounded in pairs; an output is rescaled.
        self.lanes = (4.5 * scores + rows * dim) / gpu.lanes

    @property
    def share(self) -> float:
        """Of the dense rate, with two blocks on an SM that overlap each other but nothing of their own."""
        alone = self.tensor + self.shared + self.exponentials + self.lanes
        return 2 * self.dense / max(2 * self.tensor, 2 * self.shared, alone)


# ---- tables --------------------------------------------------------------------
def step_works(program: PaperProgram, batch: int, context: int = CONTEXT) -> list[Work]:
    return [*program.works(Load([1] * batch, [context] * batch)), sampling(batch, program.spec.vocab_size)]


def steps_table(steps: Iterable[tuple[str, PaperProgram, int]]) -> Iterator[str]:
    """A line per (type of the weights, program, batch size): what a step moves, its time at the floor and predicted."""
    yield f"| weights | batch | of weights | of KV | GFLOP | {' | '.join(gpu.name for gpu in GPUS)} |"
    yield "|---|---|---|---|---|" + "---|" * len(GPUS)
    for type, program, batch in steps:
        whole, works = whole_step(program, batch), step_works(program, batch)
        cells = []
        for gpu in GPUS:
            low, high = floor(whole, gpu), sum(predicted(work, gpu) for work in works)
            share = f"{low / high:.0%} of the peak, {low / high / COPY:.0%} of a copy"
            cells.append(f"{low * 1e3:.2f} ms, {high * 1e3:.2f} ms: {share}; {batch / high:,.0f} tokens/s")
        weights = program.spec.weight_bytes
        sizes = f"{weights / 1e9:.2f} GB | {(whole.bytes - weights) / 1e9:.2f} GB | {whole.flops / 1e9:,.0f}"
        yield f"| {type} | {batch} | {sizes} | {' | '.join(cells)} |"


def whole_step(program: PaperProgram, batch: int) -> Work:
    """What no program could avoid: the weights once, the cache once, and the arithmetic."""
    kv = sum(4 * layer.kv_heads * layer.head_dim for layer in program.spec.kv) * CONTEXT * batch
    flops = sum(work.flops for work in step_works(program, batch))
    return Work("step", program.spec.weight_bytes + kv, flops)


def kernels_table(works: Sequence[Work], gpus: Sequence[Gpu]) -> Iterator[str]:
    """A line per kernel: launches, MB, GFLOP, and on each GPU the floor, the prediction and their quotient."""
    yield f"| kernel | launches | MB | GFLOP | {' | '.join(gpu.name for gpu in gpus)} |"
    yield "|---|---|---|---|" + "---|" * len(gpus)
    for name in dict.fromkeys(work.name for work in works):
        mine = [work for work in works if work.name == name]
        kernels, moved, flops = (sum(getattr(work, field) for work in mine) for field in ("kernels", "bytes", "flops"))
        cells = []
        for gpu in gpus:
            low, high = (sum(f(work, gpu) for work in mine) * 1e6 for f in (floor, predicted))
            cells.append(f"{low:,.0f}, {high:,.0f} us: {low / high:.0%}")
        yield f"| {name} | {kernels} | {moved / 1e6:,.1f} | {flops / 1e9:,.2f} | {' | '.join(cells)} |"


def aims_table(program: PaperProgram) -> Iterator[str]:
    yield "| aim | case | on paper | |"
    yield "|---|---|---|---|"
    yield from decode_attention_aim(program)
    yield from decode_step_aim(program)
    yield from prefill_attention_aim()


def decode_attention_aim(program: PaperProgram) -> Iterator[str]:
    """One layer's: the bytes of cache, queries and result at the rate of a copy, over the predicted time."""
    layers = len(program.spec.kv)
    for gpu in GPUS:
        for batch in BATCHES:
            works = [w for w in step_works(program, batch, LONG) if w.name == "decode_attention"]
            high = sum(predicted(work, gpu) for work in works) / layers
            kv = program.spec.kv[0]
            moved = batch * LONG * 4 * kv.kv_heads * kv.head_dim
            low, fixed = moved / gpu.bandwidth / COPY, LATENCY + works[0].joins * JOIN
            case = f"{gpu.name}, {batch} x {LONG:,} tokens"
            sums = f"a copy of {moved / 1e6:,.1f} MB: {low * 1e6:,.1f} us of {high * 1e6:,.1f}, "
            sums += f"of which launch and join {fixed * 1e6:.1f}"
            yield row("decode attention: 85 % of a copy", case, sums, low / high, 0.85)


def decode_step_aim(program: PaperProgram) -> Iterator[str]:
    for gpu in GPUS:
        low = floor(whole_step(program, 1), gpu)
        high = sum(predicted(work, gpu) for work in step_works(program, 1))
        for rate, name in ((1.0, "published bandwidth"), (COPY, "a copy's bandwidth")):
            sums = f"{low / rate * 1e3:.2f} ms of {high * 1e3:.2f}"
            yield row("decode step, batch 1: 80 % of the roofline", f"{gpu.name}, {name}", sums, low / rate / high, 0.8)


def prefill_attention_aim() -> Iterator[str]:
    for gpu in (A100, H100):
        tile = Tile(gpu)
        alone = f"{tile.tensor:,.0f} clocks of tensor cores, {tile.shared:,.0f} of shared memory, "
        alone += f"{tile.exponentials:,.0f} of exponentials, {tile.lanes:,.0f} of float32"
        sums = f"a tile takes {alone}; {tile.dense:,.0f} at the dense rate; two blocks: {tile.share:.0%} in the loop"
        yield row("prefill attention: 60 % of dense bf16", gpu.name, sums, EDGES * tile.share, 0.6)


def row(aim: str, case: str, sums: str, share: float, least: float) -> str:
    return f"| {aim} | {case} | {sums} | {share:.0%}: {'met' if share >= least else 'missed'} |"


def report() -> str:
    """The generated part of kernels_cuda/README.md that needs no compiler."""
    program = PaperProgram("llama-8b")
    steps = [("bfloat16", program, batch) for batch in BATCHES]
    mixed = q4_k_m(len(program.spec.kv))
    quantized: dict[str, Stored | Encoding] = {
        "Q8_0": Encoding.Q8_0,
        "Q5_K": Encoding.Q5_K,
        "Q4_K_M": mixed,
        "Q4_0": Encoding.Q4_0,
    }
    steps += [(name, PaperProgram("llama-8b", stored), 1) for name, stored in quantized.items()]
    lines = [*steps_table(steps), "", "Aims:", "", *aims_table(program)]
    for batch in BATCHES:
        lines += ["", f"Batch {batch}, {CONTEXT:,} tokens in each cache:", ""]
        lines += kernels_table(step_works(program, batch), GPUS)
    lines += ["", f"A prompt of {PROMPT:,} tokens in one step:", ""]
    return "\n".join([*lines, *kernels_table(program.works(Load([PROMPT], [PROMPT])), (A100, *GPUS))])
