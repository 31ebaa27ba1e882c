"""Pools of other processes, mapped read-only. The reader's side of ``SharedPool``.

Everything that comes from outside (an owner's name, an allocation, what answers on a socket) may be wrong; what is wrong is
a ``KVMissing`` or a refusal, never a hang, a fault or bytes from elsewhere. Knows no index and no leases: who asks
``is_live`` after reading is safe without them.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import select
import socket
import threading
from pathlib import Path

import numpy
import torch

from aaflow_langgraph.errors import UsageError
from aaflow_langgraph.pool._layout import Layout, Slots, fits
from aaflow_langgraph.pool._rundir import RunDir
from aaflow_langgraph.pool._visit import visit
from aaflow_langgraph.pool.arena import Allocation


class Attached:
    """One pool of another process, mapped read-only.

    The mapping lives as long as this object or any tensor from it, whatever becomes of the owner.
    """

    def __init__(self, layout: Layout, mapping: mmap.mmap, connection: socket.socket) -> None:
        self.owner = layout.owner
        self.capacity_bytes = layout.capacity_bytes
        view = memoryview(mapping)
        self._slots = Slots(view, layout)
        self._bytes = _read_only_tensor(view)[layout.header_bytes :]
        self._connection = connection

    def is_alive(self) -> bool:
        """Is the owner still there, its pool open? Does not wait. False also after ``close``."""
        poll = select.poll()
        try:
            poll.register(self._connection, select.POLLRDHUP)
        except ValueError:  # closed
            return False
        return not poll.poll(0)

    def is_live(self, allocation: Allocation) -> bool:
        """Is exactly this range published under this generation? Ask after reading: then what was read is right.

        Any numbers may be asked about. Keeps its answer when the owner is dead: what was live then stays so.
        """
        return self._slots.holds(allocation)

    def tensor(self, allocation: Allocation, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        """The allocation's first bytes as a contiguous tensor. Zero copy; writing to it ends the process (SIGSEGV).

        Raises:
            UsageError: The range lies outside of the pool, or the tensor outside of the range. Way out: fail.
        """
        if not fits(allocation, self.capacity_bytes):
            raise UsageError(f"{allocation} is no range of a pool of {self.capacity_bytes} bytes")
        if any(type(size) is not int or size < 0 for size in shape):
            raise UsageError(f"{shape} is no shape")
        num_bytes = math.prod(shape) * dtype.itemsize
        if num_bytes > allocation.num_bytes:
            raise UsageError(f"{shape} of {dtype} needs {num_bytes} bytes, the allocation has {allocation.num_bytes}")
        return self._bytes[allocation.offset : allocation.offset + num_bytes].view(dtype).view(shape)

    def close(self) -> None:
        """Hang up. Idempotent. The memory goes with the last tensor and this object."""
        self._connection.close()


class Peers:
    """Attached pools, by owner. Safe from several threads.

    Args:
        run_dir: The directory that the owners were given; the same default.
        deadline_s: The longest that one ``attach`` takes.
    """

    def __init__(self, run_dir: Path | None = None, *, deadline_s: float = 1.0) -> None:
        self._run_dir = RunDir.of(run_dir)
        self._deadline_s = deadline_s
        self._attached: dict[str, Attached] = {}
        self._lock = threading.Lock()

    def attach(self, owner: str) -> Attached:
        """The owner's pool; mapped at the first call, remembered until ``detach``, also beyond the owner's death.

        Raises:
            Evicted: Its owner has closed it or is dead: the pool is gone for good. Way out: recompute.
            KVMissing: Its owner does not answer within the deadline, or answers what cannot be. Way out: recompute.
            ConfigError: The run directory is not ours alone. Way out: fail.
        """
        with self._lock:
            known = self._attached.get(owner)
        if known is not None:
            return known
        # Without the lock: an owner that does not answer keeps nobody else waiting.
        seen = visit(self._run_dir, owner, self._deadline_s)
        made = Attached(seen.layout, seen.mapping, seen.connection)
        with self._lock:
            kept = self._attached.setdefault(owner, made)
        if kept is not made:
            made.close()
        return kept

    def known(self, owner: str) -> Attached | None:
        """The owner's pool if it is mapped; asks nobody."""
        return self._attached.get(owner)

    def attached(self) -> list[Attached]:
        """What is mapped now."""
        with self._lock:
            return list(self._attached.values())

    def detach(self, owner: str) -> None:
        """Forget a pool. Tensors from it stay readable. Idempotent."""
        with self._lock:
            gone = self._attached.pop(owner, None)
        if gone is not None:
            gone.close()

    def close(self) -> None:
        """Forget every pool. Idempotent."""
        for attached in self.attached():
            self.detach(attached.owner)


def _read_only_tensor(view: memoryview) -> torch.Tensor:
    """The bytes as a uint8 tensor that keeps ``view`` alive.

    torch knows no read-only tensors and warns about every such buffer. A ctypes array at the same address passes for
    writable; the memory management unit is what keeps writers out.
    """
    address = numpy.frombuffer(view, numpy.uint8).ctypes.data
    array = (ctypes.c_ubyte * len(view)).from_address(address)
    array.keep = view  # type: ignore[attr-defined]  # the tensor holds the array, the array the mapping
    return torch.frombuffer(array, dtype=torch.uint8)
