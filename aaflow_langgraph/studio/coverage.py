"""Which tokens of a handle have their KV where, and how many bytes it has for itself. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from aaflow_langgraph.index.base import ExtentRecord
from aaflow_langgraph.model import BLOCK_TOKENS, Recipe
from aaflow_langgraph.studio.facts import Facts

Where = Literal["pool", "peer", "disk"]
WHERE: tuple[Where, ...] = ("pool", "peer", "disk")
"""This process' pool, the pool of another one, disk only: in the order in which a request prefers them."""


@dataclass(frozen=True, slots=True)
class Coverage:
    """A handle's KV.

    Attributes:
        spans: ``(start, stop, where)``, ascending, without overlap. What is in none is computed again.
        own_bytes: Extents that this handle added to its parent.
        shared_bytes: Extents that it needs and others need, too.
        private_bytes: Extents that only it needs.
    """

    spans: tuple[tuple[int, int, Where], ...]
    own_bytes: int
    shared_bytes: int
    private_bytes: int

    def num_tokens(self, where: Where) -> int:
        """Tokens that are there."""
        return sum(stop - start for start, stop, at in self.spans if at == where)


class Extents:
    """Extents by their names, at one moment.

    Args:
        facts: All that is known.
        names_of: A recipe's own names; kept by the caller, they never change.
        num_users: How many handles stand on a recipe, itself included.
    """

    def __init__(
        self, facts: Facts, names_of: Callable[[Recipe], Sequence[str]], num_users: Callable[[str], int]
    ) -> None:
        self._facts = facts
        self._names_of = names_of
        self._num_users = num_users
        self._by_name: dict[str, list[ExtentRecord]] = {}
        for record in facts.extents:
            for name in set(record.names):
                self._by_name.setdefault(name, []).append(record)

    def coverage(self, chain: Sequence[Recipe]) -> Coverage:
        """Of the last recipe of a chain that begins at position 0."""
        if not chain:
            return Coverage((), 0, 0, 0)
        own_ids: set[int] = set()
        found: dict[int, ExtentRecord] = {}
        names: set[str] = set()
        for recipe in chain:
            its = self._names_of(recipe)
            names.update(its)
            own_ids = set()
            for record in self._named(its):
                own_ids.add(record.extent_id)
                found[record.extent_id] = record
        stop = chain[-1].stop
        by_where: dict[Where, list[tuple[int, int]]] = {where: [] for where in WHERE}
        for record in found.values():
            by_where[self.where(record)].append((record.start, min(_reach(record, names), stop)))
        users = {record.extent_id: self._num_users(chain[-1].kv_id) for record in found.values()}
        # What its parents added, they need, too; what it added, everybody needs who stands on it.
        private = {number for number in own_ids if users[number] == 1}
        sizes = {number: self.num_bytes(record) for number, record in found.items()}
        return Coverage(
            tuple(_laid_over(by_where)),
            sum(sizes[number] for number in own_ids),
            sum(size for number, size in sizes.items() if number not in private),
            sum(sizes[number] for number in private),
        )

    def where(self, record: ExtentRecord) -> Where:
        """Where an extent is read from."""
        if record.place is None:
            return "disk"
        return "pool" if record.place.owner == self._facts.owner else "peer"

    def num_bytes(self, record: ExtentRecord) -> int:
        """What an extent takes in a pool, or would take."""
        return record.place.allocation.num_bytes if record.place else record.num_tokens * self._facts.token_bytes

    def _named(self, names: Iterable[str]) -> Iterable[ExtentRecord]:
        return {record.extent_id: record for name in names for record in self._by_name.get(name, ())}.values()


def _reach(record: ExtentRecord, names: set[str]) -> int:
    """Up to which position a sequence with these names can read an extent."""
    if record.end_id in names:
        return record.stop
    known = [number for number, name in enumerate(record.hashes) if name in names]
    block_stop = (record.first_block + known[-1] + 1) * BLOCK_TOKENS if known else record.start
    return max([block_stop, *(stop for stop, name in record.borders if name in names)])


def _laid_over(by_where: Mapping[Where, Sequence[tuple[int, int]]]) -> Iterable[tuple[int, int, Where]]:
    """Spans without overlap, the preferred place on top."""
    borders = sorted({border for spans in by_where.values() for span in spans for border in span})
    merged: list[tuple[int, int, Where]] = []
    for start, stop in pairwise(borders):
        at = next((where for where in WHERE if any(a <= start and stop <= b for a, b in by_where[where])), None)
        if at is None:
            continue
        if merged and merged[-1][1] == start and merged[-1][2] == at:
            merged[-1] = (merged[-1][0], stop, at)
        else:
            merged.append((start, stop, at))
    return merged
