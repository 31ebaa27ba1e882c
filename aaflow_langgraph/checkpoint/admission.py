"""What may still be written to a thread that was deleted before (I13). Knows checkpoint keys; knows no handles and no files.

After a deletion the inner saver holds nothing of the thread, so whatever it holds later belongs to the thread's new life. A
write whose parent it holds is part of that; one whose parent it does not hold is late, or came ahead of its parent: LangGraph
stores the writes of a task, and the checkpoints of a subgraph, while the checkpoint that they belong to is still on its way.
Such a one waits here for its parent. Without it nobody could reach it anyway, so a crash loses nothing.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from aaflow_langgraph.checkpoint.sidecar import Key, Slot
from aaflow_langgraph.checkpoint.steps import Steps

_MAX_WAITING = 256
"""More writes than a run has in flight; the oldest go, since what they wait for did not come."""

_MAX_KNOWN = 4096

Operation = Callable[[], Steps[Any]]


class Waiting:
    """Writes that came ahead of their parents, and the checkpoints that were stored. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: OrderedDict[tuple[Key, Key | None, int], Operation] = OrderedDict()
        self._known: OrderedDict[tuple[int | None, Key | Slot], None] = OrderedDict()
        self._count = 0

    def add(self, parent: Key, own: Key | None, operation: Operation) -> None:
        """Keep a write until its parent comes; ``own`` is the checkpoint that it stores, if it is one."""
        with self._lock:
            self._count += 1
            self._waiting[(parent, own, self._count)] = operation
            while len(self._waiting) > _MAX_WAITING:
                self._waiting.popitem(last=False)

    def parent_of(self, key: Key) -> Key | None:
        """What a checkpoint that is kept here waits for."""
        with self._lock:
            return next((parent for parent, own, _ in self._waiting if own == key), None)

    def take(self, parent: Key) -> list[Operation]:
        """Everything that waited for a checkpoint, in its order."""
        with self._lock:
            found = [entry for entry in self._waiting if entry[0] == parent]
            return [self._waiting.pop(entry) for entry in found]

    def drop_thread(self, thread_id: str) -> None:
        """The thread was deleted: what waits will not be stored."""
        with self._lock:
            for entry in [entry for entry in self._waiting if entry[0].thread_id == thread_id]:
                del self._waiting[entry]
        self.forget_thread(thread_id)

    def forget_thread(self, thread_id: str) -> None:
        """Some of its checkpoints are gone: ask the saver which."""
        with self._lock:
            for entry in [entry for entry in self._known if entry[1].thread_id == thread_id]:
                del self._known[entry]

    def note(self, generation: int | None, what: Key | Slot) -> None:
        """A checkpoint, or a task's writes, were stored in this generation of their thread."""
        with self._lock:
            self._known[(generation, what)] = None
            self._known.move_to_end((generation, what))
            while len(self._known) > _MAX_KNOWN:
                self._known.popitem(last=False)

    def knows(self, generation: int | None, what: Key | Slot) -> bool:
        """Was it stored here lately? No is no answer: another process may have."""
        with self._lock:
            return (generation, what) in self._known
