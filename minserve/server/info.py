"""The routes that generate nothing: models, tokens, health, numbers.

Owns their bodies. Health says whether the engine can still compute, ready whether it takes new work.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from aiohttp import web

import minserve
from minserve.economics.caps import Scope
from minserve.economics.history import SCOPE_COLUMNS
from minserve.observe.metrics import CONTENT_TYPE
from minserve.request import RequestError
from minserve.server.errors import not_found
from minserve.server.gateway import call_of
from minserve.server.http_input import read_fields
from minserve.server.json_body import to_struct
from minserve.server.messages import Conversation, check_characters, conversation
from minserve.server.sampling import check_token_ids
from minserve.server.schema import AbortBody, DetokenizeBody, Message, ResetBody, TemplateFields, TokenizeBody
from minserve.server.services import Services, identity_of
from minserve.server.unsupported import TOKENIZE_UNSUPPORTED, refuse_of, refuse_unsupported
from minserve.server.wire import to_json
from minserve.status import State


def json_response(value: object, status: int = 200) -> web.Response:
    return web.Response(body=to_json(value), status=status, content_type="application/json")


class InfoRoutes:
    def __init__(self, services: Services) -> None:
        self._s = services

    # -- what is served

    async def models(self, request: web.Request) -> web.Response:
        return json_response({"object": "list", "data": [self._card()]})

    async def model(self, request: web.Request) -> web.Response:
        name = request.match_info["model"]
        self._s.model.check_name(name)
        return json_response(self._card())

    def _card(self) -> dict[str, Any]:
        model = self._s.model
        return {
            "id": model.name,
            "object": "model",
            "created": model.created,
            "owned_by": "minserve",
            "root": model.name,
            "parent": None,
            "permission": [],
            "max_model_len": model.max_model_len,
            **({"meta": dict(model.details)} if model.details else {}),
        }

    async def version(self, request: web.Request) -> web.Response:
        return json_response({"version": minserve.__version__})

    # -- tokens

    async def tokenize(self, request: web.Request) -> web.Response:
        body = self._token_body(await read_fields(request))
        encode, tokenizer = self._token_job(body), self._s.model.tokenizer

        def job() -> dict[str, Any]:
            ids = encode()
            reply: dict[str, Any] = {"count": len(ids), "max_model_len": self._s.model.max_model_len, "tokens": ids}
            if body.return_token_strs:
                reply["token_strs"] = [tokenizer.token_bytes(i).decode("utf-8", errors="replace") for i in ids]
            return reply

        return json_response(await self._text(request, job))

    async def detokenize(self, request: web.Request) -> web.Response:
        body = to_struct(await read_fields(request), DetokenizeBody)
        model = self._s.model
        model.check_name(body.model)
        check_characters(len(body.tokens), self._s.config.limits, "tokens")
        ids = check_token_ids("tokens", body.tokens, model.vocab_size)
        text = await self._text(request, lambda: model.tokenizer.decode(ids, skip_special=False))
        return json_response({"prompt": text, "content": text})

    async def render(self, request: web.Request) -> web.Response:
        """What the chat template makes of messages, and the tokens of that: nothing is generated."""
        body = self._token_body(await read_fields(request))
        if body.messages is None:
            raise RequestError("`messages` is needed.", param="messages")
        talk = self._conversation(body.messages, body)
        template = self._s.model.template
        text, ids = await self._text(request, lambda: (talk.render(template), talk.encode(template)))
        return json_response({"prompt": text, "count": len(ids), "tokens": ids})

    def _token_body(self, fields: dict[str, Any]) -> TokenizeBody:
        """Where messages are sent, what generating from them would refuse is refused: the tokens would be others."""
        refuse_of(TOKENIZE_UNSUPPORTED, fields)
        if "messages" in fields:
            refuse_unsupported({name: value for name, value in fields.items() if name != "prompt"}, chat=True)
        body = to_struct(fields, TokenizeBody)
        self._s.model.check_name(body.model)
        return body

    def _token_job(self, body: TokenizeBody) -> Callable[[], list[int]]:
        """How to get the ids of one of the three forms: messages, prompt (as vLLM), content (as llama.cpp)."""
        model = self._s.model
        given = [value for value in (body.messages, body.prompt, body.content) if value is not None]
        if len(given) != 1:
            raise RequestError("Send exactly one of `prompt`, `messages` and `content`.", param="prompt")
        if body.messages is not None:
            talk = self._conversation(body.messages, body)
            return lambda: talk.encode(model.template)
        text = body.prompt if body.prompt is not None else body.content or ""
        check_characters(len(text), self._s.config.limits, "prompt" if body.prompt is not None else "content")
        bos = body.prompt is not None if body.add_special_tokens is None else body.add_special_tokens
        return lambda: model.tokenizer.encode(text, bos=bos, allow_special=True)

    def _conversation(self, messages: list[Message], fields: TemplateFields) -> Conversation:
        return conversation(messages, fields, self._s.config.limits)

    async def _text(self, request: web.Request, job: Callable[[], Any]) -> Any:
        return await self._s.text.run(identity_of(request).key, job)

    # -- what calls do and have done

    async def abort(self, request: web.Request) -> web.Response:
        body = to_struct(await read_fields(request), AbortBody)
        if not self._s.gateway.abort(call_of(body.id), identity_of(request)):
            raise not_found("No such request is running.", "request_not_found", "id")
        return json_response({"aborted": body.id})

    async def reset(self, request: web.Request) -> web.Response:
        """An operator forgives: what a scope has used so far counts no more, not even after a crash that follows."""
        body = to_struct(await read_fields(request), ResetBody)
        names = {column: getattr(body, column) for column in SCOPE_COLUMNS[body.scope]}
        for column, name in names.items():
            if name is None:
                raise RequestError(f"`{column}` is needed to reset this scope.", param=column)
        if not self._s.accounting.reset(Scope(body.scope, tuple(names.values()))):
            raise not_found("Nothing is counted there.", "nothing_counted", next(reversed(names), "scope"))
        if (ledger := self._s.accounting.ledger) is not None:
            await ledger.flush()
        return json_response({"reset": {"scope": body.scope, **names}})

    # -- how it is

    async def health(self, request: web.Request) -> web.Response:
        state = self._s.engine.state
        dead = state in (State.FAILED, State.STOPPED)
        return json_response({"status": state.value if dead else "ok"}, 503 if dead else 200)

    async def ready(self, request: web.Request) -> web.Response:
        state = self._s.engine.state
        if state is State.READY and not self._s.accounting.recording:
            return json_response({"status": "ledger_unavailable"}, 503)
        return json_response({"status": state.value}, 200 if state is State.READY else 503)

    async def metrics(self, request: web.Request) -> web.Response:
        return web.Response(body=self._s.telemetry.metrics.render(), headers={"Content-Type": CONTENT_TYPE})

    async def status(self, request: web.Request) -> web.Response:
        """Counts now, numbers of the last minute, what they point at.

        ?steps=N adds the latest steps, ?requests=1 what runs and waits, with the ids of its blocks.
        """
        calls = self._s.gateway.live
        now = dataclasses.asdict(self._s.engine.status())
        steps = request.query.get("steps", "0")
        if not steps.isdecimal() or len(steps) > 4:
            raise RequestError("`steps` must be a whole number from 0 to 9999.", param="steps")
        body: dict[str, Any] = {
            "model": self._s.model.name,
            "version": minserve.__version__,
            "step_count": now.pop("steps"),
            **now,
            "calls": calls,
            "tokenizing": self._s.text.waiting,
            **self._s.telemetry.report(calls, int(steps)),
        }
        if request.query.get("requests") == "1":
            body["requests"] = [dataclasses.asdict(live) for live in self._s.engine.requests()]
        return json_response(body)
