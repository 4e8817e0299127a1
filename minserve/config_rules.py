"""What one section of the configuration means for another: the rules that a single value's type can't state.

Pure functions over a Config (and this machine's cores); each broken rule is one sentence that names the settings. A
server whose rules are broken does not start: timeouts that are not nested would fire in the wrong order, a price typo
would lock everybody out. What is only `doubtful` is said, and served.
"""

from __future__ import annotations

import ipaddress
import math
import os
from collections.abc import Iterator
from itertools import pairwise
from typing import get_args

from minserve.config import AccountConfig, Config, LimitConfig, PoolName
from minserve.origin import ORIGIN_WORDS, normal_origin

_MAX_PRICE = 10_000.0  # per million tokens: a hundred times what the dearest models cost
_MONTH_DAYS = 31
_THREADS_PER_CORE = 4
_CORES = os.cpu_count() or 1


def validate(config: Config, cores: int = _CORES) -> list[str]:
    """Every broken rule, empty if there is none. cores: of this machine."""
    return [
        *_threads(config, cores),
        *_origins(config),
        *_timeouts(config),
        *_pools(config),
        *_lengths(config),
        *_accounts(config),
        *_prices(config),
        *_money(config),
        *_degradation(config),
    ]


def require_valid(config: Config) -> None:
    """ValueError with every broken rule."""
    if broken := validate(config):
        raise ValueError("The settings contradict each other:\n  " + "\n  ".join(broken))


def doubtful(config: Config) -> list[str]:
    """What works but can hardly be meant, empty if there is nothing."""
    return [*_open_to_all(config), *_idle_shrinking(config)]


def _threads(config: Config, cores: int) -> Iterator[str]:
    threads = config.engine.threads
    if threads > _THREADS_PER_CORE * cores:
        yield f"engine.threads ({threads}) is more than {_THREADS_PER_CORE} for each of this machine's {cores} cores"


def _origins(config: Config) -> Iterator[str]:
    for origin in config.server.allowed_origins:
        try:
            if origin.lower() not in ORIGIN_WORDS:
                normal_origin(origin)
        except ValueError as error:
            yield f"server.allowed_origins: {error}"


def _open_to_all(config: Config) -> Iterator[str]:
    host = config.server.host
    if config.keys or host == "localhost":
        return
    where = f"on {host}"
    try:
        address = ipaddress.ip_address(host)
    except ValueError:  # a name
        pass
    else:
        if address.is_loopback:
            return
        if address.is_unspecified:
            where = "on all interfaces"
    yield (
        f"listening {where} without API keys: whoever reaches this machine may use the model and read /status. "
        "Make a key (minserve keys new), or bind server.host to 127.0.0.1"
    )


def _idle_shrinking(config: Config) -> Iterator[str]:
    if config.degradation.enabled:
        return
    for name, account in _all_accounts(config):
        if account.allow_shrink:
            yield f"{name}.allow_shrink does nothing while degradation.enabled is false"


def _timeouts(config: Config) -> Iterator[str]:
    t = config.timeouts
    for name in get_args(PoolName):
        pool = config.pools.of(name)
        gap, gap_name = _own(pool.token_gap_s, t.token_gap_s, name, "token_gap_s")
        first, first_name = _own(pool.first_token_s, t.first_token_s, name, "first_token_s")
        total, total_name = _own(pool.total_s, t.total_s, name, "total_s")
        yield from _nested(("timeouts.step_s", t.step_s), (gap_name, gap), (first_name, first), (total_name, total))
        yield from _nested((f"pools.{name}.queue_timeout_s", pool.queue_timeout_s), (first_name, first))
        if pool.total_s is None or name == "interactive":  # bulk's own callers wait as long as that
            yield from _nested((total_name, total), ("timeouts.client_s", t.client_s))
        yield from _nested(("timeouts.write_stall_s", t.write_stall_s), (total_name, total))
    yield from _nested(("timeouts.sse_keep_alive_s", t.sse_keep_alive_s), ("timeouts.proxy_idle_s", t.proxy_idle_s))


def _own(value: float | None, default: float, pool: str, name: str) -> tuple[float, str]:
    return (default, f"timeouts.{name}") if value is None else (value, f"pools.{pool}.{name}")


def _nested(*layers: tuple[str, float]) -> Iterator[str]:
    """Each layer must be shorter than the next."""
    for (inner, short), (outer, long) in pairwise(layers):
        if not short < long:
            yield f"{inner} ({short:g} s) must be shorter than {outer} ({long:g} s)"


def _pools(config: Config) -> Iterator[str]:
    pools = {name: config.pools.of(name) for name in get_args(PoolName)}
    for share in ("token_share", "kv_share"):
        total = sum(getattr(pool, share) for pool in pools.values())
        if total > 1 + 1e-9:
            yield f"pools.*.{share} add up to {total:g}; at most 1 can be promised"
    for name, pool in pools.items():
        if pool.max_num_seqs > config.engine.max_num_seqs:
            yield (
                f"pools.{name}.max_num_seqs ({pool.max_num_seqs}) is more than "
                f"engine.max_num_seqs ({config.engine.max_num_seqs})"
            )


def _lengths(config: Config) -> Iterator[str]:
    limits = config.limits
    for name in ("default_max_tokens", "default_completion_tokens"):
        if getattr(limits, name) > limits.max_tokens:
            yield f"limits.{name} ({getattr(limits, name)}) is more than limits.max_tokens ({limits.max_tokens})"
    for name in ("max_model_len", "num_blocks"):
        if getattr(config.engine, name) == 1:
            yield f"engine.{name} (1) has no room for a prompt and its answer; 0 takes what model and memory allow"


def _accounts(config: Config) -> Iterator[str]:
    seen: dict[str, str] = {}
    for name, key in config.keys.items():
        if len(key.sha256) != 64 or not set(key.sha256.lower()) <= set("0123456789abcdef"):
            yield f"keys.{name}.sha256 must be 64 hexadecimal digits, as `minserve keys new` prints them"
        elif other := seen.get(key.sha256.lower()):
            yield f"keys.{name} and keys.{other} are the same key"
        seen[key.sha256.lower()] = name
        if not name:
            yield "keys: a key needs a name"
    users = {key.user for key in config.keys.values()} | {config.local.user}
    for user in config.users:
        if user not in users:
            yield f"users.{user}: no key belongs to that user"


def _prices(config: Config) -> Iterator[str]:
    prices = config.prices
    for name in ("prefill", "cached", "decode"):
        price = getattr(prices, name)
        if price is not None and (not math.isfinite(price) or price > _MAX_PRICE):
            yield f"prices.{name} is {price:g} per million tokens; that can't be meant (at most {_MAX_PRICE:g})"
    if prices.cached is not None and prices.cached > (prices.prefill or 0.0) and prices.device_hour is None:
        yield "prices.cached must not be above prices.prefill: a reservation is made at the prefill price"
    if prices.device_hour is not None:
        for name, rate in (("prefill", prices.prefill_tokens_per_s), ("decode", prices.decode_tokens_per_s)):
            if rate is None and getattr(prices, name) is None:
                yield f"prices.device_hour needs prices.{name}_tokens_per_s (minserve bench measures it)"


def _money(config: Config) -> Iterator[str]:
    """Money caps need prices, room for at least one ordinary call, and a ledger that is kept long enough."""
    caps = list(_money_caps(config))
    if caps and _free(config):
        yield f"{caps[0][0]} is set, but [prices] says that nothing costs anything"
    least = _least_cost(config)
    for name, cap in caps:
        if 0 < cap < least:
            yield (
                f"{name} is {cap:g}, but one call of limits.default_max_tokens ({config.limits.default_max_tokens}) "
                f"may cost {least:g}: nobody could call"
            )
    monthly = any(limit.period == "month" for _, limit in _limits(config)) or (
        config.spend.limit is not None and config.spend.period == "month"
    )
    if monthly and 0 < config.ledger.retention_days < _MONTH_DAYS:
        yield f"ledger.retention_days must be 0 or at least {_MONTH_DAYS} while a cap counts by the month"
    if list(config.spend.alert_at) != sorted(set(config.spend.alert_at)):
        yield "spend.alert_at must rise"


def _money_caps(config: Config) -> Iterator[tuple[str, float]]:
    for name, limit in _limits(config):
        if limit.money is not None:
            yield f"{name}.money", limit.money
    for name, account in _all_accounts(config):
        if account.max_call_cost is not None:
            yield f"{name}.max_call_cost", account.max_call_cost
        if account.run.max_spend is not None:
            yield f"{name}.run.max_spend", account.run.max_spend
    if config.spend.limit is not None:
        yield "spend.limit", config.spend.limit


def _limits(config: Config) -> Iterator[tuple[str, LimitConfig]]:
    for name, account in _all_accounts(config):
        for i, limit in enumerate(account.limits):
            yield f"{name}.limits[{i}]", limit
        for i, limit in enumerate(account.end_user_limits):
            yield f"{name}.end_user_limits[{i}]", limit
    for name, user in config.users.items():
        for i, limit in enumerate(user.limits):
            yield f"users.{name}.limits[{i}]", limit


def _all_accounts(config: Config) -> Iterator[tuple[str, AccountConfig]]:
    yield "local", config.local
    yield from ((f"keys.{name}", key) for name, key in config.keys.items())


def _free(config: Config) -> bool:
    prices = config.prices
    return not (prices.prefill or prices.cached or prices.decode or prices.device_hour)


def _least_cost(config: Config) -> float:
    """What a call with a one-token prompt and the default output reserves, at configured prices."""
    prices = config.prices
    return ((prices.prefill or 0.0) + config.limits.default_max_tokens * (prices.decode or 0.0)) / 1e6


def _degradation(config: Config) -> Iterator[str]:
    d = config.degradation
    rungs = [(name, getattr(d, name)) for name in ("shrink_at", "pause_bulk_at", "static_at", "refuse_at")]
    for (first, low), (second, high) in pairwise(rungs):
        if low > high:
            yield f"degradation.{first} ({low:g}) must not be above degradation.{second} ({high:g})"
