"""What the broker asks of an index: who has which tokens, who reads them. No tensors, no bytes, no policy.

Every method is atomic and may be called from any thread. A miss allocates nothing. Extents of one namespace only meet
queries of that namespace, because every hash commits to it (I6).

Coverage. An extent holds the tokens ``[start, stop)`` of a sequence whose first ``stop`` tokens are named by
``end_id``; ``hashes`` name the full blocks that end inside it. A query matches an extent up to the last of its own block
hashes that the extent holds, or up to ``stop`` when the query knows ``end_id``:

    query hashes      h0     h1     h2            (blocks end at 256, 512, 768)
    extent            [200 ........... 700)       matches [200, 512) by h1; [200, 700) if the query also knows end_id
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from aaflow_langgraph.evict.base import Candidate
from aaflow_langgraph.model import BLOCK_TOKENS, BlockHash, Receipt
from aaflow_langgraph.pool.arena import Allocation


@dataclass(frozen=True, slots=True)
class ExtentRecord:
    """What is known of one published extent.

    Attributes:
        extent_id: Name inside this index, never reused.
        start: First token position.
        token_ids: Its own tokens, compared after every hash hit.
        end_id: ``kv_id`` of everything up to its end.
        hashes: Block hashes of the full blocks that end inside it, first one being block ``first_block``.
        canonical_stop: Whole blocks up to this position were computed alone, in canonical chunks, from canonical blocks;
            0 when none were.
        parent: The extent it was computed behind, or None.
        allocation: Where its bytes are.
        checksum: xxh3-128 of its bytes.
    """

    extent_id: int
    start: int
    token_ids: tuple[int, ...] = field(repr=False)
    end_id: str
    hashes: tuple[BlockHash, ...] = field(repr=False)
    canonical_stop: int
    parent: int | None
    allocation: Allocation
    checksum: str

    @property
    def stop(self) -> int:
        """One past its last token position."""
        return self.start + len(self.token_ids)

    @property
    def first_block(self) -> int:
        """Number of the first block that ends inside it."""
        return self.start // BLOCK_TOKENS

    @property
    def key(self) -> tuple[str, int, int]:
        """Two extents with one key hold the same KV: a second writer is dropped (I8)."""
        return (self.end_id, self.start, self.canonical_stop)


@dataclass(frozen=True, slots=True)
class Query:
    """A token sequence to look up: its ids, its block hashes, and the names of prefixes that end inside a block."""

    token_ids: tuple[int, ...] = field(repr=False)
    hashes: tuple[BlockHash, ...] = field(repr=False)
    tails: tuple[tuple[int, str], ...] = ()
    canonical: bool = False


@dataclass(frozen=True, slots=True)
class Match:
    """Extents that cover ``[0, stop)`` of a query, in order, each with the span to read from it; leased."""

    parts: tuple[tuple[ExtentRecord, int, int], ...]
    stop: int
    receipt: Receipt


class Index(Protocol):
    """Where the KV of which tokens is, and who reads it."""

    def put(self, record: ExtentRecord, lease_s: float) -> tuple[ExtentRecord, Receipt]:
        """Publish a finished extent, leased by its writer. An extent of equal key wins over ``record``: it is returned
        instead and the caller frees its own bytes (I8).
        """

    def next_extent_id(self) -> int:
        """A fresh name for an extent."""

    def match(self, query: Query, limit: int, lease_s: float) -> Match:
        """Lease the extents that cover the longest prefix of at most ``limit`` tokens."""

    def renew(self, receipt: Receipt, lease_s: float) -> Receipt:
        """Move the deadline.

        Raises:
            LeaseExpired: The lease had run out and was swept, or was released. Way out: recompute.
        """

    def release(self, receipt: Receipt) -> bool:
        """Give a lease back; False when it was already gone. Idempotent."""

    def sweep(self) -> int:
        """Drop leases past their deadline; how many were lost (I9)."""

    def candidates(self) -> list[Candidate]:
        """Extents without lease and without children."""

    def remove(self, extent_id: int) -> ExtentRecord | None:
        """Forget an extent; None when it is leased, has children, or is unknown."""

    def covering(self, query: Query) -> list[ExtentRecord]:
        """Every extent that holds tokens of the query, unleased, for ``evict`` and inspection."""

    def records(self) -> list[ExtentRecord]:
        """Every published extent."""

    def num_leases(self) -> int:
        """Live leases."""

    def check(self) -> list[tuple[str, str]]:
        """Violated invariants as (number, words)."""


def cover(
    records: Sequence[ExtentRecord], query: Query, limit: int
) -> tuple[tuple[tuple[ExtentRecord, int, int], ...], int]:
    """Fewest extents that cover the longest prefix ``[0, stop)``, ``stop <= limit``: greedy interval cover.

    Stored token ids are compared with the query's after the hash hit, so a collision cannot serve wrong KV.
    """
    spans = []
    for record in records:
        stop = min(_matched(record, query), limit)
        if stop > record.start and record.token_ids[: stop - record.start] == query.token_ids[record.start : stop]:
            spans.append((record, stop))
    parts: list[tuple[ExtentRecord, int, int]] = []
    at = 0
    while True:
        # Ties go to the older extent: a stable choice keeps chains short and repeats the same reads.
        best = max(
            ((r, s) for r, s in spans if r.start <= at < s), key=lambda rs: (rs[1], -rs[0].extent_id), default=None
        )
        if best is None:
            return tuple(parts), at
        parts.append((best[0], at, best[1]))
        at = best[1]


def _matched(record: ExtentRecord, query: Query) -> int:
    """Position up to which the extent's tokens are the query's."""
    if query.canonical:
        wanted = record.canonical_stop // BLOCK_TOKENS
    else:
        if any(stop == record.stop and end_id == record.end_id for stop, end_id in query.tails):
            return record.stop
        wanted = record.first_block + len(record.hashes)
    for block in range(min(wanted, len(query.hashes)), record.first_block, -1):
        if record.hashes[block - 1 - record.first_block] == query.hashes[block - 1]:
            return block * BLOCK_TOKENS
    return 0
