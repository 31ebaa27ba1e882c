"""The index of one process: dictionaries under a lock. Oracle and baseline for every other index."""

from __future__ import annotations

import itertools
import secrets
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from aaflow_langgraph.errors import Fenced, LeaseExpired
from aaflow_langgraph.evict.base import Candidate
from aaflow_langgraph.index.base import ExtentKey, ExtentRecord, Match, Place, Query, Swept, cover
from aaflow_langgraph.model import Receipt, Recipe


@dataclass(slots=True)
class _Use:
    """What policies look at."""

    created: int
    last: int
    count: int = 1


class MemoryIndex:
    """See ``Index`` for the contract. ``clock`` returns seconds and is injected by tests."""

    shared = False

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.RLock()
        self._ids = itertools.count(1)
        self._uses = itertools.count(1)
        self._epochs = itertools.count(1)
        self._owners: dict[str, tuple[int, float]] = {}
        self._records: dict[int, ExtentRecord] = {}
        self._by_key: dict[ExtentKey, int] = {}
        self._by_hash: dict[str, set[int]] = defaultdict(set)
        self._children: dict[int, set[int]] = defaultdict(set)
        self._used: dict[int, _Use] = {}
        self._leases: dict[str, Receipt] = {}
        self._readers: dict[int, set[str]] = defaultdict(set)
        self._claims: dict[str, tuple[str, float]] = {}
        self._recipes: dict[str, tuple[Recipe, float, float]] = {}

    # ---------------------------------------------------------------- owners

    def join(self, owner: str, lease_s: float) -> int:
        with self._lock:
            self.leave(owner)
            epoch = next(self._epochs)
            self._owners[owner] = (epoch, self._clock() + lease_s)
            return epoch

    def heartbeat(self, owner: str, epoch: int, lease_s: float) -> bool:
        with self._lock:
            if not self._is_current(owner, epoch):
                return False
            self._owners[owner] = (epoch, self._clock() + lease_s)
            return True

    def leave(self, owner: str) -> int:
        with self._lock:
            self._owners.pop(owner, None)
            held = self.records(owner)
            for record in held:
                self._vacate(record)
            return len(held)

    def owners(self) -> dict[str, float]:
        with self._lock:
            return {owner: deadline - self._clock() for owner, (_, deadline) in self._owners.items()}

    # ---------------------------------------------------------------- extents

    def next_extent_id(self) -> int:
        return next(self._ids)

    def put(self, record: ExtentRecord, epoch: int, lease_s: float) -> tuple[ExtentRecord, Receipt]:
        with self._lock:
            if record.place is not None:
                self._require_current(record.place.owner, epoch)
            known = self._records.get(self._by_key.get(record.key, 0))
            if known is not None:
                merged = replace(known, place=known.place or record.place, on_disk=known.on_disk or record.on_disk)
                self._records[known.extent_id] = record = merged
            else:
                record = self._add(record)
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

    def remove(self, extent_id: int, owner: str) -> ExtentRecord | None:
        with self._lock:
            record = self._records.get(extent_id)
            if record is None or record.place is None or record.place.owner != owner or not self._is_free(record):
                return None
            self._vacate(record)
            return record

    def move(self, extent_id: int, old: Place | None, new: Place, epoch: int) -> bool:
        with self._lock:
            self._require_current(new.owner, epoch)
            record = self._records.get(extent_id)
            if record is None or record.place != old:
                return False
            self._unbind(record)
            self._records[extent_id] = replace(record, place=new, parent=None)
            return True

    def take_over(self, extent_id: int, part_ids: Sequence[int]) -> bool:
        with self._lock:
            heir = self._records.get(extent_id)
            if heir is None:
                return False
            use = self._used[extent_id]
            for number in [number for number in part_ids if number in self._records]:
                used = self._used[number]
                use.created, use.last = min(use.created, used.created), max(use.last, used.last)
                use.count = max(use.count, used.count)
                children = self._children.get(number, set()) - {extent_id}
                self._unbind(self._records[number])
                self._records[number] = replace(self._records[number], parent=None)
                for child in [self._records[child_id] for child_id in children]:
                    if heir.place and child.place and child.place.owner == heir.place.owner:
                        self._records[child.extent_id] = replace(child, parent=extent_id)
                        self._children[extent_id].add(child.extent_id)
            return True

    def lose(self, extent_id: int, place: Place) -> bool:
        with self._lock:
            record = self._records.get(extent_id)
            if record is None or record.place != place:
                return False
            self._vacate(record)
            return True

    def set_on_disk(self, extent_id: int, on_disk: bool) -> bool:
        with self._lock:
            record = self._records.get(extent_id)
            if record is None:
                return False
            self._records[extent_id] = record = replace(record, on_disk=on_disk)
            if record.place is None and not on_disk:
                self._forget(record)
            return True

    def candidates(self, owner: str) -> list[Candidate]:
        with self._lock:
            return [
                Candidate(
                    number,
                    record.place.allocation.num_bytes,
                    record.num_tokens,
                    last_used=self._used[number].last,
                    num_uses=self._used[number].count,
                    created=self._used[number].created,
                    start=record.start,
                )
                for number, record in self._records.items()
                if record.place is not None and record.place.owner == owner and self._is_free(record)
            ]

    def records(self, owner: str | None = None) -> list[ExtentRecord]:
        with self._lock:
            return [
                record
                for record in self._records.values()
                if owner is None or (record.place is not None and record.place.owner == owner)
            ]

    # ---------------------------------------------------------------- leases

    def renew(self, receipt: Receipt, lease_s: float) -> Receipt:
        with self._lock:
            known = self._leases.get(receipt.lease_id)
            if known is None:
                raise LeaseExpired(f"lease on {len(receipt.extent_ids)} extents is gone: it ran out or was released")
            # Its own extents, not the receipt's claim (I9).
            renewed = replace(known, deadline_s=self._clock() + lease_s)
            self._leases[receipt.lease_id] = renewed
            return renewed

    def release(self, receipt: Receipt) -> bool:
        with self._lock:
            known = self._leases.pop(receipt.lease_id, None)
            if known is None:
                return not receipt.extent_ids
            # What the index recorded counts, not what the receipt claims: a forged one frees nothing else (I9).
            for extent_id in known.extent_ids:
                _discard(self._readers, extent_id, known.lease_id)
            return True

    def num_leases(self) -> int:
        with self._lock:
            return len(self._leases)

    def sweep(self) -> Swept:
        with self._lock:
            now = self._clock()
            lost = [receipt for receipt in self._leases.values() if receipt.deadline_s <= now]
            for receipt in lost:
                self.release(receipt)
            gone = [owner for owner, (_, deadline) in self._owners.items() if deadline <= now]
            num_extents = sum(self.leave(owner) for owner in gone)
            for name in [name for name, (_, deadline) in self._claims.items() if deadline <= now]:
                del self._claims[name]
            for kv_id in [kv_id for kv_id, (_, _, deadline) in self._recipes.items() if deadline <= now]:
                del self._recipes[kv_id]
            return Swept(len(lost), len(gone), num_extents)

    # ---------------------------------------------------------------- claims and recipes

    def claim(self, name: str, holder: str, lease_s: float) -> bool:
        with self._lock:
            now = self._clock()
            known, deadline = self._claims.get(name, (holder, now))
            if known != holder and deadline > now:
                return False
            self._claims[name] = (holder, now + lease_s)
            return True

    def unclaim(self, name: str, holder: str) -> bool:
        with self._lock:
            if self._claims.get(name, ("", 0.0))[0] != holder:
                return False
            del self._claims[name]
            return True

    def put_recipe(self, recipe: Recipe, lease_s: float) -> None:
        with self._lock:
            known = self._recipes.get(recipe.kv_id)
            if known is not None and (known[0].has_chat or not recipe.has_chat):
                recipe = known[0]
            self._recipes[recipe.kv_id] = (recipe, lease_s, self._clock() + lease_s)

    def recipe(self, kv_id: str) -> Recipe | None:
        with self._lock:
            known = self._recipes.get(kv_id)
            if known is None or known[2] <= self._clock():
                return None
            self._recipes[kv_id] = (known[0], known[1], self._clock() + known[1])
            return known[0]

    # ---------------------------------------------------------------- inspection

    def check(self) -> list[tuple[str, str]]:
        with self._lock:
            found: list[tuple[str, str]] = []
            for number, record in self._records.items():
                if self._by_key.get(record.key) != number:
                    found.append(("I8", f"extent {number} shares its key with extent {self._by_key.get(record.key)}"))
                if record.parent is not None and number not in self._children.get(record.parent, set()):
                    found.append(("I2", f"extent {number} is missing among the children of extent {record.parent}"))
                if record.place is None and not record.on_disk:
                    found.append(("I4", f"extent {number} is neither in memory nor on disk"))
                if record.place is not None and record.place.owner not in self._owners:
                    found.append(("I7", f"extent {number} is at a place of an owner that is gone"))
                found += [
                    ("I4", f"extent {number} cannot be found by one of its hashes")
                    for name in record.names
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

    def close(self) -> None:
        """Nothing to give back."""

    # ---------------------------------------------------------------- inside

    def _is_current(self, owner: str, epoch: int) -> bool:
        known, deadline = self._owners.get(owner, (0, 0.0))
        return known == epoch and deadline > self._clock()

    def _require_current(self, owner: str, epoch: int) -> None:
        if not self._is_current(owner, epoch):
            raise Fenced(f"owner {owner[:12]} is not registered under epoch {epoch}: join and announce again")

    def _is_free(self, record: ExtentRecord) -> bool:
        """May its place be given up? Not while it is read, nor while children need it and no copy is on disk (I3)."""
        number = record.extent_id
        return number not in self._readers and (record.on_disk or number not in self._children)

    def _add(self, record: ExtentRecord) -> ExtentRecord:
        number = record.extent_id
        parent = self._records.get(record.parent) if record.parent is not None else None
        if parent is None or parent.place is None or record.place is None or parent.place.owner != record.place.owner:
            # Its parent went while it was being computed, or lies in another pool: nothing leads to it, but it is whole and
            # reachable as soon as what is before it is there.
            record = replace(record, parent=None)
        self._records[number] = record
        self._by_key[record.key] = number
        for name in record.names:
            self._by_hash[name].add(number)
        if record.parent is not None:
            self._children[record.parent].add(number)
        self._used[number] = _Use(next(self._uses), 0)
        return record

    def _vacate(self, record: ExtentRecord) -> None:
        """Take an extent from its place; one that is nowhere then is forgotten."""
        if not record.on_disk:
            self._forget(record)
        else:
            if record.parent is not None:
                _discard(self._children, record.parent, record.extent_id)
            self._records[record.extent_id] = replace(record, place=None, parent=None)

    def _unbind(self, record: ExtentRecord) -> None:
        """End the bonds to parent and children: they order eviction inside one pool."""
        if record.parent is not None:
            _discard(self._children, record.parent, record.extent_id)
        for child in self._children.pop(record.extent_id, ()):
            self._records[child] = replace(self._records[child], parent=None)

    def _forget(self, record: ExtentRecord) -> None:
        number = record.extent_id
        for lease_id in list(self._readers.get(number, ())):
            self.release(self._leases[lease_id])
        self._unbind(record)
        del self._records[number], self._by_key[record.key], self._used[number]
        for name in record.names:
            if number in self._by_hash.get(name, ()):
                _discard(self._by_hash, name, number)

    def _lease(self, extent_ids: tuple[int, ...], lease_s: float) -> Receipt:
        receipt = Receipt(secrets.token_hex(16), extent_ids, self._clock() + lease_s)
        if not extent_ids:
            return receipt  # a miss leaves nothing behind
        self._leases[receipt.lease_id] = receipt
        for extent_id in extent_ids:
            self._readers[extent_id].add(receipt.lease_id)
            use = self._used[extent_id]
            use.count += use.last > 0  # the writer's own lease is the first use
            use.last = next(self._uses)
        return receipt


def _discard(table: dict, key: object, member: object) -> None:  # type: ignore[type-arg]
    """Take ``member`` from the set at ``key``; an empty set goes."""
    members = table[key]
    members.discard(member)
    if not members:
        del table[key]
