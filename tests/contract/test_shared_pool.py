"""The shared pool, held to the shipped contract: over a sealed memfd, and over the file that stands in for one."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest

from aaflow_langgraph.errors import ConfigError
from aaflow_langgraph.pool import _memory
from aaflow_langgraph.pool.peers import Attached, Peers
from aaflow_langgraph.pool.shared import SharedPool
from aaflow_langgraph.testing.colours import Awaited
from aaflow_langgraph.testing.shared_pool_contract import SharedPoolContract


class TestSharedPool(SharedPoolContract):
    alignment_bytes = 4096

    @pytest.fixture(autouse=True)
    def peers(self, tmp_path: Path) -> Iterator[Peers]:
        self.run_dir = tmp_path / "run"
        self.peers = Peers(self.run_dir)
        yield self.peers
        self.peers.close()

    def make_pool(self, capacity_bytes: int) -> SharedPool:
        return SharedPool(capacity_bytes, run_dir=self.run_dir)

    def attach(self, pool: SharedPool) -> Attached:
        return self.peers.attach(pool.owner)


class TestSharedPoolAwaited(TestSharedPool):
    def make_pool(self, capacity_bytes: int) -> SharedPool:
        return cast(SharedPool, Awaited(super().make_pool(capacity_bytes)))

    def attach(self, pool: SharedPool) -> Attached:
        return cast(Attached, Awaited(cast(Peers, Awaited(self.peers)).attach(pool.owner)))


class TestSharedPoolWithoutMemfd(TestSharedPool):
    """What a sandbox or an old kernel leaves us."""

    @pytest.fixture(autouse=True)
    def no_memfd(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
        def refuse(*_: object) -> int:
            raise OSError(errno.EPERM, "not here")

        monkeypatch.setattr(os, "memfd_create", refuse)
        yield
        folder = _memory.fallback_dir()
        assert not folder.exists() or not list(folder.glob(f"pool-*-{os.getpid()}-*"))


@pytest.mark.parametrize("capacity", [0, -1, 4095, 1.5, "1g", None, True])
def test_a_capacity_that_makes_no_sense_is_refused_by_name(capacity: object, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="pool_bytes"):
        SharedPool(capacity, run_dir=tmp_path / "run")  # type: ignore[arg-type]
