"""``KVChatModel`` on tiny models: same answers as without KV, every token that can be reused is, and it is a chat model."""

from __future__ import annotations

import asyncio
import copy
import json
import pickle
import threading
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import pytest
from langchain_core.load import dumpd
from langchain_core.messages import (
    AIMessage,
    AIMessageChunk,
    AnyMessage,
    BaseMessage,
    HumanMessage,
    RemoveMessage,
    SystemMessage,
    ToolMessage,
    trim_messages,
)
from langchain_core.tools import tool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.graph.message import add_messages
from pydantic import BaseModel
from typing_extensions import TypedDict

from aaflow_langgraph import KVBroker, KVChatModel, KVHandle
from aaflow_langgraph.chat.answer import handle_of
from aaflow_langgraph.engine.transformers import TransformersEngine
from aaflow_langgraph.errors import (
    AAFlowError,
    Cancelled,
    ConfigError,
    ContextTooLong,
    IncompatibleHandle,
    MalformedHandle,
)
from tests import templates, tiny
from tests.scripted import ScriptedBroker, scripted  # noqa: F401

SYSTEM = SystemMessage("You are terse. " + "Say little. " * 30)
QUESTIONS = ["Name a city.", "Another?", "And a third?", "Which of them is the largest?"]


@pytest.fixture(scope="module")
def broker() -> Iterator[ScriptedBroker]:
    """One broker with a tool template for the whole module."""
    engine = TransformersEngine(tiny.model(), tiny.tokenizer(templates.HERMES), name="tiny-tools")
    opened = ScriptedBroker.open(engine, pool_bytes=32 << 20)
    assert isinstance(opened, ScriptedBroker)
    yield opened
    assert opened.check() == []
    assert opened.stats().num_leases == 0
    opened.close()


@pytest.fixture(autouse=True)
def _unscripted(broker: ScriptedBroker) -> Iterator[None]:
    yield
    broker.script = lambda prompt: None


def talk(model: Any, questions: list[str], system: SystemMessage = SYSTEM) -> list[BaseMessage]:
    messages: list[BaseMessage] = [system]
    for question in questions:
        messages.append(HumanMessage(question))
        messages.append(model.invoke(messages))
    return messages


def answers(messages: list[BaseMessage]) -> list[AIMessage]:
    return [message for message in messages if isinstance(message, AIMessage)]


def reuse_of(message: AIMessage) -> tuple[int, int, int]:
    """Tokens of the prompt, of those reused, and of the answer."""
    assert message.usage_metadata is not None
    details = message.usage_metadata["input_token_details"]
    total = message.usage_metadata["input_tokens"]
    assert details["cache_read"] + details["cache_creation"] == total
    return total, details["cache_read"], message.usage_metadata["output_tokens"]


# ------------------------------------------------------------------ reuse


def test_a_turn_reuses_the_whole_prompt_and_answer_before_it(broker: ScriptedBroker) -> None:
    said = answers(talk(KVChatModel(broker, max_tokens=12), QUESTIONS))
    for before, now in pairwise(said):
        num_prompt, _, num_answer = reuse_of(before)
        # An answer that max_tokens ended has no KV of its last token yet.
        assert reuse_of(now)[1] == num_prompt + num_answer - (before.response_metadata["finish_reason"] == "length")


def test_a_turn_that_ended_by_itself_is_reused_to_its_last_token(broker: ScriptedBroker, scripted: None) -> None:
    broker.script = lambda prompt: "Berlin, of course."
    said = answers(talk(KVChatModel(broker), QUESTIONS[:2], SystemMessage("A talk of its own.")))
    assert [one.text for one in said] == ["Berlin, of course."] * 2
    assert said[0].response_metadata["finish_reason"] == "stop"
    num_prompt, _, num_answer = reuse_of(said[0])
    assert reuse_of(said[1])[1] == num_prompt + num_answer


@pytest.mark.parametrize("deterministic", [True, False])
def test_the_same_tokens_without_kv(broker: ScriptedBroker, deterministic: bool) -> None:
    with_kv = talk(KVChatModel(broker, max_tokens=8, deterministic=deterministic), QUESTIONS)
    without = talk(KVChatModel(broker, max_tokens=8, deterministic=deterministic, kv=False), QUESTIONS)
    assert [one.content for one in without] == [one.content for one in with_kv]
    assert [reuse_of(one)[1] for one in answers(without)] == [0] * len(QUESTIONS)
    assert [reuse_of(one)[0] for one in answers(without)] == [reuse_of(one)[0] for one in answers(with_kv)]
    assert [handle_of(one) for one in answers(without)] == [handle_of(one) for one in answers(with_kv)]


def test_sampling_repeats_with_and_without_kv(broker: ScriptedBroker) -> None:
    texts = [
        [one.content for one in answers(talk(KVChatModel(broker, max_tokens=8, temperature=1.5, kv=kv), QUESTIONS[:2]))]
        for kv in (True, False, None)
    ]
    assert texts[0] == texts[1] == texts[2]
    seeded = KVChatModel(broker, max_tokens=8, temperature=1.5, seed=7).invoke([SYSTEM, HumanMessage(QUESTIONS[0])])
    assert seeded.content != texts[0][0]


def test_parallel_branches_fork_and_never_see_each_other(broker: ScriptedBroker) -> None:
    model = KVChatModel(broker, max_tokens=8)
    shared = talk(model, QUESTIONS[:2])
    branches = [[*shared, HumanMessage(f"Secret {canary}: repeat it.")] for canary in ("ONE", "TWO", "SIX", "TEN")]
    together = model.batch(branches)
    num_shared = sum(reuse_of(answers(shared)[-1])[::2]) - 1
    assert all(reuse_of(one)[1] >= num_shared for one in together)
    alone = [KVChatModel(broker, max_tokens=8, kv=False).invoke(branch) for branch in branches]
    assert [one.content for one in together] == [one.content for one in alone]
    for one, canary in zip(together, ("ONE", "TWO", "SIX", "TEN"), strict=True):
        seen = broker.engine.frame.spell(broker.tokens_of(one.response_metadata["kv"]["kv_id"]))
        assert [other for other in ("ONE", "TWO", "SIX", "TEN") if other in seen] == [canary]


def test_nodes_and_chat_model_share_kv(broker: ScriptedBroker) -> None:
    document = "A document that two kinds of node read. " * 8
    handle = broker.prefill(document).handle
    model = KVChatModel(broker, max_tokens=4)
    question = HumanMessage(f"{document}\n\nWhat is it about?")
    for call in (model.invoke([question]), model.bind(kv_id=handle.kv_id).invoke([question])):
        assert reuse_of(call)[1] >= handle.kv_tokens
    hinted = model.invoke([question], kv=handle.to_dict())
    assert hinted.content == model.invoke([question], kv=False).content


def test_a_node_goes_on_from_an_answer_with_the_tools_it_was_shown(broker: ScriptedBroker, scripted: None) -> None:
    broker.script = lambda prompt: "I could add."
    message = KVChatModel(broker).bind_tools([add]).invoke("What can you do?")
    handle = handle_of(message)
    assert handle is not None
    after = broker.generate("Go on.", parent=handle)
    text = broker.engine.frame.spell(broker.token_ids(after.handle))
    assert '"description": "Add two numbers."' in text
    assert after.usage.num_reused == sum(reuse_of(message)[::2])


def test_an_edited_answer_is_reused_up_to_the_edit(broker: ScriptedBroker, scripted: None) -> None:
    broker.script = lambda prompt: "Berlin is a city on the Spree."
    model = KVChatModel(broker, max_tokens=40)
    history = talk(model, QUESTIONS[:2])
    first = answers(history)[0]
    first.content = "Berlin is a city on the Danube."
    again = model.invoke([*history, HumanMessage("Really?")])
    assert reuse_of(again)[1] == reuse_of(first)[0] + len("Berlin is a city on the ")
    assert again.content == model.invoke([*history, HumanMessage("Really?")], kv=False).content


def test_a_trimmed_history_is_reused_up_to_the_cut(broker: ScriptedBroker) -> None:
    model = KVChatModel(broker, max_tokens=8)
    history = [*talk(model, QUESTIONS, SystemMessage("To be trimmed. " * 9)), HumanMessage("So?")]
    # trim_messages counts the system message alone as well, and with it the frame that opens an answer.
    frame = len(broker.engine.frame.encode("<|im_start|>assistant\n"))
    budget = model.get_num_tokens_from_messages([history[0], *history[3:]]) + frame
    trimmed = trim_messages(
        history, max_tokens=budget, token_counter=model, strategy="last", include_system=True, start_on="human"
    )
    assert [m.content for m in trimmed] == [m.content for m in [history[0], *history[3:]]]
    cut = model.invoke(trimmed)
    assert reuse_of(cut)[0] == budget - frame
    assert model.get_num_tokens_from_messages(history[:1]) > reuse_of(cut)[1] > len(history[0].text)
    assert cut.content == model.invoke(trimmed, kv=False).content


def test_removed_messages_and_checkpoints_in_a_graph(broker: ScriptedBroker) -> None:
    model = KVChatModel(broker, max_tokens=6)

    def chat(state: MessagesState) -> dict[str, Any]:
        return {"messages": [model.invoke([SYSTEM, *state["messages"]])]}

    graph = StateGraph(MessagesState).add_node("chat", chat).add_edge(START, "chat").compile(InMemorySaver())
    config: Any = {"configurable": {"thread_id": "removed"}}
    for question in QUESTIONS[:3]:
        state = graph.invoke({"messages": [HumanMessage(question)]}, config)
    said = answers(state["messages"])
    assert reuse_of(said[2])[1] == sum(reuse_of(said[1])[::2]) - 1
    graph.update_state(config, {"messages": [RemoveMessage(id=str(said[-1].id))]})
    state = graph.invoke({"messages": [HumanMessage("Once more?")]}, config)
    # Everything before the removed answer, and the end of a turn that stands in its place.
    assert reuse_of(answers(state["messages"])[-1])[1] >= reuse_of(said[2])[0] - len("<|im_start|>assistant\n")
    entry = broker.journal.entries()[-1]
    assert (entry.node, entry.thread) == ("chat", "removed")
    (early,) = [s for s in graph.get_state_history(config) if len(s.values["messages"]) == 3]
    replayed = graph.invoke(None, early.config)
    assert reuse_of(answers(replayed["messages"])[-1])[1] == reuse_of(said[1])[0] - 1


def test_another_process_goes_on_from_the_message_alone(
    engines: Callable[..., TransformersEngine], tmp_path: Path
) -> None:
    def opened() -> KVBroker:
        return KVBroker.open(engines(), pool_bytes=8 << 20, disk=tmp_path)

    with opened() as first:
        history = talk(KVChatModel(first, max_tokens=8), QUESTIONS[:2])
        expected = KVChatModel(first, max_tokens=8, kv=False).invoke([*history, HumanMessage("And?")])
    stored = [m.model_copy(deep=True) for m in history]
    with opened() as second:
        again = KVChatModel(second, max_tokens=8).invoke([*stored, HumanMessage("And?")])
    assert reuse_of(again)[1] == sum(reuse_of(answers(history)[-1])[::2]) - 1
    assert again.content == expected.content


def test_a_forged_id_costs_nothing_but_reuse(broker: ScriptedBroker) -> None:
    model = KVChatModel(broker, max_tokens=6)
    history = talk(model, QUESTIONS[:1])
    expected = model.invoke([*history, HumanMessage("And?")])
    other = talk(model, ["Something else entirely."], SystemMessage("Elsewhere."))
    for forged in ("0" * 64, "garbage", None, 7, answers(other)[0].response_metadata["kv"]["kv_id"]):
        altered = answers(history)[0].model_copy(deep=True)
        altered.response_metadata["kv"]["kv_id"] = forged
        again = model.invoke([*history[:-1], altered, HumanMessage("And?")])
        assert again.content == expected.content


# ------------------------------------------------------------------ streaming, async, cancelling


def merged(chunks: list[AIMessageChunk]) -> AIMessageChunk:
    whole = chunks[0]
    for chunk in chunks[1:]:
        whole = whole + chunk
    return whole


STABLE = ("model_name", "finish_reason")


@pytest.mark.parametrize(
    "words", [None, "Berlin.", 'So:\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>']
)
async def test_a_stream_adds_up_to_the_message(broker: ScriptedBroker, scripted: None, words: str | None) -> None:
    broker.script = lambda prompt: words
    model = KVChatModel(broker, max_tokens=100 if words else 12).bind_tools([add])
    messages = [SYSTEM, HumanMessage("Stream it.")]
    whole = model.invoke(messages)
    for chunks in (list(model.stream(messages)), [c async for c in model.astream(messages)]):
        assert [chunk.chunk_position for chunk in chunks][-1] == "last"
        assert len({chunk.id for chunk in chunks}) == 1
        # All metadata comes in one chunk: strings of several would be joined.
        assert sum(bool(chunk.response_metadata) for chunk in chunks) == 1
        assert sum(chunk.usage_metadata is not None for chunk in chunks) == 1
        assert all("<tool" not in str(chunk.content) for chunk in chunks)
        added = merged(chunks)
        assert (added.content, added.tool_calls) == (whole.content, whole.tool_calls)
        assert [added.response_metadata[name] for name in STABLE] == [whole.response_metadata[name] for name in STABLE]
        assert handle_of(added) == handle_of(whole)
        assert added.usage_metadata is not None
        assert added.usage_metadata["output_tokens"] == reuse_of(whole)[2]


async def test_async_calls_are_the_sync_ones(broker: ScriptedBroker) -> None:
    model = KVChatModel(broker, max_tokens=6)
    batches = [[SYSTEM, HumanMessage(question)] for question in QUESTIONS]
    assert [one.content for one in await model.abatch(batches)] == [model.invoke(one).content for one in batches]
    assert (await model.ainvoke(batches[0])).content == model.invoke(batches[0]).content


def test_a_graph_streams_messages_with_one_set_of_metadata(broker: ScriptedBroker) -> None:
    model = KVChatModel(broker, max_tokens=6)

    async def chat(state: MessagesState) -> dict[str, Any]:
        return {"messages": [await model.ainvoke(state["messages"])]}

    graph = StateGraph(MessagesState).add_node("chat", chat).add_edge(START, "chat").compile()

    async def stream() -> list[AIMessageChunk]:
        given = {"messages": [HumanMessage("Hello")]}
        return [chunk async for chunk, _ in graph.astream(given, stream_mode="messages")]  # type: ignore[misc]

    chunks = asyncio.run(stream())
    assert len(chunks) > 1
    assert len(merged(chunks).response_metadata["kv"]["kv_id"]) == 64


class Waiting:
    """A script that says when a request of it begins."""

    def __init__(self) -> None:
        self.begun = threading.Event()

    def __call__(self, prompt: str) -> str:
        self.begun.set()
        return "x" * 3000


async def test_a_cancelled_call_ends_before_its_task_does(broker: ScriptedBroker, scripted: None) -> None:
    broker.script = waiting = Waiting()
    entries = len(broker.journal.entries())
    model = KVChatModel(broker, max_tokens=3000)
    for call in (model.ainvoke("Cancel me"), _drain(model)):
        task = asyncio.ensure_future(call)
        await asyncio.to_thread(waiting.begun.wait)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert broker.stats().num_leases == 0
        assert len(broker.journal.entries()) == entries
        waiting.begun.clear()


async def _drain(model: KVChatModel) -> None:
    async for _ in model.astream("Cancel me"):
        pass


async def test_a_stream_that_is_closed_early_computes_no_more(broker: ScriptedBroker, scripted: None) -> None:
    broker.script = Waiting()
    entries = len(broker.journal.entries())
    model = KVChatModel(broker, max_tokens=3000)
    stream = model.stream("Close me")
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    arriving = model.astream("Close me")
    await anext(arriving)
    await arriving.aclose()  # type: ignore[attr-defined]
    assert broker.stats().num_leases == 0
    assert len(broker.journal.entries()) == entries


async def test_an_error_in_a_stream_reaches_its_reader(broker: ScriptedBroker) -> None:
    model = KVChatModel(broker)
    with pytest.raises(ConfigError, match="text only"):
        [chunk async for chunk in model.astream([HumanMessage([{"type": "image", "url": "x"}])])]
    with pytest.raises(ContextTooLong, match="window of 4096"):
        await model.ainvoke("x" * 5000)


def test_a_closed_broker_says_so(engines: Callable[..., TransformersEngine]) -> None:
    closed = KVBroker.open(engines(), pool_bytes=8 << 20)
    model = KVChatModel(closed)
    closed.close()
    with pytest.raises((ConfigError, Cancelled), match="closed"):
        model.invoke("Hi")


# ------------------------------------------------------------------ tools


@tool
def add(a: int, b: int = 0) -> int:
    """Add two numbers."""
    return a + b


@tool
def find(word: str) -> str:
    """Find a word."""
    return f"{word} is here"


def call_text(name: str, **args: Any) -> str:
    return f'<tool_call>\n{{"name": "{name}",  "arguments": {json.dumps(args)}}}\n</tool_call>'


def test_tools_are_shown_and_calls_are_read(broker: ScriptedBroker, scripted: None) -> None:
    seen = []

    def script(prompt: str) -> str:
        seen.append(prompt)
        return "Let me see.\n" + call_text("add", a=1, b=2) + "\n" + call_text("find", word="né")

    broker.script = script
    model = KVChatModel(broker)
    message = model.bind_tools([add, find]).invoke("What is 1 + 2?")
    assert '"description": "Add two numbers."' in seen[0]
    assert [(one["name"], one["args"]) for one in message.tool_calls] == [
        ("add", {"a": 1, "b": 2}),
        ("find", {"word": "né"}),
    ]
    assert all(len(one["id"] or "") == 9 for one in message.tool_calls)
    assert (message.content, message.response_metadata["finish_reason"]) == ("Let me see.\n", "tool_calls")
    single = model.bind_tools([add, find], parallel_tool_calls=False).invoke("What is 1 + 2?")
    assert [one["name"] for one in single.tool_calls] == ["add"]
    silent = model.bind_tools([add], tool_choice="none").invoke("What is 1 + 2?")
    assert not silent.tool_calls
    assert "Add two numbers" not in seen[-1]


def test_a_character_that_was_cut_is_no_content_and_costs_no_reuse(broker: ScriptedBroker, scripted: None) -> None:
    broker.script = lambda prompt: "né"
    for model in (KVChatModel(broker), KVChatModel(broker).bind_tools([add])):
        asked = [HumanMessage("Cut it.")]
        cut = model.invoke(asked, max_tokens=2)
        assert cut.content == "n"
        again = model.invoke([*asked, cut, HumanMessage("Again.")])
        assert reuse_of(again)[1] == sum(reuse_of(cut)[::2]) - 1


def test_a_tool_loop_reuses_every_token_and_equals_the_one_without_kv(broker: ScriptedBroker, scripted: None) -> None:
    def script(prompt: str) -> str:
        return "It is 3." if "<tool_response>" in prompt else call_text("add", a=1, b=2)

    broker.script = script
    histories = []
    for kv in (True, False):
        model = KVChatModel(broker, kv=kv).bind_tools([add])
        history: list[BaseMessage] = [HumanMessage("What is 1 + 2?")]
        history.append(model.invoke(history))
        history.append(ToolMessage("3", tool_call_id=answers(history)[0].tool_calls[0]["id"]))
        history.append(model.invoke(history))
        histories.append(history)
    called, final = answers(histories[0])
    # To the last token of the call, although the template would have written it with one space less.
    assert reuse_of(final)[1] == sum(reuse_of(called)[::2])
    assert [m.content for m in histories[0]] == [m.content for m in histories[1]]
    assert [reuse_of(one)[0] for one in answers(histories[0])] == [reuse_of(one)[0] for one in answers(histories[1])]


@pytest.mark.parametrize("streams", [True, False])
def test_a_malformed_call_is_an_invalid_one(broker: ScriptedBroker, scripted: None, streams: bool) -> None:
    broker.script = lambda prompt: '<tool_call>\n{"name": "add", "arguments": {"a": 1'
    model = KVChatModel(broker).bind_tools([add])
    message = merged(list(model.stream("Add"))) if streams else model.invoke("Add")  # type: ignore[arg-type]
    (broken,) = message.invalid_tool_calls
    assert (message.tool_calls, broken["name"]) == ([], "add")
    assert '{"name": "add"' in str(broken["args"])


@pytest.mark.parametrize("choice", ["add", "any", True, {"type": "function", "function": {"name": "add"}}])
def test_a_chosen_tool_begins_the_answer(broker: ScriptedBroker, scripted: None, choice: Any) -> None:
    broker.script = lambda prompt: ' {"a": 4}}\n</tool_call>'
    model = KVChatModel(broker).bind_tools([add], tool_choice=choice)
    asked = [HumanMessage(f"Add to four, chosen by {choice}.")]
    message = model.invoke(asked)
    assert [(one["name"], one["args"]) for one in message.tool_calls] == [("add", {"a": 4})]
    broker.script = lambda prompt: "Four."
    after = KVChatModel(broker).bind_tools([add]).invoke([*asked, message, ToolMessage("4", tool_call_id="x")])
    assert reuse_of(after)[1] == sum(reuse_of(message)[::2])


def test_the_same_words_are_the_same_call_whether_the_tool_was_chosen_or_not(
    broker: ScriptedBroker, scripted: None
) -> None:
    """Both name the same tokens, and the recipe of the first says where its answer began."""
    model = KVChatModel(broker)
    asked = [HumanMessage("Call it in two ways.")]
    broker.script = lambda prompt: ' {"a": 4}}\n</tool_call>'
    chosen = model.bind_tools([add], tool_choice="add").invoke(asked)
    broker.script = lambda prompt: '<tool_call>\n{"name": "add", "arguments": {"a": 4}}\n</tool_call>'
    free = model.bind_tools([add]).invoke(asked)
    assert handle_of(chosen) == handle_of(free)
    assert chosen.tool_calls == free.tool_calls
    assert (chosen.content, free.content) == ("", "")


def test_structured_output_is_the_arguments_of_a_call(broker: ScriptedBroker, scripted: None) -> None:
    class City(BaseModel):
        """A city."""

        name: str
        people: int = 0

    broker.script = lambda prompt: ' {"name": "Nairobi", "people": 5}}\n</tool_call>'
    model = KVChatModel(broker)
    assert model.with_structured_output(City).invoke("Which?") == City(name="Nairobi", people=5)
    raw = model.with_structured_output(City.model_json_schema(), include_raw=True).invoke("Which?")
    assert raw["parsed"] == {"name": "Nairobi", "people": 5}
    broker.script = lambda prompt: ' {"name": '
    failed = model.with_structured_output(City, include_raw=True).invoke("Which?")
    assert failed["parsed"] is None


def test_a_model_without_a_tool_template_says_so(engines: Callable[..., TransformersEngine]) -> None:
    with KVBroker.open(engines(), pool_bytes=8 << 20) as plain:
        model = KVChatModel(plain)
        for refused in (lambda: model.bind_tools([add]), lambda: model.with_structured_output(dict)):
            with pytest.raises(ConfigError, match="knows no tools"):
                refused()
        with pytest.raises(ConfigError, match="knows no tools"):
            model.invoke("Hi", tools=[add])
        history = [HumanMessage("Add"), AIMessage("", tool_calls=[{"name": "add", "args": {}, "id": "a"}])]
        assert model.invoke([*history, ToolMessage("3", tool_call_id="a")], max_tokens=2).content is not None


# ------------------------------------------------------------------ prebuilt graphs


def agent_script(prompt: str) -> str:
    """Calls a tool once per question, then answers."""
    last = prompt.rsplit("<|im_start|>user\n", 1)[1]
    return "Three." if "<tool_response>" in last else call_text("add", a=1, b=2)


def test_create_agent_runs_a_tool_loop_over_turns(broker: ScriptedBroker, scripted: None) -> None:
    from langchain.agents import create_agent

    broker.script = agent_script
    graph = create_agent(KVChatModel(broker), [add], system_prompt="Use tools.", checkpointer=InMemorySaver())
    config: Any = {"configurable": {"thread_id": "agent"}}
    for _ in range(2):
        state = graph.invoke({"messages": [HumanMessage("What is 1 + 2?")]}, config)
    kinds = ["human", "ai", "tool", "ai"] * 2
    assert [message.type for message in state["messages"]] == kinds
    assert state["messages"][2].content == "3"
    said = answers(state["messages"])
    assert [reuse_of(now)[1] for now in said[1:]] == [sum(reuse_of(before)[::2]) for before in said[:-1]]
    assert broker.journal.entries()[-1].node == "model"


@pytest.mark.filterwarnings("ignore:create_react_agent has been moved")  # the supervisor package itself calls it
def test_a_supervisor_hands_over_and_each_agent_reuses_its_own(broker: ScriptedBroker, scripted: None) -> None:
    from langchain.agents import create_agent
    from langgraph_supervisor import create_supervisor

    def script(prompt: str) -> str:
        if "You supervise" not in prompt:
            return agent_script(prompt)
        # Once the worker has answered, its last words are in the supervisor's view.
        return "Done: three." if "Three." in prompt else call_text("transfer_to_math")

    broker.script = script
    model = KVChatModel(broker)
    math = create_agent(model, [add], system_prompt="Do sums.", name="math")
    graph = create_supervisor([math], model=model, prompt="You supervise.").compile()
    state = graph.invoke({"messages": [HumanMessage("What is 1 + 2?")]})
    assert state["messages"][-1].content == "Done: three."
    named = [message.name for message in answers(state["messages"])]
    assert "math" in named
    assert "supervisor" in named
    assert reuse_of(answers(state["messages"])[-1])[1] >= reuse_of(answers(state["messages"])[0])[0] - 1


def test_a_swarm_hands_over_and_comes_back(broker: ScriptedBroker, scripted: None) -> None:
    from langchain.agents import create_agent
    from langgraph_swarm import create_handoff_tool, create_swarm

    def script(prompt: str) -> str:
        if "You are Ann" in prompt and "transfer" not in prompt.rsplit("<|im_start|>user\n", 1)[1]:
            return call_text("transfer_to_bob")
        return "Bob speaks."

    broker.script = script
    model = KVChatModel(broker)
    ann = create_agent(model, [create_handoff_tool(agent_name="bob")], system_prompt="You are Ann.", name="ann")
    bob = create_agent(model, [add], system_prompt="You are Bob.", name="bob")
    graph = create_swarm([ann, bob], default_active_agent="ann").compile(checkpointer=InMemorySaver())
    config: Any = {"configurable": {"thread_id": "swarm"}}
    for _ in range(2):
        state = graph.invoke({"messages": [HumanMessage("Who is there?")]}, config)
    assert state["active_agent"] == "bob"
    first, second = (one for one in answers(state["messages"]) if one.content == "Bob speaks.")
    assert reuse_of(second)[1] == sum(reuse_of(first)[::2])


class Branches(TypedDict):
    messages: Annotated[list[AnyMessage], add_messages]


def test_siblings_that_say_the_same_have_calls_of_their_own(broker: ScriptedBroker, scripted: None) -> None:
    broker.script = lambda prompt: call_text("add", a=1, b=2)
    model = KVChatModel(broker).bind_tools([add])

    def ask(state: Branches) -> dict[str, Any]:
        return {"messages": [model.invoke(state["messages"])]}

    builder = StateGraph(Branches).add_node("left", ask).add_node("right", ask)
    graph = builder.add_edge(START, "left").add_edge(START, "right").compile()
    runs = [answers(graph.invoke({"messages": [HumanMessage("Add.", id="h")]})["messages"]) for _ in range(2)]
    ids = [[one.tool_calls[0]["id"] for one in run] for run in runs]
    assert len(set(ids[0])) == 2
    assert sorted(map(str, ids[0])) == sorted(map(str, ids[1]))  # a run that is repeated repeats them


# ------------------------------------------------------------------ what LangChain asks about a model


def test_it_is_named_traced_and_counted(broker: ScriptedBroker) -> None:
    model = KVChatModel(broker, temperature=0.5, stop=["END"])
    traced = model._get_ls_params()
    assert (traced["ls_provider"], traced["ls_model_name"], traced["ls_stop"]) == ("aaflow", "tiny-tools", ["END"])
    assert json.loads(json.dumps(model.asdict()))["_type"] == "aaflow"
    assert model.profile is not None
    assert model.profile["max_input_tokens"] == 4096
    prompt = [SYSTEM, HumanMessage("Hi")]
    assert model.get_num_tokens("Hi") == 2
    assert model.get_num_tokens_from_messages(prompt) == reuse_of(model.invoke(prompt, max_tokens=1))[0]
    with_tools = model.bind_tools([add]).invoke(prompt, max_tokens=1)
    assert model.get_num_tokens_from_messages(prompt, tools=[add]) == reuse_of(with_tools)[0]


def test_a_broker_is_not_serialised_and_a_copy_shares_it(broker: ScriptedBroker) -> None:
    model = KVChatModel(broker, max_tokens=3)
    assert dumpd(model)["type"] == "not_implemented"
    assert "broker" not in repr(model)
    with pytest.raises(ConfigError, match="cannot be pickled"):
        pickle.dumps(model)
    for twin in (copy.copy(model), copy.deepcopy(model), model.model_copy()):
        assert twin.broker is broker
        assert twin.invoke("Hi").content == model.invoke("Hi").content


def test_stop_strings_end_the_answer_before_them(broker: ScriptedBroker, scripted: None) -> None:
    broker.script = lambda prompt: "one two three"
    model = KVChatModel(broker, stop=["three"])
    assert model.invoke("Count").content == "one two "
    assert model.invoke("Count", stop=[" two"]).content == "one"
    assert model.bind(stop=["one"]).invoke("Count").content == ""
    bound = model.bind_tools([add])
    assert merged(list(bound.stream("Count"))).content == "one two "  # type: ignore[arg-type]
    cut = model.invoke("Count")
    again = model.invoke([HumanMessage("Count"), cut, HumanMessage("Again")])
    assert reuse_of(again)[1] == reuse_of(cut)[0] + len("one two ")


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"temperature": -1}, "temperature must lie"),
        ({"temperature": "hot"}, "temperature must lie"),
        ({"max_tokens": 0}, "max_tokens must be"),
        ({"max_tokens": None}, "max_tokens must be"),
        ({"top_p": 0}, "top_p must lie"),
        ({"top_k": -1}, "top_k must be"),
        ({"seed": "x"}, "seed must be"),
        ({"stop": "word"}, "stop must be a list"),
        ({"stop": [""]}, "stop must be"),
        ({"stop": 7}, "stop must be"),
        ({"deterministic": "yes"}, "deterministic must be"),
        ({"kv": "yes"}, "kv must be"),
        ({"temprature": 1}, "unknown field 'temprature'"),
    ],
)
def test_a_wrong_field_is_refused_by_name(broker: ScriptedBroker, fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        KVChatModel(broker, **fields)


@pytest.mark.parametrize("given", [None, "Qwen/Qwen2.5-0.5B-Instruct", 7, {}])
def test_what_is_no_broker_is_refused(given: Any) -> None:
    with pytest.raises(ConfigError, match="must be a KVBroker"):
        KVChatModel(given)


FOREIGN = KVHandle(kv_id="0" * 64, kv_namespace="1" * 64, kv_tokens=3)


@pytest.mark.parametrize(
    ("options", "error", "reason"),
    [
        ({"temperature": -1}, ConfigError, "temperature"),
        ({"max_tokens": 0}, ConfigError, "max_tokens"),
        ({"stop": "word"}, ConfigError, "stop must be a list"),
        ({"model": "gpt-5"}, ConfigError, "not 'model'"),
        ({"temprature": 1}, ConfigError, "not 'temprature'"),
        ({"deterministic": 1}, ConfigError, "deterministic"),
        ({"kv": FOREIGN}, IncompatibleHandle, "belongs to namespace"),
        ({"kv": "garbage"}, MalformedHandle, "expected a KVHandle"),
        ({"kv": 7}, MalformedHandle, "expected a KVHandle"),
        ({"kv": {"kv_id": "x"}}, MalformedHandle, "missing"),
        ({"kv_id": "garbage"}, ConfigError, "kv_id is 64"),
        ({"tools": "add"}, ConfigError, "tools must be a list"),
        ({"tools": [7]}, ConfigError, "is no tool"),
        ({"tool_choice": "add"}, ConfigError, "none is bound"),
        ({"tools": [add], "tool_choice": "subtract"}, ConfigError, "tool_choice must be"),
        ({"tools": [add], "parallel_tool_calls": "no"}, ConfigError, "parallel_tool_calls"),
    ],
)
def test_a_wrong_option_of_a_call_is_a_typed_error_and_computes_nothing(
    broker: ScriptedBroker, options: dict[str, Any], error: type[AAFlowError], reason: str
) -> None:
    entries = broker.journal.entries()
    with pytest.raises(error, match=reason):
        KVChatModel(broker).invoke("Hi", **options)
    with pytest.raises(error, match=reason):
        list(KVChatModel(broker).stream("Hi", **options))
    assert broker.journal.entries() == entries


@pytest.mark.parametrize("given", [[], [RemoveMessage(id="1")], [HumanMessage("\ud800")]])
def test_messages_that_cannot_be_answered_are_typed_errors(broker: ScriptedBroker, given: Any) -> None:
    with pytest.raises(ConfigError):
        KVChatModel(broker).invoke(given)


@pytest.mark.parametrize("tools", ["add", [7], None])
def test_what_is_no_tool_is_refused_when_it_is_bound(broker: ScriptedBroker, tools: Any) -> None:
    with pytest.raises(ConfigError):
        KVChatModel(broker).bind_tools(tools)
