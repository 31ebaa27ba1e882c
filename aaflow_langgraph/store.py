"""Extents as one thing: bytes in a pool, records in an index, a lock that keeps the two in step.

Knows allocation, publishing, leases, eviction, and how bytes that lie elsewhere come into reach: the pool of another
process is read in place, a copy on disk is fetched. All of that is about bytes in main memory; an accelerator reads copies
of them. Knows no prompts, no model, no policy beyond calling one. A cache problem is a miss here: what cannot be brought
into reach is left to be computed again (I14).
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
import xxhash

from aaflow_langgraph.engine.base import Piece
from aaflow_langgraph.errors import (
    Evicted,
    Fenced,
    IndexUnavailable,
    IntegrityError,
    KVMissing,
    LeaseExpired,
)
from aaflow_langgraph.evict.base import Policy
from aaflow_langgraph.hashing import Joint, block_hashes, extent_name, prefix_id
from aaflow_langgraph.index.base import ExtentRecord, Index, Match, Place, Query, cover, matched
from aaflow_langgraph.index.guarded import GuardedIndex
from aaflow_langgraph.lease import Leases
from aaflow_langgraph.model import BLOCK_TOKENS, BlockHash, Finding, KVLayout, Receipt
from aaflow_langgraph.movements import Movements
from aaflow_langgraph.pool.arena import Allocation
from aaflow_langgraph.pool.base import Pool
from aaflow_langgraph.pool.device import DeviceTier
from aaflow_langgraph.pool.disk import DiskPool, StoredExtent
from aaflow_langgraph.pool.peers import Attached, Peers
from aaflow_langgraph.results import Transfer
from aaflow_langgraph.tensors import DTYPES, tensor_bytes

LEASE_S = 60.0
"""Lease of a request in a process of its own: renewed at every forward, so long enough for one of a large model, short
enough that a lost receipt does not pin memory for good."""

SHARED_LEASE_S = 8.0
"""Lease where several processes share an index: a thread renews it, so it only has to outlast a busy machine."""

OWNER_LEASE_S = 15.0
"""An owner that is not heard of for so long is fenced: its places are dropped until it announces them again."""

LONGEST_CHAIN = 8
"""A longer chain of extents is merged. Measured behind 4,096 tokens (135M, bf16, 2 cores): a step over 8 extents costs 1.07 of
one over 2, over 32 it is 1.55, over 64 it is 2.2."""

_MAX_TRIES = 8
"""So often a lookup is repeated when what it found turned out to be gone; then it is a miss."""

_log = logging.getLogger("aaflow_langgraph")


@dataclass(frozen=True, slots=True)
class TokenSequence:
    """Token ids with their block hashes and joints: what a store is asked about."""

    token_ids: tuple[int, ...]
    hashes: tuple[BlockHash, ...]
    joints: tuple[Joint, ...] = ()


@dataclass(slots=True)
class StoreCounts:
    """Events since the store was opened."""

    evictions: int = 0
    lost_receipts: int = 0
    lost_extents: int = 0
    spills: int = 0
    spill_failures: int = 0
    fetches: int = 0
    fetch_failures: int = 0
    adoptions: int = 0
    announcements: int = 0
    compactions: int = 0


class _OutOfReach(Exception):
    """Bytes exist but cannot be read here now: a paused owner, a full pool. Internal: the lookup ends in front of them."""


class ExtentStore:
    """Extents of one namespace: one pool of our own, found through one index, with others' pools and a disk in reach.

    Args:
        peers: Pools of other processes of this host; None where the index is not shared.
        disk: The tier below the pool; None where there is none.
        device_tier: The tier above it, where the model does not compute in main memory; else None.
    """

    def __init__(
        self,
        namespace: str,
        layout: KVLayout,
        index: Index,
        pool: Pool,
        policy: Policy,
        *,
        peers: Peers | None = None,
        disk: DiskPool | None = None,
        device_tier: DeviceTier | None = None,
    ) -> None:
        self.namespace = namespace
        self.layout = layout
        self.index = index
        self.pool = pool
        self.peers = peers
        self.disk = disk
        self.device_tier = device_tier
        self.dtype = DTYPES[layout.dtype]
        self.counts = StoreCounts()
        self.movements = Movements()
        self.overflow_bytes = 0
        self.peak_overflow_bytes = 0
        self.leases = Leases(index, SHARED_LEASE_S if index.shared else LEASE_S)
        self.mine: dict[int, ExtentRecord] = {}
        """The manifest of our own pool: what it holds and published, to announce from when the index forgot it."""
        self.unsaved: dict[int, None] = {}
        """Extents that the disk has no copy of yet, oldest first."""
        self.lock = threading.RLock()
        self.writes_behind = True
        """Does every extent get its copy on disk in the background, or only when it leaves the pool?"""
        self.wants: Callable[[Sequence[str]], bool] | None = None
        """Which extents may go to disk, by their names; all when None."""
        self.when_long: Callable[[TokenSequence, Sequence[int], Match], None] = lambda sequence, borders, match: None
        """Told of a lookup (its sequence, its borders, what it found) that found more than ``LONGEST_CHAIN`` parts."""
        self._policy = policy
        self._fetching: dict[int, threading.Lock] = {}
        self._pinned: set[int] = set()
        self._computed: set[int] = set()
        self._files: dict[str, int] = {}
        self._removed_files: set[str] = set()
        self._epoch = 0
        self._is_announced = True
        self._num_outages = 0
        if disk is not None:
            disk.when_evicted(self._note_gone)
        self._join()

    # ---------------------------------------------------------------- lookup

    def sequence(
        self, token_ids: tuple[int, ...], known: Sequence[BlockHash] = (), joints: tuple[Joint, ...] = ()
    ) -> TokenSequence:
        """Hash a sequence, continuing from the hashes of its first blocks when they are known."""
        return TokenSequence(token_ids, block_hashes(self.namespace, token_ids, known, joints), joints)

    def name(self, sequence: TokenSequence, stop: int) -> str:
        """``kv_id`` of the first ``stop`` tokens of a sequence."""
        return prefix_id(self.namespace, sequence.token_ids, stop, sequence.hashes, sequence.joints)

    def match(
        self, sequence: TokenSequence, limit: int, *, canonical: bool = False, borders: Sequence[int] = ()
    ) -> Match:
        """Lease what covers the longest prefix of at most ``limit`` tokens, and bring all of it into reach.

        ``borders`` are positions inside blocks where an extent may end (ends of recipes); the end of the sequence is always
        one. ``canonical`` takes whole canonical blocks that this process computed itself: what another library version,
        thread count or instruction set computed is right, but its bits are not ours. Give the receipt back with ``release``.
        """
        query = self.query(sequence, borders, canonical=canonical)
        for _ in range(_MAX_TRIES):
            match = self.index.match(query, limit, self.leases.lease_s)
            # Held from now on: bringing it here may take longer than a lease, and a pool that is read is not detached.
            self.leases.hold(match.receipt, [record for record, _, _ in match.parts])
            parts = []
            try:
                for record, start, stop in match.parts:
                    if canonical and record.extent_id not in self._computed:
                        raise _OutOfReach(f"the bits of extent {record.extent_id} are another process's")
                    parts.append((self._bring(record), start, stop))
            except KVMissing:  # the index knows by now: ask again
                self.leases.release(match.receipt)
                continue
            except _OutOfReach as reason:
                _log.info("a lookup ends early: %s", reason)
                self.leases.release(match.receipt)
                limit = parts[-1][2] if parts else 0
                continue
            except BaseException:
                self.leases.release(match.receipt)
                raise
            if self.disk is not None and any(record.place is None for record, _, _ in match.parts):
                # The end of a chain first, so that it is older than its front and goes before it.
                for record, _, _ in reversed(parts):
                    for part in reversed(unmerged(record)):
                        self.disk.touch(file_name(part))
            found = replace(match, parts=tuple(parts))
            if len(parts) > LONGEST_CHAIN and not canonical:
                self.when_long(sequence, borders, found)
            return found
        return self.index.match(query, 0, self.leases.lease_s)

    def lease(self, sequence: TokenSequence, borders: Sequence[int]) -> Receipt:
        """Pin what the index knows of a sequence for ``LEASE_S``, without bringing it here; nobody renews it."""
        return self.index.match(self.query(sequence, borders), len(sequence.token_ids), LEASE_S).receipt

    def covered(self, sequence: TokenSequence, limit: int, borders: Sequence[int]) -> int:
        """How many of the first ``limit`` tokens the index knows; nothing is leased afterwards."""
        match = self.index.match(self.query(sequence, borders), limit, self.leases.lease_s)
        self.index.release(match.receipt)
        return match.stop

    def release(self, receipt: Receipt) -> bool:
        """Give a lease back; False when it was already gone. Idempotent."""
        return self.leases.release(receipt)

    def query(self, sequence: TokenSequence, borders: Sequence[int], *, canonical: bool = False) -> Query:
        """What to ask the index about a sequence."""
        ids, hashes = sequence.token_ids, sequence.hashes
        inside = sorted({stop for stop in (*borders, len(ids)) if stop % BLOCK_TOKENS and 0 < stop <= len(ids)})
        tails = () if canonical else tuple((stop, self.name(sequence, stop)) for stop in inside)
        return Query(ids, hashes, tails, canonical)

    # ---------------------------------------------------------------- bytes

    def piece(self, record: ExtentRecord, start: int, stop: int) -> Piece:
        """A view of part of an extent that is in reach, on the device that the model computes on."""
        tier = self.device_tier
        if tier is None:
            kv = self.rows(record)
        else:
            kv = tier.rows(record.place, lambda: self.rows(record), lambda: self.is_live(record))
        return Piece(kv[..., start - record.start : stop - record.start, :], start, stop)

    def rows(self, record: ExtentRecord) -> torch.Tensor:
        """All rows of an extent, ``[L, 2, H, even(T), D]``, where they lie in main memory. Tokens are laid out in even numbers,
        so that a head's keys split into two equal halves without a copy (attention.py, products).
        """
        place = record.place
        memory = self._memory(place.owner) if place else None
        if place is None or memory is None:
            raise Evicted(f"extent {record.extent_id} is not in reach")
        return memory.tensor(place.allocation, self.dtype, self.layout.shape(even(record.num_tokens)))

    def tensor(self, allocation: Allocation, num_tokens: int) -> torch.Tensor:
        """An allocation of our own pool as ``[L, 2, H, num_tokens, D]``."""
        return self._own_rows(allocation, num_tokens)[..., :num_tokens, :]

    def verify(self, receipt: Receipt, records: Sequence[ExtentRecord]) -> None:
        """Make sure that every byte read under a lease was still its extent's. Called after the reading.

        Raises:
            LeaseExpired: It was not: whatever was computed from it must be discarded. Way out: recompute.
        """
        if not all(self.is_live(record) for record in records):
            raise LeaseExpired("an extent was evicted while it was being read: its lease had run out")
        self.leases.check(receipt)

    def is_live(self, record: ExtentRecord) -> bool:
        """Do the bytes at a record's place still belong to it? Safe without any lock, in any process."""
        memory = self._memory(record.place.owner) if record.place else None
        return memory is not None and record.place is not None and memory.is_live(record.place.allocation)

    # ---------------------------------------------------------------- writing

    def reserve(self, num_tokens: int) -> Allocation | None:
        """Room for ``num_tokens`` tokens, by eviction if need be; None when leases leave too little."""
        need = self.layout.num_bytes(even(num_tokens))
        with self.lock:
            allocation = self.pool.reserve(need)
            if allocation is not None or need > self.pool.capacity_bytes:
                return allocation
            self.sweep()
            while allocation is None:
                victims = self._policy(self.index.candidates(self.pool.owner), need)
                # One round may free enough bytes but no range long enough: go on until it fits or nobody is left.
                if not sum(self.drop(victim.extent_id) > 0 for victim in victims):
                    return None
                allocation = self.pool.reserve(need)
            return allocation

    def reserve_free(self, num_tokens: int) -> Allocation | None:
        """Room for ``num_tokens`` tokens that nobody has; None where there is none."""
        with self.lock:
            return self.pool.reserve(self.layout.num_bytes(even(num_tokens)))

    def publish(
        self,
        sequence: TokenSequence,
        start: int,
        stop: int,
        allocation: Allocation,
        canonical_stop: int,
        parent: int | None,
    ) -> tuple[ExtentRecord, Receipt] | None:
        """Make finished bytes visible as the extent ``[start, stop)``; an equal one that is there already wins (I8).

        None when the index does not answer: then the bytes stay the caller's, unpublished.
        """
        return self.enter(self.finish(sequence, start, stop, allocation, canonical_stop, parent))

    def finish(
        self,
        sequence: TokenSequence,
        start: int,
        stop: int,
        allocation: Allocation,
        canonical_stop: int,
        parent: int | None,
        borders: tuple[tuple[int, str], ...] = (),
    ) -> ExtentRecord:
        """The record of bytes that are whole now: they are not changed any more. Nobody sees them before ``enter``."""
        rows = self._own_rows(allocation, stop - start)
        rows[..., stop - start :, :] = 0
        record = ExtentRecord(
            extent_id=self.index.next_extent_id(),
            start=start,
            stop=stop,
            token_ids=sequence.token_ids[start:stop],
            end_id=self.name(sequence, stop),
            hashes=sequence.hashes[start // BLOCK_TOKENS : stop // BLOCK_TOKENS],
            canonical_stop=canonical_stop,
            parent=parent,
            place=Place(self.pool.owner, allocation),
            checksum=checksum(rows),
            borders=borders,
        )
        # Two phases: the bytes are whole and their generation is in the pool's header before the index tells anybody.
        self.pool.publish(allocation)
        return record

    def enter(self, record: ExtentRecord) -> tuple[ExtentRecord, Receipt] | None:
        """The second half of ``publish``: tell the index."""
        assert record.place is not None
        allocation = record.place.allocation
        with self.lock:
            for _ in range(_MAX_TRIES):
                try:
                    kept, receipt = self._put(record)
                except (IndexUnavailable, Fenced):
                    return None
                if kept.place == record.place:
                    self._note(replace(kept, token_ids=record.token_ids, checksum=record.checksum))
                    self._computed.add(kept.extent_id)
                elif kept.place is not None:
                    try:
                        self._bring(kept, fetch=False)  # not while we hold the lock that a fetch needs
                    except (KVMissing, _OutOfReach):
                        # The equal extent of a process that is gone, or that does not answer: ours takes its place.
                        self.index.release(receipt)
                        self.index.lose(kept.extent_id, kept.place)
                        continue
                    self.pool.free(allocation)
                self.leases.hold(receipt, (kept,))
                return kept, receipt
            return None

    def free(self, allocation: Allocation) -> None:
        """Give back bytes that were never published."""
        with self.lock:
            self.pool.free(allocation)

    def shrink(self, allocation: Allocation, num_tokens: int) -> Allocation:
        """Keep room for ``num_tokens`` tokens."""
        with self.lock:
            return self.pool.shrink(allocation, self.layout.num_bytes(even(num_tokens)))

    def note_overflow(self, change_bytes: int) -> None:
        """Count bytes that requests hold outside of the pool because it was full."""
        with self.lock:
            self.overflow_bytes += change_bytes
            self.peak_overflow_bytes = max(self.peak_overflow_bytes, self.overflow_bytes)

    # ---------------------------------------------------------------- eviction, spill, fetch

    def evict(self, sequence: TokenSequence, borders: Sequence[int], *, from_disk: bool = False) -> int:
        """Drop the extents of a sequence from our pool, last first, until one is leased or somebody else builds on it;
        bytes freed. They are spilled first where there is a disk, unless they shall go from there too.
        """
        with self.lock:
            freed = 0
            query = self.query(sequence, borders)
            found = self.index.covering(query)
            for record in sorted(found, key=lambda r: -r.stop):
                if record.token_ids and record.token_ids != sequence.token_ids[record.start : record.stop]:
                    continue
                if record.borders and matched(record, query) < record.stop:
                    continue  # the rest of what was merged into it is others'
                freed += self.drop(record.extent_id, spill=not from_disk)
                if from_disk and self.disk is not None and record.on_disk:
                    self._remove_file(record)
            return freed

    def evict_copies(self, sequence: TokenSequence, borders: Sequence[int]) -> int:
        """Drop the copies of a sequence's extents on the device; bytes freed. They stay in the pool."""
        tier = self.device_tier
        if tier is None:
            return 0
        return sum(tier.drop(record.place) for record in self.index.covering(self.query(sequence, borders)))

    def drop(self, extent_id: int, *, spill: bool = True) -> int:
        """Evict one extent from our pool; bytes freed, 0 when it may not go."""
        with self.lock:
            record = self.mine.get(extent_id)
            if spill and record is not None and extent_id not in self._pinned and self.is_live(record):
                self.spill(extent_id)
            num_bytes = self.discard(extent_id)
            if record is not None and num_bytes:
                self.counts.evictions += 1
                for part in unmerged(record):  # a handle that ends inside is told why it was recomputed, too
                    self.movements.note("evict", part, self.layout.num_bytes(even(part.num_tokens)))
            return num_bytes

    def discard(self, extent_id: int) -> int:
        """Take one extent from our pool whose bytes are elsewhere, or wanted by nobody; bytes freed, 0 when it may not go."""
        with self.lock:
            record = self.mine.get(extent_id)
            if record is None or record.place is None or extent_id in self._pinned:
                return 0
            if not self.pool.is_live(record.place.allocation):
                raise IntegrityError(f"extent {extent_id} was freed before it was evicted")
            if self.index.remove(extent_id, self.pool.owner) is None:
                return 0
            self._forget(extent_id)
            self.pool.free(record.place.allocation)
            if self.device_tier is not None:
                self.device_tier.drop(record.place)
            return record.place.allocation.num_bytes

    def spill(self, extent_id: int) -> bool:
        """Write one extent of our pool to disk unless it is there; False when that failed or there is no disk.

        What was merged is written as what it was merged from: a part that is there is not written again, and each goes from
        disk when nobody needs it. A disk that cannot take it costs time later, never the request.
        """
        with self.lock:
            record = self.mine.get(extent_id)
            if self.disk is None or record is None or record.place is None:
                return False
            if extent_id in self._pinned:
                return record.on_disk
            missing = self._missing(record)
            if not missing:
                self.unsaved.pop(extent_id, None)
                return True
            wanted = [part for part in missing if self.wants is None or self.wants(part.names)]
            if not wanted:
                return False  # it stays among the unsaved: somebody may want it later
            self._pinned.add(extent_id)
        try:
            num_written = self._write(record, wanted)
        except KVMissing:  # given up for an equal extent while it was read
            return False
        except (MemoryError, OSError) as error:  # CapacityError is one
            self._count_spill_failure(error)
            return False
        finally:
            with self.lock:
                self._pinned.discard(extent_id)
                if len(wanted) == len(missing):  # else somebody may want the rest later
                    self.unsaved.pop(extent_id, None)
        if num_written:
            self.movements.note("spill", record)
        return len(wanted) == len(missing)

    def is_saved(self, record: ExtentRecord) -> bool:
        """Is all of an extent on disk, too?"""
        return not self._missing(record)

    def persist(self, sequence: TokenSequence, borders: Sequence[int], stop: int) -> bool:
        """Write what covers ``[0, stop)`` of a sequence to disk now, whosever pool it is in; is all of it there?"""
        query = self.query(sequence, borders)
        tried: set[int] = set()
        while True:
            found = self.index.covering(query)
            reached = cover([record for record in found if record.on_disk], query, stop)[1]
            # Asked again after the writing: extents are merged in the background, and one that is may be gone when its turn
            # comes. What lies in front of the gap is there already, so what starts behind it is tried first.
            fresh = [record for record in found if not record.on_disk and record.extent_id not in tried]
            if reached >= stop or self.disk is None or not fresh:
                return reached >= stop
            for record in [record for record in fresh if record.start >= reached] or fresh:
                tried.add(record.extent_id)
                if record.extent_id in self.mine:
                    self.spill(record.extent_id)
                elif record.place is not None:
                    self._spill_foreign(replace(record, token_ids=sequence.token_ids[record.start : record.stop]))

    def forget_names(self, known_by: Sequence[str], is_needed: Callable[[Sequence[str]], bool]) -> int:
        """Remove the copies on disk of extents with one of these names, unless they are needed; bytes of KV removed."""
        removed = 0
        for record in self.index.covering(Query((), tuple(BlockHash(name) for name in known_by))):
            if self.disk is None or not record.on_disk or is_needed(record.names):
                continue
            with self.lock:
                if self._remove_file(record):
                    removed += self.layout.num_bytes(even(record.num_tokens))
        return removed

    def attach_disk(self, disk: DiskPool, *, writes_behind: bool, wants: Callable[[Sequence[str]], bool]) -> None:
        """Put a tier below the pool that takes what ``wants`` says, and tell the index what is there."""
        with self.lock:
            disk.when_evicted(self._note_gone)
            self.disk, self.writes_behind, self.wants = disk, writes_behind, wants
            self.unsaved.update(dict.fromkeys(number for number, record in self.mine.items() if not record.on_disk))
        self.announce_disk()

    def detach_disk(self) -> None:
        """Write what is wanted and not there yet, then forget the tier: the index must not promise what nobody can read."""
        self._spill_unsaved()
        with self.lock:
            if not set(self.index.owners()) - {self.pool.owner}:  # else others may serve them from the same directory
                for record in self.index.records():
                    if record.on_disk:
                        self.index.set_on_disk(record.extent_id, False)
            for extent_id, record in self.mine.items():
                self.mine[extent_id] = replace(record, on_disk=False)
            self.unsaved.clear()
            self._files.clear()
            self._removed_files.clear()
            self.disk, self.writes_behind, self.wants = None, True, None

    def adopt(self, peer: Attached) -> None:
        """Take over what a dead owner left: copy it into our pool as far as room is free, then forget the owner."""
        claim = f"adopt.{peer.owner}"
        if not self.index.claim(claim, self.pool.owner, OWNER_LEASE_S):
            return  # somebody else is at it
        try:
            for record in self.index.records(peer.owner):
                if record.on_disk or record.place is None or not peer.is_live(record.place.allocation):
                    continue
                with self.lock:
                    allocation = self.pool.reserve(self.layout.num_bytes(even(record.num_tokens)))
                if allocation is None:
                    break
                rows = self._own_rows(allocation, record.num_tokens).copy_(self.rows(record))
                if not self._place(replace(record, checksum=checksum(rows)), allocation):
                    continue
                self.counts.adoptions += 1
                self.movements.note("adopt", record)
            self.index.leave(peer.owner)
        finally:
            self.index.unclaim(claim, self.pool.owner)

    def transfer(self, sequence: TokenSequence, borders: Sequence[int], total: int) -> Transfer:
        """Bring what is known of the first ``total`` tokens into reach, and out of the memory of owners that are gone."""
        before = {record.extent_id: record.place for record in self.index.covering(self.query(sequence, borders))}
        for peer in self.peers.attached() if self.peers is not None else ():
            if not peer.is_alive():
                self.adopt(peer)
        match = self.match(sequence, total, borders=borders)
        self.release(match.receipt)
        by_way = dict.fromkeys(("local", "in_place", "copied", "fetched"), 0)
        for record, start, stop in match.parts:
            was = before.get(record.extent_id)
            if record.place is not None and record.place.owner != self.pool.owner:
                way = "in_place"
            elif was is None:
                way = "fetched"
            else:
                way = "local" if was.owner == self.pool.owner else "copied"
            by_way[way] += stop - start
        return Transfer(
            total,
            by_way["local"],
            by_way["in_place"],
            by_way["copied"],
            by_way["fetched"],
            total - match.stop,
            0.0,
        )

    # ---------------------------------------------------------------- membership

    def sweep(self) -> None:
        """Drop what is past its time and count it."""
        swept = self.index.sweep()
        with self.lock:
            self.counts.lost_receipts += swept.num_leases

    def beat(self) -> None:
        """Tell the index that we live; announce everything again when it forgot us (it was flushed, or we stood still), or
        when it was away: nobody knows which of the last calls it still took.
        """
        num_outages = self.index.num_outages if isinstance(self.index, GuardedIndex) else 0
        is_known = self.index.heartbeat(self.pool.owner, self._epoch, OWNER_LEASE_S)
        if is_known and self._is_announced and num_outages == self._num_outages:
            return
        try:
            self.announce()
        except IndexUnavailable:
            return  # the next beat tries again
        self._num_outages = num_outages

    @property
    def knows_less_than_disk(self) -> bool:
        """Were files removed whose extents we cannot name without asking the index for all of them?"""
        return bool(self._removed_files)

    def reconcile(self) -> None:
        """Make the index agree with our pool and the disk again, where an answer was lost on the way or a file of another
        process was removed to make room.
        """
        with self.lock:
            removed, self._removed_files = self._removed_files, set()
            known = self.index.records()
            for record in known:
                if record.on_disk and file_name(record) in removed:
                    self.index.set_on_disk(record.extent_id, False)
            there = {record.extent_id for record in known if record.place and record.place.owner == self.pool.owner}
            for record in [record for number, record in self.mine.items() if number not in there]:
                self._announce(record)

    def announce(self) -> None:
        """Join, and publish again what our pool and the disk hold.

        Raises:
            IndexUnavailable: Way out: retry.
        """
        with self.lock:
            self._is_announced = False
            self._join()
            for record in list(self.mine.values()):
                self._announce(record)
            self.counts.announcements += 1
        self.announce_disk()
        self._is_announced = True

    def announce_disk(self) -> None:
        """Tell the index what is on disk."""
        for found in self.disk.scan() if self.disk is not None else ():
            self._announce_file(found)

    # ---------------------------------------------------------------- inspection

    def check(self) -> list[Finding]:
        """Every violated invariant that can be seen from here: I1-I8, I10, I11."""
        with self.lock:
            found = [Finding("I1", what) for what in self.pool.check()]
            found += [Finding(number, what) for number, what in self.index.check()]
            if self.pool.used_bytes > self.pool.capacity_bytes or self.pool.peak_bytes > self.pool.capacity_bytes:
                found.append(
                    Finding("I10", f"{self.pool.peak_bytes} bytes were in use, capacity is {self.pool.capacity_bytes}")
                )
            ranges: dict[int, int] = {}
            for record in self.index.records(self.pool.owner):
                where = f"extent {record.extent_id} [{record.start}, {record.stop})"
                if record.place is None or not self.pool.is_live(record.place.allocation):
                    found.append(Finding("I4", f"{where} is published but its bytes were freed"))
                    continue
                if record.extent_id not in self.mine:
                    found.append(Finding("I2", f"{where} is missing in the manifest of its pool"))
                offset = record.place.allocation.offset
                if offset in ranges:
                    found.append(Finding("I8", f"{where} shares its bytes with extent {ranges[offset]}"))
                ranges[offset] = record.extent_id
                known = self.mine.get(record.extent_id, record)
                if not self.intact(known):
                    found.append(Finding("I5", f"the bytes of {where} changed since they were published"))
                copy = self.device_tier.find(known.place) if self.device_tier is not None else None
                if copy is not None and checksum(copy) != known.checksum:
                    found.append(Finding("I5", f"the copy of {where} on the device is not what was published"))
            if self.device_tier is not None:
                found += [Finding("I10", what) for what in self.device_tier.check()]
            if self.disk is not None:
                found += self.disk.check()
            return found

    def intact(self, record: ExtentRecord) -> bool:
        """Do an extent's bytes still have the checksum they were published with?"""
        return checksum(self.rows(record)) == record.checksum

    def close(self) -> None:
        """Write what the disk lacks, leave the index, give memory and connections back."""
        self._spill_unsaved()
        if not self._has_heirs():
            self.index.leave(self.pool.owner)
        self.pool.close()
        if self.device_tier is not None:
            self.device_tier.close()
        if self.peers is not None:
            self.peers.close()
        if self.disk is not None:
            self.disk.close()
        self.index.close()

    # ---------------------------------------------------------------- inside

    def _spill_unsaved(self) -> None:
        """Give every extent that may have one its copy on disk."""
        for extent_id in list(self.unsaved):
            self.spill(extent_id)

    def _has_heirs(self) -> bool:
        """Is there a living process that may adopt what we leave in memory? Owners found dead are forgotten."""
        if self.peers is None or all(self.is_saved(record) for record in self.mine.values()):
            return False
        found = False
        for owner in set(self.index.owners()) - {self.pool.owner}:
            try:
                found = self.peers.attach(owner).is_alive() or found
            except Evicted:
                self.index.leave(owner)
            except KVMissing:
                found = True  # it does not answer now; it may later
        return found

    def _join(self) -> None:
        self._epoch = self.index.join(self.pool.owner, OWNER_LEASE_S if self.index.shared else math.inf)

    def _announce(self, record: ExtentRecord) -> None:
        kept, receipt = self.index.put(replace(record, parent=None), self._epoch, OWNER_LEASE_S)
        self.index.release(receipt)
        if kept.place != record.place and record.place is not None:
            # Somebody computed it meanwhile: one copy is enough (I8). Who reads ours finds out after its forward.
            self._forget(record.extent_id)
            self.pool.free(record.place.allocation)
        elif kept.extent_id != record.extent_id:
            self._forget(record.extent_id)
            self._note(replace(kept, token_ids=record.token_ids, checksum=record.checksum))

    def _put(self, record: ExtentRecord) -> tuple[ExtentRecord, Receipt]:
        try:
            return self.index.put(record, self._epoch, self.leases.lease_s)
        except Fenced:
            self.announce()
            return self.index.put(record, self._epoch, self.leases.lease_s)

    def _bring(self, record: ExtentRecord, *, fetch: bool = True) -> ExtentRecord:
        """Make a leased extent's bytes readable here.

        Raises:
            KVMissing: They are gone, and the index was told.
            _OutOfReach: They are not, but cannot be read now.
        """
        place = record.place
        if place is None:
            return self._fetch(record)
        if place.owner != self.pool.owner:
            if self.peers is None:
                raise _OutOfReach(f"the pool {place.owner[:12]} belongs to another process, and this one attaches none")
            try:
                memory: Pool | Attached = self.peers.attach(place.owner)
            except KVMissing as error:
                if isinstance(error, Evicted) and self._is_silent(place.owner):
                    self.index.leave(place.owner)
                    raise
                if fetch and record.on_disk and self.disk is not None:
                    return self._fetch(record)
                raise _OutOfReach(str(error)) from error
        else:
            memory = self.pool
        if memory.is_live(place.allocation):
            return record
        self.counts.lost_extents += 1
        self.index.lose(record.extent_id, place)
        raise Evicted(f"extent {record.extent_id} is published but its bytes were given to others")

    def _fetch(self, record: ExtentRecord) -> ExtentRecord:
        """Read a leased extent from disk into our pool; of several threads that need it one reads."""
        if self.disk is None:
            raise _OutOfReach(
                f"extent {record.extent_id} is on the disk of another process; this one was opened without"
            )
        with self._one_fetcher(record.extent_id):
            known = self.mine.get(record.extent_id)
            if known is not None:
                return known
            allocation = self.reserve(record.num_tokens)
            if allocation is None:
                raise _OutOfReach(f"no room in the pool to fetch {record.num_tokens} tokens from disk")
            rows = self._own_rows(allocation, record.num_tokens)
            # Where the tokens are known the file need only be what they would be written as; else it is taken apart.
            wanted = stored(record) if record.token_ids else file_name(record)
            try:
                found = self.disk.read(wanted, rows)
            except (KVMissing, IntegrityError) as error:
                self.free(allocation)
                self.counts.fetch_failures += 1
                self.index.set_on_disk(record.extent_id, False)
                _log.warning("an extent could not be read from disk and is computed again: %s", error)
                raise Evicted(f"the copy of extent {record.extent_id} on disk is gone or damaged") from error
            # Two processes may have computed the same tokens to other bits; those of the file are what is here now.
            fetched = self._place(replace(record, token_ids=found.token_ids, checksum=found.checksum), allocation)
            if fetched is None:
                raise Evicted(f"extent {record.extent_id} was fetched by another process at the same moment")
            self.counts.fetches += 1
            self.movements.note("fetch", fetched)
            return fetched

    def _place(self, record: ExtentRecord, allocation: Allocation) -> ExtentRecord | None:
        """Say that a known extent's bytes are now in our pool; None when somebody else was faster (ours are freed)."""
        self.pool.publish(allocation)
        new = Place(self.pool.owner, allocation)
        with self.lock:
            try:
                moved = self.index.move(record.extent_id, record.place, new, self._epoch)
            except Fenced:
                moved = False
            if not moved:
                self.pool.free(allocation)
                return None
            placed = replace(record, place=new, parent=None)
            self._note(placed)
            return placed

    @contextmanager
    def _one_fetcher(self, extent_id: int) -> Iterator[None]:
        with self.lock:
            lock = self._fetching.setdefault(extent_id, threading.Lock())
        try:
            with lock:
                yield
        finally:
            with self.lock:
                self._fetching.pop(extent_id, None)

    def _memory(self, owner: str) -> Pool | Attached | None:
        """Where the bytes of an owner can be read, if they are in reach."""
        if owner == self.pool.owner:
            return self.pool
        return self.peers.known(owner) if self.peers is not None else None

    def _own_rows(self, allocation: Allocation, num_tokens: int) -> torch.Tensor:
        """An allocation's tensor with the row that rounds its tokens up."""
        return self.pool.tensor(allocation, self.dtype, self.layout.shape(even(num_tokens)))

    def _note(self, record: ExtentRecord) -> None:
        """Enter an extent of our pool into its manifest."""
        self.mine[record.extent_id] = record
        if self.disk is not None and not record.on_disk:
            self.unsaved[record.extent_id] = None

    def _spill_foreign(self, record: ExtentRecord) -> None:
        """Write an extent of another's pool to our disk, as far as its tokens are known here."""
        try:
            self._bring(record)
            known_stop = record.start + len(record.token_ids)
            self._write(record, [part for part in unmerged(record) if part.stop <= known_stop])
        except (KVMissing, _OutOfReach, MemoryError, OSError) as error:
            self._count_spill_failure(error)

    def _missing(self, record: ExtentRecord) -> list[ExtentRecord]:
        """What an extent would be on disk, without what is there."""
        if record.borders:
            return [part for part in unmerged(record) if file_name(part) not in self._files]
        return [] if record.on_disk else [record]

    def _write(self, record: ExtentRecord, parts: Sequence[ExtentRecord]) -> int:
        """Write an extent that is in reach, or parts that were merged into it; how many of them were not on disk."""
        if self.disk is None:
            return 0
        rows, num_written = self.rows(record), 0
        for part in parts:
            if part is record:
                kv = rows
            else:
                kv = torch.zeros(self.layout.shape(even(part.num_tokens)), dtype=self.dtype, device="cpu")
                at = part.start - record.start
                kv[..., : part.num_tokens, :] = rows[..., at : at + part.num_tokens, :]
            # What the index says may be the checksum of an equal extent's other bits.
            is_known = part is record and record.extent_id in self.mine
            found = stored(part if is_known else replace(part, checksum=checksum(kv)))
            if not self.is_live(record):  # from here on, bytes that change hands are caught by the checksum
                raise Evicted(f"extent {record.extent_id} was given to others before it was written to disk")
            is_new = self.disk.write(found, kv)
            if part is record:
                self.index.set_on_disk(record.extent_id, True)
                self._note_file(found.name, record.extent_id)
            else:
                self._announce_file(found)
            num_written += is_new
            with self.lock:
                self.counts.spills += is_new
        return num_written

    def _announce_file(self, found: StoredExtent) -> None:
        """Tell the index of a file on disk."""
        announced = ExtentRecord(
            self.index.next_extent_id(),
            found.start,
            found.stop,
            found.token_ids,
            found.end_id,
            found.hashes,
            found.canonical_stop,
            None,
            None,
            found.checksum,
            True,
        )
        kept, receipt = self.index.put(announced, self._epoch, OWNER_LEASE_S)
        self.index.release(receipt)
        self._note_file(found.name, kept.extent_id)

    def _note_file(self, name: str, extent_id: int) -> None:
        with self.lock:
            self._files[name] = extent_id
            if extent_id in self.mine:
                self.mine[extent_id] = replace(self.mine[extent_id], on_disk=True)

    def _count_spill_failure(self, error: Exception) -> None:
        """A disk that cannot take an extent is said once and counted always."""
        self.counts.spill_failures += 1
        if self.counts.spill_failures == 1:
            _log.warning(
                "an extent could not be written to disk and will be computed again: %s (said once; see stats())", error
            )

    def _note_gone(self, name: str) -> None:
        """A copy on disk was removed. What is still in our pool is written again when it leaves it, and not before: a disk
        that is smaller than the pool would be written for ever.
        """
        with self.lock:
            extent_id = self._files.pop(name, None)
            if extent_id is None:
                self._removed_files.add(name)  # another process announced it: looked for by ``reconcile``
                return
            self._take_off_disk(extent_id)

    def _take_off_disk(self, extent_id: int) -> None:
        """Say, in the index and in the manifest, that an extent has no copy on disk any more."""
        self.index.set_on_disk(extent_id, False)
        if extent_id in self.mine:
            self.mine[extent_id] = replace(self.mine[extent_id], on_disk=False)

    def _remove_file(self, record: ExtentRecord) -> bool:
        """Forget the copy on disk of an extent."""
        self._take_off_disk(record.extent_id)
        self._files.pop(file_name(record), None)
        return self.disk is not None and self.disk.remove(file_name(record))

    def _is_silent(self, owner: str) -> bool:
        """Has the index not heard of an owner for so long that no socket means no owner? Else it may serve elsewhere."""
        return self.index.owners().get(owner, 0.0) < OWNER_LEASE_S / 2

    def _forget(self, extent_id: int) -> None:
        self.mine.pop(extent_id, None)
        self.unsaved.pop(extent_id, None)


def unmerged(record: ExtentRecord) -> tuple[ExtentRecord, ...]:
    """The extents that one was merged from, at no place; itself when it is none of those. On disk KV lies as it was computed:
    so each part goes with the last recipe that needs it, and nothing is written twice.
    """
    if not record.borders:
        return (record,)
    parts, start = [], record.start
    for stop, end_id in (*record.borders, (record.stop, record.end_id)):
        parts.append(
            replace(
                record,
                start=start,
                stop=stop,
                token_ids=record.token_ids[start - record.start : stop - record.start],
                end_id=end_id,
                hashes=record.hashes[start // BLOCK_TOKENS - record.first_block :][
                    : stop // BLOCK_TOKENS - start // BLOCK_TOKENS
                ],
                parent=None,
                place=None,
                borders=(),
            )
        )
        start = stop
    return tuple(parts)


def file_name(record: ExtentRecord) -> str:
    """Name of an extent's file on disk."""
    return extent_name(record.end_id, record.start, record.canonical_stop)


def stored(record: ExtentRecord) -> StoredExtent:
    """What the disk keeps of an extent."""
    return StoredExtent(
        record.start, record.token_ids, record.end_id, record.hashes, record.canonical_stop, record.checksum
    )


def even(num_tokens: int) -> int:
    """``num_tokens`` rounded up to a multiple of two."""
    return num_tokens + num_tokens % 2


def checksum(kv: torch.Tensor) -> str:
    """xxh3-128 of a tensor's bytes."""
    return xxhash.xxh3_128_hexdigest(tensor_bytes(kv))
