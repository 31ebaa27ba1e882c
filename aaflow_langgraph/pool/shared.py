"""The host pool in shared memory: this process writes, every process of the same user on this host reads in place.

The writer's side. Knows its own memory, its header and its door; knows no readers and no index.

Who writes, owns: nobody else can map the memory writable. A reader learns (owner, allocation) from an index, maps the
memory once (``Peers``) and asks the header, after it read, whether the range was still what it was told.
"""

from __future__ import annotations

import os
import weakref
from pathlib import Path

import torch

from aaflow_langgraph.errors import ConfigError
from aaflow_langgraph.pool import _memory
from aaflow_langgraph.pool._door import Door, Offer
from aaflow_langgraph.pool._layout import GRANULE_BYTES, Layout, Slots, expected_slots
from aaflow_langgraph.pool._rundir import PoolName, RunDir
from aaflow_langgraph.pool.arena import Allocation
from aaflow_langgraph.pool.host import RegionPool


class SharedPool(RegionPool):
    """A pool whose published ranges other processes read in place. See ``Pool`` for the rest of the contract.

    Ranges are multiples of 4096 bytes. ``owner`` is the name by which others attach: 32 hexadecimal digits, random.
    In a forked child the pool is closed: it belongs to the parent.

    Args:
        run_dir: Where readers find it: by default ``$XDG_RUNTIME_DIR/aaflow-langgraph``, else
            ``/tmp/aaflow-langgraph-<uid>``. Made when missing, private.

    Raises:
        ConfigError: ``capacity_bytes`` makes no sense or is more than the machine has, or the directory is not ours alone.
            Way out: fail.
    """

    def __init__(self, capacity_bytes: int, *, run_dir: Path | None = None) -> None:
        super().__init__(capacity_bytes, GRANULE_BYTES)
        self._pid = os.getpid()
        directory = RunDir.of(run_dir)
        with directory.opened():
            pass  # a wrong directory is refused before gigabytes are touched
        layout = Layout(self.owner, self._arena.capacity_bytes)
        name = PoolName.of_this_process(self.owner)
        memory = _memory.create(layout.total_bytes, name.file("mem"))
        mapping = memory.mapping
        front = layout.front()
        mapping[: len(front)] = front
        self._slots: Slots | None = Slots(memoryview(mapping), layout)
        self._bytes = torch.frombuffer(mapping, dtype=torch.uint8, offset=layout.header_bytes)
        try:
            door = Door(directory, name, Offer(layout, memory.kind), memory.fd)
        except ConfigError:
            os.close(memory.fd)
            raise
        # Also when the pool is dropped without close, and when the interpreter ends.
        self._close_door = weakref.finalize(self, door.close)
        _pools.add(self)

    def publish(self, allocation: Allocation) -> None:
        """Let readers find a live allocation whose bytes are complete; they are never written again. Idempotent.

        Without effect once the pool is closed.

        Raises:
            ValueError: The allocation is not live.
        """
        self._arena.require(allocation)
        if self._slots is not None:
            self._slots.publish(allocation)

    def shrink(self, allocation: Allocation, num_bytes: int) -> Allocation:
        """Keep the front. What was published stays published, under the smaller range only."""
        kept = self._arena.shrink(allocation, num_bytes)
        if self._slots is not None:
            self._slots.shrink(allocation, kept)
        return kept

    def free(self, allocation: Allocation) -> None:
        """Give a live allocation back. Readers see that it is gone before anybody can get its bytes."""
        self._arena.require(allocation)
        if self._slots is not None:
            self._slots.clear(allocation)
        self._arena.free(allocation)

    def tensor(self, allocation: Allocation, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        """A writable view. See ``Pool.tensor``.

        Raises:
            ConfigError: This is a forked child of the pool's process. Way out: fail.
        """
        if self._pid != os.getpid():
            raise ConfigError(
                f"the pool belongs to process {self._pid}, this is its child {os.getpid()}: start worker processes "
                "with 'spawn' and open a broker in each"
            )
        return super().tensor(allocation, dtype, shape)

    def check(self) -> list[str]:
        """Violations of I1, I4 and I10: the arena's, and generations in the header that no live range has."""
        found = super().check()
        if self._slots is not None:
            expected: dict[int, int] = {}
            for allocation in self._arena.live():
                expected.update(expected_slots(allocation))
            for granule, generation in self._slots.taken().items():
                if expected.get(granule) != generation:
                    found.append(f"granule {granule} shows generation {generation}, which no live range has there")
        return found

    def close(self) -> None:
        """Take no more readers and give the memory back. Idempotent. Those who mapped it keep it, with what was published
        and not freed until now, for as long as they want.
        """
        self._close_door()
        self._forget()
        super().close()

    def _forget(self) -> None:
        # The header's view would keep the mapping alive. Without it, free() need not clear: bytes are never given out again.
        self._slots = None


_pools: weakref.WeakSet[SharedPool] = weakref.WeakSet()


def _in_child() -> None:
    for pool in list(_pools):
        RegionPool.close(pool)
        pool._forget()


os.register_at_fork(after_in_child=_in_child)
