"""``aaflow bench share``: real processes, and a document that says what they did."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from aaflow_langgraph.cli import main
from tests import tiny


@pytest.mark.slow
def test_two_processes_prefill_a_context_once_and_hold_it_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    tmp_path.chmod(0o700)
    folder = tiny.save(tmp_path / "model", max_position_embeddings=2048)
    command = ["bench", "share", "--model", str(folder), "--context", "1000", "--workers", "2", "--rounds", "5"]
    assert main(command) == 0
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert sorted(document["prefilled"]) == [0, 1000]
    assert sorted(document["in_place"]) == [0, 1000]
    assert document["held_ratio"] == pytest.approx(1.0, abs=0.01)  # ranges are whole pages
    assert document["answers_equal"] is True
    assert document["reach_ms"]["rounds"] == 5
    assert [touch["foreign"] for touch in document["first_touch"]] == [True]
