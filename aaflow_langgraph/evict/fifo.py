"""First in, first out: uses do not count. A pure function of its arguments, and what every other policy must beat."""

from __future__ import annotations

from collections.abc import Sequence

from aaflow_langgraph.evict.base import Candidate, Order, oldest, take


def first_in_first_out(candidates: Sequence[Candidate], need_bytes: int, ties: Order = oldest) -> list[Candidate]:
    """The candidates stored first whose bytes add up to ``need_bytes``; all of them if they do not."""
    return take(candidates, need_bytes, lambda c: (c.created,), ties)
