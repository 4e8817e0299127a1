"""What holds for every plan, whatever runs and waits. SIM_CASES / 10 random worlds per property."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass, replace

from hypothesis import HealthCheck, assume, event, given, settings
from hypothesis import strategies as st

from minserve.policy.limits import Limits, PoolLimits
from minserve.policy.order import MAX_PREEMPTIONS, MAX_SKIPS, RANK, order
from minserve.policy.schedule import deliberate, plan_step
from minserve.policy.steady import steady
from minserve.request import Pool, StepPlan, View

thorough = settings(
    max_examples=int(os.environ.get("SIM_CASES", "200")) // 10,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
shares = st.sampled_from([0.0, 0.1, 0.3, 0.5, 0.9, 1.0])


@dataclass(frozen=True)
class World:
    step: int
    running: list[View]
    waiting: list[View]
    free: int
    limits: Limits

    def plan(self) -> StepPlan:
        return plan_step(self.step, self.running, self.waiting, self.free, self.limits)

    @property
    def views(self) -> dict[str, View]:
        return {view.id: view for view in (*self.running, *self.waiting)}


@st.composite
def views(draw: st.DrawFn, name: str, size: int, *, waits: bool, blocked: bool = False) -> View:
    known = draw(st.integers(1, 60))
    if waits:
        computed = draw(st.integers(0, (known - 1) // size)) * size
    else:
        computed = draw(st.one_of(st.just(known - 1), st.integers(0, known - 1)))
    blocks = -(-computed // size)
    unscored = draw(st.integers(0, 4)) == 0
    return View(
        id=name,
        known=known,
        computed=computed,
        blocks=blocks,
        own_blocks=0 if waits else draw(st.sampled_from([blocks, blocks, blocks // 2])),
        pool=draw(st.sampled_from(Pool)),
        priority=draw(st.integers(-1, 1)),
        arrival=float(draw(st.integers(0, 3))),
        age=draw(st.sampled_from([0, 1, 60, 130])),
        preemptions=draw(st.sampled_from([0, 0, 0, 1, MAX_PREEMPTIONS])),
        limit=known + draw(st.integers(0, 40)),
        prompt_len=draw(st.integers(1, known)),
        skips=draw(st.sampled_from([0, 0, 0, MAX_SKIPS, 300] if waits else [0, 0, 1, 2])),
        free_hits=draw(st.integers(0, blocks)) if waits else 0,
        blocked=blocked,
        forks=tuple(f"{name}#{i}" for i in range(draw(st.sampled_from([0, 0, 0, 1, 3])))),
        scored=(draw(st.integers(0, known - 1)), known - 1) if unscored else (0, 0),
        draft=() if waits else tuple(range(draw(st.sampled_from([0, 0, 3])))),
    )


@st.composite
def worlds(draw: st.DrawFn) -> World:
    size = draw(st.sampled_from([1, 4, 16]))
    seats = draw(st.integers(1, 6))
    running = [draw(views(f"r{i}", size, waits=False)) for i in range(draw(st.integers(0, seats)))]
    blocked = [bool(running) and draw(st.integers(0, 5)) == 0 for _ in range(draw(st.integers(0, 6)))]
    waiting = [draw(views(f"w{i}", size, waits=True, blocked=wait)) for i, wait in enumerate(blocked)]
    holding = bool(running) and all(view.blocks for view in running)  # else what is there is free
    free = draw(st.integers(0 if holding else 1, 40))
    shared = draw(st.integers(0, 5)) if running else 0  # blocks that several of the running hold
    waiting = [view._replace(free_hits=min(view.free_hits, free)) for view in waiting]
    step_tokens = seats + draw(st.sampled_from([0, 3, 20, 100]))
    limits = Limits(
        block_size=size,
        num_blocks=max(1, sum(view.blocks for view in running) + free + shared),
        max_seqs=seats,
        max_step_tokens=step_tokens,
        chunk_tokens=draw(st.integers(1, step_tokens)),
        max_rows=seats + draw(st.sampled_from([0, 1, 30])),
        watermark_blocks=draw(st.integers(0, 3)),
        pools={pool: PoolLimits(draw(st.integers(1, seats)), draw(shares), draw(shares)) for pool in Pool},
    )
    return World(draw(st.integers(0, 1000)), running, waiting, free, limits)


@thorough
@given(worlds(), st.integers(0, 9), st.booleans())
def test_a_steady_step_is_what_the_rules_come_to(world: World, odd: int, paused: bool) -> None:
    """Everybody decodes but for one who may do what it likes."""
    running = [view if i == odd else decodes(view, world) for i, view in enumerate(world.running)]
    blocks = world.limits.num_blocks + sum(view.blocks for view in running)
    limits = replace(world.limits, num_blocks=blocks, paused=frozenset([Pool.BULK] if paused else []))
    chunks = steady(running, world.free, limits)
    event(f"steady: {chunks is not None}")
    plan = plan_step(world.step, running, [], world.free, limits)
    assert plan == deliberate(world.step, running, [], world.free, limits)
    assert chunks in (None, plan.chunks)


def decodes(view: View, world: World) -> View:
    """The same request when it has read its prompt, in the pool of the world's first one."""
    blocks = -(-(view.known - 1) // world.limits.block_size)
    plain = view._replace(computed=view.known - 1, blocks=blocks, own_blocks=blocks, pool=world.running[0].pool)
    return plain._replace(forks=(), draft=(), scored=(0, 0))


@thorough
@given(worlds())
def test_budgets_are_kept(world: World) -> None:
    plan, limits = world.plan(), world.limits
    decoding = {view.id for view in world.running if view.known - view.computed == 1}
    prompt_tokens = sum(c.count - len(c.draft) for c in plan.chunks if c.request_id not in decoding)
    assert plan.tokens <= limits.max_step_tokens
    resting = {v.id for v in world.running if v.pool is Pool.BULK and v.id in decoding} - {
        c.request_id for c in plan.chunks
    }
    assert prompt_tokens <= (
        limits.chunk_tokens + len(resting) * limits.decode_worth if decoding else limits.max_step_tokens
    )
    assert sum(c.scored + c.samples + len(c.forks) for c in plan.chunks) <= limits.max_rows
    seats = Counter(view.pool for view in world.running if view.id not in plan.preempted)
    before = Counter(view.pool for view in world.running)
    for name in plan.admitted:
        seats[world.views[name.partition("#")[0]].pool] += 1
    assert seats.total() <= limits.max_seqs
    assert all(seats[pool] <= max(before[pool], limits.pools[pool].max_seqs) for pool in Pool)


@thorough
@given(worlds())
def test_blocks_are_there_for_every_chunk_fork_and_found_block(world: World) -> None:
    plan, views, size = world.plan(), world.views, world.limits.block_size
    freed = sum(views[name].own_blocks for name in plan.preempted)
    taken = sum(views[name].free_hits for name in plan.admitted if name in views)
    for chunk in plan.chunks:
        view = views[chunk.request_id]
        taken += max(0, world.limits.blocks_for(chunk.start + chunk.count) - view.blocks)
        taken += len(chunk.forks) * (view.known % size > 0)
    assert taken <= world.free + freed


@thorough
@given(worlds())
def test_a_plan_names_everybody_in_one_role(world: World) -> None:
    plan, views = world.plan(), world.views
    running, waiting = {v.id for v in world.running}, {v.id for v in world.waiting}
    chunks = [chunk.request_id for chunk in plan.chunks]
    forks = [fork for chunk in plan.chunks for fork in chunk.forks]
    newcomers = set(plan.admitted) - set(forks)
    assert len(set(chunks)) == len(chunks)
    assert len(set(plan.admitted)) == len(plan.admitted)
    assert newcomers <= waiting & set(chunks)
    assert set(chunks) <= running | newcomers
    assert set(plan.preempted) <= running - set(chunks)
    assert not set(plan.exhausted) & (set(chunks) | set(plan.preempted))
    decoding = {v.id for v in world.running if v.known - v.computed == 1}
    assert set(plan.skipped) <= (waiting - newcomers) | (decoding - set(chunks) - set(plan.preempted))
    assert sum(plan.waits.values()) == len(waiting - newcomers - set(plan.exhausted))
    for chunk in plan.chunks:
        view = views[chunk.request_id]
        end = chunk.start + chunk.count - len(chunk.draft)
        assert view.computed == chunk.start < end <= view.known
        assert not chunk.start < view.prompt_len < end, "a prompt's tokens and generated ones"
        assert chunk.samples == (1 + len(chunk.draft) if end == view.known < view.limit else 0)
        assert not chunk.draft or not chunk.forks


@thorough
@given(worlds())
def test_nobody_decodes_in_vain(world: World) -> None:
    """Without its token in a step remains only who had no block for it, who rests because a higher pool reads, and is
    said to be skipped, or whose pool reads in odd steps while a higher one decodes, which may read what is left."""
    plan = world.plan()
    decoding = {v.id for v in world.running if v.known - v.computed == 1}
    read = {world.views[chunk.request_id].pool for chunk in plan.chunks if chunk.request_id not in decoding}
    above = any(world.views[name].pool is Pool.INTERACTIVE for name in decoding)
    alternates = above and world.step % 2 == 1 and Pool.BULK in read
    served = {chunk.request_id for chunk in plan.chunks} | set(plan.preempted) | set(plan.exhausted)
    for view in (world.views[name] for name in decoding - served):
        skipped = Pool.INTERACTIVE in read and view.id in plan.skipped
        rests = view.pool is Pool.BULK and (skipped or alternates)
        full = view.blocks * world.limits.block_size == view.computed
        assert rests or full, "there was room in its last block"


@thorough
@given(worlds())
def test_admissions_keep_the_order_or_say_whom_they_passed(world: World) -> None:
    plan = world.plan()
    for pool in Pool:
        line = sorted((v for v in world.waiting if v.pool is pool and v.id not in plan.exhausted), key=order)
        places = [place for place, view in enumerate(line) if view.id in plan.admitted]
        for view in line[: max(places, default=0)]:
            if view.id not in plan.admitted and not view.blocked:
                assert view.id in plan.skipped or view.scored != (0, 0)
                assert view.skips < MAX_SKIPS or view.scored != (0, 0), "passed too often"


@thorough
@given(worlds())
def test_somebody_always_advances(world: World) -> None:
    plan = world.plan()
    ready = world.running or [view for view in world.waiting if not view.blocked]
    if len(world.running) == 1:  # who reads a prompt alone has room for it: its admission saw to that
        (view,) = world.running
        assume(world.free or view.known - view.computed == 1)
    assert plan.chunks or plan.exhausted or plan.preempted or not ready


@thorough
@given(worlds())
def test_only_lower_or_later_requests_are_preempted(world: World) -> None:
    plan = world.plan()
    served = [world.views[chunk.request_id] for chunk in plan.chunks]
    for name in plan.preempted:
        victim = world.views[name]
        assert any(RANK[view.pool] < RANK[victim.pool] or order(view) < order(victim) for view in served) or not served


@thorough
@given(worlds(), st.randoms(use_true_random=False))
def test_the_order_in_which_views_come_does_not_matter(world: World, rng: object) -> None:
    running, waiting = list(world.running), list(world.waiting)
    rng.shuffle(running)  # type: ignore[attr-defined]
    rng.shuffle(waiting)  # type: ignore[attr-defined]
    assert World(world.step, running, waiting, world.free, world.limits).plan() == world.plan()


@thorough
@given(worlds())
def test_a_paused_pool_gets_nothing(world: World) -> None:
    plan = World(**{**vars(world), "limits": replace(world.limits, paused=frozenset([Pool.BULK]))}).plan()
    newcomers = {name for name in plan.admitted if "#" not in name}
    assert all(world.views[chunk.request_id].pool is Pool.INTERACTIVE for chunk in plan.chunks)
    assert all(world.views[name].pool is Pool.INTERACTIVE for name in (*newcomers, *plan.skipped))
    waiting = [v for v in world.waiting if v.id not in newcomers and v.id not in plan.exhausted]
    assert plan.waits.get("paused", 0) == sum(v.pool is Pool.BULK for v in waiting)
