"""A row of the ledger: everything that is kept of one call. Never any text of a prompt or an answer.

Owns the columns. They are the schema: `ledger` writes the fields of Row in this order.
"""

from __future__ import annotations

import msgspec

OPEN = "open"
REFUSED = "refused"
STATIC = "static"
INTERRUPTED = "interrupted"


class Row(msgspec.Struct, kw_only=True):
    """One call. Times: Unix seconds for `time`, milliseconds for durations, None = never came to it.

    prompt_tokens, cached_tokens, completion_tokens: what was really processed (0 for a refused call). asked_prompt: the
    prompts' length. asked_max_tokens: what the request named, None if nothing; max_tokens: what ceiling, room and load
    left of it. Both over all choices (n times the prompts). reserved, cost: billionths of the currency. finish: stop,
    length, abort, error, refused, static, interrupted (the server died), or open. status: HTTP status, 0 = none.
    run_calls, run_cost: the budget this call declared for its run.
    """

    seq: int
    time: float
    id: str
    key: str = ""
    user: str = ""
    end_user: str = ""
    feature: str = ""
    run: str = ""
    token: str = ""
    pool: str = ""
    model: str = ""
    endpoint: str = ""
    asked_prompt: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    max_tokens: int = 0
    choices: int = 1
    reserved: int = 0
    cost: int = 0
    queue_ms: float | None = None
    ttft_ms: float | None = None
    itl_p50_ms: float | None = None
    itl_p99_ms: float | None = None
    total_ms: float | None = None
    finish: str = OPEN
    status: int = 0
    code: str = ""
    degraded: str = ""
    run_calls: int | None = None
    run_cost: int | None = None
    asked_max_tokens: int | None = None


COLUMNS: tuple[str, ...] = Row.__struct_fields__
