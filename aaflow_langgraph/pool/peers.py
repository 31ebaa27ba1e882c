"""Pools of other processes, mapped read-only. The reader's side of ``SharedPool``.

Everything that comes from outside (an owner's name, an allocation, what answers on a socket) may be wrong; what is wrong is
a ``KVMissing`` or a refusal, never a hang, a fault or bytes from elsewhere. Knows no index and no leases: who asks
``is_live`` after reading is safe without them.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import select
import socket
import threading
import time
from pathlib import Path

import numpy
import torch

from aaflow_langgraph.errors import ConfigError, Evicted, KVMissing, UsageError
from aaflow_langgraph.pool._door import MESSAGE_BYTES, Offer, peer_uid, socket_path
from aaflow_langgraph.pool._layout import Layout, Slots, fits
from aaflow_langgraph.pool._memory import is_protected
from aaflow_langgraph.pool._rundir import RunDir, is_owner
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
        made = self._attach(owner)  # without the lock: an owner that does not answer keeps nobody else waiting
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

    def _attach(self, owner: str) -> Attached:
        if not is_owner(owner):
            raise KVMissing(f"{str(owner)[:40]!r} is no pool's name: 32 hexadecimal digits")
        deadline = time.monotonic() + self._deadline_s
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            self._connect(connection, owner)
            message, fd = _receive(connection, owner, deadline)
            try:
                offer = _accepted(message, fd, owner)
                size = offer.layout.total_bytes
                mapping = mmap.mmap(fd, size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
            except (OSError, OverflowError, ValueError) as error:
                raise KVMissing(f"pool {owner} cannot be attached: {error}") from error
            finally:
                os.close(fd)
            front = offer.layout.front()
            if mapping[: len(front)] != front:
                mapping.close()
                raise KVMissing(f"pool {owner} cannot be attached: its memory begins with something else")
            return Attached(offer.layout, mapping, connection)
        except (KVMissing, ConfigError):
            connection.close()
            raise

    def _connect(self, connection: socket.socket, owner: str) -> None:
        with self._run_dir.opened() as folder:
            path = socket_path(folder, owner)
            if path is None:
                raise Evicted(f"no pool {owner} in {self._run_dir.path}: its owner has closed it or was never here")
            try:
                connection.connect(str(path))
            except ConnectionRefusedError as error:
                raise Evicted(f"nobody serves pool {owner} any more: its owner is gone") from error
            except OSError as error:
                raise KVMissing(f"pool {owner} does not answer ({error}): its owner is overrun") from error
        uid = peer_uid(connection)
        if uid != os.geteuid():
            raise KVMissing(f"pool {owner} is served by uid {uid}, this is uid {os.geteuid()}")


def _receive(connection: socket.socket, owner: str, deadline: float) -> tuple[bytes, int]:
    """The owner's message and the one descriptor beside it, in however many pieces, before the deadline."""
    message, fds = b"", list[int]()
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    try:
        while len(message) < MESSAGE_BYTES:
            left = deadline - time.monotonic()
            if left <= 0 or not poll.poll(math.ceil(left * 1000)):
                raise KVMissing(f"the owner of pool {owner} did not answer in time: stopped, or busy")
            # MSG_CMSG_CLOEXEC: what a program that we start inherits would keep the pool's memory.
            piece, got, _, _ = socket.recv_fds(connection, MESSAGE_BYTES - len(message), 4, socket.MSG_CMSG_CLOEXEC)
            fds += got
            if not piece:
                raise KVMissing(f"the owner of pool {owner} hung up: it closes, or has as many readers as it takes")
            message += piece
        if len(fds) != 1:
            raise KVMissing(f"the owner of pool {owner} sent {len(fds)} descriptors instead of one")
        return message, fds.pop()
    except OSError as error:
        raise KVMissing(f"the owner of pool {owner} is gone: {error}") from error
    finally:
        for fd in fds:
            os.close(fd)


def _accepted(message: bytes, fd: int, owner: str) -> Offer:
    """The offer, if everything about it and the descriptor is as it must be; else ValueError."""
    offer = Offer.unpack(message)
    if offer.layout.owner != owner:
        raise ValueError(f"pool {offer.layout.owner} answers there")
    size = os.fstat(fd).st_size
    if size != offer.layout.total_bytes:
        raise ValueError(f"it has {size} bytes where {offer.layout.total_bytes} were announced")
    if not is_protected(fd, offer.kind):
        raise ValueError(f"its {offer.kind} can be changed or cut under a reader")
    return offer


def _read_only_tensor(view: memoryview) -> torch.Tensor:
    """The bytes as a uint8 tensor that keeps ``view`` alive.

    torch knows no read-only tensors and warns about every such buffer. A ctypes array at the same address passes for
    writable; the memory management unit is what keeps writers out.
    """
    address = numpy.frombuffer(view, numpy.uint8).ctypes.data
    array = (ctypes.c_ubyte * len(view)).from_address(address)
    array.keep = view  # type: ignore[attr-defined]  # the tensor holds the array, the array the mapping
    return torch.frombuffer(array, dtype=torch.uint8)
