"""kill -9 while 32 calls run: nothing settled is lost, nothing counted twice, every reservation is settled."""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

from minserve.config import AccountConfig, Config, LimitConfig
from minserve.economics.accounting import Accounting
from minserve.economics.windows import Amount

# Keeps 32 calls open, settles at random, tells what its clients saw; the parent kills it somewhere in the middle.
_SERVER = """
import asyncio, json, random, sys
from pathlib import Path
from minserve.config import AccountConfig, Config, LimitConfig, PricesConfig
from minserve.economics.accounting import Accounting
from minserve.economics.reservation import Admission
from minserve.economics.settlement import Settlement

def say(**event):
    print(json.dumps(event), flush=True)

async def main():
    config = Config(prices=PricesConfig(prefill=1.0, decode=2.0))
    accounting = Accounting.open(config, Path(sys.argv[1]))
    me, rng, number = accounting.identify(None), random.Random(7), 0

    async def client():
        nonlocal number
        while True:
            number += 1
            admission = Admission(id=f"r{number}", identity=me, prompt_tokens=rng.randint(1, 50), max_tokens=40)
            reservation = await accounting.reserve(admission)
            say(seen="admitted", id=admission.id, reserved=reservation.cost)
            await asyncio.sleep(rng.random() * 0.05)
            used = rng.randint(1, 40)
            reservation.settle(Settlement(finish="stop", status=200, prompt_tokens=admission.prompt_tokens,
                                          completion_tokens=used))
            say(seen="finished", id=admission.id, cost=reservation.cost)
            if rng.random() < 0.3:
                await accounting.ledger.flush()
                say(seen="durable", id=admission.id)

    await asyncio.gather(*(client() for _ in range(32)))

asyncio.run(main())
"""


def test_kill_9_during_32_running_calls_loses_and_doubles_nothing(tmp_path: Path) -> None:
    server = subprocess.Popen([sys.executable, "-c", _SERVER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    seen = [server.stdout.readline() for _ in range(600)]
    server.kill()
    seen += server.stdout.read().splitlines()
    server.wait()
    server.stdout.close()
    events = [json.loads(line) for line in seen if line.strip().endswith("}")]
    told = {kind: {e["id"]: e for e in events if e["seen"] == kind} for kind in ("admitted", "finished", "durable")}
    assert len(told["admitted"]) > len(told["finished"]) > len(told["durable"]) > 10

    accounting = Accounting.open(
        Config(local=AccountConfig(limits=(LimitConfig(period="hour", tokens=10**9),))), tmp_path
    )
    ledger = accounting.ledger
    assert ledger is not None
    assert ledger.interrupted > 0
    with closing(sqlite3.connect(tmp_path / "ledger.db")) as database:
        rows = database.execute(
            "SELECT id, finish, reserved, cost, prompt_tokens + completion_tokens FROM calls"
        ).fetchall()
    by_id = {row[0]: row for row in rows}
    assert len(by_id) == len(rows)
    for call_id, event in told["admitted"].items():
        assert by_id[call_id][2] == event["reserved"]
    for call_id, finish, reserved, cost, _ in rows:
        assert finish in ("stop", "interrupted")
        assert cost == reserved if finish == "interrupted" else cost <= reserved
        if call_id in told["durable"]:
            assert (finish, cost) == ("stop", told["finished"][call_id]["cost"])
        elif call_id in told["finished"] and finish == "stop":
            assert cost == told["finished"][call_id]["cost"]
    (total,) = [total for _, period, total in accounting.counters.limiter if period.span == "hour"]
    assert total == Amount(len(rows), sum(row[4] for row in rows), sum(row[3] for row in rows))
    ledger.database.close()
    for lock in accounting.locks:
        lock.release()
