"""Map-reduce with ``Send``: siblings study one topic each, all on one handle that travels in their payload.

read ──> study (one for each topic) ──> conclude
"""

from __future__ import annotations

import sys
from typing import Annotated, Any

from compared import main, nodes_of
from langgraph.graph import END, START, StateGraph
from langgraph.types import Send
from reports import ALL, REPORTS
from typing_extensions import TypedDict

from aaflow_langgraph import KVBranches, KVBroker, KVChannel, KVHandle


def joined(old: list[str], new: str | list[str]) -> list[str]:
    """Texts of siblings, in the order of their tasks."""
    return [*old, *(new if isinstance(new, list) else [new])]


class State(TypedDict, total=False):
    docs: Annotated[KVHandle, KVChannel]
    studied: Annotated[dict[str, KVHandle], KVBranches]
    findings: Annotated[list[str], joined]
    conclusion: str


class Task(TypedDict):
    docs: Annotated[KVHandle, KVChannel]
    topic: str


def fan_out(state: State) -> list[Send]:
    return [Send("study", {"docs": state["docs"], "topic": topic}) for topic in REPORTS]


def build(broker: KVBroker) -> Any:
    read, generate = nodes_of(broker)
    study = generate(
        "What has to be decided about the {topic}? One sentence.",
        reads="docs",
        writes="studied",
        branch="{topic}",
        text_to="findings",
    )
    conclude = generate("Notes: {findings}\nWhich is the most urgent?", reads="docs", text_to="conclusion")
    builder = StateGraph(State)
    builder.add_node("read", read(ALL, writes="docs"))
    builder.add_node("study", study, input_schema=Task)
    builder.add_node("conclude", conclude)
    builder.add_edge(START, "read")
    builder.add_conditional_edges("read", fan_out, ["study"])
    builder.add_edge("study", "conclude")
    builder.add_edge("conclude", END)
    return builder.compile()


if __name__ == "__main__":
    sys.exit(main("map_reduce", __doc__, build, {}, ["findings", "conclusion"]))
