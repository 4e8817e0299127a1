"""SIGHUP: keys, accounts, caps and prices of a running server become those of its configuration file as it is now.

Owns which sections may change while calls run, and what the log says of a reload. A file that can't be used changes
nothing. Whatever else has changed in it is named, and waits for a restart.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec

from minserve.config import Config, Section
from minserve.config_rules import validate
from minserve.economics.schema import LedgerError
from minserve.request import RequestError
from minserve.server.services import Services

log = logging.getLogger("minserve.server")

Reread = Callable[[], Config]

LIVE = ("limits", "local", "keys", "users", "prices", "spend")
_FIXED = ("limits.max_body_bytes",)  # the application was made with it


async def reload_on(hangup: asyncio.Event, services: Services, reread: Reread) -> None:
    """Reload whenever `hangup` is set, one after the other, until cancelled."""
    started = services.config
    while True:
        await hangup.wait()
        hangup.clear()
        await reload(services, reread, started)


async def reload(services: Services, reread: Reread, started: Config) -> None:
    """Read the configuration again and take over what may change. started: the one that the server began with."""
    try:
        asked = await asyncio.to_thread(reread)
        config = _merged(services.config, asked)
        if broken := validate(config):
            raise ValueError("; ".join(broken))
        changed = list(changes(services.config, config))
        await services.accounting.reconfigure(config)
    except (ValueError, LedgerError, RequestError) as error:
        log.error("the configuration was not reloaded, the old one stays: %s", error)
        return
    services.configure(config)
    log.info("configuration reloaded: %s", "; ".join(changed) or "nothing has changed")
    waiting = [line for line in changes(started, asked) if line.startswith(_FIXED) or not line.startswith(LIVE)]
    if waiting:
        log.warning("these wait for a restart: %s", "; ".join(waiting))


def _merged(old: Config, asked: Config) -> Config:
    """`old` with the sections that may change taken from `asked`."""
    merged = msgspec.structs.replace(old, **{name: getattr(asked, name) for name in LIVE})
    limits = msgspec.structs.replace(merged.limits, max_body_bytes=old.limits.max_body_bytes)
    return msgspec.structs.replace(merged, limits=limits)


def changes(old: Any, new: Any, name: str = "") -> Iterator[str]:
    """What differs, one phrase a value: `prices.decode 2.0 -> 2.5`, `keys.bob added`. A key's hash is not shown."""
    if old == new:
        return
    if isinstance(old, Section) and type(old) is type(new):
        for field in old.__struct_fields__:
            yield from changes(getattr(old, field), getattr(new, field), f"{name}.{field}" if name else field)
    elif isinstance(old, Mapping) and isinstance(new, Mapping):
        for key in sorted(old.keys() | new.keys()):
            if key not in old or key not in new:
                yield f"{name}.{key} {'added' if key in new else 'removed'}"
            else:
                yield from changes(old[key], new[key], f"{name}.{key}")
    elif name.endswith(".sha256"):
        yield f"{name} changed"
    else:
        yield f"{name} {_shown(old)} -> {_shown(new)}"


def _shown(value: Any) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(map(_shown, value))}]"
    if isinstance(value, Section):
        fields = msgspec.structs.asdict(value)
        return "{" + ", ".join(f"{k} = {v}" for k, v in fields.items() if v is not None) + "}"
    return str(value)
