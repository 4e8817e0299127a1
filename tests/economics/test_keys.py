"""Keys and identities: who is calling, and that nothing a request says leads out of its account."""

from __future__ import annotations

import hmac
from typing import Any

import msgspec
import pytest

from minserve.config import AccountConfig, KeyConfig
from minserve.economics.keys import Identity, Keyring, digest, narrow, new_key
from minserve.economics.tokens import PageTokens
from minserve.request import Pool, RequestError


def key(secret: str, **fields: Any) -> KeyConfig:
    return KeyConfig(sha256=digest(secret).hex(), **{"user": "alice", **fields})


def ring(**found: KeyConfig) -> Keyring:
    return Keyring(found, AccountConfig(), PageTokens(b"s" * 32))


def refused(call: Any, *args: Any, **kwargs: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        call(*args, **kwargs)
    return caught.value


def test_a_new_key_is_long_and_only_its_hash_is_kept() -> None:
    secret, sha256 = new_key()
    assert secret.startswith("ms-")
    assert len(secret) >= 3 + 43
    assert ring(web=KeyConfig(sha256=sha256, user="u")).identify(f"Bearer {secret}").key == "web"
    assert new_key()[0] != secret


@pytest.mark.parametrize("header", [None, "", "Bearer", "Bearer ", "Basic abc", "abc", "Bearer wrong", "Bearer \udcff"])
def test_without_a_valid_key_nobody_is_let_in(header: str | None) -> None:  # bug: 64
    error = refused(ring(web=key("right")).identify, header)
    assert error.status == 401
    assert error.kind == "authentication_error"
    assert "right" not in error.message


def test_every_key_is_compared_in_constant_time_whichever_matches(monkeypatch: pytest.MonkeyPatch) -> None:  # bug: 64
    compared: list[bytes] = []
    really = hmac.compare_digest

    def compare(a: bytes, b: bytes) -> bool:
        compared.append(a)
        return really(a, b)

    monkeypatch.setattr(hmac, "compare_digest", compare)
    found = ring(a=key("one"), b=key("two"), c=key("three"))
    for secret in ("one", "two", "three"):
        compared.clear()
        assert found.identify(f"bearer {secret}").user == "alice"
        assert len(compared) == 3
    compared.clear()
    refused(found.identify, "Bearer none")
    assert len(compared) == 3


def test_without_keys_there_is_one_local_user_who_is_admin() -> None:
    identity = ring().identify(None)
    assert (identity.key, identity.user, identity.admin, identity.salt) == ("", "local", True, b"")


def test_tenants_have_different_salts() -> None:
    found = ring(a=key("one"), b=key("two"))
    assert found.identify("Bearer one").salt != found.identify("Bearer two").salt


def test_pools_and_priorities_are_clamped_by_the_account() -> None:
    identity = ring(a=key("one", pool="bulk", min_priority=3)).identify("Bearer one")
    assert identity.pool() is Pool.BULK
    assert refused(identity.pool, "interactive").status == 403
    assert [identity.priority(p) for p in (-100, 3, 7)] == [3, 3, 7]
    both = ring(a=key("one", pools=("bulk",))).identify("Bearer one")
    assert both.pool("bulk") is Pool.BULK


def me() -> Identity:
    return ring(web=key("one", feature="chat")).identify("Bearer one")


def test_a_request_narrows_itself_but_never_changes_its_account() -> None:  # bug: 65
    headers = {"X-Feature": "search", "X-Run-ID": "r1", "X-Run-Max-Calls": "5", "X-Run-Max-Spend": "0.25"}
    narrowed = narrow(me(), headers, None, "customer-7")
    assert (narrowed.key, narrowed.user, narrowed.account) == ("web", "alice", me().account)
    assert (narrowed.feature, narrowed.end_user, narrowed.run) == ("search", "customer-7", "r1")
    assert (narrowed.run_calls, narrowed.run_cost) == (5, 250_000_000)
    assert narrowed.salt == me().salt
    same = narrow(
        me(), {}, {"feature": "search", "run_id": "r1", "run_max_calls": 5, "run_max_spend": 0.25}, "customer-7"
    )
    assert same == narrowed
    assert narrow(me(), {}, None, None) == me()


@pytest.mark.parametrize(
    ("headers", "metadata", "user", "param"),
    [
        ({"X-Feature": "a"}, {"feature": "b"}, None, "metadata.feature"),
        ({"X-Feature": "a\nb"}, None, None, "metadata.feature"),
        ({"X-Feature": "a" * 129}, None, None, "metadata.feature"),
        ({}, {"run_id": ["x"]}, None, "metadata.run_id"),
        ({}, {"run_id": True}, None, "metadata.run_id"),
        ({}, None, "\udcff", "user"),
        ({}, None, "u\x1b[2J", "user"),
        ({"X-Run-ID": "r", "X-Run-Max-Calls": "-1"}, None, None, "metadata.run_max_calls"),
        ({"X-Run-ID": "r", "X-Run-Max-Calls": "1.5"}, None, None, "metadata.run_max_calls"),
        ({"X-Run-ID": "r", "X-Run-Max-Spend": "nan"}, None, None, "metadata.run_max_spend"),
        ({"X-Run-ID": "r", "X-Run-Max-Spend": "1e999"}, None, None, "metadata.run_max_spend"),
        ({"X-Run-ID": "r", "X-Run-Max-Spend": "much"}, None, None, "metadata.run_max_spend"),
        ({"X-Run-Max-Calls": "3"}, None, None, "metadata.run_id"),
    ],
)
def test_labels_that_mean_nothing_are_refused_by_name(
    headers: dict[str, str], metadata: dict[str, object] | None, user: str | None, param: str
) -> None:
    error = refused(narrow, me(), headers, metadata, user)
    assert (error.status, error.param) == (400, param)


# -- page tokens

ORIGIN = "https://shop.example"


def token(found: Keyring, **changes: Any) -> str:
    asked = {"origin": ORIGIN, "ttl_s": 600.0, "max_tokens": 1000, "now": 100.0, **changes}
    return found.issue(found.identify("Bearer one"), **asked)


def test_a_page_token_is_its_keys_account_for_its_origin_and_time() -> None:
    found = ring(web=key("one", admin=True))
    identity = found.identify("Bearer " + token(found, end_user="bob"), ORIGIN, now=699.0)
    assert (identity.key, identity.user, identity.end_user, identity.admin) == ("web", "alice", "bob", False)
    assert identity.token is not None
    assert identity.token.max_tokens == 1000
    assert narrow(identity, {}, None, "bob").end_user == "bob"
    assert refused(narrow, identity, {}, None, "eve").code == "user_mismatch"


@pytest.mark.parametrize(
    ("origin", "now", "status"), [(ORIGIN, 700.0, 401), ("https://evil.example", 1.0, 403), (None, 1.0, 403)]
)
def test_a_page_token_ends_with_its_time_and_its_origin(origin: str | None, now: float, status: int) -> None:
    found = ring(web=key("one"))
    assert refused(found.identify, "Bearer " + token(found), origin, now=now).status == status


@pytest.mark.parametrize("asked", ["http://a.example/", "http://A.example", "http://a.example:80", "http://a.example"])
@pytest.mark.parametrize("shown", ["http://a.example", "HTTP://A.EXAMPLE"])
def test_a_page_token_works_for_the_page_that_its_origin_means(asked: str, shown: str) -> None:
    found = ring(web=key("one"))
    assert found.identify("Bearer " + token(found, origin=asked), shown, now=1.0).key == "web"


def test_a_changed_or_foreign_page_token_is_refused() -> None:
    found = ring(web=key("one"))
    good = token(found)
    body, _, signature = good.partition(".")
    other = Keyring({"web": key("one")}, AccountConfig(), PageTokens(b"t" * 32))
    rekeyed = ring(web=key("two"))
    removed = ring(other=key("two"))
    for bad in (body, body + ".", good[:-2], body[:-4] + "AAAA." + signature, "mst-" + "A" * 5000, "mst-."):
        assert refused(found.identify, f"Bearer {bad}", ORIGIN, now=1.0).status == 401
    for ring_ in (other, rekeyed, removed):
        assert refused(ring_.identify, f"Bearer {good}", ORIGIN, now=1.0).status == 401


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"ttl_s": 0.0}, "ttl"),
        ({"ttl_s": 1e6}, "ttl"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"origin": "*"}, "origin"),
        ({"origin": "null"}, "origin"),
        ({"origin": "http://a.example/shop"}, "origin"),
        ({"origin": "http://" + "a" * 300}, "origin"),
    ],
)
def test_a_page_token_must_be_bounded(changes: dict[str, Any], param: str) -> None:
    assert refused(token, ring(web=key("one")), **changes).param == param


def test_a_page_token_can_not_issue_another() -> None:
    found = ring(web=key("one"))
    identity = found.identify("Bearer " + token(found), ORIGIN, now=1.0)
    asked: dict[str, Any] = {"origin": ORIGIN, "ttl_s": 60.0, "max_tokens": 10, "now": 1.0}
    assert refused(found.issue, identity, **asked).status == 403
    assert refused(found.issue, ring().identify(None), **asked).status == 403


@pytest.mark.parametrize("code", ["pool_not_allowed", "key_required", "origin_mismatch", "user_mismatch"])
def test_whatever_is_forbidden_says_so_in_its_type_too(code: str) -> None:
    found = ring(web=key("one"))
    page = "Bearer " + token(found, end_user="bob")
    causes: dict[str, Any] = {
        "pool_not_allowed": lambda: me().pool("bulk"),
        "key_required": lambda: ring().issue(ring().identify(None), origin=ORIGIN, ttl_s=60.0, max_tokens=10, now=1.0),
        "origin_mismatch": lambda: found.identify(page, "https://evil.example", now=1.0),
        "user_mismatch": lambda: narrow(found.identify(page, ORIGIN, now=1.0), {}, None, "eve"),
    }
    error = refused(causes[code])
    assert (error.status, error.code, error.kind) == (403, code, "permission_error")


def test_a_key_without_a_pool_has_those_of_the_local_account() -> None:
    """So that a profile, which sets the local account's, holds for keys too."""
    bulk = AccountConfig(pool="bulk", pools=("interactive",))
    keys = {"a": KeyConfig(sha256=digest("a").hex(), user="u"), "b": KeyConfig(sha256=digest("b").hex(), user="u")}
    keys["b"] = msgspec.structs.replace(keys["b"], pool="interactive")
    ring = Keyring(keys, bulk, PageTokens(b"x"))
    assert ring.of("a").pool() is Pool.BULK
    assert ring.identify("Bearer a").pool("interactive") is Pool.INTERACTIVE
    assert ring.of("b").pool() is Pool.INTERACTIVE
    with pytest.raises(RequestError, match="pool"):
        ring.of("b").pool("bulk")
    assert Keyring(keys, AccountConfig(), PageTokens(b"x")).of("a").pool() is Pool.INTERACTIVE
