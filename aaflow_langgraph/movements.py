"""Which extents moved, when, and for whom: evicted, spilled, fetched, adopted.

Knows names and numbers; knows no tokens. Bounded: the oldest go first.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from aaflow_langgraph.index.base import ExtentRecord
from aaflow_langgraph.journal import asked_by

MOST_MOVEMENTS = 10_000
"""So many are remembered."""

Move = Literal["evict", "spill", "fetch", "adopt"]


@dataclass(frozen=True, slots=True)
class Movement:
    """One extent that came or went.

    Attributes:
        number: Counts the movements of a store, from 1.
        at_s: Wall-clock time, seconds since the epoch.
        move: ``"evict"`` from the pool, ``"spill"`` to disk, ``"fetch"`` from there, ``"adopt"`` from a process that is gone.
        start: First token position of the extent.
        stop: One past its last.
        end_id: ``kv_id`` of everything up to its end.
        num_bytes: What it takes in a pool.
        node: The graph node whose request moved it; empty when nobody said, or when it was moved in the background.
        thread: Its thread id; empty likewise.
    """

    number: int
    at_s: float
    move: Move
    start: int
    stop: int
    end_id: str
    num_bytes: int
    node: str
    thread: str


class Movements:
    """The last ``MOST_MOVEMENTS``. Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._kept: deque[Movement] = deque(maxlen=MOST_MOVEMENTS)
        self._number = 0

    def note(self, move: Move, record: ExtentRecord, num_bytes: int = 0) -> None:
        """Enter a movement that has happened; ``record`` has the place in the pool that it came to or left. What was merged
        into another has none: it took ``num_bytes`` of it.
        """
        if record.place is not None:
            num_bytes = record.place.allocation.num_bytes
        asker = asked_by()
        with self._lock:
            self._number += 1
            self._kept.append(
                Movement(
                    self._number,
                    self._clock(),
                    move,
                    record.start,
                    record.stop,
                    record.end_id,
                    num_bytes,
                    asker.node,
                    asker.thread,
                )
            )

    def entries(self) -> tuple[Movement, ...]:
        """Everything remembered, oldest first."""
        with self._lock:
            return tuple(self._kept)
