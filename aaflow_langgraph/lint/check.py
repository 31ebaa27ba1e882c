"""Looks at a graph of this process: two dry runs, more than a year apart."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from aaflow_langgraph.broker import KVBroker
from aaflow_langgraph.explain.elsewhere import open_brokers
from aaflow_langgraph.lint.app import runnable_graph, turns_of
from aaflow_langgraph.lint.finding import PrefixBreak, worst
from aaflow_langgraph.lint.run import Rendered, render
from aaflow_langgraph.lint.shift import ShiftedClock

START_S = 400 * 86_400 + 3 * 3_600 + 7 * 60 + 11
"""So much later an app is started a second time."""


def find_breaks(graph: Any, inputs: Any = None, *, answers: Sequence[str] = ()) -> tuple[PrefixBreak, ...]:
    """What keeps the prompts of ``graph`` from being append-only.

    Its nodes and tools run for real, twice two turns; its models do not, and its checkpoints are kept in memory. Every open
    broker of the process is dry meanwhile: nobody else may use one.

    Args:
        graph: A LangGraph graph, compiled or not, or a function that returns one.
        inputs: One input, or a list of them, one for each turn. None makes some up from the graph's schema.
        answers: What the models say, in turn; the last one from then on.

    Raises:
        ConfigError: ``graph`` is none, the input is none, or no broker was asked for anything. Way out: fail. What the
            graph's nodes raise passes through.
    """
    rendered: Rendered | None = None
    found: list[PrefixBreak] = []
    for start, clock in enumerate((ShiftedClock(), ShiftedClock(START_S))):
        with clock.shown(start=start):
            runnable = runnable_graph(graph)
            turns = turns_of(runnable, inputs)
            against = rendered.requests if rendered else None
            rendered = render(runnable, turns, usable_brokers(), clock, answers=answers, against=against)
            found += rendered.found
    return worst(found)


def usable_brokers() -> list[KVBroker]:
    """The open brokers of this process, in a fixed order."""
    return sorted(
        (broker for broker in open_brokers() if not vars(broker).get("_closed", True)),
        key=lambda broker: (broker.namespace.model, broker.namespace.dtype, broker.namespace.tenant),
    )
