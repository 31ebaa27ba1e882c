"""A prefill stops between two forwards when it is cancelled, and leaves nothing behind."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace

import pytest

from aaflow_langgraph import KVBroker
from aaflow_langgraph.errors import Cancelled


class SetAtThirdLook(threading.Event):
    """An event that somebody sets while the request runs: seen at the third forward."""

    looks = 0

    def is_set(self) -> bool:
        self.looks += 1
        return self.looks >= 3


def test_a_cancelled_prefill_stops_before_its_next_forward_and_publishes_nothing(
    open_broker: Callable[..., KVBroker],
) -> None:
    broker = open_broker()
    before = broker.stats()
    cancel = SetAtThirdLook()
    with pytest.raises(Cancelled, match="nothing was published"):
        broker.prefill("a long document. " * 100, cancel=cancel)
    assert cancel.looks == 3  # 1,700 tokens are seven forwards; two of them ran
    assert replace(broker.stats(), pool_peak_bytes=0) == replace(before, pool_peak_bytes=0)
    assert broker.prefill("a long document. " * 100).usage.num_reused == 0
