"""Templates that break, reach for Python, or want all the memory and time there is."""

from __future__ import annotations

import time

import pytest

from minserve.backend.base import CheckpointError
from minserve.request import RequestError
from tests.text.chats import USER, template, user


@pytest.mark.parametrize(
    "source", ["{{ 1 / 0 }}", "{{ a.b.c }}", "{{ messages[9].content + 1 }}", "{{ messages.x() }}"]
)
def test_a_template_that_breaks_is_no_server_error_and_tells_nothing(source: str) -> None:
    with pytest.raises(RequestError, match="can't render") as caught:
        template(source).render([user("secret")])
    assert caught.value.status == 400
    assert "secret" not in caught.value.message


BOMBS = [
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{% for i in range(99999) recursive %}{{ loop(range(99999)) }}{% endfor %}",
    "{% set n = namespace(x='a') %}{% for i in range(99) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    "{% set n = namespace(x='a') %}{% for i in range(99) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "{% set n = namespace(x=[1]) %}{% for i in range(99) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "{% for i in range(99999) %}{{ 'a' * 9999 }}{% endfor %}",
    "{{ 'a' * 10**9 }}",
    "{{ 9 ** 999999 }}",
    "{{ 'a' | center(10**9) }}",
    "{{ 'a'.ljust(10**9) }}",
    "{{ '%999999999d' % 1 }}",
    "{{ '%*d' % (999999999, 1) }}",
    "{{ '%999999999d' | format(1) }}",
    "{{ '{:999999999}'.format(1) }}",
    "{{ [1] | tojson(indent=999999999) }}",
    "{{ ('b' * 9000000) | replace('b', 'c' * 9) }}",
    "{{ ('b' * 9000000).replace('b', 'c' * 9) }}",
    "{{ [1] * 90000 | join('x' * 90000) }}",
    "{{ ('x' * 90000).join(['1'] * 90000) }}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "{{ range(10**9) | list }}",
    "{{ lipsum(n=100000, min=99990, max=100000) }}",
    "{{ range(100000) | map('center', 100000) | list }}",
    "{{ range(100000) | batch(1) | map('map', 'center', 100000) | map('list') | list }}",
    "{{ (['a' * 160000] * 100000) | map('upper') | list }}",
    "{% set n = namespace(x=[]) %}{% for i in range(99999) %}{% set n.x = n.x + ['a'.center(99999)] %}{% endfor %}",
    "{% set n = namespace(x=[]) %}{% for i in range(99999) %}{% set n.x = n.x + ['a' * 9999999] %}{% endfor %}",
    "{% set n = namespace(x=[]) %}{% for i in range(99999) %}{% set n.x = n.x + [[1] * 9999999] %}{% endfor %}",
    "{{ ['a' * 160000] * 100000 }}",
    "{{ {'a': ['a' * 160000] * 100000} }}",
    "{{ (['a' * 160000] * 100000) | string }}",
    "{{ (['a' * 160000] * 100000) | tojson }}",
    "{{ (['a' * 160000] * 100000) | join }}",
    "{{ 'a' ~ ['a' * 160000] * 100000 }}",
    "{{ '%s' % (['a' * 160000] * 100000) }}",
    "{{ '{}{}'.format(['a' * 160000] * 100000, 1) }}",
    "{{ ('a\n' * 8000000) | indent(100000) }}",
    "{{ ('a\n' * 8000000) | indent(first=true, width=100000) }}",
    "{{ ('b' * 9000000) | replace(new='c' * 100000, old='b') }}",
    "{{ (['1'] * 90000) | join(attribute=none, d='x' * 90000) }}",
    "{{ range(90000) | map('string') | join('x' * 90000) }}",
    "{{ ('\t' * 10000000).expandtabs(100000) }}",
    "{{ ('a' * 16000000).translate({97: 'b' * 1000}) }}",
    "{{ ('ab ' * 5000000) | wordwrap(1) }}",
    "{{ ('a.b ' * 4000000) | urlize }}",
]


@pytest.mark.parametrize("source", BOMBS)
def test_a_template_can_not_take_for_ever_or_eat_the_memory(source: str) -> None:
    started = time.perf_counter()
    with pytest.raises(RequestError, match="can't render") as caught:
        template(source).render([USER])
    assert "MemoryError" not in caught.value.message
    assert time.perf_counter() - started < 10


def test_a_namespace_does_not_write_out_what_it_holds() -> None:
    source = "{% set n = namespace(x=['a' * 160000] * 100000) %}{{ n }}{{ n.x | length }}"
    assert template(source).render([USER]) == "<Namespace>100000"


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append({}) }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{{ messages[0].update(content='x') }}",
    ],
)
def test_a_template_can_not_reach_python_or_change_what_it_is_given(source: str) -> None:
    with pytest.raises(RequestError, match="can't render"):
        template(source).render([USER])


@pytest.mark.parametrize(
    "source", ["{% if %}", "{{", "{% include 'x' %}{% nope %}", "x" * (1 << 21), "{{ " + "(" * 5000]
)
def test_a_template_that_is_none_is_refused_when_loading(source: str) -> None:
    with pytest.raises(CheckpointError, match="chat template"):
        template(source)
