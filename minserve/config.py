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
Seconds = Annotated[float, Meta(gt=0)]


class Section(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, frozen=True):
    """Base of all sections: unknown keys are errors, values are checked when decoded."""


class ModelConfig(Section, frozen=True):
    """Which model, and how its files are read."""

    name: str = "smollm2-135m-instruct"  # known name, Hugging Face repo id, folder or .gguf file
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
    memory_fraction: Fraction = 0.5  # of free memory, for the KV cache (a GPU wants 0.9)
    kv_cache_bytes: Natural = 0  # instead of the fraction; 0 = use the fraction
    num_blocks: Natural = 0  # instead of both; 0 = from memory
    prefix_caching: bool = True
    itl_target_ms: Annotated[float, Meta(gt=0)] = 40.0  # chunks of prompts are sized so that steps stay near it


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
    max_queue: Count = 256  # requests that wait; more are refused with 503
    queue_timeout_s: Seconds = 30.0


class PoolsConfig(Section, frozen=True):
    interactive: PoolConfig = PoolConfig(token_share=0.8, kv_share=0.7)
    bulk: PoolConfig = PoolConfig(token_share=0.2, kv_share=0.3, max_queue=4096, queue_timeout_s=3600.0)


class TimeoutsConfig(Section, frozen=True):
    """Layers, each inside the next: step < token gap < first token < total; write stall < total."""

    step_s: Seconds = 30.0
    token_gap_s: Seconds = 60.0
    first_token_s: Seconds = 120.0
    total_s: Seconds = 600.0
    write_stall_s: Seconds = 20.0
    drain_s: Seconds = 30.0
    sse_keep_alive_s: Seconds = 10.0


class ServerConfig(Section, frozen=True):
    host: str = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535)] = 8000
    allowed_origins: tuple[str, ...] = ()  # foreign pages that may call; "localhost" = any port of this machine
    allowed_hosts: tuple[str, ...] = ()  # beside the bound address and localhost names; "*" = no check
    on_disconnect: Literal["abort", "linger"] = "abort"
    log_format: Literal["console", "json"] = "console"
    log_level: Literal["debug", "info", "warning", "error"] = "info"


class KeyConfig(Section, frozen=True):
    """An API key: a tenant. Only its SHA-256 is kept; `minserve keys new` prints both."""

    sha256: str
    user: str
    feature: str = "default"
    pool: Literal["interactive", "bulk"] = "interactive"
    pools: tuple[Literal["interactive", "bulk"], ...] = ()  # further pools that a request may choose
    min_priority: int = 0  # lower goes first: requests below it are clamped
    admin: bool = False  # may read /status, /metrics and change settings


class LedgerConfig(Section, frozen=True):
    path: str | None = None  # default: ledger.db in the data folder
    enabled: bool = True
    retention_days: Natural = 0  # 0 = for ever


class Config(Section, frozen=True):
    model: ModelConfig = ModelConfig()
    engine: EngineConfig = EngineConfig()
    limits: LimitsConfig = LimitsConfig()
    pools: PoolsConfig = PoolsConfig()
    timeouts: TimeoutsConfig = TimeoutsConfig()
    server: ServerConfig = ServerConfig()
    ledger: LedgerConfig = LedgerConfig()
    keys: dict[str, KeyConfig] = {}
