"""From the fields of a request body to a call and the shape of its answer, whoever brought them.

Owns the order of checks: type, ranges, lengths, whose account, tokens. Everything that can be refused is refused here,
before a reservation. It must not know HTTP: a route hands it what it has read, a batch file what stands on a line.
"""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from minserve.economics.keys import Identity, narrow
from minserve.request import RequestError, SamplingParams
from minserve.server.answer import Answer, Head, Options
from minserve.server.arrival import Arrival, Call, Known
from minserve.server.chat import ChatAnswer
from minserve.server.completions import CompletionAnswer
from minserve.server.generation import Generation
from minserve.server.json_body import to_struct
from minserve.server.logprobs import TokenNames
from minserve.server.messages import conversation
from minserve.server.prompts import prompt_list, read_prompt
from minserve.server.sampling import chat_params, completion_params, fit
from minserve.server.schema import ChatBody, CompletionBody, GenerationBody
from minserve.server.services import Services
from minserve.server.unsupported import refuse_unsupported
from minserve.server.wire import Response

_MAX_SALT = 128
_DEADLINE = "X-Minserve-Deadline-Ms"

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
ENDPOINTS: Mapping[str, str] = {CHAT: "chatcmpl-", COMPLETIONS: "cmpl-"}  # and the prefix of their calls' ids


@dataclass(frozen=True, slots=True)
class Prepared:
    """A call that may be run, what shapes its answer, and whether the caller wants a stream."""

    call: Call
    answer: Answer
    stream: bool


class Calls:
    def __init__(self, services: Services) -> None:
        self._s = services
        self._names = {as_ids: TokenNames(services.model.tokenizer, as_ids=as_ids) for as_ids in (False, True)}

    def arrival(self, endpoint: str, identity: Identity) -> Arrival:
        """endpoint: of ENDPOINTS."""
        call_id = ENDPOINTS[endpoint] + secrets.token_hex(12)
        return Arrival(call_id, endpoint, self._s.model.name, identity, time.monotonic())

    async def prepare(self, known: Known, fields: Mapping[str, Any], headers: Mapping[str, str]) -> Prepared:
        """headers: those by which a request narrows itself inside its account, and its deadline. known: grows with it.

        RequestError if it may not run.
        """
        chat = known.arrival.endpoint == CHAT
        refuse_unsupported(fields, chat=chat)
        deadline = _deadline(headers, known.arrival.started)
        prepared = await (self._chat if chat else self._completion)(known, fields, headers)
        return replace(prepared, call=replace(prepared.call, deadline=deadline))

    async def whole(self, prepared: Prepared) -> tuple[Response, Generation]:
        """Run the call to its end. RequestError if it is refused or fails."""
        answer = prepared.answer
        async with self._s.gateway.run(prepared.call) as generation:
            if generation.static:
                answer.plain()
            while not generation.done:
                answer.collect(await generation.read(math.inf))
            body = answer.whole(generation)
        return body, generation

    async def _chat(self, known: Known, fields: Mapping[str, Any], headers: Mapping[str, str]) -> Prepared:
        model = self._s.model
        body = to_struct(dict(fields), ChatBody)
        arrival = _narrow(known, body, headers)
        model.check_name(body.model)
        params = chat_params(body, self._s.rules)
        known.max_tokens = params.max_tokens
        talk = conversation(body.messages, body, self._s.config.limits)
        options = Options.of(body, logprobs=body.logprobs)
        ids = await self._s.text.run(arrival.identity.key, lambda: tuple(talk.encode(model.template)))
        known.prompt_tokens = len(ids)
        call = self._call(arrival, body, [ids], params)
        head = Head.new(arrival.id, "chat.completion.chunk" if body.stream else "chat.completion", model.name)
        splitters = [model.template.reasoning(ids) for _ in range(body.n)]
        names = self._names[body.return_tokens_as_token_ids]
        answer = ChatAnswer(head, options, names, ids, splitters, show_reasoning=body.include_reasoning)
        return Prepared(call, answer, body.stream)

    async def _completion(self, known: Known, fields: Mapping[str, Any], headers: Mapping[str, str]) -> Prepared:
        model = self._s.model
        body = to_struct(dict(fields), CompletionBody)
        arrival = _narrow(known, body, headers)
        model.check_name(body.model)
        params = completion_params(body, self._s.rules)
        known.max_tokens = params.max_tokens
        prompts = prompt_list(body.prompt, self._s.config.limits, model.vocab_size)
        options = Options.of(body, logprobs=body.logprobs is not None)
        read = await self._s.text.run(
            arrival.identity.key, lambda: [read_prompt(p, model.tokenizer, echo=body.echo) for p in prompts]
        )
        ids = [prompt.ids for prompt in read]
        known.prompt_tokens, known.choices = sum(map(len, ids)), body.n * len(ids)
        call = self._call(arrival, body, ids, params)
        head = Head.new(arrival.id, "text_completion", model.name)
        names = self._names[body.return_tokens_as_token_ids]
        return Prepared(call, CompletionAnswer(head, options, names, read, body.n), body.stream)

    def _call(
        self, arrival: Arrival, body: GenerationBody, prompts: Sequence[tuple[int, ...]], params: SamplingParams
    ) -> Call:
        limits = self._s.config.limits
        identity = arrival.identity
        field = "messages" if isinstance(body, ChatBody) else "prompt"
        return Call(
            arrival=arrival,
            prompts=tuple(prompts),
            params=tuple(
                fit(params, len(ids), self._s.model.max_model_len, limits.max_input_tokens, field) for ids in prompts
            ),
            n=body.n,
            pool=identity.pool(body.pool),
            priority=identity.priority(body.priority),
            salt=_salt(identity, body.cache_salt),
            asked_max_tokens=body.asked_tokens,
        )


def _narrow(known: Known, body: GenerationBody, headers: Mapping[str, str]) -> Arrival:
    """What the request says of itself; from here on a refusal's row has it too."""
    identity = narrow(known.arrival.identity, headers, body.metadata, body.user)
    known.arrival = replace(known.arrival, identity=identity)
    known.choices, known.asked_max_tokens = body.n, body.asked_tokens
    known.pool = identity.pool(body.pool)
    return known.arrival


def _deadline(headers: Mapping[str, str], arrived: float) -> float | None:
    """time.monotonic() until which the client waits: X-Minserve-Deadline-Ms after the request arrived.

    OpenAI's SDKs name their own timeout (x-stainless-timeout, x-stainless-read-timeout), but one SDK means the whole
    answer and another the silence between two pieces of it; so only the header that says what it means counts.
    """
    text = headers.get(_DEADLINE)
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and 0 < len(text) <= 9 and int(text)):
        raise RequestError(f"{_DEADLINE} must be a whole number of milliseconds, 1 to 999999999.", param=_DEADLINE)
    return arrived + int(text) / 1000


def _salt(identity: Identity, cache_salt: str | None) -> bytes:
    """Separates prefix caches: of tenants always, within one by what the request says. A length keeps them apart."""
    if cache_salt is None:
        return identity.salt
    if not 0 < len(cache_salt) <= _MAX_SALT:
        raise RequestError(f"`cache_salt` must have 1 to {_MAX_SALT} characters.", param="cache_salt")
    return b"%d:%b%b" % (len(identity.salt), identity.salt, cache_salt.encode())
