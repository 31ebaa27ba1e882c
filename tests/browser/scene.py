"""An app at work, for the inspector to look at. Not a test itself.

Two threads of a graph with a fork and a join of control, beside a checkpointer; a prompt that begins with the time of day; two
documents that are joined without being computed again; a pool too small for all of it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import uvicorn
from langgraph.graph import END, START, StateGraph
from starlette.types import ASGIApp
from typing_extensions import TypedDict

from aaflow_langgraph import (
    KVBroker,
    KVChannel,
    KVCheckpointSaver,
    KVHandle,
    Sampling,
    TransformersEngine,
    generate_node,
    prefill_node,
)
from aaflow_langgraph.journal import origin
from tests.servers import until

NOTES = (
    "The museum ship lies in the harbour and is open from ten to six. The tram to the lighthouse leaves every half hour; the "
    "last one back goes at nine. Tickets for both are sold at the old fish market, and children ride free. "
)
CABINS = "Guests sleep in cabins of two, each with a round window. Dogs are welcome on deck, cats below it, and parrots nowhere. "
MEALS = "Breakfast is at eight, and whoever is late gets porridge. Dinner is soup on weekdays and fish on Sundays. "
SHORT = Sampling(max_tokens=24)


class State(TypedDict, total=False):
    question: str
    docs: Annotated[KVHandle, KVChannel]
    plan: Annotated[KVHandle, KVChannel]
    draft: Annotated[KVHandle, KVChannel]
    critique: Annotated[KVHandle, KVChannel]
    final: Annotated[KVHandle, KVChannel]
    answer: str


def trips(broker: KVBroker) -> StateGraph[Any]:
    builder: StateGraph[Any] = StateGraph(State)
    builder.add_node("read", prefill_node(broker, lambda state: NOTES * 4, writes="docs"))
    for name, prompt, reads in (
        ("plan", "{question} Make a plan.", "docs"),
        ("draft", "Write it as a letter.", "plan"),
        ("critique", "What is missing in this plan?", "plan"),
        ("final", "Make it shorter.", "draft"),
    ):
        text_to = "answer" if name == "final" else None
        builder.add_node(
            f"{name}_node", generate_node(broker, prompt, reads=reads, writes=name, text_to=text_to, sampling=SHORT)
        )
    builder.add_edge(START, "read")
    builder.add_edge("read", "plan_node")
    builder.add_edge("plan_node", "draft_node")
    builder.add_edge("plan_node", "critique_node")
    builder.add_edge(["draft_node", "critique_node"], "final_node")
    builder.add_edge("final_node", END)
    return builder


@contextmanager
def playing(engine: TransformersEngine, folder: Path) -> Iterator[tuple[KVBroker, KVCheckpointSaver]]:
    """Run it; the broker and the checkpointer as it leaves them."""
    num_tokens = len(engine.frame.encode_text(NOTES * 4, what="notes"))
    pool_bytes = (2 * num_tokens + 512) * engine.layout.token_bytes
    with (
        KVBroker.open(engine, pool_bytes=pool_bytes, disk=str(folder / "disk")) as broker,
        KVCheckpointSaver.local(folder / "checkpoints", broker) as saver,
    ):
        _play(broker, saver)
        yield broker, saver


def _play(broker: KVBroker, saver: KVCheckpointSaver) -> None:
    graph = trips(broker).compile(checkpointer=saver)
    for name, question in (
        ("trip to Oslo", "What can we do on Monday?"),
        ("trip to Bergen", "Where do we get tickets?"),
        ("trip to Oslo", "And when it rains?"),
    ):
        graph.invoke({"question": question}, {"configurable": {"thread_id": name}})
    with origin(node="fetch", thread="house rules"):
        cabins = broker.prefill(CABINS, label="cabins").handle
        meals = broker.prefill(MEALS, label="meals").handle
    with origin(node="join", thread="house rules"):
        joined = broker.compose([cabins, meals], rung="legolink", label="cabins + meals").handle
    with origin(node="answer", thread="house rules"):
        broker.generate("When is breakfast?", parent=joined, sampling=SHORT, label="answer")
    for minute in (4, 7):
        with origin(node="greet", thread="clock"):
            dated = f"It is 2026-11-29 10:0{minute}. {NOTES * 2}"
            broker.generate(f"{dated} What is open now?", sampling=SHORT, label="greeting")


@contextmanager
def serving(app: ASGIApp) -> Iterator[tuple[str, uvicorn.Server]]:
    """An app on loopback: its address, and the server, whose ``should_exit`` stops it."""
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="error", lifespan="off"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    until(lambda: server.started, "the server starts")
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}", server
    finally:
        server.should_exit = True
        thread.join(timeout=20)
