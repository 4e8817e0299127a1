"""Alerts by HTTP: posts each to the operator's URL as JSON.

Owns one client session. Retries and the queue are `economics.alerts`' business.
"""

from __future__ import annotations

import aiohttp

_SECONDS = 10.0


class Webhook:
    def __init__(self, url: str) -> None:
        self._url = url
        self._session: aiohttp.ClientSession | None = None

    async def __call__(self, alert: dict[str, object]) -> None:
        """Raises what aiohttp raises if the alert did not arrive."""
        if self._session is None:
            self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_SECONDS))
        async with self._session.post(self._url, json=alert) as response:
            response.raise_for_status()

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
