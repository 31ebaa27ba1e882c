"""Agentic RAG: documents first, question last, so that whatever is asked about them continues one handle.

    retrieve ──> read ──> grade ──┬──> answer
        ^                         │
        └─────── rewrite <────────┘

``grade``, ``rewrite`` and ``answer`` fork from the documents' handle. A second search appends what it finds to the documents; the
KV of the first ones stays in use. With the question first, every rewrite would have changed all that follows.
"""

from __future__ import annotations

import re
import sys
from typing import Annotated, Any

from compared import main, nodes_of
from langgraph.graph import END, START, StateGraph
from reports import REPORTS
from typing_extensions import TypedDict

from aaflow_langgraph import KVBroker, KVChannel, KVHandle

MAX_SEARCHES = 3


class State(TypedDict, total=False):
    question: str
    query: str
    found: list[str]
    passages: str
    docs: Annotated[KVHandle, KVChannel]
    grade: str
    answer: str


def retrieve(state: State) -> dict[str, Any]:
    """The report that shares most words with the query, of those not read yet."""
    words = set(re.findall(r"\w{4,}", f"{state['question']} {state.get('query', '')}".lower()))
    found = state.get("found", [])
    left = [topic for topic in REPORTS if topic not in found]
    best = max(left, key=lambda topic: len(words & set(re.findall(r"\w{4,}", REPORTS[topic].lower()))))
    return {"found": [*found, best], "passages": REPORTS[best] + "\n\n"}


def judged(state: State) -> str:
    is_enough = state["grade"].strip().lower().startswith("yes")
    return "answer" if is_enough or len(state["found"]) == MAX_SEARCHES else "rewrite"


def build(broker: KVBroker) -> Any:
    read, generate = nodes_of(broker)
    builder = StateGraph(State)
    builder.add_node("begin", read("Read these reports.\n\n", writes="docs"))
    builder.add_node("retrieve", retrieve)
    builder.add_node("read", read("{passages}", reads="docs", writes="docs"))
    builder.add_node("grade", generate("Do the reports answer: {question} Yes or no?", reads="docs", text_to="grade"))
    builder.add_node(
        "rewrite", generate("Which words should be searched to answer: {question}", reads="docs", text_to="query")
    )
    builder.add_node("answer", generate("{question}", reads="docs", text_to="answer"))
    builder.add_edge(START, "begin")
    builder.add_edge("begin", "retrieve")
    builder.add_edge("retrieve", "read")
    builder.add_edge("read", "grade")
    builder.add_conditional_edges("grade", judged, ["rewrite", "answer"])
    builder.add_edge("rewrite", "retrieve")
    builder.add_edge("answer", END)
    return builder.compile()


if __name__ == "__main__":
    question = {"question": "What does the repair of the northern quay cost?"}
    sys.exit(main("agentic_rag", __doc__, build, question, ["found", "grade", "answer"]))
