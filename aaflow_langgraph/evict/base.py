"""What an eviction policy is: ``(candidates, need_bytes) -> victims``, pure, so that policies compare on traces.

Only extents that nobody leases and nothing builds on are candidates (leaf first, I3). Knows no pool, no index, no clock:
a policy sees counters, so that one call gives one answer in every process that makes it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Candidate:
    """One extent that may be evicted: tokens ``[start, start + num_tokens)`` of a prefix.

    ``last_used`` and ``created`` are values of one counter that grows with every use: larger is more recent.
    ``num_uses`` counts the uses since the extent was stored, the first included; it is gone with the extent.
    """

    extent_id: int
    num_bytes: int
    num_tokens: int
    last_used: int
    num_uses: int = 1
    created: int = 0
    start: int = 0


class Policy(Protocol):
    """Chooses what goes."""

    def __call__(self, candidates: Sequence[Candidate], need_bytes: int, /) -> list[Candidate]:
        """The first candidates in the policy's order whose bytes add up to ``need_bytes``; all if they do not.

        Pure: the argument is not changed, its order plays no part, and nothing is remembered between calls.
        """


SortKey = tuple[float, ...]
Order = Callable[[Candidate], SortKey]
"""A sort key: the candidate with the lowest goes first."""


def oldest(candidate: Candidate) -> SortKey:
    """Among equals the longest unused goes, then the deepest, then the one stored first. The default tie rule."""
    return (candidate.last_used, -candidate.start, candidate.extent_id)


def newest(candidate: Candidate) -> SortKey:
    """Among equals the most recently used goes, then the deepest, then the one stored last."""
    return (-candidate.last_used, -candidate.start, -candidate.extent_id)


def deepest(candidate: Candidate) -> SortKey:
    """Among equals the one farthest from the start goes, where prefixes are shared least, then the longest unused."""
    return (-candidate.start, candidate.last_used, candidate.extent_id)


TIES: dict[str, Order] = {"oldest": oldest, "newest": newest, "deepest": deepest}
"""Tie rules. Each is a total order, because extent ids differ: no answer depends on the order of the candidates."""


def take(candidates: Sequence[Candidate], need_bytes: int, rank: Order, ties: Order = oldest) -> list[Candidate]:
    """What every policy does: sort by ``rank``, then ``ties``; take from the front until enough is free."""
    victims: list[Candidate] = []
    freed = 0
    for candidate in sorted(candidates, key=lambda c: (rank(c), ties(c))):
        if freed >= need_bytes:
            break
        victims.append(candidate)
        freed += candidate.num_bytes
    return victims
