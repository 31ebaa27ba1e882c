"""Least frequently used, counted while the extent is stored. A pure function of its arguments.

An evicted extent comes back with one use: nothing outlives it, so there is no table of the past to keep or to bound.
"""

from __future__ import annotations

from collections.abc import Sequence

from aaflow_langgraph.evict.base import Candidate, Order, oldest, take


def least_frequently_used(candidates: Sequence[Candidate], need_bytes: int, ties: Order = oldest) -> list[Candidate]:
    """The least used candidates whose bytes add up to ``need_bytes``; all of them if they do not."""
    return take(candidates, need_bytes, lambda c: (c.num_uses,), ties)
