"""One writer a thread, between Python threads and between processes. Knows lock files; knows no savers.

A lock is ``flock`` on a file of its own descriptor: it excludes every other descriptor, whoever has it, and the kernel gives
it back when its process dies. Threads share 64 files by the hash of their id, so the directory does not grow.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterable
from hashlib import blake2b
from pathlib import Path

from aaflow_langgraph.errors import PersistenceError

_NUM_FILES = 64


class ThreadLock:
    """Held until ``release``, the end of the ``with`` block, or the end of this object, whatever comes first."""

    def __init__(self) -> None:
        self._fds: list[int] = []

    def __enter__(self) -> ThreadLock:
        return self

    def __exit__(self, *exc: object) -> None:
        self.release()

    def __del__(self) -> None:
        self.release()

    def release(self) -> None:
        """Idempotent. Closes descriptors and waits for nothing, so it may run on an event loop."""
        while self._fds:
            os.close(self._fds.pop())

    def take(self, path: Path, *, wait: bool) -> bool:
        """Add one file to what is held; False when another has it and ``wait`` is False.

        Raises:
            PersistenceError: The file cannot be opened: no descriptors, no room, no rights. Way out: fail.
        """
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise PersistenceError(f"{path} cannot be opened: {error.strerror}; nothing was stored") from error
        try:
            fcntl.flock(fd, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            return False
        except BaseException:
            os.close(fd)
            raise
        self._fds.append(fd)
        return True


class ThreadLocks:
    """Locks of LangGraph threads, by ``thread_id``."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        directory.mkdir(mode=0o700, exist_ok=True)

    def acquire(self, thread_ids: Iterable[str]) -> ThreadLock:
        """Wait for all of them; in one order everywhere, so that two who need two do not wait for each other."""
        lock = ThreadLock()
        for path in self._paths(thread_ids):
            lock.take(path, wait=True)
        return lock

    def try_acquire(self, thread_ids: Iterable[str]) -> ThreadLock | None:
        """All of them at once, or None when somebody has one."""
        lock = ThreadLock()
        for path in self._paths(thread_ids):
            if not lock.take(path, wait=False):
                lock.release()
                return None
        return lock

    def _paths(self, thread_ids: Iterable[str]) -> list[Path]:
        numbers = {blake2b(name.encode(), digest_size=2).digest()[0] % _NUM_FILES for name in thread_ids}
        return [self._directory / f"{number:02d}.lock" for number in sorted(numbers)]
