"""``aaflow bench stall`` on a tiny model: what it reports is there and holds together; times are not looked at."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from aaflow_langgraph import TransformersEngine
from aaflow_langgraph.bench import stall
from aaflow_langgraph.errors import ConfigError


def test_both_kinds_of_prompt_are_measured(
    engines: Callable[..., TransformersEngine], capsys: pytest.CaptureFixture[str]
) -> None:
    engine = engines("llama")
    stop_ids = engine.stop_ids
    document = stall.run(engine, 300, 600, 3, 2)
    assert engine.stop_ids == stop_ids
    assert [row["kind"] for row in document["rows"]] == ["behind", "cold"]
    for row in document["rows"]:
        assert row["itl_s"] > 0
        assert 0 < row["itl_during_s"] <= row["itl_max_s"]
        assert row["stall_ratio"] == pytest.approx(row["alone_s"] / row["itl_max_s"], rel=0.3)
    stall.report(document)
    assert json.loads(capsys.readouterr().out) == document


def test_what_does_not_fit_the_window_is_refused(engines: Callable[..., TransformersEngine]) -> None:
    engine = engines("llama")
    with pytest.raises(ConfigError, match="more than the window"):
        stall.run(engine, engine.window - 100, 60, 2, 1)
