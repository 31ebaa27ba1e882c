"""A reader who walks away from an async stream leaves no noise behind."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable
from typing import Annotated, Any

from langgraph.graph import START, StateGraph
from typing_extensions import TypedDict

from aaflow_langgraph import KVBroker, KVChannel, KVHandle, Sampling, generate_node


class State(TypedDict):
    question: str
    answer: Annotated[KVHandle, KVChannel]


def test_an_abandoned_async_stream_leaves_no_unretrieved_exception(open_broker: Callable[..., KVBroker]) -> None:
    broker = open_broker()
    node = generate_node(broker, "{question}", writes="answer", sampling=Sampling(max_tokens=200))
    graph = StateGraph(State).add_node("ask", node).add_edge(START, "ask").compile()
    complaints: list[dict[str, Any]] = []

    async def walk_away() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
        async for _ in graph.astream({"question": "Why?"}, stream_mode="messages"):
            break

    for _ in range(3):
        asyncio.run(walk_away())
        gc.collect()
    assert complaints == []
    assert broker.stats().num_leases == 0
