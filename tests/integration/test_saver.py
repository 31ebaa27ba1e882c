"""The checkpointer on tiny models: what is kept, what comes back, what is deleted, and what bad surroundings do to it."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import pytest
from langchain_core.runnables import RunnableConfig
from langgraph.channels import DeltaChannel, UntrackedValue
from langgraph.checkpoint.base import BaseCheckpointSaver, empty_checkpoint
from langgraph.checkpoint.base.id import uuid6
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.checkpoint.sqlite import SqliteSaver
from langgraph.checkpoint.sqlite.aio import AsyncSqliteSaver
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.types import Command, Send, interrupt
from typing_extensions import TypedDict

from aaflow_langgraph import (
    KVBroker,
    KVChatModel,
    KVCheckpointSaver,
    KVHandle,
    prefill_node,
)
from aaflow_langgraph.checkpoint.find import find_handles
from tests.savers import DOCS, KINDS, SHORT, State, asking, inner_saver, is_empty, put, query, thread


@pytest.fixture
def broker(open_broker: Callable[..., KVBroker]) -> KVBroker:
    return open_broker()


@pytest.fixture
def saver(broker: KVBroker) -> Iterator[KVCheckpointSaver]:
    with KVCheckpointSaver(InMemorySaver(), broker, durability="sync") as opened:
        yield opened


# ---------------------------------------------------------------- what comes back


@pytest.mark.parametrize("durability", ["recipe", "evict", "sync", "async"])
def test_a_thread_goes_on_in_a_later_process_with_the_same_tokens(
    durability: Any, open_broker: Callable[..., KVBroker], tmp_path: Path
) -> None:
    """Two brokers share nothing but the directory."""
    first = open_broker()
    with KVCheckpointSaver.local(tmp_path, first, durability=durability) as saver:
        asking(first).compile(checkpointer=saver).invoke({"question": "What?"}, thread())
    before = first.stats()
    expected = first.generate("And then?", parent=first.fork(_plan(first, tmp_path)), sampling=SHORT).token_ids
    first.close()
    assert before.num_decoded_tokens
    later = open_broker()
    with KVCheckpointSaver.local(tmp_path, later, durability=durability) as saver:
        plan = asking(later).compile(checkpointer=saver).get_state(thread()).values["plan"]
        again = later.generate("And then?", parent=plan, sampling=SHORT)
        assert again.token_ids == expected
        assert later.stats().num_recomputed_tokens == (
            0 if durability != "recipe" else again.usage.num_context - _added(later, plan, again)
        )


def test_an_application_of_messages_goes_on_in_a_later_process_from_the_tokens_it_said(
    open_broker: Callable[..., KVBroker], tmp_path: Path
) -> None:
    """No handle is in its state: the answers of a ``KVChatModel`` name their conversations."""

    def turn(broker: KVBroker, said: str) -> Any:
        model = KVChatModel(broker, max_tokens=4)
        builder: StateGraph[Any] = StateGraph(MessagesState)
        builder.add_node("answer", lambda state: {"messages": [model.invoke(state["messages"])]})
        builder.add_edge(START, "answer")
        with KVCheckpointSaver.local(tmp_path, broker) as saver:
            done = builder.compile(checkpointer=saver).invoke({"messages": [("user", said)]}, thread())
            return done["messages"][-1].usage_metadata

    first = open_broker()
    before = turn(first, "All work and no play?")
    first.close()
    later = open_broker()
    after = turn(later, "And then?")
    assert after["input_token_details"]["cache_read"] >= before["input_tokens"] + before["output_tokens"] - 1
    assert later.stats().num_recomputed_tokens == 0
    with KVCheckpointSaver.local(tmp_path, later) as saver:
        saver.delete_thread("1")
        assert is_empty(saver)


def _plan(broker: KVBroker, folder: Path) -> KVHandle:
    with KVCheckpointSaver.local(folder, broker, durability="recipe") as saver:
        found = saver.get_tuple(thread())
        assert found is not None
        return KVHandle.coerce(found.checkpoint["channel_values"]["plan"])


def _added(broker: KVBroker, parent: KVHandle, made: Any) -> int:
    """Tokens of the context that the parent's computed KV does not cover."""
    return made.usage.num_context - (parent.kv_tokens - broker.recipe(parent).num_pending)


@pytest.mark.parametrize("kind", ["sqlite", "aiosqlite", "memory"])
async def test_an_async_graph_reads_what_a_sync_one_wrote_and_the_other_way_round(
    kind: str, broker: KVBroker, tmp_path: Path
) -> None:
    if kind == "aiosqlite":
        async with (
            AsyncSqliteSaver.from_conn_string(str(tmp_path / "c.sqlite")) as inner,
            KVCheckpointSaver(inner, broker) as saver,
        ):
            graph = asking(broker).compile(checkpointer=saver)
            await graph.ainvoke({"question": "What?"}, thread())
            state = await asyncio.to_thread(graph.get_state, thread())
        assert (tmp_path / "c.sqlite.kv" / "manifest.sqlite").exists()
    else:
        connection = sqlite3.connect(tmp_path / "c.sqlite", check_same_thread=False)
        with (
            closing(connection),
            KVCheckpointSaver(SqliteSaver(connection) if kind == "sqlite" else InMemorySaver(), broker) as saver,
        ):
            graph = asking(broker).compile(checkpointer=saver)
            await asyncio.to_thread(graph.invoke, {"question": "What?"}, thread())
            state = await graph.aget_state(thread())
            await graph.ainvoke({"question": "And?"}, thread())
            assert len([found async for found in saver.alist(thread())]) == len(list(saver.list(thread())))
        assert (tmp_path / "c.sqlite.kv" / "manifest.sqlite").exists() == (kind == "sqlite")
    assert state.values["plan"].kv_tokens > state.values["docs"].kv_tokens


def test_one_saver_serves_two_event_loops_in_turn(broker: KVBroker, tmp_path: Path) -> None:
    """Case 15."""
    with KVCheckpointSaver.local(tmp_path, broker) as saver:
        graph = asking(broker).compile(checkpointer=saver)
        for question in ("What?", "And?"):
            asyncio.run(graph.ainvoke({"question": question}, thread()))  # type: ignore[arg-type]
        assert len(list(saver.list(thread()))) == 8


@pytest.mark.parametrize("repeat", [1, 16])
def test_what_a_step_stores_in_the_saver_does_not_grow_with_the_kv(
    repeat: int, open_broker: Callable[..., KVBroker], tmp_path: Path
) -> None:
    """Case 15: under 5 kB a step, whatever the KV's size."""
    broker = open_broker(pool_bytes=64 << 20)
    builder: StateGraph[Any] = StateGraph(State)
    builder.add_node("read", prefill_node(broker, lambda state: "All work and no play. " * 8 * repeat, writes="docs"))
    builder.add_edge(START, "read")
    with KVCheckpointSaver.local(tmp_path, broker, durability="sync") as saver:
        builder.compile(checkpointer=saver).invoke({"question": "?"}, thread())
        with closing(sqlite3.connect(tmp_path / "checkpoints.sqlite")) as database:
            (checkpoint,) = database.execute(
                "SELECT MAX(LENGTH(checkpoint) + LENGTH(metadata)) FROM checkpoints"
            ).fetchone()
            (write,) = database.execute("SELECT MAX(LENGTH(value)) FROM writes").fetchone()
        assert checkpoint + write < 5000
        assert saver.stats().tensor_bytes > 100_000 * repeat


def test_tensors_and_recipes_of_a_long_thread_grow_with_new_tokens_only(broker: KVBroker, tmp_path: Path) -> None:
    def chat(state: State) -> dict[str, Any]:
        made = broker.generate(state["question"], parent=state.get("plan"), sampling=SHORT)
        return {"plan": made.handle}

    builder: StateGraph[Any] = StateGraph(State)
    builder.add_node("chat", chat)
    builder.add_edge(START, "chat")
    with KVCheckpointSaver.local(tmp_path, broker, durability="sync") as saver:
        graph = builder.compile(checkpointer=saver)
        for number in range(12):
            graph.invoke({"question": f"Question {number}: and now?"}, thread())
        plan = graph.get_state(thread()).values["plan"]
        whole = broker.engine.layout.num_bytes(plan.kv_tokens)
        files = saver.stats().manifest.num_recipes
        headers = 24 * 8192 * 2  # per turn: prompt and answer, a page and token ids each
        assert files == 12
        assert whole * 0.9 <= saver.stats().tensor_bytes <= 1.05 * whole + headers
        (in_recipes,) = query(saver, "SELECT SUM(num_tokens) FROM recipes WHERE parent IS NULL")
        assert in_recipes < plan.kv_tokens / 4


# ---------------------------------------------------------------- every place in state


class Everywhere(TypedDict, total=False):
    plain: Any
    nested: Any
    kept: Annotated[list[Any], DeltaChannel(lambda state, writes: [*state, *writes])]
    gone: Annotated[Any, UntrackedValue]


def test_handles_are_kept_wherever_state_holds_them(saver: KVCheckpointSaver, broker: KVBroker) -> None:
    """Channels, dicts in lists, Send, interrupt payloads, pending writes and DeltaChannel; never an untracked value."""
    made = {name: broker.materialize([10 + number, 11, 12]) for number, name in enumerate("abcdefg")}

    def start(state: Everywhere) -> dict[str, Any]:
        return {
            "plain": made["a"],
            "nested": {"deep": [{"dict": made["b"].to_dict()}]},
            "kept": made["c"],
            "gone": made["g"],
        }

    def asks(payload: Any) -> dict[str, Any]:
        interrupt({"about": made["d"]})
        return {}

    def quick(payload: Any) -> dict[str, Any]:
        return {"plain": made["e"]}

    builder: StateGraph[Any] = StateGraph(Everywhere)
    builder.add_node("start", start)
    builder.add_node("asks", asks)
    builder.add_node("quick", quick)
    builder.add_edge(START, "start")
    builder.add_conditional_edges(
        "start", lambda state: [Send("asks", {"docs": made["f"].to_dict()}), Send("quick", {})], ["asks", "quick"]
    )
    graph = builder.compile(checkpointer=saver)
    graph.invoke({"nested": None}, thread())
    with closing(sqlite3.connect(saver._ledger.sidecar.path)) as database:
        kept = {kv_id for (kv_id,) in database.execute("SELECT kv_id FROM refs")}
        recipes = {kv_id for (kv_id,) in database.execute("SELECT kv_id FROM recipes")}
    assert kept == recipes == {made[name].kv_id for name in "abcdef"}
    saver.delete_thread("1")
    assert is_empty(saver)


def test_a_handle_in_a_send_is_read_in_a_later_process(open_broker: Callable[..., KVBroker], tmp_path: Path) -> None:
    """Case 12: resume where the payload of a ``Send`` carries the handle; live caches never travel."""

    def build(broker: KVBroker) -> StateGraph[Any]:
        def work(payload: dict[str, Any]) -> dict[str, Any]:
            if interrupt("go on?") != "yes":
                return {}
            made = broker.generate("Which?", parent=payload["docs"], sampling=SHORT)
            return {"answer": made.text, "plan": made.handle}

        builder: StateGraph[Any] = StateGraph(State)
        builder.add_node("read", prefill_node(broker, lambda state: DOCS, writes="docs"))
        builder.add_node("work", work)
        builder.add_edge(START, "read")
        builder.add_conditional_edges("read", lambda state: [Send("work", {"docs": state["docs"]})], ["work"])
        return builder

    first = open_broker()
    with KVCheckpointSaver.local(tmp_path, first) as saver:
        build(first).compile(checkpointer=saver).invoke({"question": "?"}, thread())
    expected = first.generate("Which?", parent=first.prefill(DOCS).handle, sampling=SHORT).text
    first.close()
    later = open_broker()
    with KVCheckpointSaver.local(tmp_path, later) as saver:
        done = build(later).compile(checkpointer=saver).invoke(Command(resume="yes"), thread())
    assert done["answer"] == expected
    assert later.stats().num_fetches > 0
    assert later.stats().num_recomputed_tokens == 0


def test_a_body_that_runs_twice_stores_one_copy_and_one_reference(saver: KVCheckpointSaver, broker: KVBroker) -> None:
    """Case 11: ``interrupt()`` re-runs the node from the top."""

    def read_and_ask(state: State) -> dict[str, Any]:
        docs = broker.prefill(DOCS).handle
        decision = interrupt({"about": docs})
        return {"docs": docs, "decision": decision}

    builder: StateGraph[Any] = StateGraph(State)
    builder.add_node("ask", read_and_ask)
    builder.add_edge(START, "ask")
    graph = builder.compile(checkpointer=saver)
    graph.invoke({"question": "?"}, thread())
    once = saver.stats()
    graph.invoke(Command(resume="fine"), thread())
    twice = saver.stats()
    assert (once.manifest.num_recipes, once.manifest.num_references) == (1, 1)
    assert twice.manifest.num_recipes == 1
    assert twice.tensor_bytes == once.tensor_bytes > 0
    per_slot = query(saver, "SELECT MAX(n) FROM (SELECT COUNT(*) AS n FROM refs GROUP BY checkpoint_id, slot)")
    assert per_slot == (1,)


# ---------------------------------------------------------------- deleting


@pytest.mark.parametrize("rounds", [25, pytest.param(1000, marks=pytest.mark.slow)])
def test_twenty_threads_of_puts_against_a_deletion_leave_nothing(
    rounds: int, saver: KVCheckpointSaver, broker: KVBroker
) -> None:
    handles = [broker.materialize([9, 8, 7, 20 + number]) for number in range(20)]
    inner: Any = saver.inner
    with ThreadPoolExecutor(21) as workers:
        for _ in range(rounds):
            root = put(saver, {"docs": handles[0]})
            together = threading.Barrier(21)

            def write(number: int, root: RunnableConfig = root, together: threading.Barrier = together) -> None:
                together.wait()
                child = put(saver, {"docs": handles[number]}, parent=root)
                saver.put_writes(child, [("docs", handles[-number])], f"task {number}")
                put(saver, {"docs": handles[number]}, parent=child)

            def delete(together: threading.Barrier = together) -> None:
                together.wait()
                saver.delete_thread("1")

            for done in [workers.submit(write, number) for number in range(20)] + [workers.submit(delete)]:
                done.result()
            assert is_empty(saver)
            assert not inner.writes
            assert not inner.blobs
            assert not any(inner.storage["1"].values())
    assert saver.stats().num_late_writes > 0


async def test_coroutines_race_a_deletion_and_leave_nothing(broker: KVBroker, tmp_path: Path) -> None:
    """More of them than worker threads: waiting for a lock must not take the threads that its holder needs."""
    handles = [broker.materialize([9, 8, 7, 20 + number]) for number in range(64)]
    async with (
        AsyncSqliteSaver.from_conn_string(str(tmp_path / "c.sqlite")) as inner,
        KVCheckpointSaver(inner, broker, durability="sync") as saver,
    ):
        checkpoint = empty_checkpoint()
        root = await saver.aput(thread(checkpoint_ns=""), checkpoint, {}, {})

        async def write(number: int) -> None:
            child = empty_checkpoint()
            child["channel_values"] = {"docs": handles[number]}
            stored = await saver.aput(root, child, {}, {})
            await saver.aput_writes(stored, [("docs", handles[number])], "task")

        await asyncio.gather(*map(write, range(32)), saver.adelete_thread("1"), *map(write, range(32, 64)))
        assert is_empty(saver)
        assert [found async for found in saver.alist(thread())] == []


def test_a_deleted_thread_stays_deleted_and_its_id_can_be_used_again(
    saver: KVCheckpointSaver, broker: KVBroker
) -> None:
    docs, more = broker.materialize([1 + 8, 2, 3]), broker.materialize([4, 5, 6])
    old = put(saver, {"docs": docs})
    saver.delete_thread("1")
    late = put(saver, {"docs": docs}, parent=old)
    saver.put_writes(late, [("docs", docs)], "task")
    saver.put_writes(old, [("docs", docs)], "task")
    assert saver.get_tuple(thread()) is None
    assert is_empty(saver, tombstones=1)
    new = put(saver, {"docs": more})
    assert put(saver, {"docs": docs}, parent=old) != new
    child = put(saver, {"docs": more}, parent=new)
    saver.put_writes(child, [("docs", more)], "task")
    found = [item.config for item in saver.list(thread())]
    assert found == [child, new]
    assert saver.stats().manifest.num_recipes == 1
    assert saver.stats().num_late_writes == 2


def test_a_late_subgraph_does_not_wake_a_deleted_thread(saver: KVCheckpointSaver, broker: KVBroker) -> None:
    """The first checkpoint of a subgraph has no parent of its own: the one above it counts."""
    docs = broker.materialize([9, 2, 3])
    root = put(saver, {"docs": docs})
    saver.delete_thread("1")
    above = {"": root["configurable"]["checkpoint_id"]}
    first = put(saver, {"docs": docs}, ns="child:1", parents=above)
    put(saver, {"docs": docs}, ns="child:1", parent=first, parents=above)
    saver.put_writes(first, [("docs", docs)], "task")
    assert list(saver.list(thread())) == []
    assert is_empty(saver)


def test_writes_that_overtake_their_checkpoint_in_a_reused_thread_are_not_lost(
    saver: KVCheckpointSaver, broker: KVBroker
) -> None:
    """LangGraph stores a task's writes, and a subgraph's checkpoints, while the checkpoint above is on its way."""
    docs = broker.materialize([9, 2, 3])
    put(saver, {})
    saver.delete_thread("1")
    new = put(saver, {})
    coming = str(uuid6(clock_seq=-2))
    place = thread(checkpoint_ns="", checkpoint_id=coming)
    saver.put_writes(place, [("docs", docs)], "task")
    nested = put(saver, {"docs": docs}, ns="child:1", parents={"": coming})
    deeper = put(saver, {"docs": docs}, ns="child:1", parent=nested, parents={"": coming})
    saver.put_writes(deeper, [("docs", docs)], "task")
    assert saver.get_tuple(nested) is None
    put(saver, {}, parent=new, checkpoint_id=coming)
    assert saver.get_tuple(place).pending_writes == [("task", "docs", docs)]  # type: ignore[union-attr]
    assert saver.get_tuple(deeper).pending_writes == [("task", "docs", docs)]  # type: ignore[union-attr]
    assert saver.get_tuple(nested) is not None
    saver.delete_thread("1")
    assert is_empty(saver)


@pytest.mark.parametrize("durability", ["sync", "async", "exit"])
def test_a_reused_thread_runs_like_a_new_one(durability: Any, saver: KVCheckpointSaver, broker: KVBroker) -> None:
    graph = asking(broker).compile(checkpointer=saver)
    first = graph.invoke({"question": "What?"}, thread(), durability=durability)
    history = [state.next for state in graph.get_state_history(thread())]
    saver.delete_thread("1")
    assert graph.invoke({"question": "What?"}, thread(), durability=durability) == first
    assert [state.next for state in graph.get_state_history(thread())] == history
    assert saver.stats().num_late_writes == 0


def test_a_thread_id_that_is_no_text_is_one_thread_everywhere(saver: KVCheckpointSaver, broker: KVBroker) -> None:
    number: Any = {"configurable": {"thread_id": 7}}
    asking(broker).compile(checkpointer=saver).invoke({"question": "What?"}, number)
    assert len(list(saver.list(number))) == len(list(saver.list(thread("7")))) == 4
    assert saver.get_tuple(number) is not None
    assert saver.sweep(verify=True).num_slots == 0
    saver.delete_thread(7)  # type: ignore[arg-type]
    assert is_empty(saver)


def test_token_ids_of_a_deleted_thread_do_not_stay_in_the_manifests_file(broker: KVBroker, tmp_path: Path) -> None:
    with KVCheckpointSaver.local(tmp_path, broker) as saver:
        for number in range(30):
            put(saver, {"docs": broker.materialize([123, 45, 67, 89, 101, number + 10] * 200)}, name=str(number))
        saver.sweep()
        path = saver._ledger.sidecar.path
        before = path.stat().st_size
        assert b"123,45,67,89,101" in path.read_bytes()
        for number in range(30):
            saver.delete_thread(str(number))
        saver.sweep()
        assert path.stat().st_size < before / 2
        left = path.read_bytes() + Path(f"{path}-wal").read_bytes()
        assert b"123,45,67,89,101" not in left


def test_a_thread_from_before_the_saver_goes_on(broker: KVBroker) -> None:
    memory = InMemorySaver()
    graph = asking(broker).compile(checkpointer=memory)
    graph.invoke({"question": "What?"}, thread())
    with KVCheckpointSaver(memory, broker) as saver:
        wrapped = asking(broker).compile(checkpointer=saver)
        old = wrapped.get_state(thread())
        wrapped.update_state(old.config, {"question": "And?"})
        assert wrapped.get_state(thread()).values["question"] == "And?"
        assert saver.stats().manifest.num_recipes == 2
        saver.delete_thread("1")
        assert is_empty(saver)


def test_a_copy_outlives_its_source(open_broker: Callable[..., KVBroker], tmp_path: Path) -> None:
    """Case 13."""
    first = open_broker()
    with KVCheckpointSaver.local(tmp_path, first, durability="sync") as saver:
        graph = asking(first).compile(checkpointer=saver)
        expected = graph.invoke({"question": "What?"}, thread())
        before = saver.stats()
        saver.copy_thread("1", "2")
        assert saver.stats().tensor_bytes == before.tensor_bytes
        saver.delete_thread("1")
        after = saver.stats()
        assert after.manifest.num_recipes == before.manifest.num_recipes
        assert after.manifest.num_references == before.manifest.num_references
    first.close()
    later = open_broker()
    with KVCheckpointSaver.local(tmp_path, later, durability="sync") as saver:
        state = asking(later).compile(checkpointer=saver).get_state(thread("2"))
        assert state.values["answer"] == expected["answer"]
        used = later.generate("And?", parent=state.values["plan"], sampling=SHORT).usage
        assert used.reuse == "handle"
        assert later.stats().num_recomputed_tokens == 0
        saver.delete_thread("2")
        assert is_empty(saver, tombstones=2)


@pytest.mark.parametrize("kind", ["memory", "sqlite"])
def test_pruning_in_the_middle_of_an_interrupt_keeps_what_the_resume_needs(
    kind: str, broker: KVBroker, tmp_path: Path
) -> None:
    """Case 13: the last reference frees bytes, nothing dangles, and the run goes on."""

    def ask(state: State) -> dict[str, Any]:
        extra = broker.append(state["docs"], [20, 21, 22])
        decision = interrupt({"about": extra})
        made = broker.generate("So?", parent=extra, sampling=SHORT)
        return {"decision": decision, "answer": made.text}

    def replace(state: State) -> dict[str, Any]:
        return {"docs": broker.prefill("Something else. " * 8).handle}

    builder: StateGraph[Any] = StateGraph(State)
    builder.add_node("read", prefill_node(broker, lambda state: DOCS, writes="docs"))
    builder.add_node("replace", replace)
    builder.add_node("ask", ask)
    builder.add_edge(START, "read")
    builder.add_edge("read", "replace")
    builder.add_edge("replace", "ask")
    with closing(sqlite3.connect(tmp_path / "c.sqlite", check_same_thread=False)) as connection:
        inner: BaseCheckpointSaver[Any] = SqliteSaver(connection) if kind == "sqlite" else InMemorySaver()
        with KVCheckpointSaver(inner, broker, durability="sync") as saver:
            graph = builder.compile(checkpointer=saver)
            expected = graph.invoke(Command(resume="x"), _started(graph, "other"))["answer"]
            config = _started(graph, "1")
            saver.delete_thread("other")
            before = saver.stats()
            assert before.manifest.num_recipes == 3
            saver.prune(["1"], strategy="keep_latest")
            after = saver.stats()
            assert after.manifest.num_recipes == 2  # the replaced documents are gone
            assert 0 < after.tensor_bytes < before.tensor_bytes
            assert graph.get_state(config).interrupts
            broker.evict(graph.get_state(config).values["docs"])
            assert graph.invoke(Command(resume="x"), config)["answer"] == expected
            saver.prune(["1"], strategy="delete")
            assert is_empty(saver)


def _started(graph: Any, name: str) -> RunnableConfig:
    graph.invoke({"question": "?"}, thread(name))
    return thread(name)


def test_pruning_keeps_what_a_delta_channel_is_replayed_from(saver: KVCheckpointSaver, broker: KVBroker) -> None:
    made = [broker.materialize([9, 2, 3, 20 + number]) for number in range(4)]

    def step(state: Any) -> dict[str, Any]:
        return {"kept": made[len(state["kept"])]}

    builder: StateGraph[Any] = StateGraph(Everywhere)
    builder.add_node("step", step)
    builder.add_edge(START, "step")
    graph = builder.compile(checkpointer=saver)
    for _ in made:
        graph.invoke({"plain": 0}, thread())
    before = graph.get_state(thread()).values["kept"]
    assert before == made
    saver.prune(["1"])
    assert graph.get_state(thread()).values["kept"] == made
    assert saver.stats().manifest.num_recipes == 4
    saver.delete_thread("1")
    assert is_empty(saver)


def test_deleting_a_run_frees_what_only_it_needed(saver: KVCheckpointSaver, broker: KVBroker) -> None:
    graph = asking(broker).compile(checkpointer=saver)
    first = "11111111-1111-1111-1111-111111111111"
    second = "22222222-2222-2222-2222-222222222222"
    for name, run_id in (("1", first), ("2", second)):
        graph.invoke({"question": f"What {name}?"}, {**thread(name), "run_id": run_id, "metadata": {"run_id": run_id}})
    assert saver.stats().manifest.num_recipes == 3
    saver.delete_for_runs([first])
    assert list(saver.list(thread("1"))) == []
    assert saver.stats().manifest.num_recipes == 2
    assert graph.get_state(thread("2")).values["answer"]
    saver.delete_for_runs([second])
    assert is_empty(saver, tombstones=0)


@pytest.mark.parametrize("kind", KINDS)
async def test_a_task_that_writes_again_is_referred_to_by_what_the_saver_kept(
    kind: str, broker: KVBroker, tmp_path: Path
) -> None:
    first, second, third = (broker.materialize([9, 8, number]) for number in range(3))
    async with (
        inner_saver(kind, tmp_path) as inner,
        KVCheckpointSaver(inner, broker, durability="sync", directory=tmp_path / "kv") as saver,
    ):
        at = await asyncio.to_thread(put, saver, {})

        async def write(task: str, channel: str, *values: Any) -> set[str]:
            for value in values:
                await saver.aput_writes(at, [(channel, value)], task)
            return referred(saver)

        assert await write("once", "docs", first, second, first) == {first.kv_id}
        assert await write("once", "__interrupt__", first, third, second) == {first.kv_id, second.kv_id}
        assert saver.stats().manifest.num_recipes == 2
        assert await write("once", "__interrupt__", "no handle") == {first.kv_id}
        assert await write("twice", "docs", "no handle", third) == {first.kv_id}
        assert query(saver, "SELECT COUNT(*) FROM refs WHERE state != 1") == (0,)
        found = await saver.aget_tuple(at)
        assert found is not None
        assert {handle.kv_id for handle in find_handles(found.pending_writes)} == {first.kv_id}
        await saver.adelete_thread("1")
        assert is_empty(saver)


def test_a_checkpoint_that_is_stored_again_is_referred_to_by_what_the_saver_kept(
    saver: KVCheckpointSaver, broker: KVBroker
) -> None:
    first, second, third = (broker.materialize([9, 8, number]) for number in range(3))
    later = str(uuid6(clock_seq=-2))
    at = thread(checkpoint_ns="", checkpoint_id=later)
    saver.put_writes(at, [("docs", first)], "ahead")
    saver.put_writes(at, [("docs", second)], "ahead")
    assert referred(saver) == {first.kv_id, second.kv_id}, "what the saver kept is seen when the checkpoint is there"
    put(saver, {"docs": third}, checkpoint_id=later)
    assert referred(saver) == {first.kv_id, third.kv_id}
    put(saver, {"docs": second}, checkpoint_id=later)
    assert referred(saver) == {first.kv_id, second.kv_id}


def test_a_task_that_writes_again_keeps_the_segments_of_what_it_composed_and_what_nobody_can_tell(
    saver: KVCheckpointSaver, broker: KVBroker
) -> None:
    parts = [broker.materialize([9, 8, number, 7]) for number in range(2)]
    other = broker.materialize([9, 9, 9])
    joined = broker.compose(parts).handle
    at = put(saver, {})
    for handle in (joined, other):
        saver.put_writes(at, [("docs", handle)], "t")
    needed = {joined.kv_id, *(part.kv_id for part in parts)}
    assert referred(saver) == needed
    foreign = replace(other, kv_namespace="f" * 64)
    for handle in (foreign, other):
        saver.put_writes(at, [("docs", handle)], "u")
    assert referred(saver) == needed | {other.kv_id}


def test_a_copy_into_a_thread_that_wrote_itself_is_referred_to_by_what_the_saver_has(
    saver: KVCheckpointSaver, broker: KVBroker
) -> None:
    first, second = (broker.materialize([9, 8, number]) for number in range(2))
    at = put(saver, {})
    saver.copy_thread("1", "2")
    saver.put_writes(at, [("docs", first)], "t")
    saver.put_writes(
        thread("2", checkpoint_ns="", checkpoint_id=at["configurable"]["checkpoint_id"]), [("docs", second)], "t"
    )
    saver.copy_thread("1", "2")
    assert referred(saver, "2") == {first.kv_id}


def referred(saver: KVCheckpointSaver, name: str = "1") -> set[str]:
    found = query(saver, "SELECT group_concat(DISTINCT kv_id) FROM refs WHERE thread_id = ?", name)[0]
    return set((found or "").split(",")) - {""}


def test_what_was_deleted_behind_its_back_is_found_by_a_verifying_sweep(
    saver: KVCheckpointSaver, broker: KVBroker
) -> None:
    """Case 13: a database's time to live, or the inner saver used directly."""
    graph = asking(broker).compile(checkpointer=saver)
    graph.invoke({"question": "What?"}, thread())
    graph.invoke({"question": "What?"}, thread("2"))
    saver.inner.delete_thread("1")
    assert saver.sweep().num_slots == 0
    assert saver.sweep(verify=True).num_slots > 0
    assert saver.stats().manifest.num_recipes == 2
    saver.inner.delete_thread("2")
    swept = saver.sweep(verify=True)
    assert swept.num_slots > 0
    assert is_empty(saver)


def test_references_whose_checkpoint_never_came_are_swept_after_the_grace_period(
    broker: KVBroker, tmp_path: Path
) -> None:
    """The process died, or the inner saver failed, between the manifest and the saver's row."""

    class Failing(InMemorySaver):
        def put(self, *args: Any) -> RunnableConfig:
            raise ConnectionError("the database is gone")

    docs = broker.materialize([9, 2, 3])
    with KVCheckpointSaver(Failing(), broker, durability="sync", directory=tmp_path) as saver:
        with pytest.raises(ConnectionError):
            put(saver, {"docs": docs})
        assert saver.stats().manifest.num_references == 1
    with KVCheckpointSaver(InMemorySaver(), broker, directory=tmp_path) as saver:
        assert saver.stats().manifest.num_references == 1, "its put may still be on its way in another process"
        assert saver.sweep(grace_s=0).num_slots == 1
        assert is_empty(saver)
