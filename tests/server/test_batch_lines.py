"""A batch's input file: lines that are wrong, and names that two lines have."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from minserve.server.batch_lines import BatchError, read_lines, scan
from tests.server.batches import WIDE, line, write


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
