"""``aaflow bench attach``: says what it measured, and refuses what cannot be."""

from __future__ import annotations

import json
import resource
from collections.abc import Iterator

import pytest

from aaflow_langgraph.cli import main


def test_the_last_line_is_one_document_and_faults_stand_apart(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "attach", "--mib", "4", "--rounds", "5"]) == 0
    captured = capsys.readouterr()
    (line,) = captured.out.splitlines()
    document = json.loads(line)
    assert (document["name"], document["pool_mib"], document["rounds"]) == ("bench attach", 4, 5)
    assert document["bytes_right"] is True
    assert document["first_touch"]["pages"] == 1024
    assert 0 < document["first_touch"]["faults"] <= 2 * 1024
    assert 0 < document["map_ms"]["p50"] <= document["map_ms"]["p95"]
    assert 0 < document["attach_ms"]["p50"] <= document["attach_ms"]["p95"]
    assert "page faults" in captured.err


@pytest.fixture
def small_files() -> Iterator[None]:
    """So that a failure of the test is not the machine's: no process started here gets more memory than this."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64 << 20, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_pool_that_the_machine_does_not_have_is_one_line_on_stderr(
    small_files: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "attach", "--mib", str(1 << 30), "--rounds", "5"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "are available; pass a smaller pool_bytes" in captured.err
