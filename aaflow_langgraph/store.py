"""Extents as one thing: bytes in a pool, records in an index, a lock that keeps the two in step.

Knows allocation, publishing, leases and eviction. Knows no prompts, no model, no policy beyond calling one.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import xxhash

from aaflow_langgraph.engine.base import Piece
from aaflow_langgraph.engine.fingerprint import DTYPES, tensor_bytes
from aaflow_langgraph.errors import IntegrityError, LeaseExpired
from aaflow_langgraph.evict.base import Policy
from aaflow_langgraph.hashing import block_hashes, prefix_id
from aaflow_langgraph.index.base import ExtentRecord, Index, Match, Query
from aaflow_langgraph.model import BLOCK_TOKENS, BlockHash, Finding, KVLayout, Receipt
from aaflow_langgraph.pool.arena import Allocation
from aaflow_langgraph.pool.base import Pool

LEASE_S = 60.0
"""A lease lasts this long and is renewed at every forward: long enough for one forward of a large model, short enough
that a lost receipt does not pin memory for good."""


@dataclass(frozen=True, slots=True)
class TokenSequence:
    """Token ids with their block hashes: what a store is asked about."""

    token_ids: tuple[int, ...]
    hashes: tuple[BlockHash, ...]


class ExtentStore:
    """Extents of one namespace in one pool, found through one index."""

    def __init__(
        self, namespace: str, layout: KVLayout, index: Index, pool: Pool, policy: Policy, device: torch.device
    ) -> None:
        self.namespace = namespace
        self.layout = layout
        self.index = index
        self.pool = pool
        self.device = device
        self.dtype = DTYPES[layout.dtype]
        self.num_evictions = 0
        self.num_lost_receipts = 0
        self.overflow_bytes = 0
        self.peak_overflow_bytes = 0
        self._policy = policy
        self._lock = threading.RLock()

    def sequence(self, token_ids: tuple[int, ...], known: Sequence[BlockHash] = ()) -> TokenSequence:
        """Hash a sequence, continuing from the hashes of its first blocks when they are known."""
        return TokenSequence(token_ids, block_hashes(self.namespace, token_ids, known))

    def match(
        self, sequence: TokenSequence, limit: int, *, canonical: bool = False, borders: Sequence[int] = ()
    ) -> Match:
        """Lease what covers the longest prefix of at most ``limit`` tokens.

        ``borders`` are positions inside blocks where an extent may end (ends of recipes); the end of the sequence is always
        one.
        """
        return self.index.match(self._query(sequence, canonical, borders), limit, LEASE_S)

    def piece(self, record: ExtentRecord, start: int, stop: int) -> Piece:
        """A view of part of an extent."""
        kv = self.tensor(record.allocation, len(record.token_ids))
        return Piece(kv[..., start - record.start : stop - record.start, :], start, stop)

    def tensor(self, allocation: Allocation, num_tokens: int) -> torch.Tensor:
        """The allocation as ``[L, 2, H, num_tokens, D]``. Tokens are laid out in even numbers, so that a head's keys split
        into two equal halves without a copy (attention.py, products).
        """
        return self._rows(allocation, num_tokens)[..., :num_tokens, :]

    def verify(self, receipt: Receipt, records: Sequence[ExtentRecord]) -> Receipt:
        """Renew a lease and make sure that every byte read under it was still its extent's.

        Raises:
            LeaseExpired: It was not: whatever was computed from it must be discarded. Way out: recompute.
        """
        if not all(self.pool.is_live(record.allocation) for record in records):
            raise LeaseExpired("an extent was evicted while it was being read: its lease had run out")
        return self.index.renew(receipt, LEASE_S) if receipt.extent_ids else receipt

    def reserve(self, num_tokens: int) -> Allocation | None:
        """Room for ``num_tokens`` tokens, by eviction if need be; None when leases leave too little."""
        need = self.layout.num_bytes(even(num_tokens))
        with self._lock:
            allocation = self.pool.reserve(need)
            if allocation is not None or need > self.pool.capacity_bytes:
                return allocation
            self.num_lost_receipts += self.index.sweep()
            while allocation is None:
                victims = self._policy(self.index.candidates(), need)
                # One round may free enough bytes but no range long enough: go on until it fits or nobody is left.
                if not sum(self._evict(victim.extent_id) > 0 for victim in victims):
                    return None
                allocation = self.pool.reserve(need)
            return allocation

    def publish(
        self,
        sequence: TokenSequence,
        start: int,
        stop: int,
        allocation: Allocation,
        canonical_stop: int,
        parent: int | None,
    ) -> tuple[ExtentRecord, Receipt]:
        """Make finished bytes visible as the extent ``[start, stop)``; an equal one that is there already wins (I8)."""
        rows = self._rows(allocation, stop - start)
        rows[..., stop - start :, :] = 0
        record = ExtentRecord(
            extent_id=self.index.next_extent_id(),
            start=start,
            token_ids=sequence.token_ids[start:stop],
            end_id=prefix_id(self.namespace, sequence.token_ids, stop, sequence.hashes),
            hashes=sequence.hashes[start // BLOCK_TOKENS : stop // BLOCK_TOKENS],
            canonical_stop=canonical_stop,
            parent=parent,
            allocation=allocation,
            checksum=checksum(rows),
        )
        with self._lock:
            kept, receipt = self.index.put(record, LEASE_S)
            if kept.allocation != allocation:
                self.pool.free(allocation)
            return kept, receipt

    def free(self, allocation: Allocation) -> None:
        """Give back bytes that were never published."""
        with self._lock:
            self.pool.free(allocation)

    def shrink(self, allocation: Allocation, num_tokens: int) -> Allocation:
        """Keep room for ``num_tokens`` tokens."""
        with self._lock:
            return self.pool.shrink(allocation, self.layout.num_bytes(even(num_tokens)))

    def evict(self, sequence: TokenSequence, borders: Sequence[int]) -> int:
        """Forget the extents of a sequence, last first, until one is leased or somebody else builds on it; bytes freed."""
        with self._lock:
            freed = 0
            found = self.index.covering(self._query(sequence, False, borders))
            for record in sorted(found, key=lambda r: -r.stop):
                if record.token_ids == sequence.token_ids[record.start : record.stop]:
                    freed += self._evict(record.extent_id)
            return freed

    def note_overflow(self, change_bytes: int) -> None:
        """Count bytes that requests hold outside of the pool because it was full."""
        with self._lock:
            self.overflow_bytes += change_bytes
            self.peak_overflow_bytes = max(self.peak_overflow_bytes, self.overflow_bytes)

    def sweep(self) -> None:
        """Drop leases that ran out and count them."""
        with self._lock:
            self.num_lost_receipts += self.index.sweep()

    def check(self) -> list[Finding]:
        """Every violated invariant that can be seen from here: I1-I6, I8, I10."""
        with self._lock:
            found = [Finding("I1", what) for what in self.pool.check()]
            found += [Finding(number, what) for number, what in self.index.check()]
            if self.pool.used_bytes > self.pool.capacity_bytes or self.pool.peak_bytes > self.pool.capacity_bytes:
                found.append(
                    Finding("I10", f"{self.pool.peak_bytes} bytes were in use, capacity is {self.pool.capacity_bytes}")
                )
            ranges: dict[int, int] = {}
            for record in self.index.records():
                where = f"extent {record.extent_id} [{record.start}, {record.stop})"
                if not self.pool.is_live(record.allocation):
                    found.append(Finding("I4", f"{where} is published but its bytes were freed"))
                    continue
                if record.allocation.offset in ranges:
                    found.append(
                        Finding("I8", f"{where} shares its bytes with extent {ranges[record.allocation.offset]}")
                    )
                ranges[record.allocation.offset] = record.extent_id
                if not self.intact(record):
                    found.append(Finding("I5", f"the bytes of {where} changed since they were published"))
            return found

    def intact(self, record: ExtentRecord) -> bool:
        """Do an extent's bytes still have the checksum they were published with?"""
        return checksum(self._rows(record.allocation, len(record.token_ids))) == record.checksum

    def _rows(self, allocation: Allocation, num_tokens: int) -> torch.Tensor:
        """The allocation's tensor with the row that rounds its tokens up."""
        return self.pool.tensor(allocation, self.dtype, self.layout.shape(even(num_tokens)))

    def _evict(self, extent_id: int) -> int:
        record = self.index.remove(extent_id)
        if record is None:
            return 0
        if not self.pool.is_live(record.allocation):
            raise IntegrityError(f"extent {extent_id} was freed before it was evicted")
        self.pool.free(record.allocation)
        self.num_evictions += 1
        return record.allocation.num_bytes

    def _query(self, sequence: TokenSequence, canonical: bool, borders: Sequence[int]) -> Query:
        ids, hashes = sequence.token_ids, sequence.hashes
        inside = sorted({stop for stop in (*borders, len(ids)) if stop % BLOCK_TOKENS and 0 < stop <= len(ids)})
        tails = () if canonical else tuple((stop, prefix_id(self.namespace, ids, stop, hashes)) for stop in inside)
        return Query(ids, hashes, tails, canonical)


class PoolTail:
    """A tail in the pool, or on the heap when the pool cannot give room: cache pressure never kills a request.

    Heap bytes are counted as overflow and the tail is not published unless room appears when it is sealed.
    """

    def __init__(self, store: ExtentStore, start: int, capacity: int) -> None:
        self.start = start
        self.length = 0
        self._store = store
        self._allocation: Allocation | None = None
        self._heap_bytes = 0
        self.kv = self._take(capacity)

    def ensure(self, num_tokens: int) -> None:
        """See ``Tail.ensure``. Grows by half, so that long generations copy little."""
        if num_tokens <= self.kv.shape[3]:
            return
        old, old_allocation, old_heap = self.kv, self._allocation, self._heap_bytes
        self._allocation, self._heap_bytes = None, 0
        self.kv = self._take(max(num_tokens, self.kv.shape[3] * 3 // 2))
        self.kv[..., : self.length, :] = old[..., : self.length, :]
        self._give_back(old_allocation, old_heap)

    def seal(
        self, sequence: TokenSequence, skip: int, canonical_stop: int, parent: int | None
    ) -> tuple[ExtentRecord, Receipt] | None:
        """Publish the tail without its first ``skip`` tokens as one extent; None when the pool has no room for it.

        The tail is used up either way; its ``kv`` stays readable only when None is returned, until ``drop``.
        """
        start, stop = self.start + skip, self.start + self.length
        if skip == 0 and self._allocation is not None:
            if even(self.length) < self.kv.shape[3]:
                self._compact()
            allocation = self._store.shrink(self._allocation, self.length)
        else:
            # Bytes in front that belong to other extents, or a tail on the heap: copy what is new into its own range.
            reserved = self._store.reserve(stop - start)
            if reserved is None:
                return None
            allocation = reserved
            target = self._store.tensor(allocation, stop - start)
            target.copy_(self.kv[..., skip : self.length, :])
            self.drop()
        self._allocation = None
        return self._store.publish(sequence, start, stop, allocation, canonical_stop, parent)

    def drop(self) -> None:
        """Give the memory back unpublished. Idempotent."""
        self._give_back(self._allocation, self._heap_bytes)
        self._allocation, self._heap_bytes = None, 0

    def _compact(self) -> None:
        """Close the gap behind every head: ``[L, 2, H, capacity, D]`` becomes ``[L, 2, H, length, D]`` in place.

        Layer by layer through a copy: a layer's target ends before the next layer's source begins.
        """
        flat, rows = self.kv.view(-1), even(self.length)
        size = self.kv[0].numel() // self.kv.shape[3] * rows
        for layer in range(self.kv.shape[0]):
            flat[layer * size : (layer + 1) * size] = self.kv[layer, :, :, :rows].reshape(-1).clone()

    def _take(self, num_tokens: int) -> torch.Tensor:
        store = self._store
        num_tokens = even(num_tokens)
        shape = store.layout.shape(num_tokens)
        self._allocation = store.reserve(num_tokens)
        if self._allocation is not None:
            kv = store.pool.tensor(self._allocation, store.dtype, shape)
        else:
            self._heap_bytes = store.layout.num_bytes(num_tokens)
            store.note_overflow(self._heap_bytes)
            kv = torch.empty(shape, dtype=store.dtype, device=store.device)
        kv[..., -1:, :] = 0  # may be read, with no weight, as the row that rounds an odd length up: must not be NaN
        return kv

    def _give_back(self, allocation: Allocation | None, heap_bytes: int) -> None:
        if allocation is not None:
            self._store.free(allocation)
        if heap_bytes:
            self._store.note_overflow(-heap_bytes)


def even(num_tokens: int) -> int:
    """``num_tokens`` rounded up to a multiple of two."""
    return num_tokens + num_tokens % 2


def checksum(kv: torch.Tensor) -> str:
    """xxh3-128 of a tensor's bytes."""
    return xxhash.xxh3_128_hexdigest(tensor_bytes(kv))
