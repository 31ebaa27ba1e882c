"""Made-up sequences and extents for tests of an index: letters instead of tokens, so that a reader sees what is shared."""

from __future__ import annotations

import itertools

from aaflow_langgraph.hashing import block_hashes, prefix_id
from aaflow_langgraph.index.base import ExtentRecord, Index, Match, Place, Query
from aaflow_langgraph.model import BLOCK_TOKENS
from aaflow_langgraph.pool.arena import Allocation

B = BLOCK_TOKENS
LEASE_S = 60.0
NAMESPACE = "a" * 64
OWNER, OTHER = "0" * 32, "1" * 32
OWNER_LEASE_S = 1e6

_offsets = itertools.count(0, 64)


def sequence(blocks: str, num_tail: int = 0) -> tuple[int, ...]:
    """One block per letter, each token different, then ``num_tail`` tokens."""
    ids = [ord(letter) * 1000 + n for letter in blocks for n in range(B)]
    return (*ids, *(n + 1 for n in range(num_tail)))


def record(
    index: Index,
    ids: tuple[int, ...],
    start: int = 0,
    stop: int | None = None,
    *,
    canonical_stop: int = 0,
    parent: int | None = None,
    namespace: str = NAMESPACE,
    owner: str | None = OWNER,
    borders: tuple[int, ...] = (),
) -> ExtentRecord:
    """What a broker publishes after it computed ``ids[start:stop]``; without an owner, what it found on disk; with borders,
    what it merged from extents that ended there.
    """
    stop = len(ids) if stop is None else stop
    hashes = block_hashes(namespace, ids)
    return ExtentRecord(
        extent_id=index.next_extent_id(),
        start=start,
        stop=stop,
        token_ids=ids[start:stop],
        end_id=prefix_id(namespace, ids, stop, hashes),
        hashes=hashes[start // B : stop // B],
        canonical_stop=canonical_stop,
        parent=parent,
        place=Place(owner, Allocation(next(_offsets), 64, 1)) if owner else None,
        checksum="0" * 32,
        on_disk=owner is None,
        borders=tuple((border, prefix_id(namespace, ids, border, hashes)) for border in borders),
    )


def query(
    ids: tuple[int, ...], *ends: int, canonical: bool = False, namespace: str = NAMESPACE, whole: bool = True
) -> Query:
    """What a broker asks: the ids, and the names of prefixes that end inside a block (the end of the ids unless told)."""
    hashes = block_hashes(namespace, ids)
    stops = sorted({stop for stop in (*ends, *((len(ids),) if whole else ())) if stop % B})
    tails = () if canonical else tuple((stop, prefix_id(namespace, ids, stop, hashes)) for stop in stops)
    return Query(ids, hashes, tails, canonical)


def spans(match: Match) -> list[tuple[int, int, int]]:
    """(extent, start, stop) of every part."""
    return [(part.extent_id, start, stop) for part, start, stop in match.parts]
