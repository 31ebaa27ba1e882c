"""Least recently used. A pure function of its arguments."""

from __future__ import annotations

from collections.abc import Sequence

from aaflow_langgraph.evict.base import Candidate, Order, oldest, take


def least_recently_used(candidates: Sequence[Candidate], need_bytes: int, ties: Order = oldest) -> list[Candidate]:
    """The longest unused candidates whose bytes add up to ``need_bytes``; all of them if they do not."""
    return take(candidates, need_bytes, lambda c: (c.last_used,), ties)
