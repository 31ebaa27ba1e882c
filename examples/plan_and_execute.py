"""Plan and execute: the plan shrinks, the work behind it grows, and what grows stands last.

    read ──> plan ──> execute ──> replan ──> execute ... ──> answer

``work`` is the handle of documents and finished steps; every step continues it. The plan, which changes each time, is never in
that handle: ``replan`` forks from the work, puts the remaining plan behind it, and its own turn is not kept.
"""

from __future__ import annotations

import sys
from typing import Annotated, Any

from compared import main, nodes_of
from langgraph.graph import END, START, StateGraph
from reports import ALL, REPORTS
from typing_extensions import TypedDict

from aaflow_langgraph import KVBroker, KVChannel, KVHandle

GOAL = "Find out what it all costs."


class State(TypedDict, total=False):
    docs: Annotated[KVHandle, KVChannel]
    work: Annotated[KVHandle, KVChannel]
    idea: str
    plan: list[str]
    step: str
    result: str
    review: str
    answer: str


def begin(state: State) -> dict[str, Any]:
    """The model's idea is kept as text; small models write no list that could be relied on, so the steps are fixed."""
    plan = [f"Name one price or cost in the report of the {topic}." for topic in REPORTS]
    return {"plan": plan[1:], "step": plan[0], "work": state["docs"]}


def shrink(state: State) -> dict[str, Any]:
    """The next step, and what is left behind it."""
    return {"step": state["plan"][0], "plan": state["plan"][1:]}


def is_done(state: State) -> str:
    return "shrink" if state["plan"] else "answer"


def build(broker: KVBroker) -> Any:
    read, generate = nodes_of(broker)
    builder = StateGraph(State)
    builder.add_node("read", read(ALL, writes="docs"))
    # Behind the documents, as a fork: the work does not go on from it.
    builder.add_node("plan", generate(f"{GOAL} How would you go about it?", reads="docs", text_to="idea"))
    builder.add_node("begin", begin)
    builder.add_node("execute", generate("{step}", reads="work", writes="work", text_to="result"))
    builder.add_node(
        "replan", generate("Still to do: {plan}. Is anything missing? One word.", reads="work", text_to="review")
    )
    builder.add_node("shrink", shrink)
    builder.add_node("answer", generate(f"{GOAL} Sum up in one sentence.", reads="work", text_to="answer"))
    builder.add_edge(START, "read")
    builder.add_edge("read", "plan")
    builder.add_edge("plan", "begin")
    builder.add_edge("begin", "execute")
    builder.add_edge("execute", "replan")
    builder.add_conditional_edges("replan", is_done, ["shrink", "answer"])
    builder.add_edge("shrink", "execute")
    builder.add_edge("answer", END)
    return builder.compile()


if __name__ == "__main__":
    sys.exit(main("plan_and_execute", __doc__, build, {}, ["idea", "result", "answer"]))
