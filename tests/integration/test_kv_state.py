"""``kv_state``: handles of agents beside an application's messages, written by the chat model, and what they are good for."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import operator
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import pytest
from langchain.agents import create_agent
from langchain.agents.middleware import AgentState
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, RemoveMessage, SystemMessage
from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.graph.message import REMOVE_ALL_MESSAGES
from langgraph.types import Command, Overwrite, RetryPolicy, Send, interrupt
from pydantic import BaseModel
from typing_extensions import TypedDict

from aaflow_langgraph import KVBranches, KVBroker, KVChatModel, KVCheckpointSaver, KVHandle, KVMessagesState, kv_state
from aaflow_langgraph.agents import KVMiddleware
from aaflow_langgraph.engine.transformers import TransformersEngine
from aaflow_langgraph.errors import ConfigError
from aaflow_langgraph.graph.lineages import LINEAGES, KVLineages
from aaflow_langgraph.graph.serde import handle_serializer
from tests import templates, tiny

SYSTEM = SystemMessage("You keep the books of a harbour. " * 8)


@pytest.fixture(scope="module")
def broker() -> Iterator[KVBroker]:
    engine = TransformersEngine(tiny.model(), tiny.tokenizer(templates.HERMES), name="tiny-tools")
    with KVBroker.open(engine, pool_bytes=32 << 20) as opened:
        yield opened
        assert opened.check() == []
        assert opened.stats().num_leases == 0


@pytest.fixture
def model(broker: KVBroker) -> KVChatModel:
    return KVChatModel(broker, max_tokens=6)


def memory() -> InMemorySaver:
    return InMemorySaver(serde=handle_serializer())


def thread(name: str = "1") -> Any:
    return {"configurable": {"thread_id": name}}


def lineages(state: Any) -> dict[str, KVHandle]:
    """Without the namespace in their names."""
    return {name.rpartition("@")[0]: handle for name, handle in state[LINEAGES].items()}


def seen(broker: KVBroker, handle: KVHandle) -> str:
    return broker.engine.frame.spell(broker.token_ids(handle))


def chatting(model: KVChatModel, state: Any = KVMessagesState, saver: Any = None) -> Any:
    def chat(state: MessagesState) -> dict[str, Any]:
        return {"messages": [model.invoke([SYSTEM, *state["messages"]])]}

    return StateGraph(state).add_node("chat", chat).add_edge(START, "chat").compile(saver)


# ------------------------------------------------------------------ what is written


def test_the_state_keeps_where_the_agent_stands_and_the_node_knows_nothing_of_it(
    broker: KVBroker, model: KVChatModel
) -> None:
    graph = chatting(model, saver=memory())
    for question in ("Who came?", "Who left?"):
        state = graph.invoke({"messages": [HumanMessage(question)]}, thread())
        kv = state["messages"][-1].response_metadata["kv"]
        assert {name: handle.kv_id for name, handle in lineages(state).items()} == {"chat": kv["kv_id"]}
        assert lineages(state)["chat"].kv_label == "chat"
    assert list(state[LINEAGES]) == [f"chat@{broker.namespace.digest[:8]}"]
    assert graph.get_state(thread()).values[LINEAGES] == state[LINEAGES]


def test_a_graph_without_the_key_is_as_it_was(model: KVChatModel) -> None:
    graph = chatting(model, MessagesState)
    assert set(graph.invoke({"messages": [HumanMessage("Who came?")]})) == {"messages"}


def test_agents_that_swap_roles_have_a_lineage_each_and_both_only_grow(broker: KVBroker, model: KVChatModel) -> None:
    def view(state: KVMessagesState, mine: str, system: str) -> dict[str, Any]:
        """What the other one said is a question to me."""
        turns: list[BaseMessage] = [
            message if message.name == mine else HumanMessage(message.text) for message in state["messages"]
        ]
        answer = model.invoke([SystemMessage(system), *turns])
        return {"messages": [answer.model_copy(update={"name": mine})]}

    builder = StateGraph(KVMessagesState)
    builder.add_node("write", lambda state: view(state, "writer", "You write."))
    builder.add_node("criticise", lambda state: view(state, "critic", "You find faults."))
    builder.add_edge(START, "write").add_edge("write", "criticise")
    graph = builder.compile(memory())
    before: dict[str, KVHandle] = {}
    for _ in range(3):
        state = graph.invoke({"messages": [HumanMessage("Once more.")]}, thread())
        now = lineages(state)
        assert list(now) == ["criticise", "write"]
        for name, handle in before.items():
            ids, kept = broker.token_ids(now[name]), broker.token_ids(handle)
            assert ids[: len(kept) - 1] == kept[: len(kept) - 1]
        before = now
    spoken = broker.journal.entries()[-2:]
    assert all(one.num_reused >= one.num_reusable - 1 and one.num_reused > one.num_context // 2 for one in spoken)


def test_two_models_in_one_node_have_a_lineage_each(broker: KVBroker, model: KVChatModel) -> None:
    other_engine = TransformersEngine(tiny.model(seed=3), tiny.tokenizer(templates.HERMES), name="tiny-other")
    with KVBroker.open(other_engine, pool_bytes=8 << 20) as second:
        other = KVChatModel(second, max_tokens=4)

        def both(state: MessagesState) -> dict[str, Any]:
            draft = model.invoke(state["messages"])
            return {"messages": [other.invoke([*state["messages"], HumanMessage(f"Shorten: {draft.text}")])]}

        graph = StateGraph(KVMessagesState).add_node("both", both).add_edge(START, "both").compile(memory())
        for _ in range(2):
            state = graph.invoke({"messages": [HumanMessage("Report.")]}, thread())
        spaces = {name: handle.kv_namespace for name, handle in state[LINEAGES].items()}
        assert spaces == {f"both@{one.namespace.digest[:8]}": one.namespace.digest for one in (broker, second)}


@pytest.mark.parametrize("is_async", [False, True])
def test_a_node_that_asks_several_times_writes_once_and_keeps_the_longest(model: KVChatModel, is_async: bool) -> None:
    questions = [[HumanMessage("Short?")], [HumanMessage("A much longer question?")], [HumanMessage("Mid-size?")]]

    def ask(state: MessagesState) -> dict[str, Any]:
        return {"messages": model.batch(questions)}

    async def aask(state: MessagesState) -> dict[str, Any]:
        return {"messages": await model.abatch(questions)}

    graph = StateGraph(KVMessagesState).add_node("ask", aask if is_async else ask).add_edge(START, "ask").compile()
    given = {"messages": [HumanMessage("Ask.")]}

    async def chunks() -> list[Any]:
        return [chunk async for chunk in graph.astream(given, stream_mode="updates")]

    (chunk,) = asyncio.run(chunks()) if is_async else list(graph.stream(given, stream_mode="updates"))
    assert isinstance(chunk["ask"], dict), "two writes of one key would make a list of it"
    copied = copy.deepcopy(chunk["ask"][LINEAGES])
    assert (type(copied), copied) == (dict, chunk["ask"][LINEAGES])
    assert lineages(chunk["ask"])["ask"].kv_tokens == max(
        message.response_metadata["kv"]["kv_tokens"] for message in chunk["ask"]["messages"]
    )


def test_a_task_that_is_retried_leaves_what_its_last_attempt_said(model: KVChatModel) -> None:
    attempts: list[int] = []

    def flaky(state: MessagesState) -> dict[str, Any]:
        attempts.append(len(attempts))
        answer = model.invoke([HumanMessage("x" * (40 - 20 * len(attempts)))])
        if len(attempts) == 1:
            raise ConnectionError("planted")
        return {"messages": [answer]}

    policy = RetryPolicy(max_attempts=2, initial_interval=0.0, jitter=False)
    graph = StateGraph(KVMessagesState).add_node("flaky", flaky, retry_policy=policy).add_edge(START, "flaky").compile()
    state = graph.invoke({"messages": [HumanMessage("Go.")]})
    assert len(attempts) == 2
    assert lineages(state)["flaky"].kv_id == state["messages"][-1].response_metadata["kv"]["kv_id"]


def test_a_task_that_is_resumed_in_the_same_process_leaves_its_handle(model: KVChatModel) -> None:
    attempts: list[Any] = []

    def ask(state: MessagesState, config: RunnableConfig) -> dict[str, Any]:
        attempts.append(config)  # whoever holds what the first attempt was given keeps its writes alive
        return {
            "messages": [
                model.invoke([*state["messages"], HumanMessage("x" * (40 - 20 * len(attempts)))]),
                interrupt("?"),
            ]
        }

    graph = StateGraph(KVMessagesState).add_node("ask", ask).add_edge(START, "ask").compile(memory())
    graph.invoke({"messages": [HumanMessage("Go.")]}, thread())
    assert graph.get_state(thread()).values[LINEAGES] == {}
    state = graph.invoke(Command(resume="yes"), thread())
    assert len(attempts) == 2
    assert lineages(state)["ask"].kv_id == state["messages"][-2].response_metadata["kv"]["kv_id"]


def test_kv_false_leaves_the_same_state(broker: KVBroker) -> None:
    states = []
    for kv in (True, False):
        graph = chatting(KVChatModel(broker, max_tokens=6, kv=kv))
        states.append(graph.invoke({"messages": [HumanMessage("Who came?", id="q")]})[LINEAGES])
    assert states[0] == states[1]


# ------------------------------------------------------------------ graphs inside graphs, siblings, commands


def test_subgraphs_that_share_the_key_add_their_own_agents(model: KVChatModel) -> None:
    team = chatting(model)
    builder = StateGraph(KVMessagesState).add_node("north", team).add_node("south", team)
    builder.add_edge(START, "north").add_edge(START, "south")
    graph = builder.compile(memory())
    for _ in range(2):
        state = graph.invoke({"messages": [HumanMessage("Report.")]}, thread())
    assert list(lineages(state)) == ["north/chat", "south/chat"]


class Wide(KVMessagesState):
    notes: Annotated[list[str], operator.add]


class Task(TypedDict):
    topic: str


def test_siblings_of_a_send_are_one_agent_and_never_a_conflict(broker: KVBroker, model: KVChatModel) -> None:
    def study(task: Task) -> dict[str, Any]:
        return {"notes": [model.invoke([SYSTEM, HumanMessage(f"Study {task['topic']}.")]).text]}

    def fan_out(state: Wide) -> list[Send]:
        return [Send("study", {"topic": "boats " * number}) for number in (1, 3, 2)]

    builder = StateGraph(Wide).add_node("study", study).add_conditional_edges(START, fan_out, ["study"])
    state = builder.compile(memory()).invoke({"messages": [HumanMessage("Go.")]}, thread())
    assert len(state["notes"]) == 3
    assert "boats boats boats" in seen(broker, lineages(state)["study"])


def test_a_command_to_the_parent_brings_the_message_and_with_it_the_conversation(model: KVChatModel) -> None:
    """What the task left in its own graph ends with that graph; the id in the message goes where the message goes."""

    def leave(state: MessagesState) -> Command[Any]:
        answer = model.invoke([SYSTEM, *state["messages"]])
        return Command(graph=Command.PARENT, goto="after", update={"messages": [answer]})

    team = StateGraph(KVMessagesState).add_node("leave", leave).add_edge(START, "leave").compile()

    def after(state: MessagesState) -> dict[str, Any]:
        return {"messages": [model.invoke([SYSTEM, *state["messages"], HumanMessage("And?")])]}

    builder = StateGraph(KVMessagesState).add_node("team", team, destinations=("after",)).add_node("after", after)
    state = builder.add_edge(START, "team").compile(memory()).invoke({"messages": [HumanMessage("Go.")]}, thread())
    assert list(lineages(state)) == ["after"]
    brought, answer = state["messages"][-2:]
    assert reused(answer) == brought.response_metadata["kv"]["kv_tokens"] - 3


def reused(message: BaseMessage) -> int:
    assert isinstance(message, AIMessage)
    assert message.usage_metadata is not None
    return message.usage_metadata["input_token_details"]["cache_read"]


def test_a_conversation_that_is_cut_or_summarised_goes_on_from_what_is_left(
    broker: KVBroker, model: KVChatModel
) -> None:
    def chat(state: MessagesState) -> dict[str, Any]:
        return {"messages": [model.invoke([SYSTEM, *state["messages"]])]}

    def tidy(state: MessagesState) -> dict[str, Any]:
        if len(state["messages"]) < 6:
            return {}
        summary = HumanMessage("Before: they talked about boats.")
        return {"messages": [RemoveMessage(id=REMOVE_ALL_MESSAGES), summary, *state["messages"][-1:]]}

    builder = StateGraph(KVMessagesState).add_node("chat", chat).add_node("tidy", tidy)
    graph = builder.add_edge(START, "chat").add_edge("chat", "tidy").compile(memory())
    system = len(broker.engine.frame.encode(SYSTEM.text))
    lengths = []
    for turn in range(6):
        state = graph.invoke({"messages": [HumanMessage(f"Turn {turn}?")]}, thread())
        entry = broker.journal.entries()[-1]
        assert entry.num_reused == entry.num_reusable
        assert entry.num_reused > system or turn == 0
        lengths.append(lineages(state)["chat"].kv_tokens)
        assert f"Turn {turn}?" in seen(broker, lineages(state)["chat"])
    assert lengths[3] < lengths[2], "the handle is the last one, also when it is shorter"


# ------------------------------------------------------------------ what it is good for: another process


def test_worker_replies_without_ids_are_not_prefilled_again_in_a_later_process(
    open_broker: Callable[..., KVBroker], tmp_path: Path
) -> None:
    """Replies are re-wrapped as named human messages, as supervisors do: no message names its conversation any more."""

    def supervised(broker: KVBroker, state: Any, saver: Any) -> tuple[Any, list[tuple[int, int]]]:
        model = KVChatModel(broker, max_tokens=4)

        def worker(state: MessagesState) -> dict[str, Any]:
            answer = model.invoke([SYSTEM, *state["messages"]])
            return {"messages": [HumanMessage(f"[{answer.response_metadata['finish_reason']}]", name="worker")]}

        graph = StateGraph(state).add_node("worker", worker).add_edge(START, "worker").compile(saver)
        since = len(broker.journal.entries())
        graph.invoke({"messages": [HumanMessage("Count the boats.")]}, thread())
        return graph, [(one.num_reused, one.num_context) for one in broker.journal.entries()[since:]]

    shares = {}
    for state in (KVMessagesState, MessagesState):
        place = tmp_path / state.__name__
        for _process in range(2):
            broker = open_broker()
            with KVCheckpointSaver.local(place, broker) as saver:
                _, ((num_reused, num_context),) = supervised(broker, state, saver)
            broker.close()
        shares[state] = num_reused / num_context
    assert shares[MessagesState] == 0, "nothing in this state names what was said"
    assert shares[KVMessagesState] > 0.7


class Asked(KVMessagesState):
    notes: Annotated[list[str], operator.add]


class Payload(TypedDict):
    said: list[str]
    topic: str


def test_siblings_that_were_interrupted_go_on_in_a_later_process_behind_what_all_of_them_read(
    open_broker: Callable[..., KVBroker], tmp_path: Path
) -> None:
    """A ``Send`` carries texts, no cache and no id; ids are in the state, and so the KV is there on resume."""

    def graph_of(broker: KVBroker, saver: Any) -> Any:
        model = KVChatModel(broker, max_tokens=4)

        def read(state: Asked) -> dict[str, Any]:
            return {"messages": [HumanMessage(model.invoke([SYSTEM, *state["messages"]]).text, name="reader")]}

        def study(state: Payload) -> dict[str, Any]:
            asked = [*map(HumanMessage, state["said"]), HumanMessage(state["topic"])]
            answer = model.invoke([SYSTEM, *asked])
            return {"notes": [f"{interrupt(state['topic'])} {answer.response_metadata['kv']['kv_id']}"]}

        def fan_out(state: Asked) -> list[Send]:
            said = [message.text for message in state["messages"][:1]]
            return [Send("study", {"said": said, "topic": topic}) for topic in ("money", "weather")]

        builder = StateGraph(Asked).add_node("read", read).add_node("study", study, input_schema=Payload)
        builder.add_edge(START, "read").add_conditional_edges("read", fan_out, ["study"])
        return builder.compile(saver)

    first = open_broker()
    with KVCheckpointSaver.local(tmp_path, first) as saver:
        graph_of(first, saver).invoke({"messages": [HumanMessage("Count the boats in the harbour.")]}, thread())
    spoken = {entry.kv_id: entry.num_context for entry in first.journal.entries() if entry.node == "study"}
    first.close()
    later = open_broker()
    with KVCheckpointSaver.local(tmp_path, later) as saver:
        graph = graph_of(later, saver)
        asked = {one.id: f"yes to {one.value}" for one in graph.get_state(thread()).interrupts}
        notes = graph.invoke(Command(resume=asked), thread())["notes"]
    assert sorted(note.rpartition(" ")[2] for note in notes) == sorted(spoken), "the same tokens"
    assert {note.rpartition(" ")[0] for note in notes} == {"yes to money", "yes to weather"}
    entries = later.journal.entries()
    assert [entry.node for entry in entries] == ["study", "study"]
    assert all(entry.num_reused > len(SYSTEM.text) for entry in entries)


def test_handles_edited_by_hand_are_hints_that_fit_nothing(broker: KVBroker, model: KVChatModel) -> None:
    graph = chatting(model, saver=memory())
    graph.invoke({"messages": [HumanMessage("Who came?")]}, thread())
    name = f"chat@{broker.namespace.digest[:8]}"
    forged = KVHandle(kv_id="0" * 64, kv_namespace=broker.namespace.digest, kv_tokens=9)
    alien = KVHandle(kv_id="1" * 64, kv_namespace="f" * 64, kv_tokens=9)
    for edit in (
        {name: forged},
        {name: alien},
        {"elsewhere@x": forged.to_dict()},
        Overwrite({name: forged}),
        {name: "no"},
    ):
        graph.update_state(thread(), {LINEAGES: edit})
        state = graph.invoke({"messages": [HumanMessage("And?")]}, thread())
        entry = broker.journal.entries()[-1]
        assert entry.num_reused == entry.num_reusable > entry.num_context // 2
        assert lineages(state)["chat"].kv_id == entry.kv_id


# ------------------------------------------------------------------ agents of langchain


def lookup(word: str) -> str:
    """Look a word up."""
    return f"{word}: unknown"


@pytest.mark.parametrize("is_async", [False, True])
def test_the_middleware_keeps_the_handle_in_checkpoints_and_out_of_results(model: KVChatModel, is_async: bool) -> None:
    agent = create_agent(model, [lookup], system_prompt="Be brief.", middleware=[KVMiddleware()], checkpointer=memory())
    given: Any = {"messages": [HumanMessage("What is a boat?")]}
    for _ in range(2):
        result = asyncio.run(agent.ainvoke(given, thread())) if is_async else agent.invoke(given, thread())
    assert set(result) == {"messages"}
    kept = lineages(agent.get_state(thread()).values)
    assert kept["model"].kv_id == result["messages"][-1].response_metadata["kv"]["kv_id"]
    assert reused(result["messages"][-1]) > 0
    assert LINEAGES not in agent.get_input_jsonschema()["properties"]
    assert LINEAGES not in agent.get_output_jsonschema()["properties"]


def test_agents_in_a_graph_with_the_key_share_it(model: KVChatModel) -> None:
    builder = StateGraph(KVMessagesState)
    for name in ("north", "south"):
        builder.add_node(name, create_agent(model, [], name=name, state_schema=kv_state(AgentState)))
    builder.add_edge(START, "north").add_edge("north", "south")
    state = builder.compile(memory()).invoke({"messages": [HumanMessage("Report.")]}, thread())
    assert list(lineages(state)) == ["north/model", "south/model"]


# ------------------------------------------------------------------ kinds of state, bad input, laws


@dataclasses.dataclass
class Form:
    question: str
    answer: str = ""


class Sheet(BaseModel):
    question: str
    answer: str = ""


class Card(TypedDict):
    question: str
    answer: str


@pytest.mark.parametrize("kind", [Form, Sheet, Card])
def test_every_kind_of_state_takes_the_key(model: KVChatModel, kind: Any) -> None:
    made = kv_state(kind)
    assert (made.__name__, made.__module__) == (f"KV{kind.__name__}", kind.__module__)

    def answer(state: Any) -> dict[str, Any]:
        question = state["question"] if kind is Card else state.question
        return {"answer": model.invoke(question).text}

    graph = StateGraph(made).add_node("answer", answer).add_edge(START, "answer").compile(memory())
    for _ in range(2):
        state = graph.invoke({"question": "Who came?"}, thread())
    assert list(lineages(state)) == ["answer"]


def test_what_is_no_state_is_refused() -> None:
    for wrong in (None, 3, "State", dict, [], {"messages": list}, Form("x"), int):
        with pytest.raises(ConfigError, match="a state is a typed dict, a dataclass or a pydantic model"):
            kv_state(wrong)  # type: ignore[type-var, arg-type]
    for twice in (KVMessagesState, kv_state(Form), kv_state(Sheet)):
        with pytest.raises(ConfigError, match=f"has a key {LINEAGES!r} already"):
            kv_state(twice)


def _handle(number: int, tokens: int) -> KVHandle:
    return KVHandle(kv_id=f"{number:064x}", kv_namespace="a" * 64, kv_tokens=tokens)


def test_one_lineage_written_twice_in_a_step_keeps_the_longest_in_any_order() -> None:
    writes: Sequence[dict[str, KVHandle]] = [
        {"a": _handle(1, 5)},
        {"a": _handle(2, 9)},
        {"a": _handle(3, 9), "b": _handle(4, 1)},
    ]
    for order in (writes, writes[::-1], [writes[1], writes[2], writes[0]]):
        channel = KVLineages()
        assert channel.update(order)
        assert channel.get() == {"a": _handle(3, 9), "b": _handle(4, 1)}
        assert not channel.update([{"a": _handle(3, 9)}, {}])
        assert channel.update([{"a": _handle(5, 2)}]), "a later step may shorten it"
        assert channel.from_checkpoint(channel.checkpoint()).get() == channel.get()


def test_lineages_are_not_branches() -> None:
    """Two schemas that disagree on the key are LangGraph's own error, not a matter of their order."""
    assert KVLineages() != KVBranches()
    assert KVLineages() == KVLineages()
    assert len({KVLineages(), KVLineages()}) == 1
