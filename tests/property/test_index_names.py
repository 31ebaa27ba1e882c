"""An index that leads to an extent by few of its blocks finds what one finds that compares all of them."""

from __future__ import annotations

import random
import secrets
from functools import cache

import pytest
import redis

from aaflow_langgraph.index._server import Server
from aaflow_langgraph.index.memory import MemoryIndex
from aaflow_langgraph.index.redis import RedisIndex
from aaflow_langgraph.testing.index_cases import LEASE_S, OWNER, OWNER_LEASE_S, B, query, record, sequence, spans
from tests.servers import RealServer, our_keys, redis_server  # noqa: F401

BASE = "abcdefghijklmnopqrstuvw"
SEEDS = range(8)


@cache
def tokens(shared: int, others: str, num_tail: int) -> tuple[int, ...]:
    """So many blocks of the base, then others, then tokens that fill no block."""
    return sequence(BASE[:shared] + others, num_tail)


def branch(draw: random.Random) -> tuple[int, ...]:
    shared = draw.choice((draw.randint(0, len(BASE)), len(BASE), 17))
    return tokens(shared, draw.choice(("", "", "y", "yz" * draw.randint(1, 5))), draw.choice((0, 0, 44, 200)))


def position(draw: random.Random, low: int, high: int) -> int:
    """Anywhere in between, half of the time at the edge of a block."""
    at = draw.randint(low, high)
    return at // B * B if draw.random() < 0.5 and at // B * B >= low else at


@pytest.mark.parametrize("seed", SEEDS)
def test_few_names_find_what_a_comparison_of_all_blocks_finds(redis_server: RealServer, seed: int) -> None:
    draw = random.Random(seed)
    namespace = secrets.token_hex(32)
    told, asked = (
        RedisIndex(Server(redis.Redis(unix_socket_path=str(redis_server.socket)), namespace, clock=lambda: 1.0))
        for _ in range(2)
    )
    plain = MemoryIndex(clock=lambda: 1.0)
    epochs = told.join(OWNER, OWNER_LEASE_S), plain.join(OWNER, OWNER_LEASE_S)
    known = set()
    for _ in range(12):
        ids = branch(draw) or tokens(3, "", 0)
        start = position(draw, 0, len(ids) - 1) if draw.random() < 0.5 else 0
        stop = position(draw, start + 1, len(ids)) if draw.random() < 0.5 else len(ids)
        canonical = draw.choice((0, draw.randint(start // B, stop // B) * B))
        borders = sorted({draw.randint(start, stop) for _ in range(draw.choice((0, 0, 3)))} - {start, stop})
        canonical = canonical if canonical > start else 0
        made = record(told, ids, start, stop, canonical_stop=canonical, borders=tuple(borders))
        for index, epoch in zip((told, plain), epochs, strict=True):
            kept, receipt = index.put(made, epoch, LEASE_S)
            index.release(receipt)
        known.add(kept.extent_id)
    for extents_to_remove in (sorted(known)[::3], []):
        for _ in range(25):
            ids = branch(draw)
            canonical_only = draw.random() < 0.2
            ends = [draw.randint(1, len(ids)) for _ in range(draw.choice((0, 0, 3)))] if ids else []
            limit = draw.choice((len(ids), draw.randint(0, len(ids))))
            what = query(ids, *ends, canonical=canonical_only)
            right = plain.match(what, limit, LEASE_S)
            for index in (told, asked, told):
                found = index.match(what, limit, LEASE_S)
                assert (spans(found), found.stop) == (spans(right), right.stop)
                index.release(found.receipt)
            covering = {extent.extent_id for extent in plain.covering(what)}
            assert {extent.extent_id for extent in told.covering(what)} == covering
            plain.release(right.receipt)
        assert (told.num_malformed, asked.num_malformed, told.check()) == (0, 0, [])
        for extent_id in extents_to_remove:
            assert (told.remove(extent_id, OWNER) is None) == (plain.remove(extent_id, OWNER) is None)
    assert told.leave(OWNER) == plain.leave(OWNER)
    assert our_keys(redis_server) == []
    for index in (told, asked):
        index.close()
