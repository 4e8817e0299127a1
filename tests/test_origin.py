"""The one form of an origin, and what is none."""

from __future__ import annotations

import pytest

from minserve.origin import normal_origin, origin_of


@pytest.mark.parametrize(
    ("text", "normal"),
    [
        ("https://example.org", "https://example.org"),
        ("https://example.org/", "https://example.org"),
        ("HTTPS://Example.ORG", "https://example.org"),
        ("http://example.org:80", "http://example.org"),
        ("https://example.org:443/", "https://example.org"),
        ("https://example.org:80", "https://example.org:80"),
        ("http://example.org:", "http://example.org"),
        ("http://example.org:08080", "http://example.org:8080"),
        ("http://[::1]:3000", "http://[::1]:3000"),
        ("chrome-extension://abcdef", "chrome-extension://abcdef"),
    ],
)
def test_an_origin_has_one_form(text: str, normal: str) -> None:
    assert normal_origin(text) == normal
    assert normal_origin(normal) == normal
    assert origin_of(text) == normal


NOT_ORIGINS = """
example.org|//example.org|://example.org|http://|http:///|http://:80|http:example.org|http://a.example/path
http://a.example//|http://a.example?q|http://a.example#f|http://user@a.example|http://a b|http://a.example:x
http://a.example:65536|http://[|http://[::1|http://bücher.example|null|*|localhost
"""


@pytest.mark.parametrize(
    "text", ["", " http://a.example", "http://a.example\n", *NOT_ORIGINS.strip().replace("\n", "|").split("|")]
)
def test_what_is_no_origin_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is no origin"):
        normal_origin(text)
    assert origin_of(text) == ""
    assert origin_of(None) == ""
