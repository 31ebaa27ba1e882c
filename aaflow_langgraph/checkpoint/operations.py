"""What a saver does to a thread, step by step. Knows the order in which things must reach the disk.

    put, put_writes   lock thread -> late? -> recipes + references (durable) -> tensors, by policy -> inner saver -> confirmed;
                      what was written there before -> ask the inner saver what it kept -> references of the rest
    deletions         lock thread -> tombstone, references in doubt -> inner saver -> references -> recipes, names -> tensors

A crash between two of these leaves references that nobody confirmed: a sweep asks the inner saver about each, and drops those
of rows that it does not have.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.base import ChannelVersions, Checkpoint, CheckpointMetadata, CheckpointTuple

from aaflow_langgraph.checkpoint.admission import Waiting
from aaflow_langgraph.checkpoint.find import find_handles
from aaflow_langgraph.checkpoint.inner import Inner, Row
from aaflow_langgraph.checkpoint.ledger import Ledger
from aaflow_langgraph.checkpoint.locks import ThreadLock, ThreadLocks
from aaflow_langgraph.checkpoint.sidecar import AGAIN, CONFIRMED, Key, Slot
from aaflow_langgraph.checkpoint.steps import Call, Steps
from aaflow_langgraph.errors import ConfigError

GRACE_S = 3600.0
"""A reference that was written ahead is left alone for so long: its checkpoint may be on its way in another process."""

TOMBSTONE_LASTS_S = 30 * 24 * 3600.0
"""Nothing is late for longer."""

_LONGEST_POLL_S = 0.05
_STATE = ""  # the slot of a checkpoint's own values

_log = logging.getLogger("aaflow_langgraph")


@dataclass(frozen=True, slots=True)
class Swept:
    """What a sweep found and removed.

    Attributes:
        num_slots: Checkpoints, or tasks' writes, whose references were dropped: the inner saver does not have them.
        tensor_bytes: Files of tensors that nothing needed.
    """

    num_slots: int
    tensor_bytes: int


@dataclass(slots=True)
class LateWrites:
    """How many writes to a deleted thread were dropped."""

    count: int = 0


class Operations:
    """Every operation that writes, as steps for either colour. Thread-safe; clones share all but ``inner``."""

    def __init__(self, inner: Inner, ledger: Ledger, locks: ThreadLocks, waiting: Waiting, late: LateWrites) -> None:
        self._inner = inner
        self._ledger = ledger
        self._sidecar = ledger.sidecar
        self._locks = locks
        self._waiting = waiting
        self._late = late

    def around(self, inner: Inner) -> Operations:
        """The same, with another saver inside."""
        return Operations(inner, self._ledger, self._locks, self._waiting, self._late)

    # ---------------------------------------------------------------- writing

    def put(
        self, config: RunnableConfig, checkpoint: Checkpoint, metadata: CheckpointMetadata, versions: ChannelVersions
    ) -> Steps[RunnableConfig]:
        """As the saver's ``put``."""
        lock = yield self._lock([_thread_of(config)])
        with lock:
            return (yield from self._put_alone(config, checkpoint, metadata, versions))

    def _put_alone(
        self, config: RunnableConfig, checkpoint: Checkpoint, metadata: CheckpointMetadata, versions: ChannelVersions
    ) -> Steps[RunnableConfig]:
        """``put`` under the thread's lock."""
        place = config["configurable"]
        key = Key(_thread_of(config), place.get("checkpoint_ns", ""), checkpoint["id"])
        stored: RunnableConfig = {
            "configurable": {
                "thread_id": place["thread_id"],
                "checkpoint_ns": key.checkpoint_ns,
                "checkpoint_id": key.checkpoint_id,
            }
        }
        generation = self._sidecar.generation(key.thread_id)
        if generation is not None:
            missing = yield from self._missing_parent(key, generation, config, metadata)
            if missing is not None:
                self._postpone(
                    missing,
                    key,
                    partial(self._put_alone, config, checkpoint, metadata, versions),
                    is_late=missing.checkpoint_ns == key.checkpoint_ns,
                )
                return stored
        slot = Slot(key, _STATE)
        handles = find_handles((checkpoint["channel_values"], checkpoint.get("pending_sends")))
        again = self._sidecar.has_references(slot) or (bool(handles) and self._waiting.knows(generation, key))
        self._ledger.note(slot, handles, again=again)
        stored = yield self._inner.call("put", config, checkpoint, metadata, versions)
        self._waiting.note(generation, key)
        yield from self._check_slots(self._ledger.confirm_checkpoint(key), may_come=True)
        for operation in self._waiting.take(key):
            yield from operation()
        return stored

    def put_writes(
        self, config: RunnableConfig, writes: Sequence[tuple[str, Any]], task_id: str, task_path: str
    ) -> Steps[None]:
        """As the saver's ``put_writes``."""
        lock = yield self._lock([_thread_of(config)])
        with lock:
            yield from self._put_writes_alone(config, writes, task_id, task_path)

    def _put_writes_alone(
        self, config: RunnableConfig, writes: Sequence[tuple[str, Any]], task_id: str, task_path: str
    ) -> Steps[None]:
        """``put_writes`` under the thread's lock."""
        place = config["configurable"]
        key = Key(_thread_of(config), place.get("checkpoint_ns", ""), place["checkpoint_id"])
        generation = self._sidecar.generation(key.thread_id)
        if generation is not None and not (yield from self._is_stored(key, generation)):
            operation = partial(self._put_writes_alone, config, writes, task_id, task_path)
            self._postpone(key, None, operation, is_late=False)
            return
        slot = Slot(key, task_id)
        handles = find_handles([value for _, value in writes])
        again = self._sidecar.has_references(slot) or (bool(handles) and self._waiting.knows(generation, slot))
        self._ledger.note(slot, handles, again=again)
        yield self._inner.call("put_writes", config, writes, task_id, task_path)
        if again:
            yield from self._check_slots([slot], may_come=True)
        elif not handles:
            self._waiting.note(generation, slot)  # of those with handles the manifest knows
        elif self._waiting.knows(generation, key):
            self._ledger.confirm([slot])

    def _missing_parent(
        self, key: Key, generation: int, config: RunnableConfig, metadata: CheckpointMetadata
    ) -> Steps[Key | None]:
        """The checkpoint that a new one of a deleted thread stands on, when the inner saver does not have it."""
        place = config["configurable"]
        if parent_id := place.get("checkpoint_id"):
            parent = Key(key.thread_id, key.checkpoint_ns, parent_id)
            if (waits_for := self._waiting.parent_of(parent)) is not None:
                return waits_for
        else:
            above = metadata.get("parents") or place.get("checkpoint_map") or {}
            if not key.checkpoint_ns or not above.get(""):
                return None  # the first one of a run: the thread lives again
            parent = Key(key.thread_id, "", above[""])
        return None if (yield from self._is_stored(parent, generation)) else parent

    def _is_stored(self, key: Key, generation: int) -> Steps[bool]:
        if self._waiting.knows(generation, key):
            return True
        found = yield self._inner.call("get_tuple", {"configurable": key._asdict()})
        if found is not None:
            self._waiting.note(generation, key)
        return found is not None

    def _postpone(self, parent: Key, own: Key | None, operation: Callable[[], Steps[Any]], *, is_late: bool) -> None:
        """Keep a write for its parent, or drop it where the parent would have come first."""
        if not is_late:
            self._waiting.add(parent, own, operation)
            return
        self._late.count += 1
        _log.info("thread %r was deleted: a late write to it was dropped", parent.thread_id)

    # ---------------------------------------------------------------- deleting, copying

    def delete_thread(self, thread_id: str, how: tuple[Any, ...], **options: Any) -> Steps[None]:
        """Delete a thread by the inner saver's method ``how``."""
        lock = yield self._lock([thread_id])
        with lock:
            self._ledger.with_room(self._sidecar.bury, thread_id)
            self._waiting.drop_thread(thread_id)
            yield self._inner.call(*how, **options)
            self._ledger.forget(self._ledger.with_room(self._sidecar.drop_thread, thread_id))

    def copy_thread(self, source: str, target: str) -> Steps[None]:
        """As the saver's ``copy_thread``. References first: a crash leaves none of the copy's without."""
        if source == target:
            return
        lock = yield self._lock([source, target])
        with lock:
            self._ledger.with_room(self._sidecar.copy, source, target)
            yield from self._inner.copy_thread(source, target)
            again = self._sidecar.slots(target, state=AGAIN)
            known = self._sidecar.slots(source, state=CONFIRMED)
            there = [Slot(key._replace(thread_id=target), task_id) for key, task_id in known]
            self._ledger.confirm(set(there).difference(again))
            yield from self._check_slots(again, may_come=True)

    def delete_for_runs(self, run_ids: Sequence[str]) -> Steps[None]:
        """As the saver's ``delete_for_runs``."""
        threads: dict[str, None] = {}
        for run_id in run_ids:
            for found in (yield self._inner.tuples(None, filter={"run_id": run_id})):
                threads[_thread_of(found.config)] = None
        if self._inner.has("delete_for_runs"):
            lock = yield self._lock(threads)
            with lock:
                for thread_id in threads:
                    self._ledger.with_room(self._sidecar.doubt, thread_id)
                yield self._inner.call("delete_for_runs", run_ids)
                for thread_id in threads:
                    yield from self._settle(thread_id)
            return
        for thread_id in threads:
            lock = yield self._lock([thread_id])
            with lock:
                all_rows: list[CheckpointTuple] = yield self._inner.tuples(_config(thread_id))
                rows = [_row(found) for found in all_rows if found.metadata.get("run_id") in run_ids]
                yield from self._remove(thread_id, rows, "delete_for_runs")

    def prune(self, thread_id: str, strategy: str) -> Steps[None]:
        """As the saver's ``prune``, for one thread."""
        if strategy == "delete":
            own = ("prune", [thread_id]) if self._inner.has("prune") else ("delete_thread", thread_id)
            options = {"strategy": strategy} if self._inner.has("prune") else {}
            yield from self.delete_thread(thread_id, own, **options)
            return
        lock = yield self._lock([thread_id])
        with lock:
            if self._inner.has("prune"):
                self._ledger.with_room(self._sidecar.doubt, thread_id)
                yield self._inner.call("prune", [thread_id], strategy=strategy)
                yield from self._settle(thread_id)
            elif strategy == "keep_latest":
                found: list[CheckpointTuple] = yield self._inner.tuples(_config(thread_id))
                kept = _needed_for_latest(found)
                yield from self._remove(thread_id, [row for row in map(_row, found) if row not in kept], "prune")
            else:
                raise ConfigError(f"strategy must be 'keep_latest' or 'delete', got {strategy!r}")

    def _remove(self, thread_id: str, rows: Sequence[Row], operation: str) -> Steps[None]:
        """Take checkpoints out of the inner saver and their references out of the manifest."""
        if not rows:
            return
        self._inner.require_removal(operation)
        self._ledger.with_room(self._sidecar.doubt, thread_id)
        yield from self._inner.remove(thread_id, rows)
        gone = set(rows)
        slots = [slot for slot in self._sidecar.slots(thread_id) if slot.key[1:] in gone]
        self._ledger.forget(self._ledger.with_room(self._sidecar.drop, slots))
        yield from self._settle(thread_id)

    def _settle(self, thread_id: str) -> Steps[None]:
        """Ask the inner saver what it kept of a thread, and drop the references of the rest."""
        self._waiting.forget_thread(thread_id)
        yield from self._check_slots(self._sidecar.open_slots(thread_id, before_s=0.0))

    # ---------------------------------------------------------------- sweeping

    def sweep(self, grace_s: float, *, verify: bool) -> Steps[Swept]:
        """As the saver's ``sweep``."""
        num_slots = 0
        for thread_id in self._sidecar.threads(only_open=not verify):
            lock = yield self._lock([thread_id])
            with lock:
                before_s = time.time() - grace_s
                slots = self._sidecar.open_slots(thread_id, before_s)
                if verify:
                    young = set(self._sidecar.open_slots(thread_id, float("inf"))) - set(slots)
                    slots = [slot for slot in self._sidecar.slots(thread_id) if slot not in young]
                num_slots += yield from self._check_slots(slots)
        self._ledger.forget(self._ledger.with_room(self._sidecar.drop_orphans))
        self._sidecar.drop_tombstones(time.time() - TOMBSTONE_LASTS_S)
        self._sidecar.shrink()
        return Swept(num_slots, self._ledger.sweep_extents())

    def _check_slots(self, slots: Sequence[Slot], *, may_come: bool = False) -> Steps[int]:
        """Confirm the references of rows that the inner saver has, drop the others; how many were dropped.

        ``may_come``: those of a checkpoint that it does not have yet stay as they are.
        """
        kept: list[Slot] = []
        gone: list[Slot] = []
        by_key: dict[Key, list[Slot]] = {}
        for slot in slots:
            by_key.setdefault(slot.key, []).append(slot)
        for key, its_slots in by_key.items():
            found: CheckpointTuple | None = yield self._inner.call("get_tuple", {"configurable": key._asdict()})
            if found is None and may_come:
                continue
            values = _by_task(found)
            again = self._sidecar.slots_again(key)
            for slot in its_slots:
                (kept if slot.task_id in values else gone).append(slot)
                if slot in again and slot.task_id in values:
                    self._ledger.keep_only(slot, find_handles(values[slot.task_id]))
        self._ledger.confirm(kept)
        if gone:
            self._ledger.forget(self._ledger.with_room(self._sidecar.drop, gone))
        return len(gone)

    def _lock(self, thread_ids: Collection[str]) -> Call:
        """Wait for threads' locks. Polled on a loop: waiting in worker threads could take all that the holder needs to go on."""
        self._sidecar.check_open()
        locks, names = self._locks, list(thread_ids)

        async def poll() -> ThreadLock:
            delay_s = 0.001
            while (lock := await asyncio.to_thread(locks.try_acquire, names)) is None:
                await asyncio.sleep(delay_s)
                delay_s = min(2 * delay_s, _LONGEST_POLL_S)
            return lock

        return Call(partial(locks.acquire, names), poll)


def _by_task(found: CheckpointTuple | None) -> dict[str, list[Any]]:
    """What a checkpoint holds, by slot; nothing where there is none."""
    if found is None:
        return {}
    values: dict[str, list[Any]] = {_STATE: [found.checkpoint["channel_values"], found.checkpoint.get("pending_sends")]}
    for task_id, _, value in found.pending_writes or ():
        values.setdefault(task_id, []).append(value)
    return values


def _needed_for_latest(found: Sequence[CheckpointTuple]) -> set[Row]:
    """The last checkpoint of each namespace, and the ancestors that its ``DeltaChannel`` values are replayed from."""
    by_row = {_row(item): item for item in found}
    latest: dict[str, str] = {}
    for ns, checkpoint_id in by_row:
        latest[ns] = max(latest.get(ns, ""), checkpoint_id)
    needed: set[Row] = set()
    for row in latest.items():
        item: CheckpointTuple | None = by_row[row]
        replayed = set(by_row[row].metadata.get("counters_since_delta_snapshot") or ())
        while item is not None:
            needed.add(_row(item))
            replayed -= item.checkpoint["channel_values"].keys()
            above = item.parent_config
            item = by_row.get((row[0], above["configurable"]["checkpoint_id"])) if above and replayed else None
    return needed


def _row(found: CheckpointTuple) -> Row:
    place = found.config["configurable"]
    return place.get("checkpoint_ns", ""), place["checkpoint_id"]


def _thread_of(config: RunnableConfig) -> str:
    return str(config["configurable"]["thread_id"])


def _config(thread_id: str) -> RunnableConfig:
    return {"configurable": {"thread_id": thread_id}}
