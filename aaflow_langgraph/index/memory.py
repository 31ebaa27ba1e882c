"""The index of one process: dictionaries under a lock. Oracle and baseline for every other index."""

from __future__ import annotations

import itertools
import secrets
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace

from aaflow_langgraph.errors import LeaseExpired
from aaflow_langgraph.evict.base import Candidate
from aaflow_langgraph.index.base import ExtentRecord, Match, Query, cover
from aaflow_langgraph.model import Receipt


class MemoryIndex:
    """See ``Index`` for the contract. ``clock`` returns seconds and is injected by tests."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.RLock()
        self._ids = itertools.count(1)
        self._uses = itertools.count(1)
        self._records: dict[int, ExtentRecord] = {}
        self._by_key: dict[tuple[str, int, int], int] = {}
        self._by_hash: dict[str, set[int]] = defaultdict(set)
        self._children: dict[int, set[int]] = defaultdict(set)
        self._last_used: dict[int, int] = {}
        self._leases: dict[str, Receipt] = {}
        self._readers: dict[int, set[str]] = defaultdict(set)

    def next_extent_id(self) -> int:
        return next(self._ids)

    def put(self, record: ExtentRecord, lease_s: float) -> tuple[ExtentRecord, Receipt]:
        with self._lock:
            known = self._by_key.get(record.key)
            if known is not None:
                record = self._records[known]
            else:
                if record.parent is not None and record.parent not in self._records:
                    # Its parent went while it was being computed: nothing leads to it, but it is whole and reachable
                    # again as soon as the parent is rebuilt.
                    record = replace(record, parent=None)
                self._records[record.extent_id] = record
                self._by_key[record.key] = record.extent_id
                for name in (*record.hashes, record.end_id):
                    self._by_hash[name].add(record.extent_id)
                if record.parent is not None:
                    self._children[record.parent].add(record.extent_id)
            return record, self._lease((record.extent_id,), lease_s)

    def match(self, query: Query, limit: int, lease_s: float) -> Match:
        with self._lock:
            parts, stop = cover(self.covering(query), query, limit)
            return Match(parts, stop, self._lease(tuple(record.extent_id for record, _, _ in parts), lease_s))

    def covering(self, query: Query) -> list[ExtentRecord]:
        with self._lock:
            found: set[int] = set()
            for name in (*query.hashes, *(end_id for _, end_id in query.tails)):
                found |= self._by_hash.get(name, set())
            return [self._records[extent_id] for extent_id in sorted(found)]

    def renew(self, receipt: Receipt, lease_s: float) -> Receipt:
        with self._lock:
            known = self._leases.get(receipt.lease_id)
            if known is None:
                raise LeaseExpired(f"lease on {len(receipt.extent_ids)} extents is gone: it ran out or was released")
            renewed = replace(
                known, deadline_s=self._clock() + lease_s
            )  # its own extents, not the receipt's claim (I9)
            self._leases[receipt.lease_id] = renewed
            return renewed

    def release(self, receipt: Receipt) -> bool:
        with self._lock:
            known = self._leases.pop(receipt.lease_id, None)
            if known is None:
                return not receipt.extent_ids
            # What the index recorded counts, not what the receipt claims: a forged one frees nothing else (I9).
            for extent_id in known.extent_ids:
                self._readers[extent_id].discard(known.lease_id)
                if not self._readers[extent_id]:
                    del self._readers[extent_id]
            return True

    def sweep(self) -> int:
        with self._lock:
            now = self._clock()
            lost = [receipt for receipt in self._leases.values() if receipt.deadline_s <= now]
            for receipt in lost:
                self.release(receipt)
            return len(lost)

    def candidates(self) -> list[Candidate]:
        with self._lock:
            return [
                Candidate(number, record.allocation.num_bytes, len(record.token_ids), self._last_used[number])
                for number, record in self._records.items()
                if number not in self._readers and number not in self._children
            ]

    def remove(self, extent_id: int) -> ExtentRecord | None:
        with self._lock:
            if extent_id in self._readers or extent_id in self._children or extent_id not in self._records:
                return None
            record = self._records.pop(extent_id)
            del self._by_key[record.key], self._last_used[extent_id]
            for name in (*record.hashes, record.end_id):
                self._by_hash[name].discard(extent_id)
                if not self._by_hash[name]:
                    del self._by_hash[name]
            if record.parent is not None:
                self._children[record.parent].discard(extent_id)
                if not self._children[record.parent]:
                    del self._children[record.parent]
            return record

    def records(self) -> list[ExtentRecord]:
        with self._lock:
            return list(self._records.values())

    def num_leases(self) -> int:
        with self._lock:
            return len(self._leases)

    def check(self) -> list[tuple[str, str]]:
        with self._lock:
            found: list[tuple[str, str]] = []
            for number, record in self._records.items():
                if self._by_key.get(record.key) != number:
                    found.append(("I8", f"extent {number} shares its key with extent {self._by_key.get(record.key)}"))
                if record.parent is not None and number not in self._children.get(record.parent, set()):
                    found.append(("I2", f"extent {number} is missing among the children of extent {record.parent}"))
                found += [
                    ("I4", f"extent {number} cannot be found by one of its hashes")
                    for name in (*record.hashes, record.end_id)
                    if number not in self._by_hash.get(name, set())
                ]
            for parent, children in self._children.items():
                if parent not in self._records:
                    found.append(("I3", f"extent {parent} was removed under its children {sorted(children)}"))
            for extent_id, readers in self._readers.items():
                if extent_id not in self._records:
                    found.append(("I3", f"extent {extent_id} was removed under {len(readers)} leases"))
                if not readers <= self._leases.keys():
                    found.append(("I2", f"extent {extent_id} is held by a lease that does not exist"))
            for lease_id, receipt in self._leases.items():
                if any(lease_id not in self._readers.get(extent_id, set()) for extent_id in receipt.extent_ids):
                    found.append(("I2", "a lease is missing from an extent it pins"))
            return found

    def _lease(self, extent_ids: tuple[int, ...], lease_s: float) -> Receipt:
        receipt = Receipt(secrets.token_hex(16), extent_ids, self._clock() + lease_s)
        if not extent_ids:
            return receipt  # a miss leaves nothing behind
        self._leases[receipt.lease_id] = receipt
        for extent_id in extent_ids:
            self._readers[extent_id].add(receipt.lease_id)
            self._last_used[extent_id] = next(self._uses)
        return receipt
