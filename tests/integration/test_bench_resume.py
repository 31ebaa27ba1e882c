"""``aaflow bench resume`` and ``aaflow bench saver``: documents that say what happened, on a tiny model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from aaflow_langgraph.cli import main
from tests import tiny


@pytest.fixture
def model(tmp_path: Path) -> str:
    return str(tiny.save(tmp_path / "model", max_position_embeddings=2048))


@pytest.mark.slow
def test_a_restart_computes_nothing_again_and_goes_on_with_the_same_tokens(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = tmp_path / "place"
    command = ["bench", "resume", "--model", model, "--context", "1000", "--rounds", "1", "--directory", str(place)]
    assert main(command) == 0
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert document["context"] == 1000
    assert document["recomputed"] == [0]
    assert document["prefilled"] == [document["prompt"]]
    assert document["tokens_equal"] is True
    assert 1.0 <= document["disk_ratio"] < 1.0 + 8 * (8192 + 4 * 125) / (1000 * 768)
    assert document["step_bytes"] < 5000
    assert min(document[leg] for leg in ("resume_s", "warm_s", "prefill_s")) > 0
    assert list(place.iterdir()) == []


def test_every_leg_is_measured_on_both_sides(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = tmp_path / "place"
    assert main(["bench", "saver", "--model", model, "--threads", "20", "--directory", str(place)]) == 0
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert document["references"] == 2 * (20 * 3 + 200), "the wrapped saver's own puts keep none"
    assert {name: leg["calls"] for name, leg in document["legs"].items()} == {
        "get_tuple": 20,
        "list": 20,
        "list_all": 2,
        "put": 200,
    }
    assert all(leg["ours_ms"] > 0 and leg["inner_ms"] > 0 for leg in document["legs"].values())
    assert list(place.iterdir()) == []


def test_a_context_that_cannot_be_made_is_refused(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["bench", "resume", "--model", model, "--context", "3", "--directory", str(tmp_path / "place")]
    assert main(command) == 2
    assert "cannot be made in 8 turns" in capsys.readouterr().err
