"""How many requests of one broker run at a time: each holds leases and room for its tokens, so the others wait in line.

First come, first served inside a priority (``engine/line.py``). Two kinds of request never wait: one that is made inside of
another (by the same thread, a callback's for instance), and the first in line when those that run all stand still (streams
that nobody reads): a rule about memory must not become a deadlock.

Knows threads; knows no request and no engine.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from aaflow_langgraph.engine.line import Waiting, leave

MOST_RUNNING = 64
"""More do not make a forward cheaper per request; each would hold room of its own meanwhile."""

POLL_S = 0.25
"""How often one that waits looks whether it was cancelled, or whether everybody stands still."""


@dataclass(eq=False, slots=True)
class _Place(Waiting):
    """A request: in the line first, then running."""

    thread: int = 0
    is_running: bool = False
    wake: threading.Event = field(default_factory=threading.Event)


class Admission:
    """Lets requests run. Thread-safe.

    Args:
        progress: A number that changes with everything that is computed for those who run; None while something is.
        most: So many run at a time.
    """

    def __init__(self, progress: Callable[[], int | None], most: int = MOST_RUNNING) -> None:
        self._progress = progress
        self._most = most
        self._lock = threading.Lock()
        self._line: list[_Place] = []
        self._running: set[_Place] = set()
        self._num_arrived = 0

    @property
    def num_running(self) -> int:
        """Requests that run."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Requests in the line."""
        return len(self._line)

    @contextmanager
    def admitted(self, priority: int, tick: Callable[[], None]) -> Iterator[None]:
        """Run the block when it is this request's turn. ``tick`` is called while waiting and may raise to give up."""
        place = self._arrive(priority)
        try:
            seen: int | None = None
            while not place.wake.wait(POLL_S):
                tick()
                now = self._progress()
                if now is not None and now == seen:
                    self._admit_first()
                seen = now
            yield
        finally:
            self._leave(place)

    def _arrive(self, priority: int) -> _Place:
        with self._lock:
            place = _Place(priority, self._num_arrived, thread=threading.get_ident())
            self._num_arrived += 1
            is_inside = any(other.thread == place.thread for other in self._running)
            if is_inside or (len(self._running) < self._most and not self._line):
                self._admit(place)
            else:
                self._line.append(place)
            return place

    def _leave(self, place: _Place) -> None:
        """It ended, or gave up."""
        with self._lock:
            if not place.is_running:
                self._line.remove(place)
                return
            self._running.remove(place)
            while self._line and len(self._running) < self._most:
                self._next()

    def _admit_first(self) -> None:
        with self._lock:
            if self._line:
                self._next()

    def _next(self) -> None:
        first = min(self._line, key=lambda place: place.turn)
        leave(self._line, [first])
        self._admit(first)

    def _admit(self, place: _Place) -> None:
        place.is_running = True
        self._running.add(place)
        place.wake.set()
