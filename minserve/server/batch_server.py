"""The lines of a batch answered by a server that runs: its bulk pool, without a second set of weights.

Owns the connection, and how a reply over HTTP becomes one of a batch. It must not know files, nor what is tried again.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import Any

import aiohttp
import msgspec

from minserve.async_engine import GAVE_UP
from minserve.backend.base import BackendError
from minserve.request import Pool, RequestError
from minserve.server.batch_answers import Answers, Reply, refuse_stream
from minserve.server.batch_lines import BatchError, Line
from minserve.server.json_body import parse_object
from minserve.server.wire import to_json

_TIMEOUT = aiohttp.ClientTimeout(total=None, sock_connect=10.0)  # how long a call may take is the server's business
_JSON = {"Content-Type": "application/json"}
_NOT_OURS = "no_openai_error"  # a proxy's page, or another kind of server


@asynccontextmanager
async def server_answers(url: str, api_key: str | None, stop: asyncio.Event) -> AsyncIterator[Answers | None]:
    """The server at `url`. None: told to stop before it said anything.

    BatchError if it is none or refuses the key, BackendError if it can't be reached.
    """
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(headers=headers, timeout=_TIMEOUT, connector=connector) as session:
        answers = ServerAnswers(session, url.rstrip("/").removesuffix("/v1"))
        checking, stopping = asyncio.ensure_future(answers.check()), asyncio.ensure_future(stop.wait())
        await asyncio.wait((checking, stopping), return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if checking.done():
            await checking
            yield answers
        else:
            checking.cancel()
            yield None


class ServerAnswers:
    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self._session = session
        self._url = url
        self._under_way: set[asyncio.Timeout] = set()

    async def check(self) -> None:
        """Whether there is a server that takes the key; it may still be loading."""
        reply = await self._ask("GET", "/v1/models")
        if reply.error is not None and reply.status < HTTPStatus.INTERNAL_SERVER_ERROR:
            raise BatchError(f"{self._url}: {reply.error.message}")

    async def answer(self, line: Line) -> Reply:
        try:
            fields = parse_object(line.body)
            refuse_stream(fields)
        except RequestError as error:
            return Reply.failed("", error)
        chosen = "pool" in fields
        fields.setdefault("pool", Pool.BULK.value)
        limit = asyncio.timeout(None)
        self._under_way.add(limit)
        try:
            async with limit:
                reply = await self._ask("POST", line.url, to_json(fields))
        except TimeoutError:
            return Reply.failed("", RequestError("The run has ended.", status=503, code="shutting_down"))
        finally:
            self._under_way.discard(limit)
        if (fault := _fault(reply, chosen=chosen)) is not None:
            raise BackendError(f"{self._url}: {fault}")
        return reply

    async def end(self, patience: float) -> None:
        until = asyncio.get_running_loop().time() + patience
        for limit in self._under_way:
            limit.reschedule(until)

    async def _ask(self, method: str, path: str, body: bytes | None = None) -> Reply:
        try:
            async with self._session.request(method, self._url + path, data=body, headers=_JSON) as response:
                return _reply(response.status, response.headers, await response.read())
        except (aiohttp.ClientError, OSError) as error:
            raise BackendError(f"{self._url} can't be reached: {error or type(error).__name__}") from None


def _fault(reply: Reply, *, chosen: bool) -> str | None:
    """Why no line will do better, if that is so. chosen: the line names its pool itself."""
    if reply.error is None:
        return None
    if reply.error.code == "pool_not_allowed" and not chosen:
        return "this account may not use the bulk pool; `pools` of its key, or of [local], has to name it"
    dead = reply.status == HTTPStatus.UNAUTHORIZED or reply.error.code in GAVE_UP | {_NOT_OURS}
    return reply.error.message if dead and reply.status != HTTPStatus.REQUEST_ENTITY_TOO_LARGE else None


def _reply(status: int, headers: Mapping[str, str], content: bytes) -> Reply:
    request_id = headers.get("X-Request-ID", "")
    try:
        body = msgspec.json.decode(content)
    except msgspec.DecodeError:
        body = None
    if status == HTTPStatus.OK and isinstance(body, dict):
        return Reply(request_id, status, body, headers.get("x-minserve-degraded", ""))
    detail = body.get("error") if isinstance(body, dict) else None
    if not isinstance(detail, dict):
        return Reply.failed(request_id, _error(status, headers, {}))
    return Reply(request_id, status, body, error=_error(status, headers, detail))


def _error(status: int, headers: Mapping[str, str], detail: Mapping[str, Any]) -> RequestError:
    wait = headers.get("Retry-After", "")
    # With other statuses `false` only says that SDKs would not wait as long as Retry-After says; a batch does.
    exhausted = status == HTTPStatus.TOO_MANY_REQUESTS and headers.get("x-should-retry") == "false"
    return RequestError(
        str(detail.get("message") or f"The server answered with status {status}."),
        status=status,
        code=str(detail.get("code") or _NOT_OURS),
        retry_after=float(wait) if wait.isdecimal() else None,
        should_retry=False if exhausted else None,
    )
