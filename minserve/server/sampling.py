"""From a request body's fields to SamplingParams: every range is checked here, before any work is spent.

Owns ranges, clamps and defaults; the numbers of the operator come from LimitsConfig, those of the model from `Rules`.
It must not know prompts: the room that a prompt leaves is cut later, by `fit`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from minserve.config import LimitsConfig
from minserve.request import RequestError, SamplingParams
from minserve.server.errors import shown
from minserve.server.schema import ChatBody, CompletionBody, GenerationBody
from minserve.weights.loaded import GenerationDefaults

_GREEDY_BELOW = 1e-5  # colder than this float32 logits are an argmax anyway
_INT64 = 1 << 63
_MAX_STOP_IDS = 1024
_MAX_STOP_CHARACTERS = 1024


@dataclass(frozen=True, slots=True)
class Rules:
    """What a request is measured against. special_ids: texts that are exactly one special token.

    defaults: what the model's authors recommend for fields that a request leaves out.
    """

    limits: LimitsConfig
    vocab_size: int
    end_ids: frozenset[int]
    special_ids: Mapping[str, int]
    defaults: GenerationDefaults


def chat_params(body: ChatBody, rules: Rules) -> SamplingParams:
    if body.asked_tokens == 0:
        raise _refused(body.tokens_field, "must be at least 1")
    if body.top_logprobs:
        if not body.logprobs:
            raise _refused("top_logprobs", "needs logprobs to be true")
        _within("top_logprobs", body.top_logprobs, 0, rules.limits.max_logprobs)
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    return _params(body, rules, rules.limits.default_max_tokens, logprobs)


def completion_params(body: CompletionBody, rules: Rules) -> SamplingParams:
    """max_tokens 0 is legal here: with echo and logprobs it scores the prompt."""
    if body.logprobs is not None:
        _within("logprobs", body.logprobs, 0, rules.limits.max_logprobs)
    params = _params(body, rules, rules.limits.default_completion_tokens, body.logprobs)
    return replace(params, prompt_logprobs=body.logprobs if body.echo else None)


def fit(
    params: SamplingParams, prompt_tokens: int, max_model_len: int, max_input_tokens: int, field: str
) -> SamplingParams:
    """Cut max_tokens to the room that the prompt leaves. RequestError 400, naming `field`, if there is none."""
    if max_input_tokens and prompt_tokens > max_input_tokens:
        raise RequestError(
            f"The prompt has {prompt_tokens} tokens; this server accepts at most {max_input_tokens}.",
            code="too_many_input_tokens",
            param=field,
        )
    room = max_model_len - prompt_tokens
    if room < 0 or (room == 0 and params.max_tokens > 0):
        raise RequestError(
            f"This model's maximum context length is {max_model_len} tokens. However, your prompt has {prompt_tokens} "
            "tokens, which leaves no room for the answer. Please shorten it.",
            code="context_length_exceeded",
            param=field,
        )
    max_tokens = min(params.max_tokens, room)
    return replace(params, max_tokens=max_tokens, min_tokens=min(params.min_tokens, max_tokens))


def _params(body: GenerationBody, rules: Rules, default_tokens: int, logprobs: int | None) -> SamplingParams:
    max_tokens, min_tokens = _lengths(body, rules.limits, default_tokens)
    _within("n", body.n, 1, rules.limits.max_n)
    if body.seed is not None and not -_INT64 <= body.seed < _INT64:
        raise _refused("seed", "must fit 64 bits, signed")
    temperature, top_p, top_k, min_p = _shape(body, rules)
    stop = _stop_texts(body.stop, rules.limits.max_stop)
    stop_ids = _stop_ids(body, stop, rules)
    allowed, banned = _allowed(body, rules.vocab_size)
    if allowed is not None and min_tokens and allowed <= stop_ids:
        raise _refused("allowed_token_ids", "leaves only tokens that end the answer before min_tokens")
    presence, frequency, repetition = _penalties(body, rules)
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        seed=body.seed,
        stop=stop,
        stop_token_ids=stop_ids,
        ignore_eos=body.ignore_eos,
        min_tokens=min_tokens,
        presence_penalty=presence,
        frequency_penalty=frequency,
        repetition_penalty=repetition,
        logit_bias=_bias(body.logit_bias or {}, rules.vocab_size),
        allowed_token_ids=allowed,
        banned_token_ids=banned,
        logprobs=logprobs,
        include_stop=body.include_stop_str_in_output,
    )


def _lengths(body: GenerationBody, limits: LimitsConfig, default_tokens: int) -> tuple[int, int]:
    """(max_tokens, min_tokens): always bounded, larger wishes are clamped."""
    asked = body.asked_tokens
    if asked is not None and asked < 0:
        raise _refused(body.tokens_field, "must not be negative")
    if body.min_tokens < 0 or (asked is not None and body.min_tokens > asked):
        raise _refused("min_tokens", f"must be between 0 and {body.tokens_field}")
    max_tokens = min(default_tokens if asked is None else asked, limits.max_tokens)
    return max_tokens, min(body.min_tokens, max_tokens)


def _shape(body: GenerationBody, rules: Rules) -> tuple[float, float, int, float]:
    """(temperature, top_p, top_k, min_p). Greedy is temperature 0; top_p 0 keeps only the best token, so it is too."""
    defaults = rules.defaults
    temperature = _first(body.temperature, defaults.temperature, 1.0)
    top_p = _first(body.top_p, defaults.top_p, 1.0)
    min_p = _first(body.min_p, defaults.min_p, 0.0)
    top_k = int(_first(body.top_k, defaults.top_k, 0))
    _within("temperature", temperature, 0.0, 2.0)
    _within("top_p", top_p, 0.0, 1.0)
    _within("min_p", min_p, 0.0, 1.0)
    if top_k < -1:
        raise _refused("top_k", "must be -1, 0 (both: off) or more")
    if temperature < _GREEDY_BELOW or top_p == 0.0:
        return 0.0, 1.0, 0, 0.0
    return temperature, top_p, top_k if 0 < top_k < rules.vocab_size else 0, min_p


def _penalties(body: GenerationBody, rules: Rules) -> tuple[float, float, float]:
    """(presence, frequency, repetition)"""
    repetition = _first(body.repetition_penalty, rules.defaults.repetition_penalty, 1.0)
    _within("presence_penalty", body.presence_penalty, -2.0, 2.0)
    _within("frequency_penalty", body.frequency_penalty, -2.0, 2.0)
    _within("repetition_penalty", repetition, 0.001, 1000.0)  # far from where logits leave float32
    return body.presence_penalty, body.frequency_penalty, repetition


def _first(*values: float | None) -> float:
    return next(value for value in values if value is not None)


def _stop_texts(stop: str | list[str] | None, limit: int) -> tuple[str, ...]:
    texts = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if len(texts) > limit:
        raise _refused("stop", f"may hold at most {limit} strings")
    if "" in texts:
        raise _refused("stop", "must not hold an empty string")
    if any(len(text) > _MAX_STOP_CHARACTERS for text in texts):
        raise _refused("stop", f"may hold strings of at most {_MAX_STOP_CHARACTERS} characters")
    return texts


def _stop_ids(body: GenerationBody, stop: Sequence[str], rules: Rules) -> frozenset[int]:
    """The caller's ids, the model's end tokens, and stop strings that are special tokens: those never show as text."""
    asked = body.stop_token_ids or []
    if len(asked) > _MAX_STOP_IDS:
        raise _refused("stop_token_ids", f"may hold at most {_MAX_STOP_IDS} ids")
    ids = {_token_id("stop_token_ids", i, rules.vocab_size) for i in asked}
    ids.update(rules.special_ids[text] for text in stop if text in rules.special_ids)
    return frozenset(ids if body.ignore_eos else ids | rules.end_ids)


def _allowed(body: GenerationBody, vocab_size: int) -> tuple[frozenset[int] | None, frozenset[int]]:
    banned = frozenset(_token_id("banned_token_ids", i, vocab_size) for i in body.banned_token_ids or ())
    if body.allowed_token_ids is None:
        if len(banned) == vocab_size:
            raise _refused("banned_token_ids", "leaves no token to choose")
        return None, banned
    allowed = frozenset(_token_id("allowed_token_ids", i, vocab_size) for i in body.allowed_token_ids)
    if not allowed - banned:
        raise _refused("allowed_token_ids", "leaves no token to choose")
    return allowed, banned


def _bias(entries: Mapping[str, object], vocab_size: int) -> dict[int, float]:
    """Keys are token ids as text, as OpenAI writes them; values -100..100."""
    bias: dict[int, float] = {}
    for key, value in entries.items():
        where = f"logit_bias.{shown(key) if len(key) > 20 else key}"
        if not (key.isascii() and key.isdigit() and len(key) <= 10 and int(key) < vocab_size):
            raise RequestError(
                f"logit_bias: {shown(key)} is not a token id of this model (0..{vocab_size - 1}).", param=where
            )
        if isinstance(value, bool) or not isinstance(value, int | float) or not -100 <= value <= 100:
            raise RequestError(f"logit_bias: the value of {key} must be a number in -100..100.", param=where)
        bias[int(key)] = float(value)
    return bias


def _token_id(name: str, token_id: int, vocab_size: int) -> int:
    if not 0 <= token_id < vocab_size:
        raise _refused(name, f"holds {shown(token_id)}, which is not a token id of this model (0..{vocab_size - 1})")
    return token_id


def check_token_ids(name: str, ids: Sequence[int], vocab_size: int) -> tuple[int, ...]:
    """ids as a tuple. RequestError 400 for the first that is outside the vocabulary."""
    if ids and not (min(ids) >= 0 and max(ids) < vocab_size):
        for token_id in ids:
            _token_id(name, token_id, vocab_size)
    return tuple(ids)


def _within(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise _refused(name, f"must be between {low:g} and {high:g}, not {shown(value)}")


def _refused(name: str, what: str) -> RequestError:
    return RequestError(f"`{name}` {what}.", param=name)
