"""What the broker asks of an index: who has which tokens, where their bytes are, who reads them. No tensors, no policy.

Every method is atomic and may be called from any thread. A miss allocates nothing. Extents of one namespace only meet
queries of that namespace, because every hash commits to it (I6). Times are readings of the index's own clock (a server's,
where there is one), so that processes need not agree about the time.

Coverage. An extent holds the tokens ``[start, stop)`` of a sequence whose first ``stop`` tokens are named by
``end_id``; ``hashes`` name the full blocks that end inside it. A query matches an extent up to the last of its own block
hashes that the extent holds, or up to ``stop`` when the query knows ``end_id``:

    query hashes      h0     h1     h2            (blocks end at 256, 512, 768)
    extent            [200 ........... 700)       matches [200, 512) by h1; [200, 700) if the query also knows end_id

An extent that others were merged into has their ends as ``borders``: names of positions inside it, by which a query matches
it up to there, as it matched what ended there.

Owners. A pool has one writer, its owner, known to the index by a lease of its own. Only the owner gives its ranges to
others, so a place is published, moved and removed by its owner. An owner whose lease ran out is fenced: its places are
dropped, and what it says under its old epoch is refused until it joins again and announces what it still holds.

Tiers. An extent is known as long as its bytes are at a place in a pool, on disk, or both. Dropping the last of them
forgets it, its leases with it (``renew`` then raises): a lease protects against eviction, not against loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from aaflow_langgraph.evict.base import Candidate
from aaflow_langgraph.model import BLOCK_TOKENS, BlockHash, Receipt, Recipe
from aaflow_langgraph.pool.arena import Allocation

ExtentKey = tuple[str, int, int, tuple[tuple[int, str], ...]]


@dataclass(frozen=True, slots=True)
class Place:
    """Where an extent's bytes are: a range of one owner's pool."""

    owner: str
    allocation: Allocation


@dataclass(frozen=True, slots=True)
class ExtentRecord:
    """What is known of one published extent.

    Attributes:
        extent_id: Name inside this index, never reused.
        start: First token position.
        stop: One past its last token position.
        token_ids: Its own tokens, compared after every hash hit; empty where the index is told to keep none, then the
            256-bit hashes alone vouch for them.
        end_id: ``kv_id`` of everything up to its end.
        hashes: Block hashes of the full blocks that end inside it, first one being block ``first_block``.
        canonical_stop: Whole blocks up to this position were computed alone, in canonical chunks, from canonical blocks;
            0 when none were.
        parent: The extent of the same owner that it was computed behind, or None.
        place: Where its bytes are in memory, or None.
        checksum: xxh3-128 of its bytes.
        on_disk: Is a copy on disk?
        borders: Ends of the extents that it was merged from, ascending, its own end left out: (position, ``kv_id`` of
            everything up to there). Empty for what was computed as one.
    """

    extent_id: int
    start: int
    stop: int
    token_ids: tuple[int, ...] = field(repr=False)
    end_id: str
    hashes: tuple[BlockHash, ...] = field(repr=False)
    canonical_stop: int
    parent: int | None
    place: Place | None
    checksum: str
    on_disk: bool = False
    borders: tuple[tuple[int, str], ...] = field(default=(), repr=False)

    @property
    def num_tokens(self) -> int:
        """Tokens it holds."""
        return self.stop - self.start

    @property
    def first_block(self) -> int:
        """Number of the first block that ends inside it."""
        return self.start // BLOCK_TOKENS

    @property
    def key(self) -> ExtentKey:
        """Two extents with one key hold the same KV and are found by the same names: a second writer is dropped (I8)."""
        return (self.end_id, self.start, self.canonical_stop, self.borders)

    @property
    def names(self) -> tuple[str, ...]:
        """Every name by which it can be found."""
        if not self.borders:
            return (*self.hashes, self.end_id)
        return (*self.hashes, *(name for _, name in self.borders), self.end_id)


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


class Swept(NamedTuple):
    """What a sweep found past its time."""

    num_leases: int
    num_owners: int
    num_extents: int


class Index(Protocol):
    """Where the KV of which tokens is, and who reads it."""

    shared: bool
    """Do other processes see it?"""

    # owners

    def join(self, owner: str, lease_s: float) -> int:
        """Register a pool's owner for ``lease_s`` seconds; its new epoch, larger than any before. Places known of an
        earlier epoch of this owner are dropped: it announces again what it still holds.
        """

    def heartbeat(self, owner: str, epoch: int, lease_s: float) -> bool:
        """Renew the owner's lease. False when it is fenced (unknown, or of another epoch): join and announce again."""

    def leave(self, owner: str) -> int:
        """Forget an owner and its places, leased or not; how many places. For the owner itself, and for whoever knows
        that it is gone. Idempotent.
        """

    def owners(self) -> dict[str, float]:
        """Every registered owner with the seconds its lease still has (negative when it ran out and was not swept)."""

    # extents

    def next_extent_id(self) -> int:
        """A fresh name for an extent, never given before, by no earlier life of this index either."""

    def put(self, record: ExtentRecord, epoch: int, lease_s: float) -> tuple[ExtentRecord, Receipt]:
        """Publish a finished extent, leased by its writer. An extent of equal key wins over ``record``: it is returned
        instead and the caller frees its own bytes (I8); if the known one has no place, it takes ``record``'s, and a copy
        on disk that either knows of counts for it.

        A record without a place announces a copy on disk; its ``epoch`` is not looked at.

        Raises:
            Fenced: The owner of ``record.place`` has not joined under this epoch. Way out: join and announce again.
        """

    def match(self, query: Query, limit: int, lease_s: float) -> Match:
        """Lease the extents that cover the longest prefix of at most ``limit`` tokens."""

    def covering(self, query: Query) -> list[ExtentRecord]:
        """Every extent that holds tokens of the query, unleased, for ``evict`` and inspection."""

    def remove(self, extent_id: int, owner: str) -> ExtentRecord | None:
        """Evict an extent from its owner's pool; the record as it was. None when it is leased, not at a place of
        ``owner``, or, without a copy on disk, has children. Afterwards the extent is on disk only, or forgotten, and
        nobody's child: bonds order eviction inside one pool.
        """

    def move(self, extent_id: int, old: Place | None, new: Place, epoch: int) -> bool:
        """Say that the bytes are at ``new``, if they were at ``old`` until now; False otherwise. For a fetch from disk
        (``old`` is None) and for the adoption of what a dead owner left. Ends its bonds to parent and children.

        Raises:
            Fenced: As in ``put``, of ``new``'s owner.
        """

    def take_over(self, extent_id: int, part_ids: Sequence[int]) -> bool:
        """Let an extent stand for the extents that were merged into it: what was computed behind them is a child of it from
        now on (where it has a place of the same owner), and their uses count as its own. They keep place, readers and
        names, but no bonds, so that ``remove`` gives them once nobody reads them. False when the extent is unknown.
        Idempotent.
        """

    def lose(self, extent_id: int, place: Place) -> bool:
        """Say that the bytes at ``place`` are gone (reused, or the owner is dead), leased or not; False when they were
        not there.
        """

    def set_on_disk(self, extent_id: int, on_disk: bool) -> bool:
        """Say that a copy on disk exists or is gone; False when the extent is unknown."""

    def candidates(self, owner: str) -> list[Candidate]:
        """Extents in the pool of ``owner`` that ``remove`` would give."""

    def records(self, owner: str | None = None) -> list[ExtentRecord]:
        """Every published extent, or those at a place of ``owner``."""

    # leases

    def renew(self, receipt: Receipt, lease_s: float) -> Receipt:
        """Move the deadline.

        Raises:
            LeaseExpired: The lease had run out and was swept, was released, or one of its extents is forgotten. Way out:
                recompute.
        """

    def release(self, receipt: Receipt) -> bool:
        """Give a lease back; False when it was already gone. Idempotent."""

    def num_leases(self) -> int:
        """Live leases."""

    def sweep(self) -> Swept:
        """Drop leases (I9), owners with their places, claims and recipes past their deadline."""

    # claims and recipes

    def claim(self, name: str, holder: str, lease_s: float) -> bool:
        """Take or renew the sole right to compute what ``name`` names; False while somebody else holds it."""

    def unclaim(self, name: str, holder: str) -> bool:
        """Give a claim back; False when it was not the holder's."""

    def put_recipe(self, recipe: Recipe, lease_s: float) -> None:
        """Share a recipe for ``lease_s`` seconds from its last use; a chat structure wins over none (``Recipe.has_chat``)."""

    def recipe(self, kv_id: str) -> Recipe | None:
        """A shared recipe, or None."""

    # inspection

    def check(self) -> list[tuple[str, str]]:
        """Violated invariants as (number, words)."""

    def close(self) -> None:
        """Give connections back. Idempotent."""


def cover(
    records: Sequence[ExtentRecord], query: Query, limit: int
) -> tuple[tuple[tuple[ExtentRecord, int, int], ...], int]:
    """Fewest extents that cover the longest prefix ``[0, stop)``, ``stop <= limit``: greedy interval cover.

    Stored token ids are compared with the query's after the hash hit, so a collision cannot serve wrong KV.
    """
    spans = []
    for record in records:
        stop = min(matched(record, query), limit)
        if stop > record.start and same_tokens(record, query, stop):
            spans.append((record, stop))
    parts: list[tuple[ExtentRecord, int, int]] = []
    at = 0
    while True:
        # Ties go to the longer extent, so that what was merged into it falls into disuse, then to the older one: a stable
        # choice keeps chains short and repeats the same reads.
        best = max(
            ((r, s) for r, s in spans if r.start <= at < s),
            key=lambda rs: (rs[1], rs[0].num_tokens, -rs[0].extent_id),
            default=None,
        )
        if best is None:
            return tuple(parts), at
        parts.append((best[0], at, best[1]))
        at = best[1]


def same_tokens(record: ExtentRecord, query: Query, stop: int) -> bool:
    """Are the extent's stored tokens up to ``stop`` the query's? Yes where it stores none."""
    return not record.token_ids or record.token_ids[: stop - record.start] == query.token_ids[record.start : stop]


def matched(record: ExtentRecord, query: Query) -> int:
    """Position up to which the extent's tokens are the query's, by their names; 0 when they are not."""
    border = 0
    if query.canonical:
        wanted = record.canonical_stop // BLOCK_TOKENS
    else:
        if any(stop == record.stop and end_id == record.end_id for stop, end_id in query.tails):
            return record.stop
        wanted = record.first_block + len(record.hashes)
        if record.borders:
            border = max((stop for stop, _ in set(record.borders).intersection(query.tails)), default=0)
    for block in range(min(wanted, len(query.hashes)), max(record.first_block, border // BLOCK_TOKENS), -1):
        if record.hashes[block - 1 - record.first_block] == query.hashes[block - 1]:
            return block * BLOCK_TOKENS
    return border
