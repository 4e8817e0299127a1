"""What JSON a body may be, and that a refusal names the field."""

from __future__ import annotations

import json

import msgspec
import pytest

from minserve.request import RequestError
from minserve.server import json_body
from minserve.server.errors import error_body
from minserve.server.json_body import parse_object, to_struct
from minserve.server.schema import ChatBody, CompletionBody
from minserve.server.unsupported import refuse_unsupported


def refused(body: bytes) -> RequestError:
    with pytest.raises(RequestError) as caught:
        parse_object(body)
    assert caught.value.status == 400
    return caught.value


def wrong(struct: type[msgspec.Struct], **fields: object) -> RequestError:
    with pytest.raises(RequestError) as caught:
        to_struct(fields, struct)
    assert caught.value.status == 400
    return caught.value


# bug: 71
@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b'{"temperature": NaN}', "temperature"),
        (b'{"temperature": Infinity}', "temperature"),
        (b'{"temperature": -Infinity}', "temperature"),
        (b'{"temperature": 1e999}', "temperature"),
        (b'{"logit_bias": {"5": 1e400}}', "logit_bias"),
        (b'{"seed": ' + b"9" * 5000 + b"}", "seed"),
        (b'{"stop": ["\\ud83d"]}', "stop"),
        (b'{"user": "\\udc00 low first"}', "user"),
        (b'{"model": "\\ud83dx"}', "model"),
        (b'{"messages": [{"role": "user", "content": "\\ud83d"}]}', "messages"),
        (b'{"metadata": {"\\ud83d": "key"}}', "metadata"),
    ],
)
def test_a_value_that_json_does_not_have_is_refused_by_name(body: bytes, param: str) -> None:
    assert refused(body).param == param


# bug: 71
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"  \n",
        b"[]",
        b'"text"',
        b"12",
        b"null",
        b"{",
        b'{"a": 1} x',
        b"{'a': 1}",
        b'{"a": "\xff"}',
        b"\xed\xa0\x80",
    ],
)
def test_a_body_that_is_no_json_object_is_refused(body: bytes) -> None:
    assert refused(body).code == "invalid_json"


# bug: 68
@pytest.mark.parametrize("depth", [3_000, 100_000])
@pytest.mark.parametrize("field", ["ignored", "tools", "metadata"])
def test_deep_nesting_is_refused_and_nothing_breaks(depth: int, field: str) -> None:
    body = b'{"%s": %s%s}' % (field.encode(), b"[" * depth, b"]" * depth)
    assert refused(body).code == "invalid_json"


# bug: 71
def test_a_byte_order_mark_is_skipped_and_null_counts_as_absent() -> None:
    assert parse_object(b'\xef\xbb\xbf{"a": 1, "stop": null}') == {"a": 1}


@pytest.mark.parametrize("second", ["n", "\\u006e"])  # bug: 71
def test_a_field_that_comes_twice_is_refused(second: str) -> None:
    with pytest.raises(RequestError) as caught:
        parse_object(b'{"n": 1, "stop": "\\"n\\"", "%b": 2}' % second.encode())
    assert (caught.value.status, caught.value.param) == (400, "n")


def test_looking_for_duplicates_takes_no_search_per_field_and_no_depth() -> None:
    many = ", ".join(f'"x{i}": {i}' for i in range(1000)).encode()
    assert json_body._may_repeat(many, dict.fromkeys(map(str, range(1000)))), "not one search for each"
    with pytest.raises(RequestError) as caught:
        parse_object(b'{%b, "x7": 1}' % many)
    assert caught.value.param == "x7"
    with pytest.raises(RequestError, match="too deeply"):
        json_body._refuse_duplicates(b'{"a": %b}' % (b"[" * 100_000 + b"]" * 100_000))


def test_a_name_may_come_again_deeper_or_as_a_value() -> None:
    fields = {"stop": "n", "n": 1, "metadata": {"n": "2", "stop": "stop"}, "user": "\u00e9"}
    assert parse_object(json.dumps(fields).encode()) == fields


# bug: 71
@pytest.mark.parametrize(
    ("field", "value"),
    [("n", True), ("n", "10"), ("n", 1.5), ("temperature", "1"), ("temperature", False), ("stream", 1), ("user", 5)],
)
def test_types_are_not_guessed(field: str, value: object) -> None:
    error = wrong(CompletionBody, **{field: value})
    assert error.param == field
    assert field in error.message


def test_ten_point_zero_is_an_integer() -> None:
    body = to_struct({"max_tokens": 10.0, "n": 2.0, "top_k": 5.0, "logprobs": 3.0}, CompletionBody)
    assert (body.max_tokens, body.n, body.top_k, body.logprobs) == (10, 2, 5, 3)


def test_errors_name_the_place_inside_a_field() -> None:
    error = wrong(ChatBody, messages=[{"role": "user", "content": "a"}, {"role": "user", "content": 5}])
    assert error.param == "messages[1].content"
    assert wrong(ChatBody).param == "messages"
    assert wrong(CompletionBody, prompt=[1, True]).param == "prompt[1]"


def test_unknown_fields_are_ignored_and_unsupported_ones_refused() -> None:
    assert to_struct({"prompt": "a", "store": True, "service_tier": "auto"}, CompletionBody).prompt == "a"
    harmless = {"best_of": 1, "suffix": "", "tool_choice": "none", "response_format": {"type": "text"}}
    refuse_unsupported(harmless, chat=True)
    for field, value in {
        "tools": [],
        "functions": [],
        "tool_choice": "auto",
        "response_format": {"type": "json_object"},
        "best_of": 2,
        "suffix": "x",
        "audio": {},
        "modalities": ["text", "audio"],
        "guided_json": {},
        "structured_outputs": {},
        "logits_processors": ["x"],
        "truncate_prompt_tokens": 5,
        "chat_template": "{{ x }}",
        "skip_special_tokens": False,
        "echo": True,
        "use_beam_search": True,
        "beam_search": True,
        "logit_processors": ["x"],
        "lora": "a",
        "lora_request": {},
        "n_cmpl": 2,
        "enable_thinking": False,
        "think": True,
        "regex_pattern": "a*",
        "reasoning_format": "none",
        "truncate": 5,
    }.items():
        with pytest.raises(RequestError) as caught:
            refuse_unsupported({field: value}, chat=True)
        assert (caught.value.param, caught.value.code) == (field, "unsupported_parameter")


@pytest.mark.parametrize(
    ("field", "value"),
    [("chat_template_kwargs", {"a": 1}), ("reasoning_effort", "low"), ("continue_final_message", True)],
)
def test_a_completion_refuses_what_only_a_chat_understands(field: str, value: object) -> None:
    refuse_unsupported({field: value}, chat=True)
    with pytest.raises(RequestError) as caught:
        refuse_unsupported({field: value}, chat=False)
    assert caught.value.param == field


@pytest.mark.parametrize("field", ["audio", "function_call", "refusal"])
def test_what_a_message_holds_and_no_template_shows_is_refused(field: str) -> None:
    user, answer = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b", field: None}
    refuse_unsupported({"messages": [user, answer]}, chat=True)
    with pytest.raises(RequestError) as caught:
        refuse_unsupported({"messages": [user, {**answer, field: {"id": "x"}}]}, chat=True)
    assert (caught.value.param, caught.value.code) == (f"messages[1].{field}", "unsupported_parameter")


def test_true_does_not_pass_for_one_in_the_table_of_unsupported_fields() -> None:
    with pytest.raises(RequestError):
        refuse_unsupported({"best_of": True}, chat=False)


def test_a_wrong_word_is_answered_with_the_right_ones() -> None:
    with pytest.raises(RequestError, match="pool: must be one of interactive, bulk") as caught:
        to_struct({"prompt": "a", "pool": "fast"}, CompletionBody)
    assert (caught.value.code, caught.value.param) == ("invalid_type", "pool")


@pytest.mark.parametrize(
    "body",
    [
        b'{"%b": NaN}',
        b'{"%b": "\\ud83d"}',
        b'{"%b": 1, "%b": 2}',
        b'{"pool": "%b"}',
        b'{"metadata": {"%b": NaN}}',
    ],
)
def test_an_error_does_not_send_the_body_back(body: bytes) -> None:
    long = b"x" * 100_000
    with pytest.raises(RequestError) as caught:
        to_struct(parse_object(body.replace(b"%b", long)), CompletionBody)
    assert len(json.dumps(error_body(caught.value))) < 1000
