"""Six applications of messages, in the shapes that people build on LangGraph, as they stand in their code: a chat model, a
state, nodes. Nothing in them but ``kv_state`` knows of KV.

What a node does next never depends on what the model says, so that two runs, and two models, do the same amount of work.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Annotated, Any

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import BaseMessage, HumanMessage, SystemMessage
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.types import Send
from typing_extensions import TypedDict

from aaflow_langgraph.graph.lineages import KVMessagesState, kv_state
from aaflow_langgraph.graph.serde import handle_serializer

TOPICS = (
    "quay",
    "crane",
    "ferry",
    "pilot boat",
    "warehouse",
    "lighthouse",
    "dredger",
    "customs",
    "fish market",
    "slipway",
)
REPORT = (
    "The {topic} was inspected in week {week}. Its repair takes {days} days and costs {cost} thousand crowns; the harbour master "
    "wants it done before the storms."
)
WORKERS = {"engineer": "You are the engineer of a small harbour.", "clerk": "You keep the books of a small harbour."}


class Searching(KVMessagesState):
    """Conversation, and what is asked now."""

    question: str


class Planning(KVMessagesState):
    """Conversation, and what is still to be done."""

    plan: list[str]


class Studying(MessagesState):
    """Conversation, and what siblings found."""

    notes: Annotated[list[tuple[str, str]], operator.add]


class Study(TypedDict):
    """What a sibling is given."""

    messages: list[BaseMessage]
    topic: str


def supervisor(model: BaseChatModel) -> StateGraph[Any]:
    """A lead and two workers who see everything; their replies come back as named messages of a user."""

    def lead(state: MessagesState) -> dict[str, Any]:
        return {"messages": [_ask(model, "You lead a small harbour and decide.", state["messages"], "lead")]}

    def worker(name: str) -> Any:
        def work(state: MessagesState) -> dict[str, Any]:
            answer = _ask(model, WORKERS[name], state["messages"], name)
            return {"messages": [HumanMessage(f"{name}: {answer.text}", name=name)]}

        return work

    workers = [(name, worker(name)) for name in WORKERS]
    builder: StateGraph[Any] = StateGraph(KVMessagesState)
    return builder.add_sequence([("lead", lead), *workers, ("decide", lead)]).add_edge(START, "lead")


def plan_and_execute(model: BaseChatModel) -> StateGraph[Any]:
    """The plan shrinks and stands last, the work behind it grows; what the planner says is not kept in the conversation."""
    system = "You carry out plans for a small harbour."

    def plan(state: Planning) -> dict[str, Any]:
        _ask(model, system, [*state["messages"], HumanMessage("Which steps?")], "planner")
        return {"plan": ["Measure it.", "Order what it needs."]}

    def execute(state: Planning) -> dict[str, Any]:
        step = HumanMessage(state["plan"][0])
        return {
            "messages": [step, _ask(model, system, [*state["messages"], step], "executor")],
            "plan": state["plan"][1:],
        }

    def replan(state: Planning) -> dict[str, Any]:
        left = HumanMessage(f"Still to do: {' '.join(state['plan']) or 'nothing'} Is anything missing?")
        _ask(model, system, [*state["messages"], left], "planner")
        return {}

    def is_done(state: Planning) -> str:
        return "execute" if state["plan"] else "conclude"

    def conclude(state: Planning) -> dict[str, Any]:
        end = HumanMessage("Sum up.")
        return {"messages": [end, _ask(model, system, [*state["messages"], end], "executor")]}

    builder: StateGraph[Any] = StateGraph(Planning)
    builder.add_sequence([("plan", plan), ("execute", execute), ("replan", replan)]).add_node("conclude", conclude)
    return builder.add_edge(START, "plan").add_conditional_edges("replan", is_done, ["execute", "conclude"])


def hierarchical_teams(model: BaseChatModel) -> StateGraph[Any]:
    """A lead, and two teams that are graphs of their own; conversation and lineages cross their borders."""

    def member(name: str, system: str) -> tuple[str, Any]:
        return name, lambda state: {"messages": [_ask(model, system, state["messages"], name)]}

    def team(*members: tuple[str, Any]) -> Any:
        builder: StateGraph[Any] = StateGraph(KVMessagesState)
        return builder.add_sequence(members).add_edge(START, members[0][0]).compile()

    research = team(
        member("facts", "You name facts about a harbour."), member("risks", "You name risks for a harbour.")
    )
    editing = team(member("headline", "You write headlines."), member("letter", "You write letters to the mayor."))
    lead = member("lead", "You lead two teams of a harbour.")
    builder: StateGraph[Any] = StateGraph(KVMessagesState)
    return builder.add_sequence([lead, ("research", research), ("editing", editing)]).add_edge(START, "lead")


def agentic_rag(model: BaseChatModel) -> StateGraph[Any]:
    """Documents first, question last: grades and rewrites fork from the documents, and only the answer is kept."""
    system = "You answer from reports."

    def retrieve(state: Searching) -> dict[str, Any]:
        number = len(state["messages"])
        topic = TOPICS[number % len(TOPICS)]
        return {"messages": [HumanMessage(REPORT.format(topic=topic, week=number, days=number + 3, cost=40 + number))]}

    def judge(state: Searching) -> dict[str, Any]:
        _ask(model, system, [*state["messages"], HumanMessage(f"Does it answer: {state['question']}")], "judge")
        return {}

    def rewrite(state: Searching) -> dict[str, Any]:
        _ask(
            model,
            system,
            [*state["messages"], HumanMessage(f"Which words to search for: {state['question']}")],
            "search",
        )
        return {}

    def answer(state: Searching) -> dict[str, Any]:
        question = HumanMessage(state["question"])
        return {"messages": [question, _ask(model, system, [*state["messages"], question], "answer")]}

    builder: StateGraph[Any] = StateGraph(Searching)
    steps = [("retrieve", retrieve), ("judge", judge), ("rewrite", rewrite)]
    again = [("retrieve_again", retrieve), ("judge_again", judge), ("answer", answer)]
    return builder.add_sequence([*steps, *again]).add_edge(START, "retrieve")


def reflection(model: BaseChatModel) -> StateGraph[Any]:
    """A writer and a critic: what is the assistant's turn to one is the user's to the other."""

    def view(name: str, system: str) -> Any:
        def speak(state: MessagesState) -> dict[str, Any]:
            seen = [one if one.name == name else HumanMessage(one.text, name=one.name) for one in state["messages"]]
            return {"messages": [_ask(model, system, seen, name)]}

        return speak

    writer, critic = view("writer", "You write about a harbour."), view("critic", "You find what is wrong in a text.")
    builder: StateGraph[Any] = StateGraph(KVMessagesState)
    return builder.add_sequence([("write", writer), ("criticise", critic), ("revise", writer)]).add_edge(START, "write")


def map_reduce(model: BaseChatModel) -> StateGraph[Any]:
    """Siblings study one topic each behind the conversation that they are sent; their notes meet in it."""
    system = "You study a harbour."

    def split(state: MessagesState) -> dict[str, Any]:
        _ask(model, system, [*state["messages"], HumanMessage("What should be looked at?")], "split")
        return {}

    def fan_out(state: MessagesState) -> list[Send]:
        return [
            Send("study", {"messages": state["messages"], "topic": topic}) for topic in ("money", "safety", "weather")
        ]

    def study(state: Study) -> dict[str, Any]:
        question = HumanMessage(f"Look at the {state['topic']} alone.")
        return {"notes": [(state["topic"], _ask(model, system, [*state["messages"], question], state["topic"]).text)]}

    def conclude(state: Studying) -> dict[str, Any]:
        notes = HumanMessage("Notes:\n" + "\n".join(f"{topic}: {note}" for topic, note in state["notes"][-3:]))
        return {"messages": [notes, _ask(model, system, [*state["messages"], notes], "conclude")]}

    builder: StateGraph[Any] = StateGraph(kv_state(Studying))
    builder.add_node("split", split).add_node("study", study, input_schema=Study).add_node("conclude", conclude)
    builder.add_edge(START, "split").add_conditional_edges("split", fan_out, ["study"])
    return builder.add_edge("study", "conclude")


SHAPES: dict[str, Callable[[BaseChatModel], StateGraph[Any]]] = {
    "supervisor": supervisor,
    "plan-and-execute": plan_and_execute,
    "hierarchical teams": hierarchical_teams,
    "agentic RAG": agentic_rag,
    "reflection": reflection,
    "map-reduce": map_reduce,
}


def converse(builder: StateGraph[Any], num_turns: int) -> dict[str, Any]:
    """Ask an application one question a turn, in one thread with a checkpointer; its last state."""
    graph = builder.compile(checkpointer=InMemorySaver(serde=handle_serializer()))
    state: dict[str, Any] = {}
    for turn in range(num_turns):
        question = f"Question {turn + 1}: what about the {TOPICS[turn % len(TOPICS)]}?"
        is_search = "question" in builder.schemas[builder.state_schema]
        given = {"question": question} if is_search else {"messages": [HumanMessage(question, id=f"question-{turn}")]}
        state = graph.invoke(given, {"configurable": {"thread_id": "bench"}})
    return state


def _ask(model: BaseChatModel, system: str, messages: Sequence[BaseMessage], name: str) -> BaseMessage:
    answer = model.invoke([SystemMessage(system), *messages])
    return answer.model_copy(update={"name": name})
