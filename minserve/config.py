"""What can be configured, with its default and its meaning: one struct per section of minserve.toml.

Owns no state and reads no file: `settings.py` merges file < environment < flags into a Config. It must not import
anything but msgspec, so that every room may import it.

Units are in the names: _s seconds, _ms milliseconds, _bytes, _tokens. Zero or None means off only where it says so.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

Fraction = Annotated[float, Meta(gt=0, le=1)]
Share = Annotated[float, Meta(ge=0, le=1)]
Count = Annotated[int, Meta(ge=1)]
Natural = Annotated[int, Meta(ge=0)]
Positive = Annotated[float, Meta(gt=0)]
Name = Annotated[str, Meta(min_length=1)]
Seconds = Annotated[float, Meta(gt=0, le=1e9)]  # infinity is no Retry-After, and no time to sleep
Money = Annotated[float, Meta(ge=0, le=1e9)]  # in prices.currency
PeriodName = Literal["minute", "hour", "day", "month"]
PoolName = Literal["interactive", "bulk"]
ProfileName = Literal["interactive", "balanced", "bulk"]


class Section(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, frozen=True):
    """Base of all sections: unknown keys are errors, values are checked when decoded."""


class ModelConfig(Section, frozen=True):
    """Which model, and how its files are read."""

    name: Name = "smollm2-135m-instruct"  # known name, Hugging Face repo id, folder or .gguf file
    served_name: str | None = None  # what /v1/models calls it; default: the name
    revision: str | None = None  # of a Hugging Face repo
    chat_template: str | None = None  # path of a Jinja file that replaces the model's own
    quantize: Literal["none", "q8", "q4"] = "none"  # requantize bf16/f16/f32 weights at load (numba)


class EngineConfig(Section, frozen=True):
    """Device, batch and cache sizes."""

    device: Literal["auto", "cuda", "cpu"] = "auto"
    backend: Literal["auto", "numba", "numpy", "cuda"] = "auto"
    threads: Natural = 0  # CPU threads of the forward pass; 0 = the cores this process may use
    activations: Literal["accurate", "int8"] = "accurate"  # numba: how activations meet quantized weights
    max_model_len: Natural = 0  # 0 = the model's own, cut to what the cache holds
    max_num_seqs: Count = 32  # requests that run at once (seats)
    max_num_batched_tokens: Count = 512  # tokens of one step
    max_logit_rows: Count = 256  # logit rows of one step (echo with logprobs is chunked to it)
    block_size: Count = 16  # tokens of a KV block
    memory_fraction: Fraction | None = None  # of free memory, for the KV cache; default: 0.9 on a GPU, 0.5 on a CPU
    kv_cache_bytes: Natural = 0  # instead of the fraction; 0 = use the fraction
    num_blocks: Natural = 0  # instead of both; 0 = from memory
    prefix_caching: bool = True
    itl_target_ms: Positive = 40.0  # chunks of prompts are sized so that steps stay near it


class LimitsConfig(Section, frozen=True):
    """Ceilings on every call. They hold with and without keys."""

    default_max_tokens: Count = 512  # chat, when the request names none
    default_completion_tokens: Count = 16  # completions, as OpenAI
    max_tokens: Count = 4096  # the most output any request may ask for; larger values are clamped
    max_body_bytes: Count = 8 * 1024 * 1024
    max_input_chars: Count = 1_000_000
    max_input_tokens: Natural = 0  # 0 = what the context allows
    max_n: Count = 8
    max_prompts: Count = 64  # prompts of one completions call
    max_stop: Count = 4
    max_logprobs: Natural = 20
    max_messages: Count = 2048


class PoolConfig(Section, frozen=True):
    """One pool's part of the engine. Shares: of a step's tokens and of the KV blocks, under contention."""

    max_num_seqs: Natural = 0  # 0 = all seats
    token_share: Share = 0.5
    kv_share: Share = 0.5
    max_queue: Count = 256  # requests that wait; while so many do, further calls are refused with 503
    queue_timeout_s: Seconds = 30.0
    token_gap_s: Seconds | None = None  # instead of timeouts.token_gap_s; a preempted or paused request is silent too
    first_token_s: Seconds | None = None  # instead of timeouts.first_token_s
    total_s: Seconds | None = None  # instead of timeouts.total_s; then the pool's callers must wait that long


class PoolsConfig(Section, frozen=True):
    interactive: PoolConfig = PoolConfig(token_share=0.8, kv_share=0.7)
    bulk: PoolConfig = PoolConfig(
        token_share=0.2,
        kv_share=0.3,
        max_queue=4096,
        queue_timeout_s=3600.0,
        token_gap_s=1800.0,
        first_token_s=3900.0,
        total_s=7200.0,
    )

    def of(self, name: str) -> PoolConfig:
        """name: a PoolName, or a Pool."""
        pool: PoolConfig = getattr(self, name)
        return pool


class TimeoutsConfig(Section, frozen=True):
    """Layers, each inside the next: step < token gap < first token < total < client; a pool's queue < first token;
    write stall < total; SSE keep-alive < proxy idle.

    config_rules.validate refuses a configuration in which they are not nested.
    """

    step_s: Seconds = 30.0
    token_gap_s: Seconds = 60.0
    first_token_s: Seconds = 120.0
    total_s: Seconds = 570.0
    client_s: Seconds = 600.0  # what clients and proxies in front wait at least (OpenAI's SDKs: 600)
    proxy_idle_s: Seconds = 60.0  # silence after which a proxy in front closes a stream
    write_stall_s: Seconds = 20.0
    drain_s: Seconds = 30.0
    sse_keep_alive_s: Seconds = 15.0  # what the HTML standard (9.2.7) advises against proxies that drop idle streams


class ServerConfig(Section, frozen=True):
    host: Name = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535)] = 8000
    allowed_origins: tuple[str, ...] = ()  # foreign pages that may call; "localhost" = any port of this machine
    allowed_hosts: tuple[str, ...] = ()  # beside the bound address and localhost names; "*" = no check
    on_disconnect: Literal["abort", "linger"] = "abort"
    log_format: Literal["console", "json"] = "console"
    log_level: Literal["debug", "info", "warning", "error"] = "info"


class LimitConfig(Section, frozen=True):
    """A cap for one period. Calendar periods begin on the UTC minute, hour, day, month; rolling ones look back.

    A rolling month is 30 days. None = no cap of that kind; 0 = nothing is allowed.
    """

    period: PeriodName
    rolling: bool = False
    requests: Natural | None = None
    tokens: Natural | None = None  # prompt + output, reserved at their maximum until the call ends
    money: Money | None = None


class RunConfig(Section, frozen=True):
    """Loop budgets: the most that one run (X-Run-ID) may do. A run's first call may declare tighter ones."""

    require_id: bool = False  # calls without a run id are refused
    max_calls: Count | None = None
    max_spend: Money | None = None


class AccountConfig(Section, frozen=True):
    """Who pays and what is allowed: what a key stands for, and the local user where there are no keys."""

    user: str = "local"
    feature: str = "default"
    pool: PoolName | None = None  # None: interactive; for a key: that of [local], with its pools, which a profile sets
    pools: tuple[PoolName, ...] = ()  # further pools that a request may choose
    min_priority: int = 0  # lower goes first: requests below it are clamped
    limits: tuple[LimitConfig, ...] = ()  # of this key
    end_user_limits: tuple[LimitConfig, ...] = ()  # of each value of the body's `user`, inside the key's own
    run: RunConfig = RunConfig()
    max_call_cost: Money | None = None  # dearer calls are refused, before any work
    allow_shrink: bool = False  # under load its answers may be cut to degradation.shrink_to tokens


class KeyConfig(AccountConfig, frozen=True, kw_only=True):
    """An API key: a tenant. Only its SHA-256 is kept; `minserve keys new` prints both."""

    sha256: str
    user: str
    admin: bool = False  # may read /status and /metrics, reset limits, end anybody's call


class UserConfig(Section, frozen=True):
    """Caps of one user over all of its keys."""

    limits: tuple[LimitConfig, ...] = ()


class PricesConfig(Section, frozen=True):
    """What a token costs: per million of each kind, or derived from what the device costs.

    Derived (device_hour set): a token costs the device time it takes at the measured rates, divided by the share of
    paid time that does useful work, so idle hours are paid too. That share is the trailing week's in the ledger, at
    start and at each reload, unless it is named. Prices named here win over derived ones.
    """

    currency: str = "USD"
    prefill: Money | None = None  # per million prompt tokens
    cached: Money | None = None  # per million prompt tokens found in the prefix cache; default: as prefill
    decode: Money | None = None  # per million output tokens
    device_hour: Money | None = None
    prefill_tokens_per_s: Positive | None = None
    decode_tokens_per_s: Positive | None = None
    utilization: Fraction | None = None  # None: as measured; 1.0 until a day has been


class SpendConfig(Section, frozen=True):
    """The server's own limit, over all keys, and the parts of it that raise an alert."""

    limit: Money | None = None
    period: PeriodName = "day"
    rolling: bool = False
    alert_at: tuple[Fraction, ...] = (0.5, 0.8, 1.0)


class AlertsConfig(Section, frozen=True):
    """Alerts are always a log line; a webhook gets them as JSON too, retried, never in a request's way."""

    webhook: str | None = None
    attempts: Count = 5
    drift_ratio: Annotated[float, Meta(gt=1)] = 1.5  # a feature's mean prompt against its trailing week
    drift_min_requests: Count = 50  # fewer say nothing


class LoopsConfig(Section, frozen=True):
    """Runaway loops: how long an idle run is remembered, and the same prompt sent again without a run id."""

    run_idle_s: Seconds = 86400.0
    repeats: Literal["off", "warn", "refuse"] = "warn"
    repeat_limit: Count = 20  # equal prompts of one key ...
    repeat_window_s: Seconds = 60.0  # ... within this time


class DegradationConfig(Section, frozen=True):
    """What gives way under load, in this order. Pressure 1.0 = the interactive queue or its time ceiling is exhausted.

    The same thresholds hold for the used share of spend.limit, except that money alone never refuses interactive calls
    here: the limit itself does. Whatever is cut says so: header x-minserve-degraded, metric, ledger row.
    """

    enabled: bool = False
    shrink_at: Positive = 0.5  # answers of accounts that allow it are cut to shrink_to tokens
    pause_bulk_at: Positive = 0.7  # new bulk work is refused; what waits or runs pauses (not for money's sake)
    static_at: Positive = 0.9  # features with a text get it instead of the model
    refuse_at: Positive = 1.0  # 503 with Retry-After
    hysteresis: Share = 0.1  # each is undone only that far below its threshold
    shrink_to: Count = 128
    texts: dict[str, str] = {}  # feature -> static text
    message: str = "The server is overloaded. Please try again later."


class LedgerConfig(Section, frozen=True):
    path: str | None = None  # default: ledger.db in the data folder
    enabled: bool = True
    retention_days: Natural = 0  # 0 = for ever
    durability: Literal["process", "power"] = "process"  # what a commit survives; "power" costs an fsync each
    on_failure: Literal["refuse", "serve"] = "refuse"  # disk full: refuse with 503, or serve unrecorded calls


class Config(Section, frozen=True):
    """The whole configuration. profile: what this deployment is for; it sets the defaults of everything else.

    interactive: people wait. Few seats and short steps, so that each token comes soon; short queues, early refusals,
    degradation on; little is promised to bulk.
    balanced: both pools in one process. The defaults as they stand here.
    bulk: throughput. Many seats and long steps, queues of hours; calls go to the bulk pool unless they or their key say
    otherwise, and bulk is promised most of the machine.

    What a profile sets stands in `profiles.py`, and `minserve config --profile NAME` shows it. A file, the environment
    and flags win over it, value by value.
    """

    profile: ProfileName = "balanced"
    model: ModelConfig = ModelConfig()
    engine: EngineConfig = EngineConfig()
    limits: LimitsConfig = LimitsConfig()
    pools: PoolsConfig = PoolsConfig()
    timeouts: TimeoutsConfig = TimeoutsConfig()
    server: ServerConfig = ServerConfig()
    ledger: LedgerConfig = LedgerConfig()
    local: AccountConfig = AccountConfig()  # the one account where there are no keys
    keys: dict[str, KeyConfig] = {}
    users: dict[str, UserConfig] = {}
    prices: PricesConfig = PricesConfig()
    spend: SpendConfig = SpendConfig()
    alerts: AlertsConfig = AlertsConfig()
    loops: LoopsConfig = LoopsConfig()
    degradation: DegradationConfig = DegradationConfig()
