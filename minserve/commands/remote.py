"""Asking a server that runs: where it is, with whose key, and what its refusals mean on a command line."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Callable
from http.client import HTTPException
from typing import Any, TypeVar

import click

from minserve.commands.options import config_options, fail, read_settings, server_url

F = TypeVar("F", bound=Callable[..., Any])

_SECONDS = 10.0


def server_options(function: F) -> F:
    """--url, --api-key and what `config_options` adds: `url`, `api_key` and the rest are for `ask`."""
    function = click.option(
        "--api-key", envvar="MINSERVE_API_KEY", help="An administrator's key, where keys are configured."
    )(function)
    return config_options(click.option("--url", type=server_url, help="The server. [default: as configured]")(function))


def ask(
    path: str, field: str, url: str | None, api_key: str | None, options: dict[str, Any], body: object = None
) -> Any:
    """The JSON object with `field` that answers a GET, or a POST of `body`; exits with the reason if there is none."""
    url = url or _configured(options)
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url + path, data, headers | {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=_SECONDS) as reply:
            answer = json.load(reply)
    except urllib.error.HTTPError as error:
        with error:
            hint = " Give an administrator's key with --api-key." if error.code in (401, 403) else ""
            fail(f"{url} answers {error.code}: {_message(error)}{hint}")
    except HTTPException:
        fail(f"{url} does not speak HTTP")
    except (OSError, ValueError) as error:
        fail(f"{url}: {getattr(error, 'reason', error)}. Is minserve running there?")
    if not isinstance(answer, dict) or field not in answer:
        fail(f"{url} is no minserve")
    return answer


def _configured(options: dict[str, Any]) -> str:
    server = read_settings(options).config.server
    host = "127.0.0.1" if server.host in ("0.0.0.0", "::") else server.host
    return f"http://{f'[{host}]' if ':' in host else host}:{server.port}"


def _message(error: urllib.error.HTTPError) -> str:
    """What the server says is wrong; its status in words if it is no minserve."""
    try:
        return str(json.load(error)["error"]["message"])
    except (OSError, ValueError, TypeError, KeyError):
        return f"{error.reason}."
