"""``aaflow bench step``: says what it measured, and refuses what does not fit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from aaflow_langgraph.cli import main
from tests import tiny


def test_the_last_line_is_one_document_with_a_row_per_context(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tiny.save(tmp_path, max_position_embeddings=600)
    assert main(["bench", "step", "--model", str(folder), "--contexts", "300,40", "--rounds", "5"]) == 0
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (document["name"], document["rounds"], document["lean"]) == ("bench step", 5, True)
    assert [row["context"] for row in document["rows"]] == [0, 40, 300]
    for row in document["rows"]:
        assert row["ratio"] == pytest.approx(row["step_s"] / row["stock_s"], rel=0.1)
    assert document["rows"][0]["forks"] is None  # nothing to fork
    for row in document["rows"][1:]:
        forks = row["forks"]
        assert forks["forks"] == 16
        assert forks["bound_s"] == pytest.approx(forks["empty_s"] + forks["attention_s"], abs=2e-5)
        assert min(forks["step_s"], forks["empty_s"], forks["attention_s"], forks["ratio"]) > 0


def test_a_context_beyond_the_window_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tiny.save(tmp_path, max_position_embeddings=600)
    assert main(["bench", "step", "--model", str(folder), "--contexts", "600"]) == 2
    assert "600" in capsys.readouterr().err
