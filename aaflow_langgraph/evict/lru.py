"""Least recently used. A pure function of its arguments."""

from __future__ import annotations

from collections.abc import Sequence

from aaflow_langgraph.evict.base import Candidate


def least_recently_used(candidates: Sequence[Candidate], need_bytes: int) -> list[Candidate]:
    """The longest unused candidates whose bytes add up to ``need_bytes``; all of them if they do not."""
    victims: list[Candidate] = []
    freed = 0
    for candidate in sorted(candidates, key=lambda c: (c.last_used, c.extent_id)):
        if freed >= need_bytes:
            break
        victims.append(candidate)
        freed += candidate.num_bytes
    return victims
