"""A chat for Studio's chat mode: each turn goes on from the KV of the turns before it, in every thread and after a restart."""

from kv import broker
from langgraph.graph import START, StateGraph

from aaflow_langgraph import KVChatModel, KVMessagesState

model = KVChatModel(broker, max_tokens=128)


async def answer(state: KVMessagesState) -> dict:
    return {"messages": [await model.ainvoke(state["messages"])]}


builder = StateGraph(KVMessagesState)  # messages, and beside them the handle of the conversation
builder.add_node("answer", answer)
builder.add_edge(START, "answer")
graph = builder.compile()  # without a checkpointer: the server brings it
