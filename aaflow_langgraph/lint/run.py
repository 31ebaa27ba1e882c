"""Runs a graph dry, for some turns of one thread, and gives what its brokers were asked for."""

from __future__ import annotations

import asyncio
import copy
import uuid
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from langgraph.errors import GraphRecursionError
from langgraph.pregel import Pregel

from aaflow_langgraph.broker import KVBroker
from aaflow_langgraph.errors import ConfigError
from aaflow_langgraph.lint.compare import between_starts, within_one_run, without_room
from aaflow_langgraph.lint.dry_run import dry_run
from aaflow_langgraph.lint.finding import PrefixBreak
from aaflow_langgraph.lint.rendering import Request, requests_of
from aaflow_langgraph.lint.shift import ShiftedClock

_MOST_STEPS = 40
"""An answer that was written before may send a graph round and round: after so many steps enough was seen."""


@dataclass(frozen=True, slots=True)
class Rendered:
    """What one start of an app asked for, and what is wrong with it."""

    requests: tuple[Request, ...]
    found: tuple[PrefixBreak, ...]


def render(
    graph: Pregel[Any, Any, Any, Any],
    turns: Sequence[Any],
    brokers: Sequence[KVBroker],
    clock: ShiftedClock,
    *,
    answers: Sequence[str] = (),
    against: Sequence[Request] | None = None,
) -> Rendered:
    """Run ``turns`` through ``graph`` with dry brokers, a day apart.

    Args:
        graph: See ``runnable_graph``.
        turns: One input each.
        brokers: The app's, open.
        clock: Shown already; goes on with every request.
        answers: What the models say, in turn.
        against: The requests of an earlier start, to compare with.

    Raises:
        ConfigError: No broker was asked for anything. Way out: fail. What the graph's nodes raise passes through.
    """
    with dry_run(brokers, answers, clock.tick) as rooms:
        # In a thread of its own: the caller may have a running loop.
        with ThreadPoolExecutor(1) as executor:
            executor.submit(asyncio.run, _run(graph, turns)).result()
        requests = requests_of(brokers)
        if not requests:
            raise ConfigError(
                "the graph ran, and no broker was asked for anything: give it an input that reaches a model, as JSON"
            )
        found = within_one_run(brokers) + without_room(rooms)
        if against is not None:
            found += between_starts(brokers, against, requests)
    return Rendered(requests, tuple(found))


async def _run(graph: Pregel[Any, Any, Any, Any], turns: Sequence[Any]) -> None:
    config: Any = {
        "configurable": {"thread_id": f"lint-{uuid.uuid4().hex[:8]}"},
        "recursion_limit": _MOST_STEPS,
        "max_concurrency": 1,  # requests come in one order
    }
    for turn in turns:
        try:
            await graph.ainvoke(copy.deepcopy(turn), config)  # nodes may change what they are given
        except GraphRecursionError:
            return
