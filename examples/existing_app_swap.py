"""An application that was written for another chat model, before and after: two lines are new, nothing else.

      triage ──> answer        one turn of the conversation

    - llm = HuggingFacePipeline.from_model_id(model_id=MODEL, task="text-generation", ...)
    - model = ChatHuggingFace(llm=llm)
    + broker = KVBroker.open(MODEL)
    + model = KVChatModel(broker)

Its state is LangGraph's own ``MessagesState``, its nodes call ``model.invoke`` with messages, and its checkpointer is whichever it
had. Both nodes read the reports in one system prompt, so they are prefilled once for both, and every turn goes on where the
last one ended.
"""

from __future__ import annotations

import sys
from typing import Any

from compared import chat_main
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import HumanMessage, SystemMessage
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, MessagesState, StateGraph
from reports import ALL, REPORTS

SYSTEM = SystemMessage(f"You answer questions of a town council from these reports.\n\n{ALL}")
QUESTIONS = (
    "What does the repair of the northern quay cost?",
    "When does the new wing of the museum open?",
    "Why was the line over the mountains closed?",
    "Which of them asks for a decision?",
)


class State(MessagesState):
    topic: str


def build(model: BaseChatModel) -> Any:
    """The application. It knows a chat model and no KV."""

    def triage(state: State) -> dict[str, Any]:
        asked = HumanMessage(f"Is this about the {', the '.join(REPORTS)}? One word: {state['messages'][-1].text}")
        return {"topic": model.invoke([SYSTEM, *state["messages"][:-1], asked]).text}

    def answer(state: State) -> dict[str, Any]:
        return {"messages": [model.invoke([SYSTEM, *state["messages"]])]}

    builder = StateGraph(State)
    builder.add_sequence([("triage", triage), ("answer", answer)])
    builder.add_edge(START, "triage")
    return builder.compile(checkpointer=InMemorySaver())


if __name__ == "__main__":
    sys.exit(chat_main("existing_app_swap", __doc__, build, QUESTIONS))
