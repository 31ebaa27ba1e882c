"""Reflection: a writer and a critic whose roles swap, so each has a lineage of its own behind the documents they share.

    read ──> write ──> criticise ──> write ... END

What is the assistant's turn to one is the user's to the other. One conversation for both would have to be re-read whenever the
roles swap; two handles only ever grow.
"""

from __future__ import annotations

import sys
from typing import Annotated, Any

from compared import main, nodes_of
from langgraph.graph import END, START, StateGraph
from reports import ALL
from typing_extensions import TypedDict

from aaflow_langgraph import KVBroker, KVChannel, KVHandle

NUM_DRAFTS = 3


class State(TypedDict, total=False):
    docs: Annotated[KVHandle, KVChannel]
    writer: Annotated[KVHandle, KVChannel]
    critic: Annotated[KVHandle, KVChannel]
    num_drafts: int
    draft: str
    criticism: str


def fork(state: State) -> dict[str, Any]:
    """Both begin behind the documents: a fork is an assignment."""
    return {"writer": state["docs"], "critic": state["docs"], "num_drafts": 0, "criticism": "none yet"}


def count(state: State) -> dict[str, int]:
    return {"num_drafts": state["num_drafts"] + 1}


def is_done(state: State) -> str:
    return END if state["num_drafts"] == NUM_DRAFTS else "criticise"


def build(broker: KVBroker) -> Any:
    read, generate = nodes_of(broker, max_tokens=48)
    ask = "Write two sentences for a newspaper about the reports. What was wrong with the last ones: {criticism}"
    builder = StateGraph(State)
    builder.add_node("read", read(ALL, writes="docs"))
    builder.add_node("fork", fork)
    builder.add_node("write", generate(ask, reads="writer", writes="writer", text_to="draft"))
    builder.add_node("count", count)
    builder.add_node(
        "criticise",
        generate("Name one error in this: {draft}", reads="critic", writes="critic", text_to="criticism"),
    )
    builder.add_edge(START, "read")
    builder.add_edge("read", "fork")
    builder.add_edge("fork", "write")
    builder.add_edge("write", "count")
    builder.add_conditional_edges("count", is_done, ["criticise", END])
    builder.add_edge("criticise", "write")
    return builder.compile()


if __name__ == "__main__":
    sys.exit(main("reflection", __doc__, build, {}, ["draft", "criticism"]))
