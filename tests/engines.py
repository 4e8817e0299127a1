"""Real engines for tests: dummy weights (nothing to download), the NumPy backend, small limits."""

from __future__ import annotations

import time
from typing import Any

import msgspec

from minserve.assemble import Assembly, assemble
from minserve.config import Config, EngineConfig, ModelConfig
from minserve.engine import Delivery, Engine
from minserve.request import Pool, RequestOutcome, SamplingParams, StepRecord, Submission

PROMPT = [*b"Hello, world"]  # a byte is its own id


def tiny(model: str = "dummy", observers: Any = (), config: Config | None = None, **engine: Any) -> Assembly:
    """A two-layer random model. Keyword arguments are fields of EngineConfig."""
    options: dict[str, Any] = {"backend": "numpy", "num_blocks": 64, "block_size": 4, "max_num_seqs": 4}
    options |= {"max_num_batched_tokens": 32, "max_model_len": 128, **engine}
    base = config or Config()
    return assemble(
        msgspec.structs.replace(base, model=ModelConfig(name=model), engine=EngineConfig(**options)),
        observers=observers,
    )


def submission(
    prompt: list[int] | tuple[int, ...],
    id: str = "r",
    n: int = 1,
    pool: Pool = Pool.INTERACTIVE,
    salt: bytes = b"",
    **params: Any,
) -> Submission:
    defaults: dict[str, Any] = {"max_tokens": 8, "temperature": 0.0}
    return Submission(id, tuple(prompt), SamplingParams(**(defaults | params)), n=n, pool=pool, salt=salt)


class Collected:
    """What every choice of every submission got, gathered from deliveries."""

    def __init__(self) -> None:
        self.tokens: dict[tuple[str, int], list[int]] = {}
        self.text: dict[tuple[str, int], str] = {}
        self.outcomes: dict[tuple[str, int], RequestOutcome] = {}
        self.last: dict[tuple[str, int], Any] = {}

    def add(self, deliveries: list[Delivery]) -> None:
        for d in deliveries:
            key = (d.group, d.delta.choice)
            assert key not in self.outcomes, "a delta after the end"
            self.tokens.setdefault(key, []).extend(d.delta.token_ids)
            self.text[key] = self.text.get(key, "") + d.delta.text
            self.last[key] = d.delta
            if d.outcome is not None:
                self.outcomes[key] = d.outcome


def run(engine: Engine, *submissions: Submission, steps: int = 2000) -> Collected:
    """Submit everything, step until nothing is left."""
    collected = Collected()
    for each in submissions:
        engine.submit(each)
    for _ in range(steps):
        if not engine.has_work:
            break
        collected.add(engine.step())
    engine.scheduler.check()
    return collected


class Records:
    """An observer that keeps what it is given."""

    def __init__(self) -> None:
        self.steps: list[StepRecord] = []
        self.outcomes: list[RequestOutcome] = []

    def __call__(self, record: StepRecord | RequestOutcome) -> None:
        if isinstance(record, StepRecord):
            self.steps.append(record)
        else:
            self.outcomes.append(record)


class Delayed:
    """A runner whose steps take at least so long, and fail where told."""

    def __init__(self, runner: Any, seconds: float = 0.0, fail: set[int] | None = None) -> None:
        self._runner = runner
        self.seconds = seconds
        self.fail = fail or set()
        self.spec = runner.spec

    def run(self, plan: Any, batch: Any) -> Any:
        time.sleep(self.seconds)
        if plan.step in self.fail:
            raise RuntimeError("boom with secret prompt text")
        return self._runner.run(plan, batch)

    def ideal_seconds(self, batch: Any) -> float:
        return float(self._runner.ideal_seconds(batch))

    def close(self) -> None:
        self._runner.close()
