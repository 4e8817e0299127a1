"""Durations and moments as people write them."""

from __future__ import annotations

import time

import click
import pytest

from minserve.commands.options import duration, moment, server_url


@pytest.mark.parametrize(
    ("text", "seconds"), [("30s", 30), ("10m", 600), ("1h30m", 5400), ("7d", 604800), ("2w", 1209600), ("0.5", 0.5)]
)
def test_durations(text: str, seconds: float) -> None:
    assert duration(text) == seconds


@pytest.mark.parametrize("text", ["", "ten", "5y", "-1s", "1h 2m", "m"])
def test_what_is_no_duration_is_refused(text: str) -> None:
    with pytest.raises(click.BadParameter, match="no duration"):
        duration(text)


def test_a_moment_is_a_time_ago_or_a_date() -> None:
    assert moment("1h") == pytest.approx(time.time() - 3600, abs=5)
    assert moment("2026-01-31") == 1769817600
    assert moment("2026-01-31T12:00+02:00") == 1769853600
    with pytest.raises(click.BadParameter, match="no time"):
        moment("yesterday")


@pytest.mark.parametrize("url", ["http://127.0.0.1:8000/", "https://host", "http://[::1]:8000/v1"])
def test_a_server_is_an_address(url: str) -> None:
    assert server_url(url) == url.rstrip("/")


@pytest.mark.parametrize(
    "url",
    [
        "",
        "host",
        "host:8000",
        "ftp://host",
        "http://",
        "http://host:x",
        "http://[::1",
        "/v1",
        "http://a b",
        "http://host/\x01",
    ],
)
def test_what_is_no_address_of_a_server_is_refused(url: str) -> None:
    with pytest.raises(click.BadParameter, match="is no server"):
        server_url(url)
