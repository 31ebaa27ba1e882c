"""``explain_miss``: planted faults are found by name in real runs, and nothing is found where nothing is wrong."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from langgraph.checkpoint.memory import InMemorySaver
from rich.console import Console

from aaflow_langgraph import KVBroker, TransformersEngine
from aaflow_langgraph.errors import ConfigError
from aaflow_langgraph.explain import MissReport, explain_miss, explain_request, misses_document, misses_table
from aaflow_langgraph.explain.report import Cause
from aaflow_langgraph.journal import origin
from tests import planted
from tests.planted import PLANTED, App


@pytest.fixture
def open_one() -> Iterator[Callable[..., KVBroker]]:
    opened: list[KVBroker] = []

    def open_it(engine: TransformersEngine, pool_bytes: int = 8 << 20) -> KVBroker:
        opened.append(KVBroker.open(engine, pool_bytes=pool_bytes))
        return opened[-1]

    yield open_it
    for broker in opened:
        assert broker.check() == []
        broker.close()


def run(app: App) -> tuple[MissReport, ...]:
    """Run an app for real; the reports of all of its brokers."""
    graph = app.graph.copy({"checkpointer": InMemorySaver()})
    for turn in app.turns:
        graph.invoke(turn, {"configurable": {"thread_id": "talk"}})
    return tuple(report for broker in app.brokers for report in explain_miss(broker))


@pytest.mark.parametrize("cause", sorted(PLANTED))
def test_each_planted_cause_is_named_with_where_it_is_and_how_to_mend_it(
    cause: Cause, open_one: Callable[..., KVBroker]
) -> None:
    make, node = PLANTED[cause]
    missed = [report for report in run(make(open_one)) if report.is_miss]
    print(missed)
    assert {report.cause for report in missed} == {cause}
