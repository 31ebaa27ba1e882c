"""Where a pool hands its descriptor over: one socket, one message, one thread.

The owner speaks first and only once: a fixed message with the descriptor beside it. Whoever sends anything has
misunderstood and is cut off. The connection then stays open for as long as both live; its end is how each learns that the
other is gone, SIGKILL included. Knows sockets and processes, no pools.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import struct
import threading
import weakref
from dataclasses import dataclass
from pathlib import Path

from aaflow_langgraph.errors import ConfigError
from aaflow_langgraph.pool._layout import GRANULE_BYTES, Layout
from aaflow_langgraph.pool._memory import Kind
from aaflow_langgraph.pool._rundir import PoolName, RunDir, reached

_MESSAGE = struct.Struct("<8sII16sQ")  # magic, version, kind, owner, capacity_bytes
_MAGIC = b"AAFLOWFD"
_VERSION = 1
_KINDS: tuple[Kind, ...] = ("memfd", "file")
_PEER = struct.Struct("iII")  # struct ucred: pid, uid, gid

MESSAGE_BYTES = _MESSAGE.size
MAX_READERS = 256
"""Connections held at a time; each takes a descriptor of the owner, of which a process has 1024 unless told otherwise."""

_BACKLOG = 128
_PAUSE_S = 0.05
"""So long nobody is accepted after the system had no descriptor for another connection."""

_fork_lock = threading.Lock()
_doors: weakref.WeakSet[Door] = weakref.WeakSet()


@dataclass(frozen=True, slots=True)
class Offer:
    """What the message says."""

    layout: Layout
    kind: Kind

    def pack(self) -> bytes:
        """The message."""
        layout = self.layout
        owner = bytes.fromhex(layout.owner)
        return _MESSAGE.pack(_MAGIC, _VERSION, _KINDS.index(self.kind), owner, layout.capacity_bytes)

    @classmethod
    def unpack(cls, message: bytes) -> Offer:
        """Raises ValueError with what is wrong about ``message`` (``MESSAGE_BYTES`` bytes)."""
        magic, version, kind, owner, capacity_bytes = _MESSAGE.unpack(message)
        if (magic, version) != (_MAGIC, _VERSION) or kind >= len(_KINDS):
            raise ValueError(f"an answer in another format ({magic!r}, version {version}, kind {kind})")
        if not 0 < capacity_bytes < 1 << 62 or capacity_bytes % GRANULE_BYTES:
            raise ValueError(f"an impossible capacity of {capacity_bytes} bytes")
        return cls(Layout(owner.hex(), capacity_bytes), _KINDS[kind])


def peer_uid(connection: socket.socket) -> int:
    """Who is at the other end, according to the kernel."""
    uid: int = _PEER.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))[1]
    return uid


class Door:
    """Serves one descriptor until it is closed.

    Args:
        fd: What is handed over. Belongs to the door, which closes it.

    Raises:
        ConfigError: The directory or the socket cannot be had. Way out: fail.
    """

    def __init__(self, run_dir: RunDir, name: PoolName, offer: Offer, fd: int) -> None:
        self._run_dir = run_dir
        self._file = name.file("sock")
        self._message = offer.pack()
        self._fd = fd
        self._pid = os.getpid()
        self._readers: set[socket.socket] = set()
        self._listener = self._listen(name.file("new"))
        self._bell, self._bell_end = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._bell_end, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._serve, name=f"aaflow-pool-{name.owner[:8]}", daemon=True)
        with _fork_lock:
            _doors.add(self)
        self._thread.start()

    def close(self) -> None:
        """Remove the socket, end the thread, close every descriptor. Idempotent; in a forked child without effect."""
        if self._pid != os.getpid() or self._fd < 0:
            return
        with contextlib.suppress(ConfigError, FileNotFoundError), self._run_dir.opened() as folder:
            os.unlink(self._file, dir_fd=folder)
        self._bell.send(b"x")
        self._thread.join()
        self._close_descriptors()

    def leave(self) -> None:
        """In a forked child: let go of the parent's descriptors, or readers would not see the parent's end."""
        self._close_descriptors()

    def _listen(self, new: str) -> socket.socket:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            with self._run_dir.opened() as folder:
                listener.bind(reached(folder, new))
                os.chmod(new, 0o600, dir_fd=folder)
                listener.listen(_BACKLOG)
                # Under its own name only now: a socket that refuses connections there belongs to somebody dead.
                os.rename(new, self._file, src_dir_fd=folder, dst_dir_fd=folder)
        except OSError as error:
            listener.close()
            raise ConfigError(f"cannot listen in {self._run_dir.path}: {error}; name another directory") from error
        except ConfigError:
            listener.close()
            raise
        return listener

    def _serve(self) -> None:
        paused = False
        while True:
            ready = self._selector.select(_PAUSE_S if paused else None)
            if paused:
                self._selector.register(self._listener, selectors.EVENT_READ)
                paused = False
            for key, _ in ready:
                if key.fileobj is self._bell_end:
                    return
                if key.fileobj is not self._listener:
                    self._drop(key.fileobj)  # type: ignore[arg-type]  # gone, or talking: nothing is to be said
                elif not self._welcome():
                    self._selector.unregister(self._listener)  # it would stay ready and the thread would spin
                    paused = True

    def _welcome(self) -> bool:
        """Accept and serve one connection; False when the system has no descriptor for it."""
        with _fork_lock:  # a fork between accept and add would leave the child with a connection that it cannot find
            try:
                reader, _ = self._listener.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return True
            except OSError:
                return False
            self._readers.add(reader)
        try:
            reader.setblocking(False)
            if len(self._readers) > MAX_READERS or peer_uid(reader) != os.geteuid():
                raise PermissionError
            # An empty socket's buffer takes the message whole; one that does not is no reader's.
            if socket.send_fds(reader, [self._message], [self._fd]) != MESSAGE_BYTES:
                raise BrokenPipeError
            self._selector.register(reader, selectors.EVENT_READ)
        except OSError:
            self._readers.discard(reader)
            reader.close()
        return True

    def _drop(self, reader: socket.socket) -> None:
        self._selector.unregister(reader)
        self._readers.discard(reader)
        reader.close()

    def _close_descriptors(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        self._selector.close()
        for end in (self._listener, self._bell, self._bell_end, *self._readers):
            end.close()
        self._readers.clear()


def is_listening(folder: int, file: str) -> bool:
    """Does anybody listen on this socket? A stopped process does; a dead one does not."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as probe:
        try:
            probe.connect(reached(folder, file))
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except OSError:  # a full queue, for one: somebody is there
            return True
        return True


def socket_path(folder: int, owner: str) -> Path | None:
    """Where the owner's socket is, in an opened run directory."""
    for file in os.listdir(folder):
        name = PoolName.parse(file)
        if name is not None and name.owner == owner and file == name.file("sock"):
            return Path(reached(folder, file))
    return None


def _in_child() -> None:
    _fork_lock.release()
    for door in list(_doors):
        door.leave()


os.register_at_fork(before=_fork_lock.acquire, after_in_parent=_fork_lock.release, after_in_child=_in_child)
