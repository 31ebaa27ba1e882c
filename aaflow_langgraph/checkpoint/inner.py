"""The saver inside: its methods in both colours, and the operations that it lacks. Knows LangGraph's contract, and the tables
of the savers that LangGraph ships; knows nothing of handles.

Copying a thread works with any saver, by ``list``, ``put`` and ``put_writes``. Taking single checkpoints out of a thread
(``prune``, ``delete_for_runs``) has no way through the base contract: it is done for the savers whose storage is known.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Sequence
from typing import Any

from langgraph.checkpoint.base import BaseCheckpointSaver, CheckpointTuple

from aaflow_langgraph.checkpoint.steps import Call, Steps

Saver = BaseCheckpointSaver[Any]
Row = tuple[str, str]  # (checkpoint_ns, checkpoint_id)


class Inner:
    """One saver. Which of its async methods are only stubs is found out once."""

    def __init__(self, saver: Saver, stubs: set[str] | None = None) -> None:
        self.saver = saver
        self.stubs: set[str] = set() if stubs is None else stubs

    def has(self, name: str) -> bool:
        """Does it have an operation of its own, in one colour at least?"""
        return self._overrides(name) or self._overrides(f"a{name}")

    def call(self, name: str, *args: Any, **options: Any) -> Call:
        """A method in the colour of whoever runs it; without an async one, the sync one in a thread."""
        method = getattr(self.saver, name)

        async def acall() -> Any:
            if self._has_async(name):
                try:
                    return await getattr(self.saver, f"a{name}")(*args, **options)
                except NotImplementedError:
                    self._note_stub(name)
            return await asyncio.to_thread(method, *args, **options)

        return Call(lambda: method(*args, **options), acall)

    def tuples(self, config: Any, **options: Any) -> Call:
        """Everything that ``list`` finds, as a list."""

        async def all_of_them() -> list[CheckpointTuple]:
            return [found async for found in self.alist(config, **options)]

        return Call(lambda: list(self.saver.list(config, **options)), all_of_them)

    async def alist(self, config: Any, **options: Any) -> AsyncIterator[CheckpointTuple]:
        """``list`` with a free event loop. A sync saver is read to the end first: it may hold a lock while it lists."""
        if self._has_async("list"):
            found = self.saver.alist(config, **options)
            try:
                first = await anext(found)
            except StopAsyncIteration:
                return
            except NotImplementedError:
                self._note_stub("list")
            else:
                yield first
                async for item in found:
                    yield item
                return
        for item in await asyncio.to_thread(lambda: list(self.saver.list(config, **options))):
            yield item

    def is_bound_to_a_loop(self) -> bool:
        """Do its sync methods need an event loop that runs elsewhere? Those of async savers do."""
        return isinstance(getattr(self.saver, "loop", None), asyncio.AbstractEventLoop)

    # ---------------------------------------------------------------- what it may lack

    def copy_thread(self, source: str, target: str) -> Steps[None]:
        """Copy every checkpoint with its writes."""
        if self.has("copy_thread"):
            yield self.call("copy_thread", source, target)
        elif (kind := self._kind()) == "memory":
            _copy_in_memory(self.saver, source, target)
        elif kind is not None:
            yield self._sql([(statement, (target, source)) for statement in _COPY])
        else:
            yield from self._copy_by_contract(source, target)

    def require_removal(self, operation: str) -> None:
        """Can single checkpoints be taken out of a thread?

        Raises:
            NotImplementedError: Nobody knows how to, with this saver.
        """
        if self._kind() is None:
            raise NotImplementedError(
                f"{type(self.saver).__name__} has no {operation}, and single checkpoints cannot be deleted through the base "
                "contract of LangGraph's savers; delete_thread and prune(strategy='delete') work"
            )

    def remove(self, thread_id: str, rows: Collection[Row]) -> Steps[None]:
        """Take checkpoints with their writes out of a thread; see ``require_removal``."""
        if self._kind() == "memory":
            _remove_from_memory(self.saver, thread_id, rows)
        else:
            yield self._sql([(statement, (thread_id, *row)) for statement in _REMOVE for row in rows])

    def _copy_by_contract(self, source: str, target: str) -> Steps[None]:
        found: list[CheckpointTuple] = yield self.tuples({"configurable": {"thread_id": source}})
        for item in sorted(found, key=lambda item: str(item.config["configurable"]["checkpoint_id"])):
            place = {"thread_id": target, "checkpoint_ns": item.config["configurable"].get("checkpoint_ns", "")}
            above = item.parent_config
            parent = {"checkpoint_id": above["configurable"]["checkpoint_id"]} if above else {}
            versions = item.checkpoint["channel_versions"]
            stored = yield self.call(
                "put", {"configurable": {**place, **parent}}, item.checkpoint, item.metadata, versions
            )
            by_task: dict[str, list[tuple[str, Any]]] = {}
            for task_id, channel, value in item.pending_writes or ():
                by_task.setdefault(task_id, []).append((channel, value))
            for task_id, writes in by_task.items():
                yield self.call("put_writes", stored, writes, task_id)

    def _sql(self, statements: Sequence[tuple[str, tuple[str, ...]]]) -> Call:
        """One transaction on the tables of LangGraph's SQLite savers."""
        saver: Any = self.saver

        def now() -> None:
            with saver.cursor() as cursor:
                for statement, values in statements:
                    cursor.execute(statement, values)

        async def later() -> None:
            await saver.setup()
            async with saver.lock, saver.conn.cursor() as cursor:
                for statement, values in statements:
                    await cursor.execute(statement, values)
                await saver.conn.commit()

        def later_from_here() -> None:
            _refuse_own_loop(saver.loop)
            asyncio.run_coroutine_threadsafe(later(), saver.loop).result()

        async def in_a_thread() -> None:
            await asyncio.to_thread(now)

        return Call(now, in_a_thread) if self._kind() == "sqlite" else Call(later_from_here, later)

    def _kind(self) -> str | None:
        return next((_KINDS[name] for base in type(self.saver).__mro__ if (name := _name(base)) in _KINDS), None)

    def _overrides(self, name: str) -> bool:
        return getattr(type(self.saver), name, None) is not getattr(BaseCheckpointSaver, name, None)

    def _has_async(self, name: str) -> bool:
        return name not in self.stubs and (self._overrides(f"a{name}") or not self._overrides(name))

    def _note_stub(self, name: str) -> None:
        if not self._overrides(name):
            raise NotImplementedError(f"{type(self.saver).__name__} has no {name}")
        self.stubs.add(name)


_KINDS = {
    "langgraph.checkpoint.memory.InMemorySaver": "memory",
    "langgraph.checkpoint.sqlite.SqliteSaver": "sqlite",
    "langgraph.checkpoint.sqlite.aio.AsyncSqliteSaver": "aiosqlite",
}
_COPY = (
    "INSERT OR REPLACE INTO checkpoints (thread_id, checkpoint_ns, checkpoint_id, parent_checkpoint_id, type, checkpoint, "
    "metadata) SELECT ?, checkpoint_ns, checkpoint_id, parent_checkpoint_id, type, checkpoint, metadata FROM checkpoints "
    "WHERE thread_id = ?",
    "INSERT OR REPLACE INTO writes (thread_id, checkpoint_ns, checkpoint_id, task_id, task_path, idx, channel, type, value) "
    "SELECT ?, checkpoint_ns, checkpoint_id, task_id, task_path, idx, channel, type, value FROM writes WHERE thread_id = ?",
)
_REMOVE = (
    "DELETE FROM checkpoints WHERE thread_id = ? AND checkpoint_ns = ? AND checkpoint_id = ?",
    "DELETE FROM writes WHERE thread_id = ? AND checkpoint_ns = ? AND checkpoint_id = ?",
)


def sqlite_file(saver: Saver) -> str | None:
    """The file of one of LangGraph's SQLite savers; ``""`` when it is in memory, None when it is no such saver, or hides it."""
    kind = Inner(saver)._kind()
    connection: Any = getattr(saver, "conn", None)
    if kind == "sqlite":
        rows = connection.execute("PRAGMA database_list").fetchall()
        return next((str(file or "") for _, name, file in rows if name == "main"), "")
    if kind != "aiosqlite":
        return None
    # An aiosqlite connection says where it leads only on its own loop, which may not run yet, or is this one.
    closure: Iterable[Any] = getattr(getattr(connection, "_connector", None), "__closure__", None) or ()
    places = [cell.cell_contents for cell in closure]
    named = [str(place) for place in places if isinstance(place, str) or hasattr(place, "__fspath__")]
    if len(named) != 1:
        return None
    return "" if named[0] == ":memory:" else named[0]


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _refuse_own_loop(loop: asyncio.AbstractEventLoop) -> None:
    try:
        running = asyncio.get_running_loop()
    except RuntimeError:
        return
    if running is loop:
        raise asyncio.InvalidStateError("an async saver's sync methods need another thread; await the async ones here")


def _copy_in_memory(saver: Any, source: str, target: str) -> None:
    for ns, rows in list(saver.storage.get(source, {}).items()):
        saver.storage[target][ns].update(rows)
    for (thread_id, ns, checkpoint_id), writes in list(saver.writes.items()):
        if thread_id == source:
            saver.writes[(target, ns, checkpoint_id)].update(writes)
    for (thread_id, *rest), blob in list(saver.blobs.items()):
        if thread_id == source:
            saver.blobs[(target, *rest)] = blob


def _remove_from_memory(saver: Any, thread_id: str, rows: Collection[Row]) -> None:
    namespaces = saver.storage.get(thread_id, {})
    for ns, checkpoint_id in rows:
        namespaces.get(ns, {}).pop(checkpoint_id, None)
        saver.writes.pop((thread_id, ns, checkpoint_id), None)
    loads: Callable[[Any], Any] = saver.serde.loads_typed
    for ns in {ns for ns, _ in rows}:
        kept = [loads(row[0])["channel_versions"] for row in namespaces.get(ns, {}).values()]
        used = {(channel, version) for versions in kept for channel, version in versions.items()}
        for thread, its_ns, channel, version in list(saver.blobs):
            if (thread, its_ns) == (thread_id, ns) and (channel, version) not in used:
                del saver.blobs[(thread, its_ns, channel, version)]
