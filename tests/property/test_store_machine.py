"""The shipped state machine over every index we ship."""

from __future__ import annotations

import secrets

import pytest
import redis
import torch
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from aaflow_langgraph.index._server import Server
from aaflow_langgraph.index.base import Index
from aaflow_langgraph.index.memory import MemoryIndex
from aaflow_langgraph.index.redis import RedisIndex
from aaflow_langgraph.pool.device import DeviceTier
from aaflow_langgraph.testing.store_machine import LAYOUT, StoreMachine
from tests.servers import RealServer, redis_server  # noqa: F401

STEPS = settings(
    max_examples=25,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)


class MemoryMachine(StoreMachine):
    def make_index(self) -> Index:
        return MemoryIndex(self.clock)


class CopyingMachine(MemoryMachine):
    """Everything is read through copies, as on an accelerator; there is room for few of them."""

    def make_device_tier(self) -> DeviceTier:
        return DeviceTier(torch.device("cpu"), LAYOUT.num_bytes(800))


class RedisMachine(StoreMachine):
    server: RealServer

    def __init__(self) -> None:
        self.namespace = secrets.token_hex(32)
        super().__init__()

    def make_index(self) -> Index:
        client = redis.Redis(unix_socket_path=str(self.server.socket))
        return RedisIndex(Server(client, self.namespace, clock=self.clock))


@pytest.mark.filterwarnings("default")  # Hypothesis' own notes about the machine are no faults of ours
class TestMemoryMachine(MemoryMachine.TestCase):  # type: ignore[misc, name-defined]
    settings = STEPS


@pytest.mark.filterwarnings("default")
class TestCopyingMachine(CopyingMachine.TestCase):  # type: ignore[misc, name-defined]
    settings = STEPS


@pytest.mark.filterwarnings("default")
def test_redis_machine(redis_server: RealServer) -> None:
    RedisMachine.server = redis_server
    run_state_machine_as_test(RedisMachine, settings=STEPS)
    with redis_server.client() as client:
        client.flushall()
