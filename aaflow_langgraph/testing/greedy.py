"""The first greedy tokens behind a handle: what every test of reuse compares."""

from __future__ import annotations

from aaflow_langgraph.broker import KVBroker
from aaflow_langgraph.engine.sampling import Sampling
from aaflow_langgraph.handle import KVHandle


def first_tokens(broker: KVBroker, handle: KVHandle, num_tokens: int = 6) -> tuple[int, ...]:
    """``num_tokens`` greedy token ids after ``handle`` and a short prompt."""
    return broker.generate("so", parent=handle, raw=True, sampling=Sampling(max_tokens=num_tokens)).token_ids
