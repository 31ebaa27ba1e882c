"""Handles in real graphs: every kind of state, parallel work, edits, interrupts, time travel, savers, new processes."""

from __future__ import annotations

import json
import operator
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from langchain_core.runnables import RunnableConfig
from langgraph.cache.memory import InMemoryCache
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.checkpoint.sqlite import SqliteSaver
from langgraph.errors import InvalidUpdateError
from langgraph.graph import END, START, StateGraph
from langgraph.types import CachePolicy, Command, Overwrite, RetryPolicy, Send, interrupt
from pydantic import BaseModel, Field
from typing_extensions import TypedDict

from aaflow_langgraph import KVBranches, KVBroker, KVChannel, KVHandle, Sampling, generate_node, prefill_node
from aaflow_langgraph.errors import RecipeMissing
from aaflow_langgraph.graph.rejected import rejected_writes
from aaflow_langgraph.graph.serde import handle_serializer
from tests import tiny

DOCS = "Berlin is the capital of Germany. Paris is the capital of France. " * 6
SHORT = Sampling(max_tokens=6)
WARM = Sampling(max_tokens=12, temperature=1.5)
ROOT = Path(__file__).parents[2]


class State(TypedDict):
    question: str
    docs: Annotated[KVHandle, KVChannel]
    plan: Annotated[KVHandle, KVChannel]
    drafts: Annotated[dict[str, KVHandle], KVBranches]
    answer: str
    answers: Annotated[list[str], operator.add]
    decision: str


@dataclass
class DataState:
    question: str
    docs: Annotated[KVHandle | None, KVChannel] = None
    plan: Annotated[KVHandle | None, KVChannel] = None
    drafts: Annotated[dict[str, KVHandle], KVBranches] = field(default_factory=dict)
    answer: str = ""


class ModelState(BaseModel):
    question: str
    docs: Annotated[KVHandle | None, KVChannel] = None
    plan: Annotated[KVHandle | None, KVChannel] = None
    drafts: Annotated[dict[str, KVHandle], KVBranches] = Field(default_factory=dict)
    answer: str = ""


SCHEMAS = pytest.mark.parametrize("schema", [State, DataState, ModelState], ids=["typeddict", "dataclass", "pydantic"])
COLOURS = pytest.mark.parametrize("colour", ["sync", "async"])
DURABILITIES = pytest.mark.parametrize("durability", ["sync", "async", "exit"])


@pytest.fixture
def broker(open_broker: Callable[..., KVBroker]) -> KVBroker:
    return open_broker()


def thread(name: str = "1") -> RunnableConfig:
    return {"configurable": {"thread_id": name}}


async def run(graph: Any, state: Any, colour: str, config: RunnableConfig, **options: Any) -> Any:
    if colour == "sync":
        return graph.invoke(state, config, **options)
    return await graph.ainvoke(state, config, **options)


def chain_builder(broker: KVBroker, schema: Any = State, sampling: Sampling = SHORT) -> Any:
    builder = StateGraph(schema)
    builder.add_node("retrieve", prefill_node(broker, lambda state: DOCS, writes="docs"))
    builder.add_node("plan", generate_node(broker, "Plan: {question}", reads="docs", writes="plan", sampling=sampling))
    builder.add_node("reason", generate_node(broker, "Answer.", reads="plan", text_to="answer", sampling=sampling))
    builder.add_edge(START, "retrieve")
    builder.add_edge("retrieve", "plan")
    builder.add_edge("plan", "reason")
    return builder


def value_of(result: Any, key: str) -> Any:
    return result[key] if isinstance(result, dict) else getattr(result, key)


# --- kinds of state ---


SharedChannel = Annotated[KVHandle | None, KVChannel()]


class Shared(TypedDict, total=False):
    first: SharedChannel
    second: SharedChannel


@SCHEMAS
@COLOURS
async def test_the_chain_runs_the_same_in_every_kind_of_state(broker: KVBroker, schema: Any, colour: str) -> None:
    expected = chain_builder(broker).compile().invoke({"question": "q"})
    graph = chain_builder(broker, schema).compile(checkpointer=InMemorySaver())
    result = await run(graph, schema(question="q"), colour, thread())
    for key in ("docs", "plan", "answer"):
        assert value_of(result, key) == expected[key]
    stored = graph.get_state(thread()).values
    assert isinstance(stored["docs"], KVHandle)


@SCHEMAS
def test_a_state_with_handles_has_a_json_schema(broker: KVBroker, schema: Any) -> None:
    graph = chain_builder(broker, schema).compile()
    for described in (graph.get_input_jsonschema(), graph.get_output_jsonschema()):
        assert "kv_id" in json.dumps(described)


@SCHEMAS
def test_none_defaults_written_by_a_node_keep_the_handles(broker: KVBroker, schema: Any) -> None:
    builder = chain_builder(broker, schema)
    builder.add_node("touch", lambda state: schema(question="changed"))
    builder.add_edge("reason", "touch")
    result = builder.compile().invoke(schema(question="q"))
    assert value_of(result, "docs") == broker.prefill(DOCS).handle
    assert value_of(result, "question") == "changed"


def test_a_key_may_be_optional_or_share_one_channel_instance(broker: KVBroker) -> None:
    builder = StateGraph(Shared)
    builder.add_node("first", prefill_node(broker, "one", writes="first"))
    builder.add_node("second", prefill_node(broker, "two", writes="second"))
    builder.add_edge(START, "first")
    builder.add_edge("first", "second")
    result = builder.compile(checkpointer=InMemorySaver()).invoke({}, thread())
    assert result["first"].kv_label == "first"
    assert result["second"].kv_label == "second"


def test_a_private_input_schema_adds_handles_to_an_application_that_does_not_know_them(broker: KVBroker) -> None:
    class Public(TypedDict):
        question: str
        answer: str

    class Private(TypedDict):
        question: str
        docs: Annotated[KVHandle, KVChannel]

    builder = StateGraph(Public)
    builder.add_node("retrieve", prefill_node(broker, lambda state: DOCS, writes="docs"))
    reason = generate_node(broker, "{question}", reads="docs", text_to="answer", sampling=SHORT)
    builder.add_node("reason", reason, input_schema=Private)
    builder.add_edge(START, "retrieve")
    builder.add_edge("retrieve", "reason")
    graph = builder.compile(checkpointer=InMemorySaver())
    assert set(graph.invoke({"question": "q"}, thread())) == {"question", "answer"}
    assert isinstance(graph.get_state(thread()).values["docs"], KVHandle)


# --- parallel work ---


class Echoed(TypedDict):
    docs: Annotated[KVHandle, KVChannel]
    drafts: Annotated[dict[str, KVHandle], KVBranches]
    left: str
    right: str


@COLOURS
async def test_parallel_subgraphs_that_echo_shared_handles_do_not_conflict(broker: KVBroker, colour: str) -> None:
    def subgraph(key: str) -> Any:
        inner = StateGraph(Echoed)
        inner.add_node("write", generate_node(broker, f"Write {key}", reads="docs", text_to=key, sampling=SHORT))
        inner.add_edge(START, "write")
        return inner.compile()

    builder = StateGraph(Echoed)
    builder.add_node("retrieve", prefill_node(broker, lambda state: DOCS, writes="docs"))
    builder.add_node("draft", prefill_node(broker, "a draft", reads="docs", writes="drafts", branch="first"))
    builder.add_edge(START, "retrieve")
    builder.add_edge("retrieve", "draft")
    for key in ("left", "right"):
        builder.add_node(f"write {key}", subgraph(key))
        builder.add_edge("draft", f"write {key}")
    result = await run(builder.compile(), {}, colour, {})
    assert result["docs"] == broker.prefill(DOCS).handle
    assert set(result["drafts"]) == {"first"}
    assert result["left"] == broker.generate("Write left", parent=result["docs"], sampling=SHORT).text
    assert result["right"] == broker.generate("Write right", parent=result["docs"], sampling=SHORT).text


def test_a_subgraph_that_extends_the_shared_handle_wins_over_an_echo_beside_it(broker: KVBroker) -> None:
    def subgraph(node: Any) -> Any:
        inner = StateGraph(Echoed)
        inner.add_node("node", node)
        inner.add_edge(START, "node")
        return inner.compile()

    builder = StateGraph(Echoed)
    builder.add_node("extend", subgraph(prefill_node(broker, "and more", reads="docs", writes="docs")))
    builder.add_node("echo", subgraph(lambda state: {"left": "x"}))
    builder.add_edge(START, "extend")
    builder.add_edge(START, "echo")
    docs = broker.prefill(DOCS).handle
    result = builder.compile().invoke({"docs": docs})
    assert result["docs"].kv_tokens > docs.kv_tokens


@COLOURS
async def test_two_nodes_that_write_one_key_in_one_step_conflict_by_name(broker: KVBroker, colour: str) -> None:
    builder = StateGraph(State)
    for number in (1, 2):
        node = prefill_node(broker, f"text number {number}", writes="docs", label=f"text{number}")
        builder.add_node(f"write{number}", node)
        builder.add_edge(START, f"write{number}")
    with pytest.raises(InvalidUpdateError, match=r"'docs'.*text1.*text2.*KVBranches"):
        await run(builder.compile(), {"question": "q"}, colour, {})


@COLOURS
async def test_two_nodes_that_write_the_same_tokens_to_one_key_do_not_conflict(broker: KVBroker, colour: str) -> None:
    builder = StateGraph(State)
    for number in (1, 2):
        builder.add_node(f"write{number}", prefill_node(broker, DOCS, writes="docs", label=f"text{number}"))
        builder.add_edge(START, f"write{number}")
    result = await run(builder.compile(), {"question": "q"}, colour, {})
    assert result["docs"] == broker.prefill(DOCS).handle
    assert broker.stats().num_extents == 1


@COLOURS
async def test_parallel_branches_merge_and_are_read_by_name(broker: KVBroker, colour: str) -> None:
    builder = StateGraph(State)
    builder.add_node("retrieve", prefill_node(broker, lambda state: DOCS, writes="docs"))
    builder.add_edge(START, "retrieve")
    builder.add_node("judge", generate_node(broker, "Judge.", reads="drafts.b", text_to="answer", sampling=SHORT))
    for name in ("c", "a", "b"):
        node = generate_node(broker, f"Draft {name}", reads="docs", writes="drafts", branch=name, sampling=SHORT)
        builder.add_node(name, node)
        builder.add_edge("retrieve", name)
    builder.add_edge(["c", "a", "b"], "judge")
    result = await run(builder.compile(), {"question": "q"}, colour, {})
    assert list(result["drafts"]) == ["a", "b", "c"]
    assert result["answer"] == broker.generate("Judge.", parent=result["drafts"]["b"], sampling=SHORT).text


@COLOURS
async def test_send_carries_a_handle_and_siblings_join_in_branches(broker: KVBroker, colour: str) -> None:
    def fan_out(state: State) -> list[Send]:
        return [Send("draft", {"docs": state["docs"], "topic": topic}) for topic in ("tea", "rain")]

    builder = StateGraph(State)
    builder.add_node("retrieve", prefill_node(broker, lambda state: DOCS, writes="docs"))
    draft = generate_node(broker, "On {topic}", reads="docs", writes="drafts", branch="{topic}", sampling=SHORT)
    builder.add_node("draft", draft)
    builder.add_edge(START, "retrieve")
    builder.add_conditional_edges("retrieve", fan_out, ["draft"])
    graph = builder.compile(checkpointer=InMemorySaver(serde=handle_serializer()))
    result = await run(graph, {"question": "q"}, colour, thread())
    assert list(result["drafts"]) == ["rain", "tea"]
    for topic, handle in result["drafts"].items():
        assert handle == broker.generate(f"On {topic}", parent=result["docs"], sampling=SHORT).handle


def test_a_command_updates_a_handle_given_as_plain_dict_and_goes_on(broker: KVBroker) -> None:
    docs = broker.prefill(DOCS).handle

    def choose(state: State) -> Command[Literal["reason"]]:
        return Command(update={"docs": docs.to_dict()}, goto="reason")

    builder = StateGraph(State)
    builder.add_node("choose", choose)
    builder.add_node("reason", generate_node(broker, "Say", reads="docs", text_to="answer", sampling=SHORT))
    builder.add_edge(START, "choose")
    result = builder.compile().invoke({"question": "q"})
    assert isinstance(result["docs"], KVHandle)
    assert result["answer"] == broker.generate("Say", parent=docs, sampling=SHORT).text


def test_a_command_from_a_subgraph_writes_to_its_parent(broker: KVBroker) -> None:
    def hand_over(state: State) -> Command[Any]:
        return Command(update={"plan": state["docs"]}, goto="reason", graph=Command.PARENT)

    inner = StateGraph(State)
    inner.add_node("retrieve", prefill_node(broker, lambda state: DOCS, writes="docs"))
    inner.add_node("hand over", hand_over)
    inner.add_edge(START, "retrieve")
    inner.add_edge("retrieve", "hand over")
    builder = StateGraph(State)
    builder.add_node("inner", inner.compile(), destinations=("reason",))
    builder.add_node("reason", generate_node(broker, "Say", reads="plan", text_to="answer", sampling=SHORT))
    builder.add_edge(START, "inner")
    result = builder.compile(checkpointer=InMemorySaver()).invoke({"question": "q"}, thread())
    assert result["plan"] == broker.prefill(DOCS).handle
    assert result["answer"] == broker.generate("Say", parent=result["plan"], sampling=SHORT).text


@pytest.mark.parametrize("node", ["generate", "prefill"])
def test_a_conditional_edge_sees_the_handle_that_the_node_has_just_written(broker: KVBroker, node: str) -> None:
    def route(state: State) -> str:
        return "long" if state["docs"].kv_tokens > 20 else "short"

    nodes = {
        "generate": generate_node(broker, DOCS, writes="docs", sampling=SHORT),
        "prefill": prefill_node(broker, DOCS, writes="docs"),
    }
    builder = StateGraph(State)
    builder.add_node("write", nodes[node])
    builder.add_node("long", lambda state: {"decision": "long"})
    builder.add_node("short", lambda state: {"decision": "short"})
    builder.add_edge(START, "write")
    builder.add_conditional_edges("write", route, ["long", "short"])
    assert builder.compile().invoke({"question": "q"})["decision"] == "long"


def test_a_cached_node_gives_its_handle_back(broker: KVBroker) -> None:
    calls: list[str] = []

    def source(state: State) -> str:
        calls.append("read")
        return DOCS

    builder = StateGraph(State)
    builder.add_node("retrieve", prefill_node(broker, source, writes="docs"), cache_policy=CachePolicy())
    builder.add_node("reason", generate_node(broker, "Say", reads="docs", text_to="answer", sampling=SHORT))
    builder.add_edge(START, "retrieve")
    builder.add_edge("retrieve", "reason")
    graph = builder.compile(cache=InMemoryCache())
    assert graph.invoke({"question": "q"}) == graph.invoke({"question": "q"})
    assert calls == ["read"]


def test_a_retried_node_repeats_and_stores_once(broker: KVBroker) -> None:
    attempts: list[int] = []

    def source(state: State) -> str:
        attempts.append(broker.stats().num_extents)
        if len(attempts) == 1:
            raise ConnectionError("flaky")
        return DOCS

    builder = StateGraph(State)
    policy = RetryPolicy(initial_interval=0, jitter=False)
    builder.add_node("retrieve", prefill_node(broker, source, writes="docs"), retry_policy=policy)
    builder.add_edge(START, "retrieve")
    assert builder.compile().invoke({"question": "q"})["docs"] == broker.prefill(DOCS).handle
    assert attempts == [0, 0]


# --- sampling: a re-run repeats, siblings differ ---


def test_two_runs_of_one_graph_on_one_input_sample_the_same(broker: KVBroker) -> None:
    graph = chain_builder(broker, sampling=WARM).compile()
    assert graph.invoke({"question": "q"}) == graph.invoke({"question": "q"})


@COLOURS
@pytest.mark.parametrize("nested", [False, True], ids=["node", "subgraph"])
async def test_send_siblings_with_equal_input_sample_differently(broker: KVBroker, nested: bool, colour: str) -> None:
    node: Any = generate_node(broker, "Say something", text_to="answer", sampling=WARM)

    class Worker(TypedDict):
        answer: str
        answers: Annotated[list[str], operator.add]

    class Joined(TypedDict):
        answers: Annotated[list[str], operator.add]

    inner = StateGraph(Worker, output_schema=Joined)
    inner.add_node("sample", node)
    inner.add_node("collect", lambda state: {"answers": [state["answer"]]})
    inner.add_edge(START, "sample")
    inner.add_edge("sample", "collect")
    worker = inner.compile()

    builder = StateGraph(Joined)
    if nested:
        builder.add_node("work", worker, input_schema=Worker)
    else:
        one = node | (lambda update: {"answers": [update["answer"]]})
        builder.add_node("work", one, input_schema=Worker)
    builder.add_conditional_edges(START, lambda state: [Send("work", {"answers": []}) for _ in range(3)], ["work"])
    result = await run(builder.compile(), {}, colour, {})
    assert len(set(result["answers"])) == 3


def test_a_loop_that_comes_by_again_with_equal_input_samples_anew(broker: KVBroker) -> None:
    builder = StateGraph(State)
    builder.add_node("sample", generate_node(broker, "Say something", text_to="answer", sampling=WARM))
    builder.add_node("collect", lambda state: {"answers": [state["answer"]]})
    builder.add_edge(START, "sample")
    builder.add_edge("sample", "collect")
    builder.add_conditional_edges("collect", lambda state: "sample" if len(state["answers"]) < 3 else END)
    assert len(set(builder.compile().invoke({"question": "q"})["answers"])) == 3


def test_a_given_seed_repeats_everywhere(broker: KVBroker) -> None:
    seeded = Sampling(max_tokens=12, temperature=1.5, seed=7)
    node = generate_node(broker, "Say something", text_to="answer", sampling=seeded)
    assert node.invoke({}) == node.invoke({})
    assert node.invoke({})["answer"] == broker.generate("Say something", sampling=seeded).text


# --- edits from outside ---


def test_an_edited_dict_becomes_a_handle_again(broker: KVBroker) -> None:
    graph = chain_builder(broker).compile(checkpointer=InMemorySaver(), interrupt_before=["plan"])
    graph.invoke({"question": "q"}, thread())
    other = broker.prefill("Some other text that was read before.").handle
    graph.update_state(thread(), {"docs": json.loads(json.dumps(other.to_dict()))})
    assert isinstance(graph.get_state(thread()).values["docs"], KVHandle)
    result = graph.invoke(None, thread())
    assert result["docs"] == other
    assert broker.recipe(result["plan"]).parent == other.kv_id


@pytest.mark.parametrize("edit", [None, "garbage", {}, {"kv_id": "truncated"}, ["list"], 0])
def test_a_malformed_edit_keeps_the_handle_and_the_thread_goes_on(broker: KVBroker, edit: Any) -> None:
    graph = chain_builder(broker).compile(checkpointer=InMemorySaver(), interrupt_before=["plan"])
    docs = graph.invoke({"question": "q"}, thread())["docs"]
    graph.update_state(thread(), {"docs": edit})
    assert graph.get_state(thread()).values["docs"] == docs
    assert rejected_writes()[-1].key == "docs"
    assert "answer" in graph.invoke(None, thread())


@pytest.mark.parametrize(
    "form",
    [
        lambda value: Overwrite(value),
        lambda value: {"__overwrite__": value},
        lambda value: {"value": value, "type": "__overwrite__"},
    ],
)
def test_overwrite_settles_a_conflict_in_a_graph(broker: KVBroker, form: Any) -> None:
    chosen = broker.prefill("chosen").handle
    builder = StateGraph(State)
    builder.add_node("a", prefill_node(broker, "text a", writes="docs"))
    builder.add_node("b", prefill_node(broker, "text b", writes="docs"))
    builder.add_node("settle", lambda state: {"docs": form(chosen.to_dict())})
    for name in ("a", "b", "settle"):
        builder.add_edge(START, name)
    assert builder.compile().invoke({"question": "q"})["docs"] == chosen


def test_an_overwrite_with_none_forgets_a_handle_across_a_checkpoint(broker: KVBroker) -> None:
    graph = chain_builder(broker).compile(checkpointer=InMemorySaver(), interrupt_before=["plan"])
    graph.invoke({"question": "q"}, thread())
    graph.update_state(thread(), {"docs": Overwrite(None)})
    assert "docs" not in graph.get_state(thread()).values


# --- interrupts: a body that runs twice stores once and says the same ---


def reviewing_graph(broker: KVBroker, checkpointer: Any, sampling: Sampling = SHORT) -> tuple[Any, list[Any]]:
    """A node that generates and then asks a person; what every run of its body made is kept."""
    draft = generate_node(broker, "Draft: {question}", reads="docs", writes="plan", text_to="answer", sampling=sampling)
    made: list[Any] = []

    def review(state: State, config: RunnableConfig) -> Any:
        update = draft.invoke(state, config)
        made.append((update, broker.stats().num_extents))
        return {**update, "decision": interrupt({"draft": update["answer"], "plan": update["plan"]})}

    builder = StateGraph(State)
    builder.add_node("retrieve", prefill_node(broker, lambda state: DOCS, writes="docs"))
    builder.add_node("review", review)
    builder.add_edge(START, "retrieve")
    builder.add_edge("retrieve", "review")
    return builder.compile(checkpointer=checkpointer), made


@DURABILITIES
@pytest.mark.parametrize("sampling", [SHORT, WARM], ids=["greedy", "sampled"])
@COLOURS
async def test_a_body_that_an_interrupt_runs_twice_stores_one_copy_and_says_the_same(
    broker: KVBroker, sampling: Sampling, durability: Any, colour: str
) -> None:
    graph, made = reviewing_graph(broker, InMemorySaver(serde=handle_serializer()), sampling)
    stopped = await run(graph, {"question": "q"}, colour, thread(), durability=durability)
    payload = stopped["__interrupt__"][0].value
    used = broker.stats().pool_used_bytes
    result = await run(graph, Command(resume="fine"), colour, thread(), durability=durability)
    assert len(made) == 2
    assert made[0] == made[1]
    assert broker.stats().pool_used_bytes == used
    assert result["decision"] == "fine"
    assert result["answer"] == payload["draft"]
    assert result["plan"] == KVHandle.coerce(payload["plan"])


def test_an_interrupt_inside_a_text_source_resumes_with_its_answer(broker: KVBroker) -> None:
    def ask(state: State) -> str:
        return DOCS + str(interrupt("which city?"))

    builder = StateGraph(State)
    builder.add_node("ask", prefill_node(broker, ask, writes="docs"))
    builder.add_edge(START, "ask")
    graph = builder.compile(checkpointer=InMemorySaver())
    assert graph.invoke({"question": "q"}, thread())["__interrupt__"][0].value == "which city?"
    assert broker.stats().num_extents == 0
    result = graph.invoke(Command(resume="Rome"), thread())
    assert result["docs"] == broker.prefill(DOCS + "Rome").handle


async def test_an_interrupt_inside_an_async_text_source_resumes_with_its_answer(broker: KVBroker) -> None:
    async def ask(state: State) -> str:
        return DOCS + str(interrupt("which city?"))

    builder = StateGraph(State)
    builder.add_node("ask", prefill_node(broker, ask, writes="docs"))
    builder.add_edge(START, "ask")
    graph = builder.compile(checkpointer=InMemorySaver())
    await graph.ainvoke({"question": "q"}, thread())
    result = await graph.ainvoke(Command(resume="Rome"), thread())
    assert result["docs"] == broker.prefill(DOCS + "Rome").handle


def test_a_handle_goes_out_in_an_interrupt_and_comes_back_in_its_answer(broker: KVBroker) -> None:
    def choose(state: State) -> Any:
        return {"docs": interrupt({"now": state["docs"]})}

    builder = StateGraph(State)
    builder.add_node("retrieve", prefill_node(broker, lambda state: DOCS, writes="docs"))
    builder.add_node("choose", choose)
    builder.add_node("reason", generate_node(broker, "Say", reads="docs", text_to="answer", sampling=SHORT))
    builder.add_edge(START, "retrieve")
    builder.add_edge("retrieve", "choose")
    builder.add_edge("choose", "reason")
    graph = builder.compile(checkpointer=InMemorySaver(serde=handle_serializer()))
    graph.invoke({"question": "q"}, thread())
    other = broker.prefill("another text").handle
    result = graph.invoke(Command(resume=other.to_dict()), thread())
    assert result["docs"] == other
    assert isinstance(result["docs"], KVHandle)


# --- savers, durability, time travel ---


@DURABILITIES
@COLOURS
async def test_every_durability_mode_stores_the_same_state(broker: KVBroker, durability: Any, colour: str) -> None:
    graph = chain_builder(broker).compile(checkpointer=InMemorySaver(serde=handle_serializer()))
    result = await run(graph, {"question": "q"}, colour, thread(), durability=durability)
    stored = graph.get_state(thread()).values
    assert {key: stored[key] for key in ("docs", "plan", "answer")} == {
        key: result[key] for key in ("docs", "plan", "answer")
    }


def test_time_travel_replays_a_step_with_the_same_tokens_and_forks_with_others(broker: KVBroker) -> None:
    graph = chain_builder(broker).compile(checkpointer=InMemorySaver())
    result = graph.invoke({"question": "q"}, thread())
    before_plan = next(s for s in graph.get_state_history(thread()) if s.next == ("plan",))
    num_extents = broker.stats().num_extents
    assert graph.invoke(None, before_plan.config) == result
    assert broker.stats().num_extents == num_extents
    forked_config = graph.update_state(before_plan.config, {"question": "another question"})
    forked = graph.invoke(None, forked_config)
    assert forked["docs"] == result["docs"]
    assert forked["plan"] != result["plan"]
    assert graph.get_state(before_plan.config).values["docs"] == result["docs"]


def test_a_second_turn_on_a_thread_extends_its_own_handle(broker: KVBroker) -> None:
    class Chat(TypedDict):
        question: str
        chat: Annotated[KVHandle, KVChannel]
        answer: str

    builder = StateGraph(Chat)
    first = generate_node(broker, "{question}", writes="chat", text_to="answer", sampling=SHORT)
    later = generate_node(broker, "{question}", reads="chat", writes="chat", text_to="answer", sampling=SHORT)
    builder.add_node("first", first)
    builder.add_node("later", later)
    builder.add_conditional_edges(START, lambda state: "later" if state.get("chat") else "first", ["first", "later"])
    graph = builder.compile(checkpointer=InMemorySaver())
    one = graph.invoke({"question": "one"}, thread())["chat"]
    two = graph.invoke({"question": "two"}, thread())["chat"]
    assert broker.token_ids(two)[: one.kv_tokens] == broker.token_ids(one)


def stored_sizes(path: Path) -> list[int]:
    """Bytes of every checkpoint (SQLite keeps all channel values inline) and of every write."""
    with closing(sqlite3.connect(path)) as connection:
        rows = connection.execute("select length(checkpoint) + length(metadata) from checkpoints").fetchall()
        rows += connection.execute("select length(value) from writes").fetchall()
    return [size for (size,) in rows]


def test_serialised_state_stays_under_five_kilobytes_whatever_the_kv_size(broker: KVBroker, tmp_path: Path) -> None:
    largest = []
    for length in (100, 3000):
        path = tmp_path / f"{length}.db"
        builder = StateGraph(State)
        builder.add_node("retrieve", prefill_node(broker, "x" * length, writes="docs"))
        for name in ("a", "b", "c"):
            node = generate_node(broker, "Go on", reads="docs", writes="drafts", branch=name, sampling=SHORT)
            builder.add_node(name, node)
            builder.add_edge("retrieve", name)
        builder.add_edge(START, "retrieve")
        with SqliteSaver.from_conn_string(str(path)) as saver:
            builder.compile(checkpointer=saver).invoke({"question": "q"}, thread())
        largest.append(max(stored_sizes(path)))
    assert max(largest) < 5000
    assert abs(largest[0] - largest[1]) < 200


# --- another process ---

PROGRAM = """
import json, sqlite3, sys
from typing import Annotated
from typing_extensions import TypedDict
from langgraph.checkpoint.sqlite import SqliteSaver
from langgraph.graph import START, StateGraph
from langgraph.types import Command, interrupt
from aaflow_langgraph import KVBroker, KVChannel, KVHandle, Sampling, generate_node, prefill_node
from aaflow_langgraph.errors import RecipeMissing
from aaflow_langgraph.graph import handle_serializer

model, database, part = sys.argv[1:]
DOCS = "Berlin is the capital of Germany. " * 8
broker = KVBroker.open(model, pool_bytes=4 << 20)

class State(TypedDict):
    docs: Annotated[KVHandle, KVChannel]
    go: str
    answer: str

builder = StateGraph(State)
builder.add_node("retrieve", prefill_node(broker, DOCS, writes="docs"))
builder.add_node("ask", lambda state: {"go": interrupt("go on?")})
builder.add_node("reason", generate_node(broker, "Say", reads="docs", text_to="answer", sampling=Sampling(max_tokens=6)))
builder.add_edge(START, "retrieve")
builder.add_edge("retrieve", "ask")
builder.add_edge("ask", "reason")
connection = sqlite3.connect(database, check_same_thread=False)
graph = builder.compile(checkpointer=SqliteSaver(connection, serde=handle_serializer()))
config = {"configurable": {"thread_id": "1"}}
report = {}
if part == "first":
    graph.invoke({}, config)
    report["docs"] = graph.get_state(config).values["docs"].kv_id
    report["answer"] = broker.generate("Say", parent=broker.prefill(DOCS).handle, sampling=Sampling(max_tokens=6)).text
else:
    report["docs"] = graph.get_state(config).values["docs"].kv_id
    try:
        graph.invoke(Command(resume="yes"), config)
    except RecipeMissing as error:
        report["error"] = str(error)
        report["recovery"] = error.recovery
    state = graph.get_state(config)
    report["written"] = sorted(state.values)
    report["next"] = list(state.next)
    report["extents"] = broker.stats().num_extents
    # The way out that the message names: run the node that wrote it again; equal text gives the equal id.
    start = next(s for s in graph.get_state_history(config) if s.next == ("retrieve",))
    graph.invoke(None, start.config)
    report["again"] = graph.get_state(config).values["docs"].kv_id
    report["answer"] = graph.invoke(Command(resume="yes"), config)["answer"]
print(json.dumps(report))
"""


def test_a_resume_in_a_new_process_finds_the_handle_unknown_and_can_make_it_again(tmp_path: Path) -> None:
    model = tiny.save(tmp_path / "model")
    reports = []
    for part in ("first", "second"):
        finished = subprocess.run(
            [sys.executable, "-c", PROGRAM, str(model), str(tmp_path / "state.db"), part],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        assert finished.returncode == 0, finished.stderr
        reports.append(json.loads(finished.stdout.splitlines()[-1]))
    first, second = reports
    assert second["docs"] == first["docs"]
    assert "no recipe" in second["error"]
    assert second["recovery"] == "fail"
    assert "answer" not in second["written"]
    assert second["next"] == ["reason"]
    assert second["extents"] == 0
    assert second["again"] == first["docs"]
    assert second["answer"] == first["answer"]


def test_an_unknown_handle_leaves_the_thread_readable_and_a_new_input_heals_it(broker: KVBroker) -> None:
    graph = chain_builder(broker).compile(checkpointer=InMemorySaver(), interrupt_before=["plan"])
    graph.invoke({"question": "q"}, thread())
    graph.update_state(thread(), {"docs": KVHandle("0" * 64, broker.namespace.digest, 9)})
    with pytest.raises(RecipeMissing):
        graph.invoke(None, thread())
    assert "plan" not in graph.get_state(thread()).values
    graph.invoke({"question": "again"}, thread())
    assert "answer" in graph.invoke(None, thread())
