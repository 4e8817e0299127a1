"""A batch's two files: lines that are wrong, results that are torn or no results at all."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from minserve.server.batch_lines import BatchError, Line, Results, answered, faulty, read_lines, read_results, scan
from tests.server.batches import WIDE, line, results_of, write


def test_a_wrong_line_says_why_and_the_others_are_read(tmp_path: Path) -> None:
    source = write(
        tmp_path / "in.jsonl",
        "\ufeff" + line("a"),
        "",
        "not json",
        line("b", method="GET"),
        line("c", url="/v1/embeddings"),
        line(""),
        json.dumps({"custom_id": "d"}),
        line("e" * 4000),
        line("f"),
    )
    found = {each.number: each for each in read_lines(source, 2000)}
    assert sorted(found) == [1, 3, 4, 5, 6, 7, 8, 9]
    assert [n for n, each in found.items() if each.fault is None] == [1, 9]
    assert (found[1].key, found[3].key, found[4].key, found[6].key, found[7].key) == ("a", 3, "b", 6, "d")
    assert "method" in str(found[4].fault)
    assert "/v1/completions" in str(found[5].fault)
    assert "2000 bytes" in str(found[8].fault)


def test_two_lines_with_one_name_are_refused_before_anything_runs(tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", line("a"), line("b"), line("a"))
    with pytest.raises(BatchError, match="lines 1 and 3 have the same custom_id 'a'"):
        scan(source, WIDE)


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
