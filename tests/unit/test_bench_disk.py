"""``aaflow bench disk``: what it prints for machines, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from aaflow_langgraph.bench import disk
from aaflow_langgraph.cli import main
from aaflow_langgraph.errors import ConfigError


def test_the_last_line_is_one_document_and_nothing_is_left_behind(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "disk", "--bytes", str(1 << 20), "--directory", str(tmp_path / "new")]) == 0
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert document["name"] == "bench disk"
    (row,) = document["rows"]
    assert (row["num_files"], document["rounds"]) == (1, disk.ROUNDS)
    ratios = {name: value for name, value in row.items() if name.endswith("ratio")}
    assert len(ratios) == 5
    assert all(value > 0 for value in ratios.values())
    assert row["spill_ratio"] == pytest.approx(row["write_s"] / row["spill_s"], abs=0.05)
    assert list((tmp_path / "new").iterdir()) == []


def test_less_than_one_extent_and_a_place_that_is_no_directory_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="less than one extent"):
        disk.run(1000, str(tmp_path))
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="--directory"):
        disk.run(1 << 20, str(tmp_path / "file"))
    assert main(["bench", "disk", "--bytes", "1000"]) == 2
