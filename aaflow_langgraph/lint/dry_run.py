"""Runs an app's brokers dry: they render, look up and name as always, and their model is a ``DryEngine``.

For as long as the block lasts, each broker has the inner parts of a twin: an index, a pool and recipes of its own. What the
app really keeps is neither read, but for recipes, nor written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from langgraph.config import get_config

from aaflow_langgraph import requests
from aaflow_langgraph.broker import KVBroker
from aaflow_langgraph.index.memory import MemoryIndex
from aaflow_langgraph.journal import Origin
from aaflow_langgraph.lint.dry_engine import DryEngine
from aaflow_langgraph.pool.host import HostPool

_POOL_BYTES = 8 << 20


DECLARED = "_declared_room"
"""Attribute of a broker that was opened without weights: what it would have had."""


@dataclass(frozen=True, slots=True)
class Room:
    """What a broker really has for KV.

    Attributes:
        pool_bytes: Capacity of its pool.
        token_bytes: What a token takes there.
        has_disk: Is there a tier below?
    """

    pool_bytes: int
    token_bytes: int
    has_disk: bool


@contextmanager
def dry_run(
    brokers: Sequence[KVBroker], answers: Sequence[str], on_request: Callable[[], None]
) -> Iterator[Mapping[KVBroker, Room]]:
    """Nothing is computed inside; yields what each broker really has.

    Args:
        brokers: Open ones.
        answers: What their models say, in turn.
        on_request: Called when a request begins.
    """
    asked_by = vars(requests)["asked_by"]

    def ask() -> Origin:
        origin = asked_by()
        on_request()
        return origin if origin.node else _from_langgraph(origin)

    with ExitStack() as undo:
        rooms = {broker: undo.enter_context(_dry(broker, answers)) for broker in brokers}
        vars(requests)["asked_by"] = ask
        undo.callback(setattr, requests, "asked_by", asked_by)
        yield rooms


@contextmanager
def _dry(broker: KVBroker, answers: Sequence[str]) -> Iterator[Room]:
    real = dict(vars(broker))
    room = real.get(DECLARED) or Room(
        broker.stats().pool_capacity_bytes, broker.engine.layout.token_bytes, broker.has_disk
    )
    engine = DryEngine.like(broker.engine, answers)
    twin = KVBroker(engine, MemoryIndex(), HostPool(_POOL_BYTES), previews=real["_previews"])
    # What an approximate rung would move is named as one sequence: there is nothing to move.
    composing: Any = vars(twin)["_composing"]
    composing._approximately = lambda made, audited: composing._exactly(made)
    twin.add_recipe_source(real["_recipes"].find)  # of handles that the app has made already
    vars(broker).clear()
    vars(broker).update(vars(twin))
    try:
        yield room
    finally:
        broker.close()
        vars(twin).update(_closed=True)
        vars(broker).clear()
        vars(broker).update(real)


def _from_langgraph(origin: Origin) -> Origin:
    """Who asks, where a node calls the broker by itself."""
    try:
        config: Mapping[str, Any] = get_config()
    except RuntimeError:
        return origin
    node = (config.get("metadata") or {}).get("langgraph_node")
    thread = (config.get("configurable") or {}).get("thread_id")
    return Origin(str(node or origin.node), str(thread or origin.thread))
