"""Ranges, clamps and defaults of sampling parameters."""

from __future__ import annotations

from typing import Any

import pytest

from minserve.config import LimitsConfig
from minserve.request import RequestError, SamplingParams
from minserve.server.json_body import to_struct
from minserve.server.sampling import Rules, chat_params, check_token_ids, completion_params, fit
from minserve.server.schema import ChatBody, CompletionBody
from minserve.weights.loaded import GenerationDefaults

VOCAB = 1000
RULES = Rules(
    limits=LimitsConfig(max_tokens=100),
    vocab_size=VOCAB,
    end_ids=frozenset({2}),
    special_ids={"<|end|>": 7},
    defaults=GenerationDefaults(),
)


def completion(rules: Rules = RULES, **fields: Any) -> SamplingParams:
    return completion_params(to_struct({"prompt": "x", **fields}, CompletionBody), rules)


def chat(rules: Rules = RULES, **fields: Any) -> SamplingParams:
    return chat_params(to_struct({"messages": [], **fields}, ChatBody), rules)


def refused(make: Any, **fields: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        make(**fields)
    assert caught.value.status == 400
    return caught.value


def test_every_call_has_a_bounded_length() -> None:
    assert completion().max_tokens == 16
    assert chat().max_tokens == 100  # the default of 512, under this server's maximum
    assert completion(max_tokens=5).max_tokens == 5


# bug: 45
@pytest.mark.parametrize("huge", [101, 10**9, 2**63, 10**30])
def test_max_completion_tokens_wins_and_huge_values_clamp(huge: int) -> None:
    assert chat(max_completion_tokens=3).max_tokens == 3
    assert chat(max_completion_tokens=3, max_tokens=50).max_tokens == 3
    assert chat(max_completion_tokens=huge).max_tokens == 100
    assert completion(max_tokens=huge).max_tokens == 100


# bug: 45
def test_zero_and_negative_lengths() -> None:
    assert refused(chat, max_completion_tokens=0).param == "max_completion_tokens"
    assert refused(chat, max_tokens=-1).param == "max_tokens"
    assert refused(completion, max_tokens=-1).param == "max_tokens"
    assert completion(max_tokens=0, echo=True, logprobs=1).max_tokens == 0


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", 2.1),
        ("top_p", -0.1),
        ("top_p", 1.01),
        ("min_p", 1.5),
        ("top_k", -2),
        ("presence_penalty", 2.5),
        ("frequency_penalty", -2.5),
        ("repetition_penalty", 0),
        ("repetition_penalty", 1e-38),  # logits by it are beyond float32
        ("seed", 2**63),
        ("seed", -(2**63) - 1),
        ("n", 0),
        ("n", 9),
        ("logprobs", -1),
        ("logprobs", 21),
        ("min_tokens", -1),
        ("stop", ""),
        ("stop", ["a", ""]),
        ("stop", list("abcde")),
        ("stop", "x" * 2000),
    ],
)
def test_values_out_of_range_are_refused_by_name(field: str, value: object) -> None:
    assert refused(completion, **{field: value}).param == field


def test_min_tokens_fits_max_tokens() -> None:
    assert refused(completion, min_tokens=9, max_tokens=8).param == "min_tokens"
    assert completion(min_tokens=90, max_tokens=10**6).min_tokens == 90


@pytest.mark.parametrize("cold", [{"temperature": 0}, {"temperature": 1e-6}, {"top_p": 0}])
def test_greedy_forms_are_one(cold: dict[str, Any]) -> None:
    params = completion(**cold, top_k=5, min_p=0.1)
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.0, 1.0, 0, 0.0)


# bug: 34
@pytest.mark.parametrize(("top_k", "meant"), [(0, 0), (-1, 0), (1, 1), (VOCAB - 1, VOCAB - 1), (VOCAB, 0), (10**7, 0)])
def test_top_k_off_and_above_the_vocabulary(top_k: int, meant: int) -> None:
    assert completion(top_k=top_k).top_k == meant


# bug: 37
@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("99999999", 1),
        ("-1", 1),
        ("AI", 1),
        ("5", None),
        ("5", "1"),
        ("5", True),
        ("5", 101),
        ("", 1),
        ("٣", 1),
        ("1e1", 1),
    ],
)
def test_logit_bias_is_checked_key_by_key(key: str, value: object) -> None:
    error = refused(completion, logit_bias={key: value})
    assert error.param == f"logit_bias.{key}"


def test_logit_bias_of_real_tokens() -> None:
    assert completion(logit_bias={"5": 1, "999": -100.0}).logit_bias == {5: 1.0, 999: -100.0}


# bug: 12
@pytest.mark.parametrize("token_id", [VOCAB, -1, 2**40, 2**70])
@pytest.mark.parametrize("field", ["stop_token_ids", "allowed_token_ids", "banned_token_ids"])
def test_token_ids_outside_the_vocabulary_are_refused(token_id: int, field: str) -> None:
    assert refused(completion, **{field: [token_id]}, min_tokens=1).param == field


# bug: 36
def test_a_choice_without_any_token_is_refused() -> None:
    assert refused(completion, allowed_token_ids=[5], banned_token_ids=[5]).param == "allowed_token_ids"
    assert refused(completion, allowed_token_ids=[]).param == "allowed_token_ids"
    assert refused(completion, allowed_token_ids=[2], min_tokens=1).param == "allowed_token_ids"
    assert refused(completion, banned_token_ids=list(range(VOCAB))).param == "banned_token_ids"
    assert completion(allowed_token_ids=[5, 6], banned_token_ids=[5]).allowed_token_ids == frozenset({5, 6})


def test_stop_ids_hold_the_models_end_tokens_and_special_stop_strings() -> None:
    assert completion(stop_token_ids=[9]).stop_token_ids == {2, 9}
    assert completion(stop_token_ids=[9], ignore_eos=True).stop_token_ids == {9}
    assert completion(stop=["<|end|>", "plain"]).stop_token_ids == {2, 7}


def test_logprobs_of_both_endpoints() -> None:
    assert completion().logprobs is None
    assert completion(logprobs=0).logprobs == 0
    assert completion(logprobs=2).prompt_logprobs is None
    assert completion(logprobs=2, echo=True).prompt_logprobs == 2
    assert chat(logprobs=True).logprobs == 0
    assert chat(logprobs=True, top_logprobs=20).logprobs == 20
    assert refused(chat, logprobs=True, top_logprobs=21).param == "top_logprobs"
    assert refused(chat, top_logprobs=3).param == "top_logprobs"
    assert chat(logprobs=False, top_logprobs=0).logprobs is None


def test_the_models_own_defaults_stand_under_the_request() -> None:
    rules = Rules(RULES.limits, VOCAB, RULES.end_ids, {}, GenerationDefaults(temperature=0.6, top_p=0.9, top_k=20))
    own = completion(rules)
    assert (own.temperature, own.top_p, own.top_k) == (0.6, 0.9, 20)
    asked = completion(rules, temperature=1, top_k=0)
    assert (asked.temperature, asked.top_p, asked.top_k) == (1.0, 0.9, 0)


# bug: 41
def test_the_room_that_a_prompt_leaves_cuts_max_tokens() -> None:
    params = SamplingParams(max_tokens=97, min_tokens=95)
    cut = fit(params, 8, 100, 0, "prompt")
    assert (cut.max_tokens, cut.min_tokens) == (92, 92)
    with pytest.raises(RequestError) as caught:
        fit(params, 100, 100, 0, "prompt")
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "prompt")
    assert "maximum context length is 100 tokens" in caught.value.message
    assert "100 tokens, which" in caught.value.message
    assert fit(SamplingParams(max_tokens=0), 100, 100, 0, "prompt").max_tokens == 0
    with pytest.raises(RequestError):
        fit(SamplingParams(max_tokens=0), 101, 100, 0, "prompt")


def test_a_servers_own_input_limit_has_its_own_code() -> None:
    with pytest.raises(RequestError) as caught:
        fit(SamplingParams(max_tokens=1), 51, 100, 50, "messages")
    assert (caught.value.code, caught.value.param) == ("too_many_input_tokens", "messages")


# bug: 44
@pytest.mark.parametrize("bad", [[-1], [VOCAB], [2**62], [1, 2, -5]])
def test_prompt_ids_outside_the_vocabulary_are_refused(bad: list[int]) -> None:
    with pytest.raises(RequestError) as caught:
        check_token_ids("prompt", bad, VOCAB)
    assert caught.value.param == "prompt"


@pytest.mark.parametrize(("wanted", "left"), [(10, 10), (92, 92), (93, 92), (2**63, 92), (0, 0)])
def test_output_is_cut_to_what_the_context_leaves(wanted: int, left: int) -> None:
    assert fit(SamplingParams(max_tokens=wanted), 8, 100, 0, "prompt").max_tokens == left
