"""What an eviction policy is: ``(candidates, need_bytes) -> victims``, pure, so that policies compare on traces.

Only extents that nobody leases and nothing builds on are candidates (leaf first, I3).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Candidate:
    """One extent that may be evicted. ``last_used`` is a counter: larger is more recent."""

    extent_id: int
    num_bytes: int
    num_tokens: int
    last_used: int


Policy = Callable[[Sequence[Candidate], int], list[Candidate]]
