"""Long chains of extents made short in the background: neighbours of our own pool are merged into one extent.

    chain     | doc          | a | b | c | d | e | f | g | h |
    merged    | doc          | M                             |      M is found wherever a, b, ... h ended

A request's past grows by an extent a turn, and beyond ``LONGEST_CHAIN`` of them every step pays for each. Bytes move here;
identity does not, nor the positions where recipes end, which the merged extent keeps as its borders. On disk KV stays as it
was computed. Knows a store; decides no lookup, evicts nobody to make room, and never copies under the store's lock.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from aaflow_langgraph.index.base import ExtentRecord, Match, cover
from aaflow_langgraph.pool.arena import Allocation
from aaflow_langgraph.store import LONGEST_CHAIN, ExtentStore, TokenSequence

NUM_LEFT = 2
"""Parts that a long chain is merged to: what is merged, and most often a long document in front of it, which others share."""

MOST_BYTES = 256 << 20
"""The most that one extent is merged to, and that one tick copies before it leaves the rest to the next."""

MOST_NOTED = 64
"""Chains that wait to be merged; of more the oldest are left to their next lookup."""


@dataclass(frozen=True, slots=True)
class _Chain:
    """A lookup that found many parts: ask it again."""

    sequence: TokenSequence
    borders: tuple[int, ...]
    stop: int


class Compactor:
    """``note`` may be called from any thread, ``tick`` from one at a time.

    Args:
        longest: Parts of a chain that are left alone. At least half as many are merged at once: what is merged every turn
            would be copied every turn.
    """

    def __init__(self, store: ExtentStore, longest: int = LONGEST_CHAIN) -> None:
        self._store = store
        self._longest = longest
        self._lock = threading.Lock()
        self._noted: dict[int, _Chain] = {}
        self._retiring: dict[int, tuple[int, ...]] = {}

    def note(self, sequence: TokenSequence, borders: Sequence[int], match: Match) -> None:
        """Merge, at the next tick, what a lookup found."""
        if not match.parts:
            return
        last = match.parts[-1][0].extent_id
        with self._lock:
            self._noted.pop(last, None)
            self._noted[last] = _Chain(sequence, tuple(borders), match.stop)
            while len(self._noted) > MOST_NOTED:
                del self._noted[next(iter(self._noted))]

    def tick(self) -> None:
        """Merge what was noted, and drop what was merged before and is read no more.

        The last first: a conversation is noted at every turn, and its last turn holds the others.
        """
        self._retire()
        num_copied = 0
        while num_copied < MOST_BYTES:
            with self._lock:
                if not self._noted:
                    return
                _, chain = self._noted.popitem()
            num_copied += self._merge(chain)

    def _merge(self, chain: _Chain) -> int:
        """Make a chain shorter as far as there is room; bytes copied."""
        store = self._store
        query = store.query(chain.sequence, chain.borders)
        parts, _ = cover(store.index.covering(query), query, chain.stop)
        for run in self._runs(parts):
            allocation = store.reserve_free(run[-1].stop - run[0].start)
            if allocation is not None:
                self._replace(chain.sequence, run, allocation)
                return allocation.num_bytes
        return 0

    def _runs(self, parts: Sequence[tuple[ExtentRecord, int, int]]) -> Iterator[list[ExtentRecord]]:
        """Neighbours to merge, those that shorten the chain most first; of equals the ones with the fewest tokens.

        What is read in part is another's, and what is canonical keeps its own bounds.
        """
        if len(parts) <= self._longest:
            return
        num_fixed = [0, *itertools.accumulate(not self._is_movable(part) for part in parts)]
        num_tokens = [0, *(stop for _, _, stop in parts)]
        length, fewest = len(parts) - min(NUM_LEFT, self._longest) + 1, max(2, self._longest // 2)
        while length >= fewest:
            runs = [
                (num_tokens[first + length] - num_tokens[first], first)
                for first in range(len(parts) - length + 1)
                if num_fixed[first + length] == num_fixed[first]
            ]
            if runs:
                tokens, first = min(runs)
                if self._store.layout.num_bytes(tokens) <= MOST_BYTES:
                    yield [record for record, _, _ in parts[first : first + length]]
            length = min(length - 1, max(fewest, length * 3 // 4))

    def _is_movable(self, part: tuple[ExtentRecord, int, int]) -> bool:
        record, start, stop = part
        return self._is_here(record) and not record.canonical_stop and (start, stop) == (record.start, record.stop)

    def _is_here(self, record: ExtentRecord) -> bool:
        """Are an extent's bytes in our pool, where the record says?"""
        ours = self._store.mine.get(record.extent_id)
        return ours is not None and ours.place == record.place and self._store.is_live(ours)

    def _replace(self, sequence: TokenSequence, run: Sequence[ExtentRecord], allocation: Allocation) -> None:
        """Copy a run into one extent, publish that, and let go of the run."""
        store, start, stop = self._store, run[0].start, run[-1].stop
        rows = store.tensor(allocation, stop - start)
        borders: list[tuple[int, str]] = []
        try:
            for record in run:
                part = store.rows(record)[..., : record.num_tokens, :]
                rows[..., record.start - start : record.stop - start, :] = part
                borders += [*record.borders, (record.stop, record.end_id)]
            merged = store.finish(sequence, start, stop, allocation, 0, run[0].parent, tuple(borders[:-1]))
        except BaseException:
            store.free(allocation)
            raise
        with store.lock:
            # Nobody was kept from evicting what was copied: then the copy may be of other bytes, and is not wanted.
            entered = store.enter(merged) if all(map(self._is_here, run)) else None
            if entered is None:
                store.free(allocation)
                return
            kept, receipt = entered
            if kept.place == merged.place:
                store.counts.compactions += 1
                self._retiring[kept.extent_id] = tuple(record.extent_id for record in run)
            store.release(receipt)
        self._retire()

    def _retire(self) -> None:
        """Drop the parts of merged extents, those that nobody reads now. Where the merged one is gone they stay."""
        store = self._store
        for extent_id, part_ids in list(self._retiring.items()):
            with store.lock:
                left: tuple[int, ...] = ()
                if extent_id in store.mine and store.index.take_over(extent_id, part_ids):
                    left = tuple(number for number in part_ids if number in store.mine and not store.discard(number))
            if left:
                self._retiring[extent_id] = left
            else:
                del self._retiring[extent_id]
