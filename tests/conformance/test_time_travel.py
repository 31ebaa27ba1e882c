"""Time travel and subgraph persistence as LangGraph's own tests have them, with handles in state: every run goes on from exactly
the KV of the checkpoint that it starts at, whatever happened to that KV since.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from langchain_core.runnables import RunnableConfig
from langgraph.graph import END, START, StateGraph
from langgraph.types import Command, interrupt
from typing_extensions import TypedDict

from aaflow_langgraph import KVBroker, KVChannel, KVCheckpointSaver, KVHandle, Sampling
from tests.savers import inner_saver, thread

WAYS = [("memory", "sync"), ("sqlite", "sync"), ("sqlite", "async"), ("aiosqlite", "async")]
WARM = Sampling(max_tokens=12, temperature=1.5)  # seeded by what it continues: what differs before differs after
DOCS = "All of the documents, read once. " * 10

pytestmark = pytest.mark.parametrize("way", WAYS, ids="-".join)


class State(TypedDict, total=False):
    question: str
    docs: Annotated[KVHandle, KVChannel]
    chat: Annotated[KVHandle, KVChannel]
    answer: str
    decision: str


class Way:
    """A graph in one colour."""

    def __init__(self, graph: Any, colour: str) -> None:
        self.graph = graph
        self.colour = colour

    async def run(self, given: Any, config: RunnableConfig) -> Any:
        if self.colour == "async":
            return await self.graph.ainvoke(given, config)
        return await asyncio.to_thread(self.graph.invoke, given, config)

    async def state(self, config: RunnableConfig, **options: Any) -> Any:
        if self.colour == "async":
            return await self.graph.aget_state(config, **options)
        return await asyncio.to_thread(self.graph.get_state, config, **options)

    async def history(self, config: RunnableConfig) -> list[Any]:
        if self.colour == "async":
            return [state async for state in self.graph.aget_state_history(config)]
        return await asyncio.to_thread(lambda: list(self.graph.get_state_history(config)))

    async def update(self, config: RunnableConfig, values: Any, **options: Any) -> RunnableConfig:
        if self.colour == "async":
            made: RunnableConfig = await self.graph.aupdate_state(config, values, **options)
        else:
            made = await asyncio.to_thread(lambda: self.graph.update_state(config, values, **options))
        return made


@pytest.fixture
def broker(open_broker: Callable[..., KVBroker]) -> KVBroker:
    return open_broker()


@pytest.fixture
async def saver(way: tuple[str, str], broker: KVBroker, tmp_path: Path) -> AsyncIterator[KVCheckpointSaver]:
    async with (
        inner_saver(way[0], tmp_path) as inner,
        KVCheckpointSaver(inner, broker, durability="sync", directory=tmp_path / "kv") as opened,
    ):
        yield opened


@pytest.fixture
def cold(open_broker: Callable[..., KVBroker], broker: KVBroker) -> Callable[..., str]:
    """The answer of a broker that has seen nothing else."""

    def answer(*questions: str) -> str:
        other = open_broker()
        at = other.prefill(DOCS).handle
        for question in questions:
            made = other.generate(question, parent=at, sampling=WARM)
            at = made.handle
        other.close()
        return made.text

    return answer


def chatting(broker: KVBroker, *, asks: bool = False) -> StateGraph[Any]:
    """Reads the documents once, then one turn a run, each on the turn before."""

    def read(state: State) -> dict[str, Any]:
        return {"docs": broker.prefill(DOCS).handle} if "docs" not in state else {}

    def talk(state: State) -> dict[str, Any]:
        if asks:
            state["question"] = interrupt({"about": state["docs"], "asked": state["question"]})
        made = broker.generate(state["question"], parent=state.get("chat") or state["docs"], sampling=WARM)
        return {"chat": made.handle, "answer": made.text}

    builder: StateGraph[Any] = StateGraph(State)
    builder.add_node("read", read)
    builder.add_node("talk", talk)
    builder.add_edge(START, "read")
    builder.add_edge("read", "talk")
    builder.add_edge("talk", END)
    return builder


async def test_a_replay_from_any_checkpoint_gives_what_the_run_gave(
    way: tuple[str, str], broker: KVBroker, saver: KVCheckpointSaver
) -> None:
    it = Way(chatting(broker).compile(checkpointer=saver), way[1])
    for question in ("One?", "Two?", "Three?"):
        await it.run({"question": question}, thread())
    history = await it.history(thread())
    assert len(history) == 12
    last: dict[str, Any] = {}
    for state in reversed(history):  # oldest first: what the run that state belongs to ended with
        if not state.next:
            last[state.values["question"]] = state.values
    for state in history:
        if state.next and state.next != ("__start__",):
            again = await it.run(None, state.config)
            assert again["chat"] == last[state.values["question"]]["chat"]
            assert again["answer"] == last[state.values["question"]]["answer"]
            assert (await it.state(state.config)).values == state.values


@pytest.mark.parametrize("lost", ["nothing", "pool", "pool and disk"])
async def test_a_fork_goes_on_from_its_own_checkpoint_and_leaves_the_other_branch_alone(
    lost: str,
    way: tuple[str, str],
    broker: KVBroker,
    saver: KVCheckpointSaver,
    cold: Callable[..., str],
    tmp_path: Path,
) -> None:
    it = Way(chatting(broker).compile(checkpointer=saver), way[1])
    for question in ("One?", "Two?"):
        await it.run({"question": question}, thread())
    abandoned = await it.state(thread())
    before_two = next(
        state for state in await it.history(thread()) if state.next == ("talk",) and state.values["question"] == "Two?"
    )
    if lost != "nothing":
        for handle in (abandoned.values["chat"], before_two.values["chat"], before_two.values["docs"]):
            broker.evict(handle)
        assert broker.stats().pool_used_bytes == 0
    if lost == "pool and disk":
        for folder in (tmp_path / "kv" / "extents" / broker.namespace.digest).iterdir():
            shutil.rmtree(folder)
    fork = await it.update(before_two.config, {"question": "Instead?"})
    forked = await it.run(None, fork)
    assert forked["answer"] == cold("One?", "Instead?")
    assert broker.token_ids(forked["chat"])[: before_two.values["chat"].kv_tokens] == broker.token_ids(
        before_two.values["chat"]
    )
    assert (await it.state(abandoned.config)).values == abandoned.values
    beyond = await it.update(abandoned.config, {"question": "Three?"}, as_node="read")
    assert (await it.run(None, beyond))["answer"] == cold("One?", "Two?", "Three?")


async def test_an_interrupt_is_replayed_forked_and_resumed_on_its_own_kv(
    way: tuple[str, str], broker: KVBroker, saver: KVCheckpointSaver, cold: Callable[..., str]
) -> None:
    it = Way(chatting(broker, asks=True).compile(checkpointer=saver), way[1])
    paused = await it.run({"question": "?"}, thread())
    assert KVHandle.coerce(paused["__interrupt__"][0].value["about"]) == paused["docs"]
    waiting = await it.state(thread())
    assert (await it.run(Command(resume="One?"), thread()))["answer"] == cold("One?")
    again = await it.run(None, waiting.config)
    assert again["__interrupt__"]
    assert (await it.run(Command(resume="Other?"), thread()))["answer"] == cold("Other?")
    fork = await it.update(waiting.config, {"question": "changed"})
    asked = await it.run(None, fork)
    assert asked["__interrupt__"][0].value["asked"] == "changed"
    assert (await it.run(Command(resume="Third?"), thread()))["answer"] == cold("Third?")


class Inner(TypedDict, total=False):
    docs: Annotated[KVHandle, KVChannel]
    question: str
    notes: Annotated[KVHandle, KVChannel]
    answer: str


def nested(broker: KVBroker, keeps: Literal["run", "thread"], *, asks: bool = False) -> StateGraph[Any]:
    """The documents go down, an answer comes up; ``notes`` stay inside, for one run or as long as the thread."""

    def take_notes(state: Inner) -> dict[str, Any]:
        made = broker.generate(state["question"], parent=state.get("notes") or state["docs"], sampling=WARM)
        return {"notes": made.handle, "answer": made.text}

    def check(state: Inner) -> dict[str, Any]:
        if asks:
            interrupt({"about": state["notes"]})
        return {}

    below: StateGraph[Any] = StateGraph(Inner)
    below.add_node("notes", take_notes)
    below.add_node("check", check)
    below.add_edge(START, "notes")
    below.add_edge("notes", "check")
    builder: StateGraph[Any] = StateGraph(State)
    builder.add_node("read", lambda state: {"docs": broker.prefill(DOCS).handle})
    builder.add_node("think", below.compile(checkpointer=True if keeps == "thread" else None))
    builder.add_edge(START, "read")
    builder.add_edge("read", "think")
    return builder


async def test_a_subgraph_of_a_run_starts_afresh(
    way: tuple[str, str], broker: KVBroker, saver: KVCheckpointSaver, cold: Callable[..., str]
) -> None:
    it = Way(nested(broker, "run").compile(checkpointer=saver), way[1])
    assert len({cold("One?"), cold("Two?"), cold("One?", "Two?")}) == 3, "else equal answers would show nothing"
    for question in ("One?", "Two?"):
        assert (await it.run({"question": question}, thread()))["answer"] == cold(question)


async def test_a_subgraph_that_keeps_its_state_goes_on_from_its_own_handles(
    way: tuple[str, str], broker: KVBroker, saver: KVCheckpointSaver, cold: Callable[..., str]
) -> None:
    it = Way(nested(broker, "thread").compile(checkpointer=saver), way[1])
    await it.run({"question": "One?"}, thread())
    assert (await it.run({"question": "Two?"}, thread()))["answer"] == cold("One?", "Two?")
    assert (await it.run({"question": "One?"}, thread("other")))["answer"] == cold("One?")


@pytest.mark.parametrize("reused", [False, True], ids=["new thread", "reused thread"])
async def test_an_interrupted_subgraph_resumes_on_its_own_handles_and_goes_with_its_thread(
    reused: bool, way: tuple[str, str], broker: KVBroker, saver: KVCheckpointSaver, cold: Callable[..., str]
) -> None:
    it = Way(nested(broker, "run", asks=True).compile(checkpointer=saver), way[1])
    if reused:
        await it.run({"question": "Before?"}, thread())
        await saver.adelete_thread("1")
    paused = await it.run({"question": "One?"}, thread())
    notes = KVHandle.coerce(paused["__interrupt__"][0].value["about"])
    below = (await it.state(thread(), subgraphs=True)).tasks[0].state
    assert below.values["notes"] == notes
    broker.evict(notes)
    assert (await it.run(Command(resume="fine"), thread()))["answer"] == cold("One?")
    fork = await it.update((await it.history(thread()))[1].config, {"question": "Other?"}, as_node="read")
    await it.run(None, fork)
    assert (await it.run(Command(resume="fine"), thread()))["answer"] == cold("Other?")
    assert saver.stats().num_late_writes == 0
    await saver.adelete_thread("1")
    await saver.asweep(grace_s=0)
    left = saver.stats()
    assert (left.manifest.num_references, left.manifest.num_recipes, left.tensor_bytes) == (0, 0, 0)
