"""The pools of this package, held to the shipped contract."""

from __future__ import annotations

from typing import cast

import pytest
import torch

from aaflow_langgraph.errors import ConfigError
from aaflow_langgraph.pool.base import Pool
from aaflow_langgraph.pool.host import HostPool
from aaflow_langgraph.testing.colours import Awaited
from aaflow_langgraph.testing.pool_contract import PoolContract


class TestHostPool(PoolContract):
    def make_pool(self, capacity_bytes: int) -> Pool:
        return HostPool(capacity_bytes)


class TestHostPoolAwaited(PoolContract):
    def make_pool(self, capacity_bytes: int) -> Pool:
        return cast(Pool, Awaited(HostPool(capacity_bytes)))


@pytest.mark.parametrize("capacity", [0, -1, 63, 1.5, "1g", None, True])
def test_a_capacity_that_makes_no_sense_is_refused_by_name(capacity: object) -> None:
    with pytest.raises(ConfigError, match="pool_bytes"):
        HostPool(capacity)  # type: ignore[arg-type]


def test_a_pool_that_the_machine_cannot_give_is_refused_with_a_way_out() -> None:
    with pytest.raises(ConfigError, match="smaller pool_bytes"):
        HostPool(1 << 60)


def test_every_page_is_touched_before_the_first_request() -> None:
    pool = HostPool(4096)
    allocation = pool.reserve(4096)
    assert allocation is not None
    assert bool((pool.tensor(allocation, torch.uint8, (4096,)) == 1).all())
