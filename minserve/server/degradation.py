"""What gives way under load, here and now: the rung that holds, what it does to a call, the text that needs no model.

Owns the rung. It changes when a call comes, when the engine plans and when somebody scrapes, so that it also ends when
nobody comes any more. The rules are `policy.degrade`'s.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from dataclasses import replace

from minserve.config import Config
from minserve.economics.accounting import Accounting
from minserve.economics.alerts import Alert
from minserve.policy.degrade import Backlog, Decision, Ladder, Rung, decide, rung_of, thrift
from minserve.request import FinishReason, Pool, RequestOutcome, TextDelta, Usage
from minserve.server.arrival import Call
from minserve.server.ports import ServingEngine
from minserve.status import PromptProgress

log = logging.getLogger("minserve.server")

_LOOK_EVERY_S = 0.1  # at most so often, though the engine asks before every step
_ALERT_EVERY_S = 600.0


class Degradation:
    def __init__(
        self,
        config: Config,
        engine: ServingEngine,
        accounting: Accounting,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        degradation, pool = config.degradation, config.pools.interactive
        self.enabled = degradation.enabled
        self._ladder = Ladder(
            thresholds=(degradation.shrink_at, degradation.pause_bulk_at, degradation.static_at, degradation.refuse_at),
            hysteresis=degradation.hysteresis,
            shrink_to=degradation.shrink_to,
            texts=degradation.texts,
            message=degradation.message,
        )
        self._max_queue = pool.max_queue
        self._ceiling = pool.queue_timeout_s
        self._engine = engine
        self._accounting = accounting
        self._clock = clock
        self._rung = Rung.NONE
        self._looked = 0.0
        self._paused_at = -math.inf
        self._alerted: dict[Rung, float] = {}
        if self.enabled:
            engine.pause(self.paused)

    @property
    def rung(self) -> Rung:
        """What load and money call for together, now."""
        return max(self._of_load(), self._of_money()) if self.enabled else Rung.NONE

    def apply(self, call: Call) -> tuple[Call, str | None]:
        """The call as it may run, and the text that answers it instead of the model, if one does.

        RequestError 503 if it may not run now.
        """
        if not self.enabled:
            return call, None
        self._looked = 0.0  # each call is judged by the queue as it stands before it
        decision = self._decide(call)
        if decision.applied is None:
            return call, None
        call = replace(call, degraded=decision.applied.word)
        if decision.text is None:
            most = decision.max_tokens
            params = (
                replace(p, max_tokens=min(p.max_tokens, most), min_tokens=min(p.min_tokens, most)) for p in call.params
            )
            call = replace(call, params=tuple(params))
        return call, decision.text

    def paused(self) -> frozenset[Pool]:
        """Pools that get nothing now. Money pauses nobody who has been admitted."""
        if not self.enabled or self._of_load() < Rung.PAUSE_BULK:
            return frozenset()
        self._paused_at = self._clock()
        return frozenset([Pool.BULK])

    def met(self, call: Call, since: float) -> str:
        """Every rung that cut a call which was admitted at `since`, with commas between, "" for none: bulk that stood
        still has been cut too."""
        stood = call.pool is Pool.BULK and self._paused_at >= since
        return ",".join(filter(None, (call.degraded, Rung.PAUSE_BULK.word if stood else "")))

    def _decide(self, call: Call) -> Decision:
        load, money = self._of_load(), self._of_money()
        wait = self._engine.wait(Pool.INTERACTIVE)
        saving = load < Rung.PAUSE_BULK <= money
        return decide(
            max(load, money),
            self._ladder,
            self._accounting.affordable_in(self._ladder.thresholds[1]) if saving else wait,
            pool=call.pool,
            feature=call.identity.feature,
            max_tokens=max(params.max_tokens for params in call.params),
            allows_shrink=call.identity.account.allow_shrink,
        )

    def _of_load(self) -> Rung:
        now = self._clock()
        if now - self._looked >= _LOOK_EVERY_S:
            self._looked = now
            waiting = self._engine.status().waiting[Pool.INTERACTIVE]
            backlog = Backlog(waiting, self._max_queue, self._engine.wait(Pool.INTERACTIVE), self._ceiling)
            self._change(rung_of(backlog, self._ladder, self._rung), backlog, now)
        return self._rung

    def _of_money(self) -> Rung:
        return thrift(self._accounting.spent_share, self._ladder)

    def _change(self, rung: Rung, backlog: Backlog, now: float) -> None:
        before, self._rung = self._rung, rung
        if rung == before:
            return
        message = (
            f"Degradation: {rung.word} (was {before.word}), {backlog.queued} waiting, {backlog.wait:.1f} s to wait"
        )
        if rung > before and now - self._alerted.get(rung, -_ALERT_EVERY_S) >= _ALERT_EVERY_S:
            self._alerted[rung] = now
            values: dict[str, object] = {"rung": rung.word, "waiting": backlog.queued, "wait_s": round(backlog.wait, 1)}
            self._accounting.alerts(Alert("degraded", message, self._accounting.clock(), values))
        else:
            log.info(message)


class StaticText:
    """A token stream that says one text for every choice, at once: what stands in the model's place.

    No tokens are counted: nothing was read or generated.
    """

    def __init__(self, call: Call, text: str) -> None:
        self.progress = PromptProgress("done", 0, 0, 0)
        self.done = True
        usage = Usage(0, 0, 0)
        self._deltas = [TextDelta(k, text, finish=FinishReason.STOP, usage=usage) for k in range(call.choices)]
        self.outcomes = [
            RequestOutcome(
                id=f"{call.id}#{k}",
                group=call.id,
                pool=call.pool,
                usage=usage,
                max_tokens=0,
                finish=FinishReason.STOP,
                error_code=None,
                arrival=0.0,
                queue=0.0,
                ttft=None,
                total=0.0,
                gaps=(),
                preemptions=0,
            )
            for k in range(call.choices)
        ]

    def __aiter__(self) -> StaticText:
        return self

    async def __anext__(self) -> list[TextDelta]:
        deltas, self._deltas = self._deltas, []
        if not deltas:
            raise StopAsyncIteration
        return deltas

    def close(self) -> None:
        """It has ended already."""
