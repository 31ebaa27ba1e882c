"""``aaflow lint`` and ``assert_prefix_stable``: what they find in planted apps, and nothing in clean ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from aaflow_langgraph import KVBroker, TransformersEngine
from aaflow_langgraph.explain.report import Cause
from aaflow_langgraph.lint.check import find_breaks
from tests import planted
from tests.planted import PLANTED


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


@pytest.mark.parametrize("cause", sorted(PLANTED))
def test_each_planted_cause_is_found_at_its_node(cause: Cause, open_one: Callable[..., KVBroker]) -> None:
    make, node = PLANTED[cause]
    app = make(open_one)
    found = find_breaks(app.graph, app.turns)
    print([(f.node, f.cause, f.why) for f in found])
    assert {(one.node, one.cause) for one in found} == {(node, cause)}


@pytest.mark.parametrize("make", [planted.reads_and_answers, planted.talks])
def test_nothing_is_found_in_a_clean_app(make: Any, open_one: Callable[..., KVBroker]) -> None:
    app = make(open_one)
    assert find_breaks(app.graph, app.turns) == ()
    assert find_breaks(app.graph) == ()
