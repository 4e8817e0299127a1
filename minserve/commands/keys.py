"""keys: make API keys and short-lived tokens for pages, and reset what is counted against caps."""

from __future__ import annotations

import secrets
import time
from typing import Any

import click

from minserve.commands.options import config_options, duration, fail, read_settings
from minserve.commands.remote import ask, server_options
from minserve.settings import data_dir


@click.group()
def keys() -> None:
    """API keys, page tokens, and what is counted against their caps. Keys stand in minserve.toml, as hashes only."""


@keys.command()
@click.argument("name", required=False)
@click.option("--user", help="Who pays. [default: NAME]")
@click.option("--feature", help="What calls are attributed to, unless they say. [default: default]")
@click.option("--pool", type=click.Choice(["interactive", "bulk"]), help="[default: interactive]")
@click.option("--also-pool", "pools", multiple=True, type=click.Choice(["interactive", "bulk"]), help="May be chosen.")
@click.option("--admin", is_flag=True, help="May read /status and /metrics, reset limits, end anybody's call.")
@click.option("--limit", "limits", multiple=True, metavar="PERIOD:KIND=N", help="As day:tokens=200000; repeatable.")
def new(name: str | None, user: str | None, limits: tuple[str, ...], **fields: Any) -> None:
    """Make a key. Its secret goes to standard error, once; the table for minserve.toml to standard output."""
    from minserve.config import KeyConfig
    from minserve.economics.issue import key_table, parse_limit
    from minserve.economics.keys import MAX_LABEL, new_key

    name = name or "key-" + secrets.token_hex(2)
    for what, label in (("NAME", name), ("--user", user or name), ("--feature", fields["feature"] or "default")):
        if len(label) > MAX_LABEL or not label.isprintable():
            fail(f"{what} must be at most {MAX_LABEL} printable characters")
    secret, digest = new_key()
    given = {field: value for field, value in fields.items() if value}
    try:
        caps = tuple(map(parse_limit, limits))
    except ValueError as error:
        fail(f"--limit {error}")
    key = KeyConfig(sha256=digest, user=user or name, limits=caps, **given)
    click.echo(f"The key is {secret}\nIt is not shown again. A running server takes it after SIGHUP.", err=True)
    click.echo(key_table(name, key), nl=False)


@keys.command()
@click.option("--key-name", required=True, help="The key whose account pays: its name in minserve.toml.")
@click.option("--ttl", type=duration, default="10m", show_default=True, help="How long it is good for, at most 1h.")
@click.option("--origin", required=True, help="The page's origin, as https://example.org.")
@click.option("--max-tokens", type=int, required=True, help="Prompt and output tokens over its life.")
@click.option("--user", default="", help="The end user it stands for.")
@config_options
def token(key_name: str, ttl: float, origin: str, max_tokens: int, user: str, **options: Any) -> None:
    """Make a token for a page, so that the page never holds a key.

    It is signed with a secret in the server's data folder: run this where the server runs (and with its MINSERVE_DATA).
    """
    from minserve.economics.keys import Keyring
    from minserve.economics.tokens import PageTokens, server_secret
    from minserve.request import RequestError
    from minserve.server.origins import Origins

    config = read_settings(options).config
    if key_name not in config.keys:
        fail(f"there is no key {key_name!r} in the configuration; known: {', '.join(config.keys) or 'none'}")
    try:
        tokens = PageTokens(server_secret(data_dir() / "page-token.secret"))
        ring = Keyring(config.keys, config.local, tokens)
        made = ring.issue(
            ring.of(key_name), origin=origin, ttl_s=ttl, max_tokens=max_tokens, now=time.time(), end_user=user
        )
    except (RequestError, OSError, ValueError) as error:
        fail(str(error))
    if not Origins(config.server).allows(origin):
        click.echo(f"Pages of {origin} can't call yet: server.allowed_origins does not list it.", err=True)
    click.echo(made)


@keys.command()
@click.argument("scope", type=click.Choice(["server", "key", "user", "end_user", "run", "token"]))
@click.option("--key", default="", help="The key's name, of a key, an end user or a run.")
@click.option("--user", help="The account that pays.")
@click.option("--end-user", help="The end user of the key.")
@click.option("--run", help="The run of the key.")
@click.option("--token", help="The page token's id, as the ledger has it.")
@server_options
def reset(
    scope: str,
    key: str,
    user: str | None,
    end_user: str | None,
    run: str | None,
    token: str | None,
    url: str | None,
    api_key: str | None,
    **options: Any,
) -> None:
    """Set what is counted against the caps of SCOPE to zero, in a server that runs. Its ledger keeps the rows."""
    names = {"key": key, "user": user, "end_user": end_user, "run": run, "token": token}
    body = {"scope": scope, **{name: value for name, value in names.items() if value is not None}}
    done = ask("/limits/reset", "reset", url, api_key, options, body)["reset"]
    click.echo("Reset: " + ", ".join(f"{name} {value}" for name, value in done.items()))


COMMANDS = (keys,)
