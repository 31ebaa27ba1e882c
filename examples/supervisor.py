"""A supervisor and two workers who read one conversation; the workers' replies come back as named messages of a user.

    lead ──> engineer ──> clerk ──> decide

Each has a system prompt of its own and so a line of KV of its own; in each the conversation only grows. A reply that is re-wrapped
does not name its conversation any more: ``KVMessagesState`` keeps the handle of every agent beside the messages, so that a
checkpointer with KV finds them in a later process, too.
"""

from __future__ import annotations

import sys
from typing import Any

from compared import chat_main
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import HumanMessage, SystemMessage
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, StateGraph
from reports import REPORTS

from aaflow_langgraph import KVMessagesState
from aaflow_langgraph.graph import handle_serializer

LEAD = "You lead the town's works and decide. Answer in one sentence."
WORKERS = {
    "engineer": f"You are the engineer of the port. Answer in one sentence.\n\n{REPORTS['port']}",
    "clerk": "You keep the town's books and look at costs only. Answer in one sentence.",
}
QUESTIONS = (
    "Should the town pay for a second pilot boat?",
    "And for the northern quay?",
    "Which of them comes first?",
    "What do we tell the harbour master?",
)


def build(model: BaseChatModel) -> Any:
    """Who speaks is fixed: small models do not route."""

    def lead(state: KVMessagesState) -> dict[str, Any]:
        return {"messages": [model.invoke([SystemMessage(LEAD), *state["messages"]])]}

    def worker(name: str) -> Any:
        def work(state: KVMessagesState) -> dict[str, Any]:
            reply = model.invoke([SystemMessage(WORKERS[name]), *state["messages"]])
            return {"messages": [HumanMessage(f"The {name} says: {reply.text}", name=name)]}

        return work

    builder = StateGraph(KVMessagesState)
    builder.add_sequence([("lead", lead), *((name, worker(name)) for name in WORKERS), ("decide", lead)])
    builder.add_edge(START, "lead")
    return builder.compile(checkpointer=InMemorySaver(serde=handle_serializer()))


if __name__ == "__main__":
    sys.exit(chat_main("supervisor", __doc__, build, QUESTIONS))
