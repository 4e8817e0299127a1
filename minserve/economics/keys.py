"""Who is calling: keys, the account behind each, and how a request may narrow itself inside that account.

Owns the table of keys (only hashes of them). It must not know counters: an Identity says who pays, `payers` how much.
A request's feature, user and run only say more about a call; they never choose another account, so no header dodges a
cap.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Mapping

import msgspec

from minserve.config import AccountConfig, KeyConfig
from minserve.economics.prices import nano
from minserve.economics.tokens import PageToken, PageTokens, is_page_token
from minserve.origin import origin_of
from minserve.request import Pool, RequestError

MAX_LABEL = 128


class Identity(msgspec.Struct, frozen=True):
    """A caller: the key's account, and what the request says of itself inside it.

    key: the key's name, "" without keys. salt: separates the prefix cache of tenants. run_calls, run_cost: the budget
    that the run's first call declared (calls; billionths of the currency). token: set when a page token was shown.
    """

    key: str
    account: AccountConfig
    admin: bool
    feature: str
    end_user: str = ""
    run: str = ""
    run_calls: int | None = None
    run_cost: int | None = None
    token: PageToken | None = None

    @property
    def user(self) -> str:
        return self.account.user

    @property
    def salt(self) -> bytes:
        return b"key:" + self.key.encode() if self.key else b""

    def pool(self, asked: str | None = None) -> Pool:
        """The pool of a call. RequestError 403 if the account may not use the one it asked for."""
        own = self.account.pool or Pool.INTERACTIVE.value
        if asked is None:
            return Pool(own)
        if asked not in (own, *self.account.pools):
            raise _forbidden("This account may not use that pool.", "pool_not_allowed", "pool")
        return Pool(asked)

    def priority(self, asked: int) -> int:
        """Lower goes first; an account can't go before its minimum."""
        return max(asked, self.account.min_priority)


def new_key() -> tuple[str, str]:
    """A fresh key and the SHA-256 that the configuration keeps of it."""
    secret = "ms-" + secrets.token_urlsafe(32)
    return secret, digest(secret).hex()


def digest(secret: str) -> bytes:
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).digest()


class Keyring:
    """Finds the account of a request. Without keys everybody is the local account, which is also the admin."""

    def __init__(self, keys: Mapping[str, KeyConfig], local: AccountConfig, tokens: PageTokens) -> None:
        self._by_name = {name: _with_pools(key, local) for name, key in keys.items()}
        self._keys = [(name, bytes.fromhex(key.sha256), key) for name, key in self._by_name.items()]
        self._local = Identity("", local, True, local.feature)
        self._tokens = tokens

    def identify(self, authorization: str | None, origin: str | None = None, *, now: float = 0.0) -> Identity:
        """The caller behind an Authorization header. RequestError 401 if it names no account, 403 for a foreign page.

        Every key is compared, equal or not, so the time tells nothing about which one was close.
        """
        if not self._keys:
            return self._local
        scheme, _, secret = (authorization or "").strip().partition(" ")
        secret = secret.strip()
        if scheme.lower() != "bearer" or not secret:
            raise _unauthorized("An API key is needed: Authorization: Bearer YOUR_KEY.", "missing_api_key")
        if is_page_token(secret):
            return self._of_token(secret, origin, now)
        shown = digest(secret)
        found = -1
        for index, (_, known, _) in enumerate(self._keys):
            if hmac.compare_digest(known, shown):
                found = index
        if found < 0:
            raise _unauthorized("The API key is not valid.", "invalid_api_key")
        return self.of(self._keys[found][0])

    def of(self, name: str) -> Identity:
        """The account of a key by its name. KeyError if there is none."""
        key = self._by_name[name]
        return Identity(name, key, key.admin, key.feature)

    def issue(
        self, identity: Identity, *, origin: str, ttl_s: float, max_tokens: int, now: float, end_user: str = ""
    ) -> str:
        """A short-lived token for a page of `origin`, inside the key's account and capped on its own."""
        if not identity.key or identity.token is not None:
            raise _forbidden("Page tokens are issued to API keys only.", "key_required")
        name, key = identity.key, self._by_name[identity.key]
        return self._tokens.issue(
            name, bytes.fromhex(key.sha256), origin=origin, ttl_s=ttl_s, max_tokens=max_tokens, now=now, user=end_user
        )

    def _of_token(self, secret: str, origin: str | None, now: float) -> Identity:
        name = self._tokens.key_of(secret)
        key = self._by_name.get(name)
        token = self._tokens.check(secret, bytes.fromhex(key.sha256), now) if key is not None else None
        if key is None or token is None:
            raise _unauthorized("The page token is not valid or has expired.", "invalid_page_token")
        if origin_of(origin) != token.origin:
            raise _forbidden("The page token belongs to another origin.", "origin_mismatch")
        return Identity(name, key, False, key.feature, end_user=token.user, token=token)


def _unauthorized(message: str, code: str) -> RequestError:
    return RequestError(message, status=401, code=code, kind="authentication_error")


def _forbidden(message: str, code: str, param: str | None = None) -> RequestError:
    return RequestError(message, status=403, code=code, kind="permission_error", param=param)


def narrow(
    identity: Identity, headers: Mapping[str, str], metadata: Mapping[str, object] | None, user: str | None
) -> Identity:
    """What a request says of itself: X-Feature, X-Run-ID and the run's budget, or the same in metadata; body `user`.

    metadata keys: feature, run_id, run_max_calls, run_max_spend. A header and a metadata value that differ are refused:
    nobody could say which was meant. headers: matched without regard to case by the mapping itself.
    """
    fields = dict(metadata or {})

    def said(header: str, name: str) -> str | None:
        values = [v for v in (headers.get(header), fields.get(name)) if v is not None]
        if not values:
            return None
        if not all(isinstance(v, str | int | float) and not isinstance(v, bool) for v in values):
            raise RequestError(f"metadata.{name} must be text or a number.", param=f"metadata.{name}")
        texts = {str(v) for v in values}
        if len(texts) > 1:
            raise RequestError(f"{header} and metadata.{name} differ.", param=f"metadata.{name}", code="conflict")
        return texts.pop()

    feature = _label(said("X-Feature", "feature"), "metadata.feature")
    run = _label(said("X-Run-ID", "run_id"), "metadata.run_id")
    calls = _number(said("X-Run-Max-Calls", "run_max_calls"), "metadata.run_max_calls", whole=True)
    spend = _number(said("X-Run-Max-Spend", "run_max_spend"), "metadata.run_max_spend")
    if (calls is not None or spend is not None) and not run:
        raise RequestError("A run's budget needs a run id (X-Run-ID).", param="metadata.run_id", code="run_id_required")
    named = _label(user, "user")
    if named and identity.token is not None and identity.end_user not in ("", named):
        raise _forbidden("The page token names another user.", "user_mismatch", "user")
    return msgspec.structs.replace(
        identity,
        feature=feature or identity.feature,
        end_user=named or identity.end_user,
        run=run or identity.run,
        run_calls=None if calls is None else int(calls),
        run_cost=None if spend is None else nano(spend),
    )


def _with_pools(key: KeyConfig, local: AccountConfig) -> KeyConfig:
    """A key that names no pool has the local account's."""
    if key.pool is not None:
        return key
    return msgspec.structs.replace(key, pool=local.pool, pools=key.pools or local.pools)


def _label(text: str | None, param: str) -> str:
    """A name that may stand in logs and the ledger: short, printable. "" when absent."""
    if text is None or text == "":
        return ""
    if len(text) > MAX_LABEL or not text.isprintable():
        raise RequestError(f"{param} must be at most {MAX_LABEL} printable characters.", param=param)
    return text


def _number(text: str | None, param: str, *, whole: bool = False) -> float | None:
    if text is None:
        return None
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1e9 or (whole and value != int(value)):
        raise RequestError(f"{param} must be a {'whole ' if whole else ''}number from 0 to 1e9.", param=param)
    return value
