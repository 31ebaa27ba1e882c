"""Read a document once, then answer any number of questions about it, with a person in between when you ask for one."""

from typing import Annotated

from kv import HERE, broker
from langgraph.graph import START, StateGraph
from langgraph.types import interrupt
from typing_extensions import TypedDict

from aaflow_langgraph import KVChannel, KVHandle, Sampling, generate_node, prefill_node


class Question(TypedDict, total=False):
    question: str
    ask_me_first: bool


class State(Question, total=False):
    docs: Annotated[KVHandle, KVChannel]
    chat: Annotated[KVHandle, KVChannel]
    approved: str
    answer: str
    usage: dict


def memo(state: State) -> str:
    return (HERE / "memo.md").read_text(encoding="utf-8")


async def confirm(state: State) -> dict:
    return {"approved": interrupt("Shall I answer?")} if state.get("ask_me_first") else {}


answer = generate_node(
    broker,
    "{question}",
    reads="docs",
    writes="chat",
    text_to="answer",
    usage_to="usage",
    sampling=Sampling(max_tokens=64),
)

builder = StateGraph(State, input_schema=Question)
builder.add_node("read", prefill_node(broker, memo, writes="docs"))
builder.add_node("confirm", confirm)
builder.add_node("answer", answer)
builder.add_edge(START, "read")
builder.add_edge("read", "confirm")
builder.add_edge("confirm", "answer")
graph = builder.compile()  # without a checkpointer: the server brings it
