"""A policy from a function that says what keeping an extent is worth: the hook for whoever knows what will be read."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from aaflow_langgraph.evict.base import Candidate, Order, Policy, oldest, take


def by_value(value: Callable[[Candidate], float], ties: Order = oldest) -> Policy:
    """A policy that evicts the candidates of least ``value``: equal values by ``ties``, so an unknown 0.0 is plain LRU.

    ``value`` is asked once for each candidate of a call and must give a number, never NaN. What it knows beyond the
    candidate (who reads it, how soon) it looks up by ``extent_id``.
    """

    def least_valuable(candidates: Sequence[Candidate], need_bytes: int) -> list[Candidate]:
        return take(candidates, need_bytes, lambda c: (value(c),), ties)

    return least_valuable
