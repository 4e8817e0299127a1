"""What running requests hold: a seat, blocks, their place in the prefix index. One acquire and one release for each.

Owns the BlockPool, the seats, a Chain per live request and the block copies that forks need. It must not know queues,
plans or results; of a request it changes `seat`, `blocks`, `computed` and `cached`, nothing else.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from heapq import heappop, heappush

from minserve.blocks import BlockPool
from minserve.prefix import Chain, root_key
from minserve.request import Request


@dataclass(frozen=True, slots=True)
class Copy:
    """The partial last block of a prompt, which a fork needs for itself. owner: the fork's id."""

    source: int
    destination: int
    owner: str


class Cache:
    def __init__(self, num_blocks: int, block_size: int, weights_id: bytes, *, prefix_caching: bool) -> None:
        self.blocks = BlockPool(num_blocks)
        self.block_size = block_size
        self.queries = 0  # prompt tokens looked up in the index at admissions
        self.hits = 0  # and found there
        self._weights_id = weights_id
        self._caching = prefix_caching
        self._chains: dict[str, Chain] = {}
        self._free_seats: list[int] = []  # a heap: seats stay small
        self._seats_made = 0
        self._staged: list[Copy] = []  # of forks in the step that runs
        self._pending: list[Copy] = []  # for the next batch
        self._handed: list[Copy] = []  # in the batch that runs

    def open(self, request: Request) -> None:
        self._chains[request.id] = Chain(root_key(self._weights_id, request.salt), request.tokens, self.block_size)

    def close(self, request: Request) -> None:
        del self._chains[request.id]

    # -- what could be found

    def hit_blocks(self, request: Request) -> int:
        """Leading blocks in the index that the request may start from. Rows that are to be scored must be computed."""
        if not self._caching:
            return 0
        hit = self._chains[request.id].probe(self.blocks)
        return min(hit, request.scored // self.block_size) if unscored(request) else hit

    def unheld(self, request: Request, hit: int) -> int:
        """How many of the first `hit` blocks nobody holds: the last ones, for who holds a block holds its ancestors."""
        chain = self._chains[request.id]
        return hit - bisect_left(
            range(hit), True, key=lambda index: not self.blocks.is_held(chain.block(self.blocks, index))
        )

    def next_key(self, request: Request, blocks: int) -> bytes | None:
        """The key of the block after the first `blocks`, if the known tokens fill it and it may be shared."""
        return self._chains[request.id].next_key(blocks) if self._caching else None

    # -- acquire

    def seat(self, request: Request) -> None:
        """A seat, and the blocks the index has for it."""
        request.seat = self._take_seat()
        if request.preemptions == 0 and self._caching and not unscored(request):
            self.queries += request.prompt_len
        self._share(request, self.hit_blocks(request))

    def jump(self, request: Request) -> None:
        """Move a running request over blocks that others have computed since it was admitted."""
        hit = self.hit_blocks(request)
        if hit * self.block_size > request.computed:
            self._share(request, hit)

    def grow(self, request: Request, end: int) -> None:
        """Blocks for rows up to `end`."""
        missing = -(-end // self.block_size) - len(request.blocks)
        if missing > 0:
            request.blocks += self.blocks.allocate(missing, request.blocks[-1] if request.blocks else None)

    def fork(self, leader: Request, fork: Request) -> None:
        """A seat, the leader's full blocks, and a block for a copy of the partial one."""
        fork.seat = self._take_seat()
        full = leader.prompt_len // self.block_size
        fork.blocks = leader.blocks[:full]
        self.blocks.share(fork.blocks)
        if leader.prompt_len % self.block_size:
            (destination,) = self.blocks.allocate(1)
            fork.blocks.append(destination)
            self._staged.append(Copy(leader.blocks[full], destination, fork.id))

    def advance(self, request: Request) -> None:
        """Put the blocks that are now full into the index. Where another request was first, hold its block instead."""
        if not self._caching:
            return
        chain, pool = self._chains[request.id], self.blocks
        for index in range(chain.registered, request.computed // self.block_size):
            own = request.blocks[index]
            first = pool.register(chain.key(index), own)
            if first != own:
                pool.share((first,))
                pool.release((own,))
                request.blocks[index] = first
            chain.registered = index + 1

    # -- release

    def release(self, request: Request) -> None:
        """Everything the request holds: at its end, and when it is preempted."""
        self.blocks.release(request.blocks)
        request.blocks = []
        request.computed = 0
        heappush(self._free_seats, request.seat)
        request.seat = -1
        self._chains[request.id].registered = 0
        for copies in (self._staged, self._pending, self._handed):
            copies[:] = [copy for copy in copies if copy.owner != request.id]

    # -- copies

    def copies(self) -> tuple[tuple[int, int], ...]:
        """(source, destination) of every copy that the coming batch must make first. Cleared by reading."""
        self._handed, self._pending = self._handed + self._pending, []
        return tuple((copy.source, copy.destination) for copy in self._handed)

    def step_done(self, *, ran: bool) -> None:
        """Copies handed to a batch that ran are made; the forks of this step need theirs in the next one."""
        self._pending = ([] if ran else self._handed) + self._pending + self._staged
        self._handed, self._staged = [], []

    def step_failed(self, requests: dict[str, Request]) -> None:
        """Copies may not have been made: their owners compute those rows again."""
        for copy in self._handed:
            owner = requests[copy.owner]
            owner.computed -= owner.computed % self.block_size
        self._handed = []

    # -- inside

    def _share(self, request: Request, hit: int) -> None:
        chain = self._chains[request.id]
        found = [chain.block(self.blocks, index) for index in range(chain.registered, hit)]
        self.blocks.share(found)
        self.blocks.release(request.blocks[chain.registered :])
        request.blocks[chain.registered :] = found
        chain.registered = hit
        if request.preemptions == 0:
            request.cached += hit * self.block_size - request.computed
            self.hits += hit * self.block_size - request.computed
        request.computed = hit * self.block_size

    def _take_seat(self) -> int:
        if self._free_seats:
            return heappop(self._free_seats)
        self._seats_made += 1
        return self._seats_made - 1

    def check(self, running: Iterable[Request]) -> None:
        """The invariant; AssertionError says what is wrong. `running` must be all requests that hold anything."""
        self.blocks.check()
        running = list(running)
        held = Counter(block for request in running for block in request.blocks)
        counts = {block: count for block, count in enumerate(self.blocks.references) if count}
        assert held == counts, f"held {dict(held)}, counted {counts}"
        seats = sorted([request.seat for request in running] + self._free_seats)
        assert seats == list(range(self._seats_made)), f"seats {seats} of {self._seats_made}"
        for request in running:
            assert len(request.blocks) * self.block_size >= request.computed, f"{request.id}: rows without blocks"
            chain = self._chains[request.id]
            full = request.computed // self.block_size
            assert not self._caching or chain.registered == full, (
                f"{request.id}: {full} full blocks, {chain.registered}"
            )
            for index in range(chain.registered):
                assert chain.block(self.blocks, index) == request.blocks[index], f"{request.id}: block {index} differs"


def unscored(request: Request) -> bool:
    """Log probabilities of prompt positions are wanted and still missing."""
    return request.params.prompt_logprobs is not None and request.scored < request.prompt_len - 1
