"""How often a guard asks an index that fails, and whom it lets ask. The index behind it fails on command."""

from __future__ import annotations

import logging
import threading

import pytest

from aaflow_langgraph.errors import IndexFull, IndexUnavailable, LeaseExpired
from aaflow_langgraph.index.base import Match, Query
from aaflow_langgraph.index.guarded import PAUSE_S, GuardedIndex
from aaflow_langgraph.index.memory import MemoryIndex
from aaflow_langgraph.model import Receipt
from aaflow_langgraph.testing.clock import ManualClock
from aaflow_langgraph.testing.index_cases import LEASE_S, OWNER, B, query, record, sequence


class Failing(MemoryIndex):
    """Raises ``error`` while one is set; counts who asked."""

    def __init__(self) -> None:
        super().__init__()
        self.error: Exception | None = None
        self.num_asked = 0
        self.gate: threading.Event | None = None

    def match(self, query: Query, limit: int, lease_s: float) -> Match:
        self.num_asked += 1
        if self.gate is not None:
            assert self.gate.wait(30)
        if self.error is not None:
            raise self.error
        return super().match(query, limit, lease_s)


def ask(index: GuardedIndex) -> Match:
    return index.match(query(sequence("A")), B, LEASE_S)


def test_an_index_that_failed_is_asked_once_per_pause() -> None:
    inner, clock = Failing(), ManualClock()
    index = GuardedIndex(inner, clock=clock)
    inner.error = IndexUnavailable("gone")
    for second in range(5):
        for _ in range(10):
            assert ask(index).parts == ()
        assert inner.num_asked == second + 1
        clock.advance(PAUSE_S)
    assert (index.num_outages, index.num_failed_calls) == (1, 50)


def test_one_of_many_asks_whether_it_is_back() -> None:
    """The others do not wait for its timeout."""
    inner, clock = Failing(), ManualClock()
    index = GuardedIndex(inner, clock=clock)
    inner.error = IndexUnavailable("gone")
    ask(index)
    clock.advance(PAUSE_S)
    inner.gate = threading.Event()
    probe = threading.Thread(target=ask, args=(index,))
    probe.start()
    while inner.num_asked < 2:
        threading.Event().wait(0.001)
    for _ in range(10):
        assert ask(index).parts == ()
    assert inner.num_asked == 2
    inner.error = None
    inner.gate.set()
    probe.join()
    assert not index.is_out
    ask(index)
    assert inner.num_asked == 3


def test_many_who_were_asking_when_it_failed_are_one_outage() -> None:
    inner = Failing()
    warnings: list[str] = []
    index = GuardedIndex(inner, clock=ManualClock(), on_warning=warnings.append)
    inner.error, inner.gate = IndexUnavailable("gone"), threading.Event()
    threads = [threading.Thread(target=ask, args=(index,)) for _ in range(8)]
    for thread in threads:
        thread.start()
    while inner.num_asked < 8:
        threading.Event().wait(0.001)
    inner.gate.set()
    for thread in threads:
        thread.join()
    assert (index.num_outages, index.num_failed_calls, len(warnings)) == (1, 8, 1)


def test_a_full_index_is_asked_again_at_once_and_warns_once() -> None:
    inner = Failing()
    warnings: list[str] = []
    index = GuardedIndex(inner, on_warning=warnings.append)
    inner.error = IndexFull("full")
    for _ in range(3):
        assert ask(index).parts == ()
    assert (inner.num_asked, index.num_outages, index.is_out, len(warnings)) == (3, 1, False, 1)
    inner.error = None
    index.put(record(index, sequence("A")), index.join(OWNER, LEASE_S), LEASE_S)
    inner.error = IndexFull("full again")
    ask(index)
    assert len(warnings) == 2


def test_errors_that_are_answers_pass() -> None:
    index = GuardedIndex(Failing())
    with pytest.raises(LeaseExpired):
        index.renew(Receipt("f" * 32, (1,), 0.0), LEASE_S)
    assert index.num_failed_calls == 0


def test_the_warning_goes_to_the_log_of_the_package(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "aaflow_langgraph")
    inner, clock = Failing(), ManualClock()
    index = GuardedIndex(inner, clock=clock)
    inner.error = IndexUnavailable("gone")
    ask(index)
    inner.error = None
    clock.advance(PAUSE_S)
    ask(index)
    assert [(record.name, record.levelname) for record in caplog.records] == [
        ("aaflow_langgraph", "WARNING"),
        ("aaflow_langgraph", "INFO"),
    ]
    assert index.join(OWNER, LEASE_S)
