"""What is kept of a call: its row, even if malformed, in a ledger that may fail; never its text."""

from __future__ import annotations

import io
import json
from pathlib import Path

from minserve.economics.ledger import Ledger
from minserve.observe.log import setup
from tests.server.fakes import FakeEngine, say
from tests.server.serving import CHAT, COMPLETION, keyed, serving


async def test_a_server_that_can_not_record_its_calls_is_not_ready_and_counts_what_it_lost(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "l.db")
    async with serving(book=ledger) as server:
        assert (await server.get("/ready")) == (200, {"status": "ready"})
        ledger.database.execute("PRAGMA query_only = ON")
        for _ in range(2):
            status, body = await server.post("/v1/completions", COMPLETION)
            assert (status, body["error"]["code"]) == (503, "ledger_unavailable")
        assert (await server.get("/ready")) == (503, {"status": "ledger_unavailable"})
        assert (await server.get("/health"))[0] == 200
        async with server.session.get(server.url + "/metrics") as response:
            page = await response.text()
        assert "# TYPE minserve_ledger_lost_rows_total counter" in page
        assert f'minserve_ledger_lost_rows_total{{model_name="tiny"}} {ledger.lost_rows}.0' in page
        assert ledger.lost_rows > 0
        ledger.database.execute("PRAGMA query_only = OFF")


async def test_numbers_that_no_ledger_holds_do_it_no_harm(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "l.db")
    async with serving(book=ledger) as server:
        for wrong in ({"max_tokens": -(10**30)}, {"n": 10**30}, {"n": 2**40, "max_tokens": 2**40}):
            assert (await server.post("/v1/completions", {**COMPLETION, **wrong}))[0] == 400
        assert (await server.post("/v1/completions", {**COMPLETION, "max_tokens": 10**30}))[0] == 200
        await ledger.flush()
        found = ledger.database.execute("SELECT status, asked_max_tokens FROM calls ORDER BY seq").fetchall()
    assert found == [(400, -(2**31) + 1), (400, None), (400, 2**31 - 1), (200, 2**31 - 1)]


async def test_malformed_calls_have_rows_too() -> None:
    async with serving(keys={"a": keyed("a")}) as server:
        own = {"Authorization": "Bearer a"}
        await server.post("/v1/completions", b"{", headers=own)
        await server.post("/v1/chat/completions", {**CHAT, "tools": []}, headers=own)
        await server.post("/v1/completions", COMPLETION)
        assert [(row.status, row.code, row.key) for row in server.rows] == [
            (400, "invalid_json", "a"),
            (400, "unsupported_parameter", "a"),
            (401, "missing_api_key", ""),
        ]


async def test_what_a_request_says_of_itself_stands_in_its_row() -> None:
    async with serving() as server:
        body = {**COMPLETION, "user": "bob", "metadata": {"feature": "search", "run_id": "r1"}}
        await server.post("/v1/completions", body)
        row = server.rows[0]
        assert (row.user, row.end_user, row.feature, row.run) == ("local", "bob", "search", "r1")
        status, reply = await server.post("/v1/completions", {**body, "metadata": {"feature": "x" * 500}})
        assert (status, reply["error"]["param"]) == (400, "metadata.feature")


async def test_no_text_of_a_prompt_reaches_the_log() -> None:
    secret, lines = "the-secret-words", io.StringIO()
    setup("console", "debug", lines)
    async with serving(FakeEngine(say("the-secret-reply"))) as server:
        await server.post("/v1/completions", {**COMPLETION, "prompt": secret})
        await server.post("/v1/completions", {**COMPLETION, "prompt": secret, "stop": [""]})
        await server.post("/v1/chat/completions", {"messages": [{"role": secret, "content": secret}]})
        await server.post("/v1/completions", json.dumps({"prompt": secret}).encode() + b"}")
        await server.get(f"/{secret}")
    assert "completion_tokens=" in lines.getvalue()
    assert "the-secret" not in lines.getvalue()
