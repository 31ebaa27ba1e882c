"""How many requests of one broker run at a time: each holds leases and room for its tokens, so the others wait in line.

First come, first served inside a priority (``engine/line.py``). Two kinds of request never wait: one that is made inside of
another (by the same thread, a callback's for instance), and the first in line when those that run all stand still (streams
that nobody reads): a rule about memory must not become a deadlock. It is let in alone: the next one only if all stand still
for as long again.

Knows threads; knows no request and no engine.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from aaflow_langgraph.engine.line import Waiting, leave

MOST_RUNNING = 64
"""More do not make a forward cheaper per request; each would hold room of its own meanwhile."""

POLL_S = 0.25
"""How often one that waits looks whether it was cancelled, or whether everybody stands still."""

STANDSTILL_S = 0.5
"""When nothing was computed for so long, one more runs."""


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
        clock: Seconds.
    """

    def __init__(
        self,
        progress: Callable[[], int | None],
        most: int = MOST_RUNNING,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._progress = progress
        self._most = most
        self._clock = clock
        self._lock = threading.Lock()
        self._line: list[_Place] = []
        self._running: set[_Place] = set()
        self._num_arrived = 0
        self._seen: int | None = None
        self._seen_s = 0.0

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
        place = _Place(priority, 0, thread=threading.get_ident())
        try:
            if not self._arrive(place):
                while not place.wake.wait(POLL_S):
                    tick()
                    self._look()
                tick()
            yield
        finally:
            self._leave(place)

    def _arrive(self, place: _Place) -> bool:
        """Come; may it run at once?"""
        with self._lock:
            place.ticket = self._num_arrived
            self._num_arrived += 1
            is_inside = any(other.thread == place.thread for other in self._running)
            if is_inside or (len(self._running) < self._most and not self._line):
                self._admit(place)
            else:
                self._line.append(place)
            return place.is_running

    def _leave(self, place: _Place) -> None:
        """It ended, or gave up."""
        with self._lock:
            if place in self._line:
                self._line.remove(place)
            self._running.discard(place)
            while self._line and len(self._running) < self._most:
                self._next()

    def _look(self) -> None:
        """Let the first in line run when nothing was computed for those who run since somebody looked long ago."""
        progress = self._progress()
        with self._lock:
            now = self._clock()
            if progress is None or progress != self._seen:
                self._seen, self._seen_s = progress, now
            elif self._line and now - self._seen_s >= STANDSTILL_S:
                self._seen_s = now
                self._next()

    def _next(self) -> None:
        first = min(self._line, key=lambda place: place.turn)
        leave(self._line, [first])
        self._admit(first)

    def _admit(self, place: _Place) -> None:
        place.is_running = True
        self._running.add(place)
        place.wake.set()
