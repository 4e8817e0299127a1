"""Blocks: who holds them, what the index remembers, what is evicted; and the keys that make blocks findable."""

import random

import pytest

from minserve.blocks import BlockPool
from minserve.prefix import Chain, block_key, root_key


def key(name: str) -> bytes:
    return name.encode()


def chain_of(pool: BlockPool, *names: str) -> list[int]:
    """A request's blocks, full and registered, still held."""
    blocks = pool.allocate(len(names))
    for name, block in zip(names, blocks, strict=True):
        assert pool.register(key(name), block) == block
    return blocks


# -- allocation


def test_blocks_are_consecutive_where_possible() -> None:
    pool = BlockPool(10)
    first, second = pool.allocate(3), pool.allocate(4)
    assert (first, second) == ([0, 1, 2], [3, 4, 5, 6])
    pool.release(first)
    assert pool.allocate(2, after=6) == [7, 8], "what follows the request's last block is best"
    assert pool.allocate(2, after=8) == [0, 1], "else a run"
    assert pool.allocate(2) == [2, 9], "else any"
    assert (pool.free, pool.available) == (0, 0)
    pool.check()


def test_too_many_blocks_are_refused_and_nothing_is_taken() -> None:
    pool = BlockPool(4)
    pool.allocate(2)
    with pytest.raises(MemoryError, match="3 blocks wanted, 2 available"):
        pool.allocate(3)
    assert pool.available == 2
    pool.check()


def test_a_shared_block_is_free_only_after_its_last_holder_let_go() -> None:  # bug: 18
    pool = BlockPool(4)
    blocks = pool.allocate(2)
    pool.share(blocks)
    assert pool.owned(blocks) == 0
    pool.release(blocks)
    assert (pool.owned(blocks), pool.free) == (2, 2)
    pool.release(blocks)
    assert pool.free == 4
    pool.check()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ("pool.references[0] -= 1", "is lost|free"),
        ("pool.references[3] = 1", "free and held"),
        ("pool._num_free += 1", "counted"),
        ("pool._keys.clear()", "index and keys differ"),
        ("pool.references[2] = -1", "negative"),
    ],
)
def test_check_finds_what_is_wrong(damage: str, message: str) -> None:
    pool = BlockPool(4)
    chain_of(pool, "a", "b")
    pool.check()
    exec(damage)
    with pytest.raises(AssertionError, match=message):
        pool.check()


# -- the index


def test_a_released_block_is_found_again_until_it_is_needed() -> None:
    pool = BlockPool(2)
    (block,) = chain_of(pool, "a")
    pool.release([block])
    assert (pool.free, pool.cached, pool.available) == (1, 1, 2)
    pool.share([pool.find(key("a"))])
    assert pool.cached == 0
    pool.release([block])
    pool.allocate(2)
    assert not pool.knows(key("a")), "deleted on reuse"
    with pytest.raises(KeyError):
        pool.find(key("a"))
    pool.check()


def test_the_first_registration_wins() -> None:
    pool = BlockPool(4)
    (first,) = chain_of(pool, "a")
    (second,) = pool.allocate(1)
    assert pool.register(key("a"), second) == first
    pool.release([second])
    assert (pool.free, pool.cached) == (3, 0)
    pool.check()


def test_free_blocks_go_before_cached_ones_and_old_ones_before_new() -> None:
    pool = BlockPool(4)
    old, new = chain_of(pool, "old"), chain_of(pool, "new")
    pool.release(old)
    pool.release(new)
    pool.allocate(3)
    assert (pool.knows(key("old")), pool.knows(key("new"))) == (False, True)


def test_leaves_are_evicted_before_their_parents() -> None:
    pool = BlockPool(4)
    blocks = chain_of(pool, "root", "middle", "leaf")
    pool.release(blocks)
    gone = []
    for _ in range(4):
        pool.allocate(1)
        gone.append([name for name in ("root", "middle", "leaf") if not pool.knows(key(name))])
    assert gone == [[], ["leaf"], ["middle", "leaf"], ["root", "middle", "leaf"]]


def test_what_was_used_again_is_evicted_later() -> None:
    pool = BlockPool(2)
    a, b = chain_of(pool, "a"), chain_of(pool, "b")
    pool.release(a)
    pool.release(b)
    pool.share(a)
    pool.release(a)
    pool.allocate(1)
    assert (pool.knows(key("a")), pool.knows(key("b"))) == (True, False)


def test_nothing_is_lost_whatever_happens() -> None:  # bug: 18
    """Random holders with shared chains: after each action every block is in exactly one state."""
    rng = random.Random(0)
    pool, holders, number = BlockPool(12), list[list[int]](), 0
    for _ in range(3000):
        action = rng.random()
        if action < 0.5 and pool.available:
            count = rng.randint(1, min(4, pool.available))
            holders.append(pool.allocate(count))
            for block in holders[-1][: rng.randint(0, count)]:
                pool.register(key(str(number)), block)
                number += 1
        elif action < 0.7 and holders:
            shared = rng.choice(holders)[:2]
            pool.share(shared)
            holders.append(list(shared))
        elif holders:
            pool.release(holders.pop(rng.randrange(len(holders))))
        pool.check()
    for blocks in holders:
        pool.release(blocks)
    pool.check()
    assert pool.available == pool.total == 12
    assert not any(pool.references)


# -- keys


def test_a_salt_is_never_taken_for_anything_else() -> None:  # bug: 23
    """Parts are tagged and length-delimited: moving bytes from one to the other changes the key."""
    keys = {
        root_key(b"X", b""),
        root_key(b"", b"X"),
        root_key(b"weights", b"salt"),
        root_key(b"weightssalt", b""),
        root_key(b"weight", b"ssalt"),
        root_key(b"X", b"X"),
    }
    assert len(keys) == 6


def test_the_salt_counts_from_the_first_block_on() -> None:  # bug: 29
    tokens = list(range(12))
    mine, yours = (Chain(root_key(b"w", salt), tokens, 4) for salt in (b"me", b"you"))
    assert all(mine.key(i) != yours.key(i) for i in range(3))


def test_reloaded_weights_find_nothing_of_the_old_ones() -> None:  # bug: 24
    assert root_key(b"load 1", b"") != root_key(b"load 2", b"")


def test_a_key_depends_on_every_token_before_its_end_and_none_behind() -> None:
    root = root_key(b"w", b"")
    tokens = list(range(12))
    keys = [Chain(root, tokens, 4).key(i) for i in range(3)]
    for place in range(12):
        changed = tokens.copy()
        changed[place] = 99
        other = [Chain(root, changed, 4).key(i) for i in range(3)]
        assert [a == b for a, b in zip(keys, other, strict=True)] == [i < place // 4 for i in range(3)]
    assert block_key(root, [1, 2]) != block_key(root, [1, 2, 0])
    assert block_key(root, [258]) != block_key(root, [2, 1])


def registered(tokens: list[int], size: int = 4) -> tuple[BlockPool, bytes]:
    """A pool that knows all full blocks of these tokens."""
    pool, root = BlockPool(16), root_key(b"w", b"")
    chain = Chain(root, tokens, size)
    blocks = pool.allocate(len(tokens) // size)
    for index, block in enumerate(blocks):
        pool.register(chain.key(index), block)
    pool.release(blocks)
    return pool, root


@pytest.mark.parametrize(("known", "found"), [(1, 0), (4, 0), (5, 1), (8, 1), (9, 2), (12, 2), (13, 3), (20, 3)])
def test_a_hit_leaves_the_last_known_token_to_be_computed(known: int, found: int) -> None:  # bug: 26
    pool, root = registered(list(range(12)))
    assert Chain(root, list(range(known)), 4).probe(pool) == found


def test_probing_again_follows_what_was_registered_and_evicted() -> None:
    pool, root = registered(list(range(8)))
    chain = Chain(root, list(range(20)), 4)
    assert chain.probe(pool) == 2
    other = Chain(root, list(range(20)), 4)
    held = [pool.find(other.key(0)), pool.find(other.key(1))]
    pool.share(held)
    held += pool.allocate(1)
    pool.register(other.key(2), held[2])
    assert chain.probe(pool) == 3
    pool.release(held)
    pool.allocate(pool.available - 1)
    assert chain.probe(pool) == 1
    assert chain.block(pool, 0) == pool.find(chain.key(0))


def test_the_next_key_exists_only_for_a_full_block() -> None:
    chain = Chain(root_key(b"w", b""), list(range(7)), 4)
    assert chain.next_key(0) == chain.key(0)
    assert chain.next_key(1) is None
