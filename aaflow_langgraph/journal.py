"""What a broker was asked for, request by request: who asked, what was reused, and what could have been.

Knows numbers and ids; knows no tokens and no text, so it can be shown to anybody who may see metadata. Bounded: the oldest
entries go first.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import dropwhile

from aaflow_langgraph.model import Operator

MOST_ENTRIES = 10_000
"""So many requests are remembered."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One request.

    Attributes:
        number: Counts the requests of a broker, from 1.
        at_s: Wall-clock time of its end, seconds since the epoch.
        operator: What was asked for.
        node: Name of the graph node that asked; empty when nobody said (``origin``).
        thread: Its thread id; empty likewise.
        label: Label of the handle that was made.
        kv_id: That handle.
        parent: The handle it went on from, or None.
        num_context: Tokens of context before the first new one.
        num_reused: Tokens whose KV was read instead of computed.
        num_reusable: Longest common token prefix with anything that was computed before in this process, as far as a request
            can use it (one that generates runs at least its last token).
        num_decoded: New tokens generated.
        num_recomputed: Tokens of the parent that had been computed once and had to be computed again.
        ttft_s: Seconds to the first new token (of a prefill: to its end).
        total_s: Seconds in all.
        nearest: The handle with the longest common token prefix, its own parent included, or None.
        num_nearest: How long that prefix is.
    """

    number: int
    at_s: float
    operator: Operator
    node: str
    thread: str
    label: str
    kv_id: str
    parent: str | None
    num_context: int
    num_reused: int
    num_reusable: int
    num_decoded: int
    num_recomputed: int
    ttft_s: float
    total_s: float
    nearest: str | None
    num_nearest: int


@dataclass(frozen=True, slots=True)
class Origin:
    """Who asks: a node of a graph, in a thread (of conversation)."""

    node: str = ""
    thread: str = ""


_origin: ContextVar[Origin] = ContextVar("aaflow_origin", default=Origin())  # noqa: B039 - frozen


@contextmanager
def origin(*, node: str = "", thread: str = "") -> Iterator[None]:
    """Requests of this context are entered as asked for by ``node`` in ``thread``."""
    token = _origin.set(Origin(node, thread))
    try:
        yield
    finally:
        _origin.reset(token)


def asked_by() -> Origin:
    """Who asks in this context."""
    return _origin.get()


class Journal:
    """The last ``MOST_ENTRIES`` requests. Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._entries: deque[Entry] = deque(maxlen=MOST_ENTRIES)
        self._number = 0

    def enter(
        self,
        operator: Operator,
        asker: Origin,
        *,
        label: str,
        kv_id: str,
        parent: str | None,
        num_context: int,
        num_reused: int,
        num_reusable: int,
        num_decoded: int,
        num_recomputed: int,
        ttft_s: float,
        total_s: float,
        nearest: str | None,
        num_nearest: int,
    ) -> Entry:
        """Add a request that has ended."""
        with self._lock:
            self._number += 1
            entry = Entry(
                self._number,
                self._clock(),
                operator,
                asker.node,
                asker.thread,
                label,
                kv_id,
                parent,
                num_context,
                num_reused,
                num_reusable,
                num_decoded,
                num_recomputed,
                ttft_s,
                total_s,
                nearest,
                num_nearest,
            )
            self._entries.append(entry)
            return entry

    def entries(self) -> tuple[Entry, ...]:
        """Everything remembered, oldest first."""
        with self._lock:
            return tuple(self._entries)

    def since(self, number: int) -> tuple[Entry, ...]:
        """What came after the entry ``number``, oldest first."""
        return tuple(dropwhile(lambda entry: entry.number <= number, self.entries()))
