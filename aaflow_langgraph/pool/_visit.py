"""A visit at another process's door: its pool mapped read-only, or the reason why not. The reader's side of ``_door``.

Everything that comes from outside (an owner's name, what answers on a socket) may be wrong; what is wrong is a
``KVMissing``, never a hang or a fault. Knows sockets and mappings; knows no tensors and remembers nobody.
"""

from __future__ import annotations

import math
import mmap
import os
import select
import socket
import time
from dataclasses import dataclass

from aaflow_langgraph.errors import ConfigError, Evicted, KVMissing
from aaflow_langgraph.pool._door import MESSAGE_BYTES, Offer, peer_uid, socket_path
from aaflow_langgraph.pool._layout import Layout
from aaflow_langgraph.pool._memory import is_protected
from aaflow_langgraph.pool._rundir import RunDir, is_owner


@dataclass(frozen=True, slots=True)
class Visit:
    """A pool's sizes, its memory mapped read-only, and the connection whose end is the owner's."""

    layout: Layout
    mapping: mmap.mmap
    connection: socket.socket


def visit(run_dir: RunDir, owner: str, deadline_s: float) -> Visit:
    """Ask an owner for its pool and map it; whoever asked closes the connection.

    Raises:
        Evicted: Its owner has closed it or is dead: the pool is gone for good. Way out: recompute.
        KVMissing: Its owner does not answer within the deadline, or answers what cannot be. Way out: recompute.
        ConfigError: The run directory is not ours alone. Way out: fail.
    """
    if not is_owner(owner):
        raise KVMissing(f"{str(owner)[:40]!r} is no pool's name: 32 hexadecimal digits")
    deadline = time.monotonic() + deadline_s
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        _connect(connection, run_dir, owner)
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
        return Visit(offer.layout, mapping, connection)
    except (KVMissing, ConfigError):
        connection.close()
        raise


def _connect(connection: socket.socket, run_dir: RunDir, owner: str) -> None:
    with run_dir.opened() as folder:
        path = socket_path(folder, owner)
        if path is None:
            raise Evicted(f"no pool {owner} in {run_dir.path}: its owner has closed it or was never here")
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
