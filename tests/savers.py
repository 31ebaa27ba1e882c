"""Savers, graphs and states for tests of the checkpointer. Not a test itself."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Annotated, Any

import aiosqlite
from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.base import BaseCheckpointSaver, CheckpointTuple, DeltaChannelHistory, empty_checkpoint
from langgraph.checkpoint.base.id import uuid6
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.checkpoint.sqlite import SqliteSaver
from langgraph.checkpoint.sqlite.aio import AsyncSqliteSaver
from langgraph.graph import END, START, StateGraph
from typing_extensions import TypedDict

from aaflow_langgraph import (
    KVBranches,
    KVBroker,
    KVChannel,
    KVCheckpointSaver,
    KVHandle,
    Sampling,
    generate_node,
    prefill_node,
)

KINDS = ("memory", "sqlite", "aiosqlite")
DOCS = "Berlin is the capital of Germany. Paris is the capital of France. " * 6
SHORT = Sampling(max_tokens=6)


class State(TypedDict, total=False):
    question: str
    docs: Annotated[KVHandle, KVChannel]
    plan: Annotated[KVHandle, KVChannel]
    drafts: Annotated[dict[str, KVHandle], KVBranches]
    answer: str
    decision: str


def thread(name: str = "1", **place: str) -> RunnableConfig:
    return {"configurable": {"thread_id": name, **place}}


def asking(broker: KVBroker) -> StateGraph[Any]:
    """Documents once, then answers that read them."""
    builder: StateGraph[Any] = StateGraph(State)
    builder.add_node("read", prefill_node(broker, lambda state: DOCS, writes="docs"))
    builder.add_node(
        "answer", generate_node(broker, "{question}", reads="docs", writes="plan", text_to="answer", sampling=SHORT)
    )
    builder.add_edge(START, "read")
    builder.add_edge("read", "answer")
    builder.add_edge("answer", END)
    return builder


def put(
    saver: BaseCheckpointSaver[Any],
    values: dict[str, Any],
    *,
    name: str = "1",
    ns: str = "",
    parent: RunnableConfig | None = None,
    parents: dict[str, str] | None = None,
    checkpoint_id: str | None = None,
    **metadata: Any,
) -> RunnableConfig:
    """Store a checkpoint by hand."""
    checkpoint = empty_checkpoint()
    checkpoint["id"] = checkpoint_id or str(uuid6(clock_seq=-2))
    checkpoint["channel_values"] = values
    checkpoint["channel_versions"] = dict.fromkeys(values, checkpoint["id"])
    config = thread(name, checkpoint_ns=ns)
    if parent is not None:
        config["configurable"]["checkpoint_id"] = parent["configurable"]["checkpoint_id"]
    about: Any = {"source": "loop", "step": 0, "parents": parents or {}, **metadata}
    return saver.put(config, checkpoint, about, checkpoint["channel_versions"])


def is_empty(saver: KVCheckpointSaver, *, tombstones: int | None = None) -> bool:
    """Neither references nor recipes nor tensors are left."""
    left = saver.stats()
    rows = left.manifest
    assert tombstones is None or rows.num_tombstones == tombstones
    return (rows.num_references, rows.num_recipes, rows.num_names, left.tensor_bytes) == (0, 0, 0, 0)


def query(saver: KVCheckpointSaver, statement: str, *values: Any) -> Any:
    with closing(sqlite3.connect(saver._ledger.sidecar.path)) as database:
        return database.execute(statement, values).fetchone()


@asynccontextmanager
async def inner_saver(kind: str, folder: Path) -> AsyncIterator[BaseCheckpointSaver[Any]]:
    """One of the savers that LangGraph ships."""
    if kind == "memory":
        yield InMemorySaver()
    elif kind == "sqlite":
        connection = sqlite3.connect(folder / "checkpoints.sqlite", check_same_thread=False)
        yield SqliteSaver(connection)
        connection.close()
    else:
        async with aiosqlite.connect(folder / "checkpoints.sqlite") as opened:
            yield AsyncSqliteSaver(opened)


async def rows_of(inner: BaseCheckpointSaver[Any]) -> int:
    """Everything that a saver of LangGraph's stores: checkpoints, writes, blobs."""
    if isinstance(inner, InMemorySaver):
        return sum(len(rows) for ns in inner.storage.values() for rows in ns.values()) + sum(
            map(len, (*inner.writes.values(), inner.blobs))
        )
    query = "SELECT (SELECT COUNT(*) FROM checkpoints) + (SELECT COUNT(*) FROM writes)"
    if isinstance(inner, SqliteSaver):
        with inner.cursor() as cursor:
            return int(cursor.execute(query).fetchone()[0])
    assert isinstance(inner, AsyncSqliteSaver)
    await inner.setup()
    async with inner.conn.execute(query) as found:
        row = await found.fetchone()
        assert row is not None
        return int(row[0])


class Bystander(BaseCheckpointSaver[Any]):
    """Forwards to a saver, whose type it hides: a user's own saver, with the base contract only."""

    def __init__(self, inner: BaseCheckpointSaver[Any]) -> None:
        super().__init__(serde=inner.serde)
        self.inner = inner

    def get_tuple(self, config: RunnableConfig) -> CheckpointTuple | None:
        return self.inner.get_tuple(config)

    def list(self, config: RunnableConfig | None, **options: Any) -> Iterator[CheckpointTuple]:
        return self.inner.list(config, **options)

    def put(self, *args: Any) -> RunnableConfig:
        return self.inner.put(*args)

    def put_writes(
        self, config: RunnableConfig, writes: Sequence[tuple[str, Any]], task_id: str, task_path: str = ""
    ) -> None:
        self.inner.put_writes(config, writes, task_id, task_path)

    def delete_thread(self, thread_id: str) -> None:
        self.inner.delete_thread(thread_id)

    def get_next_version(self, current: Any, channel: None) -> Any:
        return self.inner.get_next_version(current, channel)


class SyncFace(BaseCheckpointSaver[Any]):
    """Answers async calls by a saver's sync methods, in a thread."""

    def __init__(self, saver: KVCheckpointSaver) -> None:
        super().__init__(serde=saver.serde)
        self.saver = saver

    async def _ask(self, call: Callable[..., Any], *args: Any, **options: Any) -> Any:
        return await asyncio.to_thread(call, *args, **options)

    async def aget_tuple(self, config: RunnableConfig) -> CheckpointTuple | None:
        return await self._ask(self.saver.get_tuple, config)

    async def alist(self, config: RunnableConfig | None, **options: Any) -> AsyncIterator[CheckpointTuple]:
        for found in await self._ask(lambda: list(self.saver.list(config, **options))):
            yield found

    async def aput(self, *args: Any) -> RunnableConfig:
        return await self._ask(self.saver.put, *args)

    async def aput_writes(
        self, config: RunnableConfig, writes: Sequence[tuple[str, Any]], task_id: str, task_path: str = ""
    ) -> None:
        await self._ask(self.saver.put_writes, config, writes, task_id, task_path)

    async def adelete_thread(self, thread_id: str) -> None:
        await self._ask(self.saver.delete_thread, thread_id)

    async def adelete_for_runs(self, run_ids: Sequence[str]) -> None:
        await self._ask(self.saver.delete_for_runs, run_ids)

    async def acopy_thread(self, source_thread_id: str, target_thread_id: str) -> None:
        await self._ask(self.saver.copy_thread, source_thread_id, target_thread_id)

    async def aprune(self, thread_ids: Sequence[str], *, strategy: str = "keep_latest") -> None:
        await self._ask(self.saver.prune, thread_ids, strategy=strategy)

    async def aget_delta_channel_history(
        self, *, config: RunnableConfig, channels: Sequence[str]
    ) -> Mapping[str, DeltaChannelHistory]:
        return await self._ask(self.saver.get_delta_channel_history, config=config, channels=channels)

    def get_next_version(self, current: Any, channel: None) -> Any:
        return self.saver.get_next_version(current, channel)


class WithHandles(BaseCheckpointSaver[Any]):
    """Adds a handle to the channel values of every checkpoint and to every list of writes on the way in, and takes it out on
    the way back: the suite's own values stay what it compares.
    """

    CHANNEL = "the handle"

    def __init__(self, saver: BaseCheckpointSaver[Any], make: Callable[[], KVHandle]) -> None:
        super().__init__(serde=saver.serde)
        self.saver = saver
        self.make = make
        self.num_seen = 0

    async def aput(self, config: RunnableConfig, checkpoint: Any, metadata: Any, new_versions: Any) -> RunnableConfig:
        handle = self.make()
        with_handle = {
            **checkpoint,
            "channel_values": {**checkpoint["channel_values"], self.CHANNEL: handle},
            "channel_versions": {**checkpoint["channel_versions"], self.CHANNEL: checkpoint["id"]},
        }
        return await self.saver.aput(config, with_handle, metadata, {**new_versions, self.CHANNEL: checkpoint["id"]})

    async def aput_writes(
        self, config: RunnableConfig, writes: Sequence[tuple[str, Any]], task_id: str, task_path: str = ""
    ) -> None:
        await self.saver.aput_writes(config, [*writes, (self.CHANNEL, self.make())], task_id, task_path)

    async def aget_tuple(self, config: RunnableConfig) -> CheckpointTuple | None:
        found = await self.saver.aget_tuple(config)
        return None if found is None else self._without(found)

    async def alist(self, config: RunnableConfig | None, **options: Any) -> AsyncIterator[CheckpointTuple]:
        async for found in self.saver.alist(config, **options):
            yield self._without(found)

    async def adelete_thread(self, thread_id: str) -> None:
        await self.saver.adelete_thread(thread_id)

    async def adelete_for_runs(self, run_ids: Sequence[str]) -> None:
        await self.saver.adelete_for_runs(run_ids)

    async def acopy_thread(self, source_thread_id: str, target_thread_id: str) -> None:
        await self.saver.acopy_thread(source_thread_id, target_thread_id)

    async def aprune(self, thread_ids: Sequence[str], *, strategy: str = "keep_latest") -> None:
        await self.saver.aprune(thread_ids, strategy=strategy)

    def with_allowlist(self, extra_allowlist: Collection[tuple[str, ...]]) -> WithHandles:
        return self

    def get_next_version(self, current: Any, channel: None) -> Any:
        return self.saver.get_next_version(current, channel)

    def _without(self, found: CheckpointTuple) -> CheckpointTuple:
        values = dict(found.checkpoint["channel_values"])
        assert isinstance(values.pop(self.CHANNEL), KVHandle)
        versions = dict(found.checkpoint["channel_versions"])
        del versions[self.CHANNEL]
        self.num_seen += 1
        checkpoint: Any = {**found.checkpoint, "channel_values": values, "channel_versions": versions}
        writes = [write for write in found.pending_writes or () if write[1] != self.CHANNEL]
        return found._replace(checkpoint=checkpoint, pending_writes=writes)


def numbered_handles(broker: KVBroker) -> Callable[[], KVHandle]:
    """A new handle at each call: chains, so that recipes have parents, and now and then one that was there before."""
    made: list[KVHandle] = []

    def make() -> KVHandle:
        number = len(made)
        made.append(broker.append(made[-1], [7, 8 + number % 5]) if number % 7 else broker.materialize([9, 8, 7]))
        return made[-1]

    return make
