"""A batch's results file: torn, no results at all, or written by somebody else."""

from __future__ import annotations

from pathlib import Path

import pytest

from minserve.server.batch_lines import BatchError, Line
from minserve.server.batch_results import Results, answered, faulty, read_results
from tests.server.batches import results_of


async def test_half_a_result_at_the_end_is_dropped_and_what_follows_is_whole(tmp_path: Path) -> None:
    target = tmp_path / "out.jsonl"
    results = Results(target)
    results.add(Line(1, "a"), answered(Line(1, "a"), "cmpl-1", 200, {}), failed=False)
    results.add(Line(2, None), faulty(Line(2, None, fault="no JSON")), failed=True)
    await results.close()
    whole = target.read_bytes()
    for torn in (b'{"id":"ba', whole[: len(whole) // 3]):
        target.write_bytes(whole + torn)
        results = Results(target)
        assert (results.done, results.failed) == ({"a", 2}, 1)
        results.add(Line(3, "c"), answered(Line(3, "c"), "cmpl-3", 429, {}), failed=True)
        await results.close()
        assert [r["custom_id"] for r in results_of(target)] == ["a", None, "c"]
        assert read_results(target).failed == 2


@pytest.mark.parametrize("content", ["notes\n", '{"id": "x"}\n', "notes", '{"id":"batch_req_1"}\n{"id":"batch_req_2'])
def test_a_file_that_holds_something_else_is_refused_and_left_as_it_is(tmp_path: Path, content: str) -> None:
    target = tmp_path / "out.jsonl"
    target.write_text(content, encoding="utf-8")
    with pytest.raises(BatchError, match="line 1 is no result"):
        Results(target)
    assert target.read_text(encoding="utf-8") == content


async def test_two_runs_never_write_one_file_at_the_same_time(tmp_path: Path) -> None:
    target = tmp_path / "out.jsonl"
    first = Results(target)
    with pytest.raises(BatchError, match=r"out\.jsonl is being written by another run of minserve batch"):
        Results(target)
    first.add(Line(1, "a"), answered(Line(1, "a"), "cmpl-1", 200, {}), failed=False)
    await first.close()
    second = Results(target)
    assert second.done == {"a"}  # read while nobody else can write
    await second.close()
