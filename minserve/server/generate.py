"""The two routes that generate: /v1/chat/completions and /v1/completions.

Owns the order of things: read, refuse, tokenize, run, answer. Everything that can be refused is refused before headers
go out, so that it has its real status. Shapes are chat.py's and completions.py's business, ends the gateway's.
"""

from __future__ import annotations

import logging
import math
import secrets
import time
from collections.abc import Sequence

from aiohttp import web

from minserve.economics.keys import Identity, narrow
from minserve.request import RequestError, SamplingParams
from minserve.server.answer import Answer, Head, Options
from minserve.server.chat import ChatAnswer
from minserve.server.completions import CompletionAnswer
from minserve.server.errors import not_found, shown, unexpected
from minserve.server.generation import Arrival, Call, Generation
from minserve.server.http_input import read_fields
from minserve.server.json_body import to_struct
from minserve.server.logprobs import TokenNames
from minserve.server.messages import conversation
from minserve.server.prompts import encode_prompt, prompt_list, shown_prompt
from minserve.server.sampling import chat_params, completion_params, fit
from minserve.server.schema import ChatBody, CompletionBody, GenerationBody, refuse_unsupported
from minserve.server.services import VISIT, Services, identity_of
from minserve.server.sse import EventStream
from minserve.server.wire import to_json

log = logging.getLogger("minserve.server")

_STATE_SECONDS = 0.25  # how often a waiting reader is told what has changed
_MAX_SALT = 128


class GenerateRoutes:
    def __init__(self, services: Services) -> None:
        self._s = services
        self._names = {as_ids: TokenNames(services.model.tokenizer, as_ids=as_ids) for as_ids in (False, True)}

    async def chat(self, request: web.Request) -> web.StreamResponse:
        arrival = self._arrival(request, "chatcmpl-")
        with self._s.gateway.refusals(arrival):
            fields = await read_fields(request)
            refuse_unsupported(fields, chat=True)
            body = to_struct(fields, ChatBody)
            call, answer = await self._chat_call(request, arrival, body)
        return await self._respond(request, call, answer, stream=body.stream)

    async def completions(self, request: web.Request) -> web.StreamResponse:
        arrival = self._arrival(request, "cmpl-")
        with self._s.gateway.refusals(arrival):
            fields = await read_fields(request)
            refuse_unsupported(fields, chat=False)
            body = to_struct(fields, CompletionBody)
            call, answer = await self._completion_call(request, arrival, body)
        return await self._respond(request, call, answer, stream=body.stream)

    # -- from a body to a call

    async def _chat_call(self, request: web.Request, arrival: Arrival, body: ChatBody) -> tuple[Call, Answer]:
        model = self._s.model
        self._check_model(body.model)
        params = chat_params(body, self._s.rules)
        talk = conversation(body.messages, body, self._s.config.limits)
        options = Options.of(body, logprobs=body.logprobs)
        arrival = self._narrowed(request, arrival, body)
        ids = await self._s.text.run(arrival.identity.key, lambda: tuple(talk.encode(model.template)))
        call = self._call(arrival, body, [ids], params)
        head = Head.new(arrival.id, "chat.completion.chunk" if body.stream else "chat.completion", model.name)
        splitters = [model.template.reasoning(ids) for _ in range(body.n)]
        names = self._names[body.return_tokens_as_token_ids]
        return call, ChatAnswer(head, options, names, ids, splitters, show_reasoning=body.include_reasoning)

    async def _completion_call(
        self, request: web.Request, arrival: Arrival, body: CompletionBody
    ) -> tuple[Call, Answer]:
        model = self._s.model
        self._check_model(body.model)
        params = completion_params(body, self._s.rules)
        prompts = prompt_list(body.prompt, self._s.config.limits, model.vocab_size)
        options = Options.of(body, logprobs=body.logprobs is not None)
        arrival = self._narrowed(request, arrival, body)
        tokenizer = model.tokenizer
        ids = await self._s.text.run(arrival.identity.key, lambda: [encode_prompt(p, tokenizer) for p in prompts])
        call = self._call(arrival, body, ids, params)
        shown_prompts = [shown_prompt(p, i, tokenizer, echo=body.echo) for p, i in zip(prompts, ids, strict=True)]
        head = Head.new(arrival.id, "text_completion", model.name)
        names = self._names[body.return_tokens_as_token_ids]
        return call, CompletionAnswer(head, options, names, shown_prompts, body.n)

    def _arrival(self, request: web.Request, prefix: str) -> Arrival:
        call_id = prefix + secrets.token_hex(12)
        request[VISIT].recorded = True
        return Arrival(call_id, request.path, self._s.model.name, identity_of(request), time.monotonic())

    def _narrowed(self, request: web.Request, arrival: Arrival, body: GenerationBody) -> Arrival:
        identity = narrow(arrival.identity, request.headers, body.metadata, body.user)
        return Arrival(arrival.id, arrival.endpoint, arrival.model, identity, arrival.started)

    def _check_model(self, name: str | None) -> None:
        if name is not None and name != self._s.model.name:
            raise not_found(
                f"The model {shown(name)} is not served here; this server has {self._s.model.name!r}.",
                "model_not_found",
                "model",
            )

    def _call(
        self, arrival: Arrival, body: GenerationBody, prompts: Sequence[tuple[int, ...]], params: SamplingParams
    ) -> Call:
        limits = self._s.config.limits
        identity = arrival.identity
        return Call(
            arrival=arrival,
            prompts=tuple(prompts),
            params=tuple(
                fit(params, len(ids), self._s.model.max_model_len, limits.max_input_tokens) for ids in prompts
            ),
            n=body.n,
            pool=identity.pool(body.pool),
            priority=identity.priority(body.priority),
            salt=_salt(identity, body.cache_salt),
        )

    # -- from a call to an answer

    async def _respond(self, request: web.Request, call: Call, answer: Answer, *, stream: bool) -> web.StreamResponse:
        if stream:
            return await self._stream(request, call, answer)
        async with self._s.gateway.run(call) as generation:
            while not generation.done:
                answer.collect(await generation.read(math.inf))
            body = answer.whole(generation)
        headers = generation.reservation.headers()
        return web.Response(body=to_json(body), content_type="application/json", headers=headers)

    async def _stream(self, request: web.Request, call: Call, answer: Answer) -> web.StreamResponse:
        events: EventStream | None = None
        try:
            async with self._s.gateway.run(call) as generation:
                timeouts = self._s.config.timeouts
                events = await EventStream.open(
                    request, stall_s=timeouts.write_stall_s, first_comment=_state(generation)
                )
                await self._pump(generation, answer, events)
        except RequestError as error:
            if events is None:
                raise
            await events.fail(error)
        except ConnectionError:
            if events is None:
                raise
        except Exception as error:
            if events is None:
                raise
            log.exception("a stream failed")
            await events.fail(unexpected(error))
        else:
            await events.finish()
        assert events is not None
        return events.response

    async def _pump(self, generation: Generation, answer: Answer, events: EventStream) -> None:
        """Events as they come; what the reader waits for while nothing comes."""
        keep_alive = self._s.config.timeouts.sse_keep_alive_s
        told = _state(generation)
        while not generation.done:
            deltas = await generation.read(keep_alive if generation.begun else min(keep_alive, _STATE_SECONDS))
            if data := answer.events(deltas, generation.tally):
                await events.send(data)
            elif not generation.begun and (state := _state(generation)) != told:
                told = state
                await events.comment(state)
            elif events.silent_for >= keep_alive:
                await events.comment("keep-alive")
        if data := answer.closing(generation):
            await events.send(data)


def _state(generation: Generation) -> str:
    """`queued 3` (requests ahead) or `prefill 120/400` (prompt tokens read so far)."""
    progress = generation.progress
    if progress.phase == "queued":
        return f"queued {progress.ahead}"
    return f"prefill {progress.computed}/{progress.prompt}"


def _salt(identity: Identity, cache_salt: str | None) -> bytes:
    """Separates prefix caches: of tenants always, within one by what the request says. A length keeps them apart."""
    if cache_salt is None:
        return identity.salt
    if not 0 < len(cache_salt) <= _MAX_SALT:
        raise RequestError(f"`cache_salt` must have 1 to {_MAX_SALT} characters.", param="cache_salt")
    return b"%d:%b%b" % (len(identity.salt), identity.salt, cache_salt.encode())
