"""Hierarchical teams: two subgraphs whose agents share the documents' handle across the borders of their graphs.

    read ──> research (facts ──> risks) ──> editing (headline ──> letter)

A KV channel of the same name in parent and subgraph crosses the border: ``docs`` and ``findings`` do, ``talk`` stays in its team.
"""

from __future__ import annotations

import sys
from typing import Annotated, Any

from compared import main, nodes_of
from langgraph.graph import END, START, StateGraph
from reports import ALL
from typing_extensions import TypedDict

from aaflow_langgraph import KVBroker, KVChannel, KVHandle


class State(TypedDict, total=False):
    """What crosses the borders."""

    docs: Annotated[KVHandle, KVChannel]
    findings: Annotated[KVHandle, KVChannel]
    headline: str
    letter: str


class Research(TypedDict, total=False):
    docs: Annotated[KVHandle, KVChannel]
    talk: Annotated[KVHandle, KVChannel]
    findings: Annotated[KVHandle, KVChannel]


class Editing(TypedDict, total=False):
    docs: Annotated[KVHandle, KVChannel]
    findings: Annotated[KVHandle, KVChannel]
    headline: str
    letter: str


def team(schema: type, members: dict[str, Any]) -> Any:
    """A compiled subgraph of members who work one after the other."""
    builder = StateGraph(schema)
    builder.add_sequence(list(members.items()))
    builder.add_edge(START, next(iter(members)))
    return builder.compile()


def build(broker: KVBroker) -> Any:
    read, generate = nodes_of(broker)
    research = {
        "facts": generate("Name the three most important facts.", reads="docs", writes="talk"),
        "risks": generate("Name the greatest risk among them.", reads="talk", writes="findings"),
    }
    editing = {
        "headline": generate("Write a headline of at most eight words.", reads="findings", text_to="headline"),
        "letter": generate(
            "Write a letter to the mayor, two sentences: {headline}", reads="findings", text_to="letter"
        ),
    }
    builder = StateGraph(State)
    builder.add_node("read", read(ALL, writes="docs"))
    builder.add_node("research", team(Research, research))
    builder.add_node("editing", team(Editing, editing))
    builder.add_edge(START, "read")
    builder.add_edge("read", "research")
    builder.add_edge("research", "editing")
    builder.add_edge("editing", END)
    return builder.compile()


if __name__ == "__main__":
    sys.exit(main("hierarchical_teams", __doc__, build, {}, ["headline", "letter"]))
