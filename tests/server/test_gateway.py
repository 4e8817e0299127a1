"""How calls end: exactly one row each, whatever ended them, and nothing left behind."""

from __future__ import annotations

import asyncio

import pytest

from minserve.config import AccountConfig, LimitConfig, ServerConfig
from minserve.request import FinishReason, TextDelta, Usage
from minserve.status import PromptProgress
from tests.server.fakes import FakeEngine, say
from tests.server.serving import CHAT, COMPLETION, keyed, serving
from tests.server.streams import STREAM, error_event, open_stream


# bug: 60
async def test_every_admitted_call_has_one_row_and_the_sums_agree() -> None:
    async with serving(FakeEngine(say("Hello"))) as server:
        await server.post("/v1/completions", COMPLETION)
        await server.events("/v1/chat/completions", CHAT)
        await server.post("/v1/completions", {**COMPLETION, "n": 2, "prompt": ["a", "bc"]})
        finishes = [(row.finish, row.status, row.completion_tokens) for row in server.rows]
        assert finishes == [("stop", 200, 5), ("stop", 200, 5), ("stop", 200, 20)]
        assert [row.prompt_tokens for row in server.rows][2] == 3
        assert [row.choices for row in server.rows] == [1, 1, 4]
        assert len({row.id for row in server.rows}) == 3


# bug: 13
@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_ends_its_call(stream: bool) -> None:
    engine = FakeEngine(None)
    async with serving(engine) as server:
        task = asyncio.create_task(server.post("/v1/completions", {**COMPLETION, "stream": stream}))
        opened = await engine.stream()
        opened.push(TextDelta(0, "a", (97,)))
        await asyncio.sleep(0.05)
        task.cancel()
        await server.settled()
        assert opened.closed
        (row,) = server.rows
        assert (row.finish, row.status, row.code) == ("abort", 499, "client_closed")


# bug: 14
async def test_normal_ends_are_no_aborts_and_early_closes_all_are() -> None:
    engine = FakeEngine(say("ab"))
    async with serving(engine) as server:
        for _ in range(5):
            await asyncio.gather(*(server.events("/v1/completions", COMPLETION) for _ in range(20)))
        assert [row.finish for row in server.rows] == ["stop"] * 100
        server.rows.clear()
        engine.script = None
        for response in await asyncio.gather(*(open_stream(server) for _ in range(30))):
            response.close()
        await server.settled()
        assert [row.finish for row in server.rows] == ["abort"] * 30


# bug: 15
async def test_clients_that_leave_while_queued_leave_no_work_behind() -> None:
    engine = FakeEngine(None)
    async with serving(engine) as server:
        responses = await asyncio.gather(*(open_stream(server) for _ in range(20)))
        assert len(engine.streams) == 20
        for response in responses:
            response.close()
        await server.settled()
        assert not engine.streams
        assert all((row.prompt_tokens, row.completion_tokens) == (0, 0) for row in server.rows)


# bug: 16
async def test_what_was_read_of_a_prompt_is_billed_when_its_client_leaves() -> None:
    engine = FakeEngine(None)
    async with serving(engine) as server:
        response = await open_stream(server, {**STREAM, "prompt": "x" * 300})
        (await engine.stream()).progress = PromptProgress("prefill", 128, 300, 0)
        response.close()
        await server.settled()
        assert server.rows[0].prompt_tokens == 128


async def test_a_lingering_server_finishes_what_a_client_left() -> None:
    engine = FakeEngine(None)
    async with serving(engine, server=ServerConfig(on_disconnect="linger")) as server:
        response = await open_stream(server)
        stream = await engine.stream()
        response.close()
        await asyncio.sleep(0.1)
        assert not stream.closed
        stream.push(TextDelta(0, "a", (97,)))
        stream.push(TextDelta(0, finish=FinishReason.STOP, usage=Usage(2, 0, 1)))
        await server.settled()
        (row,) = server.rows
        assert (row.finish, row.status, row.completion_tokens) == ("stop", 499, 1)


async def test_abort_ends_a_call_by_id_and_only_ones_own() -> None:
    keys = {"a": keyed("a"), "b": keyed("b"), "root": keyed("root", admin=True)}
    engine = FakeEngine(None)
    async with serving(engine, keys=keys) as server:
        for aborter, status in (("b", 404), ("a", 200)):
            by = {"Authorization": f"Bearer {aborter}"}
            if aborter == "b":
                own = {"Authorization": "Bearer a"}
                response = await server.session.post(server.url + "/v1/completions", json=STREAM, headers=own)
                call_id = (await engine.stream()).submission.id
            reply = await server.post("/abort", {"id": f"{call_id}#0"}, headers=by)  # as /status names it
            assert reply[0] == status
        assert error_event(await response.text())["code"] == "aborted"
        await server.settled()
        assert (server.rows[-1].finish, server.rows[-1].code) == ("error", "aborted")
        assert (await server.post("/abort", {"id": call_id}, headers=by))[0] == 404


async def test_a_call_of_many_prompts_can_be_aborted_by_each_id_that_status_names() -> None:
    engine = FakeEngine(None)
    async with serving(engine) as server:
        response = await server.session.post(server.url + "/v1/completions", json={**STREAM, "prompt": ["a", "b"]})
        _, status = await server.get("/status?requests=1")
        assert (await server.post("/abort", {"id": status["requests"][1]["id"]}))[0] == 200
        assert error_event(await response.text())["code"] == "aborted"
        await server.settled()
        assert [(row.finish, row.code) for row in server.rows] == [("error", "aborted")]


# bug: 66
async def test_fifty_calls_at_once_against_a_budget_for_two() -> None:
    local = AccountConfig(limits=(LimitConfig(period="day", requests=2),))
    async with serving(FakeEngine(say("ok")), local=local) as server:
        replies = await asyncio.gather(*(server.post("/v1/completions", COMPLETION) for _ in range(50)))
        assert sorted(status for status, _ in replies) == [200] * 2 + [429] * 48
        assert len(server.engine.submissions) == 2
        assert sorted(row.finish for row in server.rows) == ["refused"] * 48 + ["stop"] * 2
