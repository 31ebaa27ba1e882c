"""The node factories on a real (tiny, random) model: what they return, refuse, stream and cancel."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable, Iterator
from typing import Annotated, Any

import pytest
from langchain_core.callbacks import AsyncCallbackHandler, BaseCallbackHandler
from langchain_core.messages import AIMessageChunk
from langchain_core.runnables import RunnableConfig, RunnableLambda
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, StateGraph
from langgraph.runtime import Runtime
from langgraph.store.memory import InMemoryStore
from langgraph.types import StreamWriter
from typing_extensions import TypedDict

from aaflow_langgraph import (
    KVBranches,
    KVBroker,
    KVChannel,
    KVHandle,
    Sampling,
    compose_node,
    generate_node,
    prefill_node,
)
from aaflow_langgraph.errors import (
    Cancelled,
    ConfigError,
    ContextTooLong,
    IncompatibleHandle,
    MalformedHandle,
    RecipeMissing,
)
from aaflow_langgraph.graph.nodes import KVNode

DOCS = "Berlin is the capital of Germany. Paris is the capital of France. " * 6
SHORT = Sampling(max_tokens=8)


class State(TypedDict):
    question: str
    docs: Annotated[KVHandle, KVChannel]
    plan: Annotated[KVHandle, KVChannel]
    drafts: Annotated[dict[str, KVHandle], KVBranches]
    answer: str
    usage: dict[str, Any]


def retrieve(state: State) -> str:
    return DOCS


@pytest.fixture
def broker(open_broker: Callable[..., KVBroker]) -> KVBroker:
    return open_broker()


def chain(broker: KVBroker, sampling: Sampling = SHORT, **options: Any) -> Any:
    """retrieve -> plan -> reason, as on the first screen of the README."""
    builder = StateGraph(State)
    builder.add_node("retrieve", prefill_node(broker, retrieve, writes="docs"))
    builder.add_node(
        "plan", generate_node(broker, "Plan: {question}", reads="docs", writes="plan", sampling=sampling, **options)
    )
    builder.add_node(
        "reason", generate_node(broker, "Now answer: {question}", reads="plan", text_to="answer", sampling=sampling)
    )
    builder.add_edge(START, "retrieve")
    builder.add_edge("retrieve", "plan")
    builder.add_edge("plan", "reason")
    builder.add_edge("reason", END)
    return builder.compile()


# --- what a node returns ---


def test_the_chain_passes_handles_and_answers_as_the_broker_does_alone(broker: KVBroker) -> None:
    result = chain(broker).invoke({"question": "Which city?"})
    docs = broker.prefill(DOCS).handle
    plan = broker.generate("Plan: Which city?", parent=docs, sampling=SHORT)
    answer = broker.generate("Now answer: Which city?", parent=plan.handle, sampling=SHORT)
    assert result["docs"] == docs
    assert result["plan"] == plan.handle
    assert result["answer"] == answer.text
    assert set(result) == {"question", "docs", "plan", "answer", "drafts"}


def test_a_generated_turn_is_part_of_the_handle_that_is_written(broker: KVBroker) -> None:
    result = chain(broker).invoke({"question": "Which city?"})
    written = broker.token_ids(result["plan"])
    read = broker.token_ids(result["docs"])
    assert written[: len(read)] == read
    text = broker.engine.frame.decode(written)
    assert text.startswith(DOCS[:20]) or DOCS[:20] in text
    assert "Plan: Which city?" in text


@pytest.mark.parametrize(
    ("options", "keys"),
    [
        ({"writes": "plan"}, {"plan"}),
        ({"text_to": "answer"}, {"answer"}),
        ({"writes": "plan", "text_to": "answer", "usage_to": "usage"}, {"plan", "answer", "usage"}),
        ({"writes": "drafts", "branch": "first"}, {"drafts"}),
    ],
)
def test_a_node_returns_only_what_it_was_told_to_name(broker: KVBroker, options: Any, keys: set[str]) -> None:
    docs = broker.prefill(DOCS).handle
    node = generate_node(broker, "Say it: {question}", reads="docs", sampling=SHORT, **options)
    assert set(node.invoke({"question": "?", "docs": docs})) == keys


def test_reads_none_starts_fresh_and_reads_extends(broker: KVBroker) -> None:
    fresh = generate_node(broker, "Hello {question}", writes="plan", sampling=SHORT).invoke({"question": "you"})["plan"]
    assert broker.recipe(fresh).parent is None
    extended = prefill_node(broker, "More of {question}", reads="plan", writes="docs")
    longer = extended.invoke({"question": "it", "plan": fresh})["docs"]
    assert broker.token_ids(longer)[: fresh.kv_tokens] == broker.token_ids(fresh)
    assert longer.kv_tokens > fresh.kv_tokens


def test_a_node_never_changes_what_it_reads(broker: KVBroker) -> None:
    docs = broker.prefill(DOCS).handle
    before = broker.token_ids(docs)
    state = {"question": "?", "docs": docs}
    generate_node(broker, "Say: {question}", reads="docs", writes="plan", sampling=SHORT).invoke(state)
    assert state == {"question": "?", "docs": docs}
    assert broker.token_ids(docs) == before


def test_a_branch_is_written_and_read_by_name_and_may_come_from_the_state(broker: KVBroker) -> None:
    writer = prefill_node(broker, "About {topic}: " + DOCS, writes="drafts", branch="{topic}")
    drafts = writer.invoke({"topic": "cities"})["drafts"]
    assert set(drafts) == {"cities"}
    assert drafts["cities"].kv_label == "drafts.cities"
    reader = generate_node(broker, "Go on", reads="drafts.{topic}", writes="plan", sampling=SHORT)
    plan = reader.invoke({"topic": "cities", "drafts": drafts})["plan"]
    assert broker.recipe(plan).parent == drafts["cities"].kv_id


def test_a_handle_that_arrives_as_plain_dict_is_read(broker: KVBroker) -> None:
    docs = broker.prefill(DOCS).handle
    node = generate_node(broker, "Say: {question}", reads="docs", writes="plan", sampling=SHORT)
    assert node.invoke({"question": "?", "docs": docs.to_dict()}) == node.invoke({"question": "?", "docs": docs})


def test_labels_name_the_key_unless_given(broker: KVBroker) -> None:
    assert prefill_node(broker, DOCS, writes="docs").invoke({})["docs"].kv_label == "docs"
    assert prefill_node(broker, DOCS, writes="docs", label="factbook").invoke({})["docs"].kv_label == "factbook"
    long_key = prefill_node(broker, DOCS, writes="k" * 80).invoke({})["k" * 80]
    assert len(long_key.kv_label) == 64


def test_raw_and_role_reach_the_broker(broker: KVBroker) -> None:
    raw = prefill_node(broker, DOCS, writes="docs", raw=True).invoke({})["docs"]
    system = prefill_node(broker, DOCS, writes="docs", role="system").invoke({})["docs"]
    assert [turn.role for turn in broker.recipe(raw).turns] == [""]
    assert [turn.role for turn in broker.recipe(system).turns] == ["system"]
    answer = generate_node(broker, "go on", reads="docs", raw=True, text_to="answer", sampling=SHORT)
    assert answer.invoke({"docs": raw})["answer"] == broker.generate("go on", parent=raw, raw=True, sampling=SHORT).text


def test_deterministic_reaches_the_broker_and_repeats(broker: KVBroker) -> None:
    docs = prefill_node(broker, DOCS, writes="docs", deterministic=True).invoke({})["docs"]
    node = generate_node(broker, "Say", reads="docs", text_to="answer", sampling=SHORT, deterministic=True)
    assert node.invoke({"docs": docs}) == node.invoke({"docs": docs})


def test_usage_is_plain_json_and_adds_up(broker: KVBroker) -> None:
    docs = broker.prefill(DOCS).handle
    node = generate_node(broker, "Say", reads="docs", text_to="answer", usage_to="usage", sampling=SHORT)
    usage = node.invoke({"docs": docs})["usage"]
    assert usage["num_reused"] == docs.kv_tokens
    assert usage["num_context"] == usage["num_reused"] + usage["num_prefilled"]
    assert usage["num_decoded"] == 8
    assert usage["reuse"] == "handle"
    assert 0 < usage["ttft_ms"] <= usage["total_ms"]
    assert all(type(value) in (int, float, str) for value in usage.values())
    fresh = prefill_node(broker, "another text", writes="docs", usage_to="usage").invoke({})["usage"]
    assert (fresh["num_reused"], fresh["num_decoded"], fresh["reuse"]) == (0, 0, "none")


# --- where a prefill node gets its text ---


class AsyncCallable:
    async def __call__(self, state: State) -> str:
        return DOCS


async def aretrieve(state: State) -> str:
    await asyncio.sleep(0)
    return DOCS


def method_source() -> Any:
    class Retriever:
        def retrieve(self, state: State) -> str:
            return DOCS

    return Retriever().retrieve


SYNC_SOURCES = [retrieve, lambda state: DOCS, lambda state: DOCS.encode(), method_source(), RunnableLambda(retrieve)]


@pytest.mark.parametrize("source", [*SYNC_SOURCES, "{text}"])
async def test_every_kind_of_source_gives_the_same_handle_in_both_colours(broker: KVBroker, source: Any) -> None:
    node = prefill_node(broker, source, writes="docs")
    expected = broker.prefill(DOCS).handle
    assert node.invoke({"text": DOCS})["docs"] == expected
    assert (await node.ainvoke({"text": DOCS}))["docs"] == expected


@pytest.mark.parametrize("source", [aretrieve, AsyncCallable(), RunnableLambda(aretrieve)])
async def test_an_async_source_is_awaited_on_the_loop(broker: KVBroker, source: Any) -> None:
    assert (await prefill_node(broker, source, writes="docs").ainvoke({}))["docs"] == broker.prefill(DOCS).handle


@pytest.mark.parametrize("source", [aretrieve, AsyncCallable()])
def test_an_async_source_in_a_sync_run_says_what_to_do(broker: KVBroker, source: Any) -> None:
    with pytest.raises(ConfigError, match="ainvoke"):
        prefill_node(broker, source, writes="docs").invoke({})


@pytest.mark.parametrize("colour", ["sync", "async"])
async def test_a_source_gets_what_langgraph_gives_a_node_function(broker: KVBroker, colour: str) -> None:
    seen: dict[str, Any] = {}

    def source(
        state: State, config: RunnableConfig, *, runtime: Runtime, store: InMemoryStore, writer: StreamWriter
    ) -> str:
        seen.update(node=config["metadata"]["langgraph_node"], context=runtime.context, store=store)
        writer({"from": "source"})
        return DOCS

    builder = StateGraph(State, context_schema=dict)
    builder.add_node("retrieve", prefill_node(broker, source, writes="docs"))
    builder.add_edge(START, "retrieve")
    store = InMemoryStore()
    graph = builder.compile(store=store)
    if colour == "sync":
        events = list(graph.stream({"question": "q"}, stream_mode="custom", context={"user": "u"}))
    else:
        events = [e async for e in graph.astream({"question": "q"}, stream_mode="custom", context={"user": "u"})]
    assert seen == {"node": "retrieve", "context": {"user": "u"}, "store": store}
    assert events[0] == {"from": "source"}


# --- options that cannot be right ---


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda b: generate_node(b, "Say"), "writes nothing"),
        (lambda b: prefill_node(b, DOCS, writes=None), "writes nothing"),
        (lambda b: generate_node(b, "{docs}", reads="docs", writes="plan"), "the handle it reads"),
        (lambda b: generate_node(b, "{a.b}", writes="plan"), "not a plain state key"),
        (lambda b: generate_node(b, "", writes="plan"), "empty"),
        (lambda b: generate_node(b, "Say", writes="x", text_to="x"), "different state keys"),
        (lambda b: generate_node(b, "Say", text_to="x", usage_to="x"), "different state keys"),
        (lambda b: generate_node(b, "Say", writes=""), "writes"),
        (lambda b: generate_node(b, "Say", writes="drafts.first"), "writes='drafts', branch='first'"),
        (lambda b: generate_node(b, "Say", text_to="x", branch="first"), "needs writes="),
        (lambda b: generate_node(b, "Say", writes="x", branch="{a[0]}"), "not a plain state key"),
        (lambda b: generate_node(b, "Say", writes="x", label="l" * 65), "at most 64"),
        (lambda b: generate_node(b, "Say", writes="x", role=""), "role"),
        (lambda b: generate_node(b, "Say", writes="x", sampling={"max_tokens": 3}), "must be a Sampling"),
        (lambda b: prefill_node(b, 7, writes="docs"), "function, a runnable or a prompt"),
        (lambda b: prefill_node(b, "{}", writes="docs"), "not a plain state key"),
    ],
)
def test_an_option_that_cannot_be_right_is_refused_when_the_node_is_made(
    broker: KVBroker, make: Any, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        make(broker)


# --- input that cannot be right: a typed error, and nothing is written ---


def returning(value: Any) -> Callable[[State], Any]:
    def source(state: State) -> Any:
        return value

    return source


def coroutine_function(state: State) -> Any:
    """Returns a coroutine without being a coroutine function."""
    coroutine = aretrieve(state)
    coroutine.close()
    return coroutine


BAD_TEXTS = [
    (b"ok \xff\xfe", "offset 3"),
    ("lone \ud800", "character 5"),
    ("", "empty"),
    (" \n", "empty"),
    (None, "NoneType"),
    (7, "int"),
    (["list"], "list"),
    ("<|im_start|><|im_end|>", "special tokens only"),
]


@pytest.mark.parametrize(("text", "message"), BAD_TEXTS)
@pytest.mark.parametrize("colour", ["sync", "async"])
async def test_bad_text_is_a_config_error_and_nothing_is_written(
    broker: KVBroker, text: Any, message: str, colour: str
) -> None:
    builder = StateGraph(State)
    builder.add_node("retrieve", prefill_node(broker, returning(text), writes="docs"))
    builder.add_edge(START, "retrieve")
    graph = compiled_with_memory(builder)
    with pytest.raises(ConfigError, match=message):
        await run(graph, {"question": "q"}, colour)
    assert "docs" not in graph.get_state(THREAD).values
    assert broker.stats().num_extents == 0


def test_a_source_that_returns_a_coroutine_is_refused(broker: KVBroker) -> None:
    with pytest.raises(ConfigError, match="coroutine"):
        prefill_node(broker, coroutine_function, writes="docs").invoke({})


THREAD: RunnableConfig = {"configurable": {"thread_id": "1"}}


def compiled_with_memory(builder: StateGraph[Any, Any, Any, Any]) -> Any:
    return builder.compile(checkpointer=InMemorySaver())


async def run(graph: Any, state: Any, colour: str, config: RunnableConfig = THREAD) -> Any:
    return graph.invoke(state, config) if colour == "sync" else await graph.ainvoke(state, config)


def reading_graph(broker: KVBroker, prompt: str = "Say: {question}", sampling: Sampling = SHORT) -> Any:
    builder = StateGraph(State)
    node = generate_node(broker, prompt, reads="docs", writes="plan", text_to="answer", sampling=sampling)
    builder.add_node("read", node)
    builder.add_edge(START, "read")
    return compiled_with_memory(builder)


@pytest.mark.parametrize("colour", ["sync", "async"])
async def test_a_missing_placeholder_lists_the_keys_present_and_nothing_is_written(
    broker: KVBroker, colour: str
) -> None:
    graph = reading_graph(broker, "Say: {question} {answer}")
    docs = broker.prefill(DOCS).handle
    with pytest.raises(ConfigError, match="needs the state keys answer; the state has docs, drafts, question"):
        await run(graph, {"question": "q", "docs": docs}, colour)
    assert not {"plan", "answer"} & set(graph.get_state(THREAD).values)


@pytest.mark.parametrize("colour", ["sync", "async"])
async def test_nothing_under_reads_says_which_node_should_have_written_it(broker: KVBroker, colour: str) -> None:
    graph = reading_graph(broker)
    with pytest.raises(ConfigError, match=r"a node with writes='docs' has to run before"):
        await run(graph, {"question": "q"}, colour)
    assert not {"plan", "answer"} & set(graph.get_state(THREAD).values)


@pytest.mark.parametrize("colour", ["sync", "async"])
async def test_an_unknown_handle_is_accepted_by_the_channel_and_refused_by_the_node(
    broker: KVBroker, colour: str
) -> None:
    graph = reading_graph(broker)
    forged = KVHandle("0" * 64, broker.namespace.digest, 10)
    with pytest.raises(RecipeMissing):
        await run(graph, {"question": "q", "docs": forged}, colour)
    values = graph.get_state(THREAD).values
    assert values["docs"] == forged
    assert not {"plan", "answer"} & set(values)


def test_a_handle_of_another_model_or_dtype_is_refused(broker: KVBroker, open_broker: Callable[..., KVBroker]) -> None:
    foreign = open_broker("qwen3").prefill(DOCS).handle
    graph = reading_graph(broker)
    with pytest.raises(IncompatibleHandle):
        graph.invoke({"question": "q", "docs": foreign}, THREAD)
    assert not {"plan", "answer"} & set(graph.get_state(THREAD).values)


def test_a_malformed_value_never_reaches_the_node_through_a_channel(broker: KVBroker) -> None:
    graph = reading_graph(broker)
    with pytest.raises(ConfigError, match="writes='docs' has to run before"):
        graph.invoke({"question": "q", "docs": {"kv_id": "truncated"}}, THREAD)
    assert "docs" not in graph.get_state(THREAD).values
    node = generate_node(broker, "Say", reads="docs", text_to="answer")
    with pytest.raises(MalformedHandle, match="'docs'"):
        node.invoke({"docs": {"kv_id": "truncated"}})


def test_a_context_longer_than_the_window_is_refused(broker: KVBroker) -> None:
    docs = broker.prefill("x" * 4000).handle
    graph = reading_graph(broker, sampling=Sampling(max_tokens=200))
    with pytest.raises(ContextTooLong):
        graph.invoke({"question": "q", "docs": docs}, THREAD)
    assert not {"plan", "answer"} & set(graph.get_state(THREAD).values)


def test_a_tokenizer_without_chat_template_needs_raw(open_broker: Callable[..., KVBroker]) -> None:
    broker = open_broker(template=None)
    with pytest.raises(ConfigError, match="raw=True"):
        generate_node(broker, "Say", text_to="answer", sampling=SHORT).invoke({})
    assert generate_node(broker, "Say", text_to="answer", raw=True, sampling=SHORT).invoke({})["answer"] is not None


@pytest.mark.parametrize("branch", ["", "  "])
def test_a_branch_that_renders_to_nothing_is_refused(broker: KVBroker, branch: str) -> None:
    node = prefill_node(broker, DOCS, writes="drafts", branch="{topic}")
    with pytest.raises(ConfigError, match="branch"):
        node.invoke({"topic": branch})


def test_what_the_users_function_raises_passes_through(broker: KVBroker) -> None:
    class OwnError(Exception):
        pass

    def source(state: State) -> str:
        raise OwnError

    with pytest.raises(OwnError):
        prefill_node(broker, source, writes="docs").invoke({})


# --- both colours ---


async def test_sync_and_async_runs_are_equal(broker: KVBroker) -> None:
    graph = chain(broker)
    assert graph.invoke({"question": "q"}) == await graph.ainvoke({"question": "q"})


def test_one_graph_runs_in_two_event_loops_in_turn(broker: KVBroker) -> None:
    graph = chain(broker)
    first = asyncio.run(graph.ainvoke({"question": "q"}))
    assert asyncio.run(graph.ainvoke({"question": "q"})) == first


def test_every_async_method_has_a_sync_twin_with_the_same_parameters() -> None:
    assert inspect.signature(KVNode.invoke).parameters.keys() == inspect.signature(KVNode.ainvoke).parameters.keys()


class Gate:
    """Holds a generation at its first token until the test says go."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self.go = threading.Event()
        self.num_tokens = 0

    async def reached_by(self, running: asyncio.Task[Any]) -> None:
        while not self.reached.is_set():
            assert not running.done(), running
            await asyncio.sleep(0.001)


def gated(broker: KVBroker, monkeypatch: pytest.MonkeyPatch) -> Gate:
    """Make the broker's generation wait in its worker thread at the first token."""
    gate = Gate()
    original = broker.generate

    def generate(*args: Any, on_token: Callable[[Any], None], **kwargs: Any) -> Any:
        def held(delta: Any) -> None:
            on_token(delta)
            gate.num_tokens += 1
            gate.reached.set()
            assert gate.go.wait(30)

        return original(*args, on_token=held, **kwargs)

    monkeypatch.setattr(broker, "generate", generate)
    return gate


async def test_the_event_loop_turns_while_a_node_generates(broker: KVBroker, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = gated(broker, monkeypatch)
    running = asyncio.create_task(chain(broker).ainvoke({"question": "q"}))
    await gate.reached_by(running)
    # The generation stands still in its thread, and this coroutine runs: the loop is free.
    assert not running.done()
    gate.go.set()
    assert (await running)["answer"] is not None


async def test_cancelling_the_task_stops_the_generation_and_writes_nothing(
    broker: KVBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    docs = broker.prefill(DOCS).handle
    num_extents = broker.stats().num_extents
    graph = reading_graph(broker, sampling=Sampling(max_tokens=500))
    gate = gated(broker, monkeypatch)
    running = asyncio.create_task(graph.ainvoke({"question": "q", "docs": docs}, THREAD))
    await gate.reached_by(running)
    running.cancel()
    asyncio.get_running_loop().call_soon(gate.go.set)
    with pytest.raises(asyncio.CancelledError):
        await running
    assert gate.num_tokens < 10
    assert broker.stats().num_extents == num_extents
    assert broker.stats().num_leases == 0
    assert not {"plan", "answer"} & set(graph.get_state(THREAD).values)


async def test_when_a_cancelled_node_is_over_its_thread_is_over(
    broker: KVBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = gated(broker, monkeypatch)
    errors = Recorder()
    node = generate_node(broker, "Say", text_to="answer", sampling=Sampling(max_tokens=500))
    running = asyncio.create_task(node.ainvoke({}, {"callbacks": [errors]}))
    await gate.reached_by(running)
    running.cancel()
    await asyncio.sleep(0)
    assert not running.done()
    gate.go.set()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert [name for name, _ in errors.events][-1] == "error"
    assert isinstance(errors.events[-1][1], Cancelled)


# --- streaming and callbacks ---


class Recorder(BaseCallbackHandler):
    raise_error = True

    def __init__(self) -> None:
        self.events: list[tuple[str, Any]] = []

    def on_chat_model_start(self, serialized: Any, messages: Any, **kwargs: Any) -> None:
        self.events.append(("start", (messages[0][0], kwargs["metadata"])))

    def on_llm_new_token(self, token: str, **kwargs: Any) -> None:
        self.events.append(("token", kwargs["chunk"].message))

    def on_llm_end(self, response: Any, **kwargs: Any) -> None:
        self.events.append(("end", response))

    def on_llm_error(self, error: BaseException, **kwargs: Any) -> None:
        self.events.append(("error", error))


class AsyncRecorder(AsyncCallbackHandler):
    raise_error = True

    def __init__(self) -> None:
        self.events: list[str] = []
        self.loops: set[asyncio.AbstractEventLoop] = set()

    async def on_chat_model_start(self, serialized: Any, messages: Any, **kwargs: Any) -> None:
        self._note("start")

    async def on_llm_new_token(self, token: str, **kwargs: Any) -> None:
        await asyncio.sleep(0)
        self._note("token")

    async def on_llm_end(self, response: Any, **kwargs: Any) -> None:
        self._note("end")

    def _note(self, event: str) -> None:
        self.events.append(event)
        self.loops.add(asyncio.get_running_loop())


def chunks_by_node(stream: Iterator[tuple[AIMessageChunk, dict[str, Any]]]) -> dict[str, list[AIMessageChunk]]:
    grouped: dict[str, list[AIMessageChunk]] = {}
    for chunk, metadata in stream:
        grouped.setdefault(metadata["langgraph_node"], []).append(chunk)
    return grouped


@pytest.mark.parametrize("colour", ["sync", "async"])
async def test_tokens_stream_as_message_chunks_that_merge_to_the_answer(broker: KVBroker, colour: str) -> None:
    graph = chain(broker, Sampling(max_tokens=8, logprobs=True))
    if colour == "sync":
        streamed = list(graph.stream({"question": "q"}, stream_mode="messages"))
    else:
        streamed = [part async for part in graph.astream({"question": "q"}, stream_mode="messages")]
    grouped = chunks_by_node(iter(streamed))
    assert list(grouped) == ["plan", "reason"]
    answer = graph.invoke({"question": "q"})["answer"]
    merged = grouped["reason"][0]
    for chunk in grouped["reason"][1:]:
        merged = merged + chunk
    assert merged.content == answer
    assert len({chunk.id for chunk in grouped["reason"]}) == 1
    assert [chunk.chunk_position for chunk in grouped["reason"]][-1] == "last"
    kv = merged.response_metadata["kv"]
    assert merged.response_metadata["finish_reason"] in ("stop", "length")
    assert merged.response_metadata["model_name"] == broker.namespace.model
    assert len(merged.response_metadata["logprobs"]) == kv["num_decoded"]
    assert kv["reuse"] == "handle"
    assert kv["ttft_ms"] > 0
    usage = merged.usage_metadata
    assert usage is not None
    assert usage["input_tokens"] == kv["num_context"]
    assert usage["output_tokens"] == kv["num_decoded"]
    assert usage["input_token_details"] == {"cache_read": kv["num_reused"], "cache_creation": kv["num_prefilled"]}
    assert [chunk.usage_metadata for chunk in grouped["reason"]].count(None) == len(grouped["reason"]) - 1


@pytest.mark.parametrize("colour", ["sync", "async"])
async def test_the_custom_stream_carries_every_token_and_the_usage(broker: KVBroker, colour: str) -> None:
    graph = chain(broker)
    if colour == "sync":
        events = list(graph.stream({"question": "q"}, stream_mode="custom"))
    else:
        events = [event async for event in graph.astream({"question": "q"}, stream_mode="custom")]
    usages = {event["node"]: event for event in events if event["type"] == "aaflow.usage"}
    assert list(usages) == ["retrieve", "plan", "reason"]
    result = graph.invoke({"question": "q"})
    assert usages["retrieve"]["kv_id"] == result["docs"].kv_id
    assert usages["plan"]["kv_id"] == result["plan"].kv_id
    tokens = [event for event in events if event["type"] == "aaflow.token" and event["node"] == "reason"]
    assert "".join(token["text"] for token in tokens) == result["answer"]
    assert len([token for token in tokens if token["token_id"] is not None]) == usages["reason"]["num_decoded"]


async def test_nodes_of_a_subgraph_stream_with_its_namespace(broker: KVBroker) -> None:
    builder = StateGraph(State)
    builder.add_node("inner", chain(broker))
    builder.add_edge(START, "inner")
    graph = builder.compile()
    parts = [
        part async for part in graph.astream({"question": "q"}, stream_mode=["messages", "custom"], subgraphs=True)
    ]
    assert {namespace[0].split(":")[0] for namespace, _, _ in parts} == {"inner"}
    assert {mode for _, mode, _ in parts} == {"messages", "custom"}


@pytest.mark.parametrize("colour", ["sync", "async"])
async def test_callbacks_of_the_run_are_honoured(broker: KVBroker, colour: str) -> None:
    recorder = Recorder()
    result = await run(chain(broker), {"question": "q"}, colour, {"callbacks": [recorder]})
    names = [name for name, _ in recorder.events]
    assert names.count("start") == names.count("end") == 2
    assert names[0] == "start"
    assert names[-1] == "end"
    message, metadata = recorder.events[0][1]
    assert message.content == "Plan: q"
    assert metadata["ls_model_name"] == broker.namespace.model
    assert metadata["langgraph_node"] == "plan"
    response = recorder.events[-1][1]
    assert response.generations[0][0].text == result["answer"]
    assert response.llm_output["kv"]["num_decoded"] == response.llm_output["token_usage"]["output_tokens"]


async def test_async_handlers_run_on_the_graphs_own_loop_in_order(broker: KVBroker) -> None:
    recorder = AsyncRecorder()
    await chain(broker).ainvoke({"question": "q"}, {"callbacks": [recorder]})
    assert recorder.loops == {asyncio.get_running_loop()}
    assert recorder.events[0] == "start"
    assert recorder.events[-1] == "end"
    assert recorder.events.count("end") == 2


@pytest.mark.parametrize("colour", ["sync", "async"])
async def test_a_failing_generation_ends_its_run_with_the_error(broker: KVBroker, colour: str) -> None:
    recorder = Recorder()
    docs = KVHandle("0" * 64, broker.namespace.digest, 10)
    with pytest.raises(RecipeMissing):
        await run(reading_graph(broker), {"question": "q", "docs": docs}, colour, {**THREAD, "callbacks": [recorder]})
    assert [name for name, _ in recorder.events] == ["start", "error"]
    assert isinstance(recorder.events[-1][1], RecipeMissing)


class Broken(BaseCallbackHandler):
    raise_error = True

    def on_llm_new_token(self, token: str, **kwargs: Any) -> None:
        raise KeyError("broken handler")


@pytest.mark.parametrize("colour", ["sync", "async"])
async def test_a_handler_that_raises_stops_the_generation_and_nothing_stays_leased(
    broker: KVBroker, colour: str
) -> None:
    docs = broker.prefill(DOCS).handle
    num_extents = broker.stats().num_extents
    with pytest.raises(KeyError, match="broken handler"):
        await run(reading_graph(broker), {"question": "q", "docs": docs}, colour, {**THREAD, "callbacks": [Broken()]})
    assert broker.stats().num_leases == 0
    assert broker.stats().num_extents == num_extents


async def test_astream_events_sees_the_model_and_its_tokens(broker: KVBroker) -> None:
    events = [event async for event in chain(broker).astream_events({"question": "q"}, version="v2")]
    kinds = [event["event"] for event in events if event["name"] == "KVBroker"]
    assert kinds.count("on_chat_model_start") == kinds.count("on_chat_model_end") == 2
    assert kinds.count("on_chat_model_stream") > 2


def test_a_node_works_outside_a_graph_without_any_listener(broker: KVBroker) -> None:
    node = generate_node(broker, "Say {question}", text_to="answer", sampling=SHORT)
    assert node.invoke({"question": "it"})["answer"] == broker.generate("Say it", sampling=SHORT).text


# --- kv=False ---


def test_nodes_without_kv_say_the_same_and_reuse_nothing(broker: KVBroker) -> None:
    def pair(kv: bool) -> dict[str, Any]:
        docs = prefill_node(broker, DOCS, writes="docs", kv=kv, usage_to="usage").invoke({})
        ask = generate_node(broker, "Why?", reads="docs", writes="plan", text_to="answer", kv=kv, sampling=SHORT)
        join = compose_node(broker, reads=["docs"], writes="whole", kv=kv)
        return {**docs, **ask.invoke(docs), **join.invoke(docs)}

    with_kv, without = pair(True), pair(False)
    assert [with_kv[key] for key in ("docs", "plan", "answer")] == [without[key] for key in ("docs", "plan", "answer")]
    assert with_kv["whole"].kv_id == without["whole"].kv_id
    entries = broker.journal.entries()
    read, asked, asked_again = entries[0], *(one for one in entries if one.operator == "generate")
    assert asked.num_reused == read.num_context
    assert (asked_again.num_context, asked_again.num_reused) == (asked.num_context, 0)
    assert asked_again.num_reusable == asked.num_context - 1


@pytest.mark.parametrize("kv", [None, 1, "False"])
def test_kv_of_a_node_is_true_or_false(broker: KVBroker, kv: Any) -> None:
    for make in (
        lambda: prefill_node(broker, DOCS, writes="docs", kv=kv),
        lambda: generate_node(broker, "Why?", writes="plan", kv=kv),
        lambda: compose_node(broker, reads="docs", writes="plan", kv=kv),
    ):
        with pytest.raises(ConfigError, match="kv must be True or False"):
            make()
