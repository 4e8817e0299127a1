"""Host names, foreign pages and preflight questions."""

from __future__ import annotations

import pytest

from minserve.config import ServerConfig
from minserve.request import RequestError
from minserve.server.origins import ALLOW_HEADERS, Origins

PAGE = "https://page.example"


def origins(**fields: object) -> Origins:
    return Origins(ServerConfig(**fields))  # type: ignore[arg-type]


def status_of(call: object, *args: object) -> int:
    try:
        call(*args)  # type: ignore[operator]
    except RequestError as error:
        return error.status
    return 200


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1:8000", 200),
        ("localhost:8000", 200),
        ("LOCALHOST", 200),
        ("localhost.:8000", 200),
        ("[::1]:8000", 200),
        ("192.168.1.5:8000", 200),  # an address can't be rebound
        (None, 200),
        ("evil.example", 403),
        ("evil.example:8000", 403),
        ("127.0.0.1.evil.example", 403),
        ("localhost.evil.example", 403),
        ("user@evil.example", 403),
        ("", 403),
    ],
)
def test_foreign_host_names_are_refused(host: str | None, status: int) -> None:
    assert status_of(origins().check_host, host) == status


def test_host_names_can_be_listed() -> None:
    assert status_of(origins(allowed_hosts=("llm.lan",)).check_host, "llm.lan:8000") == 200
    assert status_of(origins(allowed_hosts=("*",)).check_host, "anything.example") == 200
    assert status_of(origins(host="box.lan").check_host, "box.lan:8000") == 200


@pytest.mark.parametrize(
    ("origin", "status"),
    [
        (None, 200),
        ("http://127.0.0.1:8000", 200),  # its own page
        ("https://127.0.0.1:8000", 200),  # behind a proxy that adds TLS
        (PAGE, 200),
        ("HTTPS://PAGE.EXAMPLE", 200),
        ("https://page.example.evil.example", 403),
        ("https://page.example:444", 403),
        ("http://127.0.0.1:3000", 403),
        ("null", 403),
        ("https://evil.example", 403),
    ],
)
def test_foreign_pages_may_not_post(origin: str | None, status: int) -> None:
    checked = origins(allowed_origins=(PAGE,))
    assert status_of(checked.check_origin, origin, "127.0.0.1:8000", "POST") == status
    assert status_of(checked.check_origin, origin, "127.0.0.1:8000", "GET") == 200


@pytest.mark.parametrize(
    "listed", ["http://a.example/", "HTTP://A.Example", "http://a.example:80", "http://a.example:"]
)
def test_a_listed_origin_is_the_page_it_means_however_it_is_written(listed: str) -> None:
    checked = origins(allowed_origins=(listed,))
    assert checked.allows("http://a.example")
    assert not checked.allows("https://a.example")
    assert not checked.allows("http://a.example:8080")


@pytest.mark.parametrize("header", ["http://[", "http://a.example/x", "http://a b", "localhost", "*", "", "null"])
def test_a_header_that_is_no_origin_is_no_listed_page(header: str) -> None:
    assert status_of(origins(allowed_origins=("localhost", PAGE)).check_origin, header, "127.0.0.1:8000", "POST") == 403


def test_pages_without_an_origin_can_be_listed() -> None:
    assert origins(allowed_origins=("null",)).allows("null")
    assert origins(allowed_origins=("*",)).allows("null")


def test_the_word_localhost_lists_all_ports_of_this_machine() -> None:
    local = origins(allowed_origins=("localhost",))
    assert local.allows("http://localhost:5173")
    assert local.allows("http://127.0.0.1:3000")
    assert not local.allows("http://localhost.evil.example:5173")


# bug: 48
def test_preflight_answers_a_listed_page_with_the_headers_it_asked_for() -> None:
    checked = origins(allowed_origins=(PAGE,))
    asked = "authorization,content-type,x-stainless-lang"
    reply = checked.preflight({"Origin": PAGE, "Host": "h", "Access-Control-Request-Headers": asked})
    assert reply["Access-Control-Allow-Headers"] == asked
    assert "Access-Control-Allow-Private-Network" not in reply
    private = {"Origin": PAGE, "Host": "h", "Access-Control-Request-Private-Network": "true"}
    assert checked.preflight(private)["Access-Control-Allow-Private-Network"] == "true"


def test_preflight_never_echoes_what_is_no_list_of_header_names() -> None:
    checked = origins(allowed_origins=(PAGE,))
    reply = checked.preflight({"Origin": PAGE, "Access-Control-Request-Headers": "a\r\nSet-Cookie: x"})
    assert reply["Access-Control-Allow-Headers"] == ALLOW_HEADERS
    for name in ("authorization", "content-type", "x-stainless-retry-count", "last-event-id", "x-run-id"):
        assert name in ALLOW_HEADERS


def test_preflight_refuses_an_unlisted_page() -> None:
    assert status_of(origins().preflight, {"Origin": PAGE, "Host": "127.0.0.1"}) == 403


def test_replies_carry_the_exact_origin_and_expose_each_header_by_name() -> None:
    listed = origins(allowed_origins=(PAGE,)).headers(PAGE)
    assert listed["Access-Control-Allow-Origin"] == PAGE
    assert "x-ratelimit-remaining-tokens" in listed["Access-Control-Expose-Headers"]
    assert "*" not in listed["Access-Control-Expose-Headers"]
    assert listed["Vary"] == "Origin"
    assert "Access-Control-Allow-Origin" not in origins(allowed_origins=(PAGE,)).headers("https://evil.example")
    assert origins().headers(None) == {}
