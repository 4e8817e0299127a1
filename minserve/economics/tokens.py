"""Short-lived tokens for browser pages: a page must not hold an API key, but may hold this.

Owns the form and the signature of page tokens. A token is bound to an origin, ends by itself, carries its own cap of
tokens and lives inside the account of the key it was issued to. Its signature needs both a secret of this server and
the key's hash: a leaked configuration is not enough to make one, and removing the key ends all of its tokens.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import os
import secrets
from dataclasses import dataclass
from pathlib import Path

import msgspec

from minserve.origin import normal_origin
from minserve.request import RequestError

_PREFIX = "mst-"
MAX_TTL_S = 3600.0
_MAX_LENGTH = 2048
_MAX_ORIGIN = 256


@dataclass(frozen=True, slots=True)
class PageToken:
    """A checked token.

    origin: in its normal form. expires: Unix seconds. max_tokens: prompt + output over the token's life.
    """

    id: str
    origin: str
    expires: float
    max_tokens: int
    user: str


class _Payload(msgspec.Struct, frozen=True, array_like=True):
    id: str
    key: str
    origin: str
    expires: float
    max_tokens: int
    user: str


def is_page_token(secret: str) -> bool:
    return secret.startswith(_PREFIX)


def server_secret(path: Path) -> bytes:
    """The 32 bytes kept at `path`, made on first use and readable by the owner only."""
    try:
        handle = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
    except FileExistsError:
        secret = path.read_bytes()
        if len(secret) != 32:
            raise ValueError(f"{path} does not hold 32 bytes; delete it and a new one is made") from None
        return secret
    with os.fdopen(handle, "wb") as file:
        file.write(secret := secrets.token_bytes(32))
    return secret


class PageTokens:
    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    def issue(
        self, key: str, key_digest: bytes, *, origin: str, ttl_s: float, max_tokens: int, now: float, user: str = ""
    ) -> str:
        if not 0 < ttl_s <= MAX_TTL_S:
            raise RequestError(f"ttl must be above 0 and at most {MAX_TTL_S:g} seconds.", param="ttl")
        if max_tokens < 1:
            raise RequestError("max_tokens must be at least 1.", param="max_tokens")
        origin = _page(origin)
        payload = msgspec.json.encode(_Payload(secrets.token_urlsafe(12), key, origin, now + ttl_s, max_tokens, user))
        return f"{_PREFIX}{_encode(payload)}.{_encode(self._sign(payload, key_digest))}"

    def key_of(self, text: str) -> str:
        """The name of the key that a token claims to come from; "" if it is no token. Nothing is checked yet."""
        parts = _split(text)
        return "" if parts is None else parts[0].key

    def check(self, text: str, key_digest: bytes, now: float) -> PageToken | None:
        """The token, or None if its signature is not ours or its time is over."""
        parts = _split(text)
        if parts is None:
            return None
        payload, signed, signature = parts
        if not hmac.compare_digest(self._sign(signed, key_digest), signature) or now >= payload.expires:
            return None
        return PageToken(payload.id, payload.origin, payload.expires, payload.max_tokens, payload.user)

    def _sign(self, payload: bytes, key_digest: bytes) -> bytes:
        secret = hmac.digest(self._secret, b"page-token" + key_digest, hashlib.sha256)
        return hmac.digest(secret, payload, hashlib.sha256)


def _page(origin: str) -> str:
    """In the form that requests are compared in: a token of any other would never be let in."""
    try:
        if len(origin) > _MAX_ORIGIN:
            raise ValueError(f"it has more than {_MAX_ORIGIN} characters")
        return normal_origin(origin)
    except ValueError as error:
        raise RequestError(
            f"origin must be the page's origin, as https://example.org: {error}.", param="origin"
        ) from None


def _split(text: str) -> tuple[_Payload, bytes, bytes] | None:
    if len(text) > _MAX_LENGTH:
        return None
    body, _, signature = text.removeprefix(_PREFIX).partition(".")
    try:
        payload = _decode(body)
        return msgspec.json.decode(payload, type=_Payload), payload, _decode(signature)
    except (ValueError, binascii.Error, msgspec.MsgspecError):
        return None


def _encode(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def _decode(text: str) -> bytes:
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
