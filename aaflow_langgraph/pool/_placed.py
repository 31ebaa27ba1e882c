"""Files that appear whole: written under a name that says by whom, then renamed. Knows processes; knows no format."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
from collections.abc import Sequence

from aaflow_langgraph.pool._rundir import boot_id, start_time

NAME = re.compile(r"(?P<boot>[0-9a-f]{16})-(?P<pid>[1-9][0-9]{0,9})-(?P<start>[0-9]{1,20})-[0-9a-f]{16}\.tmp")
DIRECTORY_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
FILE_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
"""For reading whatever lies there: no link is followed, and a pipe does not make the reader wait."""


def names(directory: int) -> list[str]:
    """Names in a directory."""
    # A descriptor has one reading position, whoever reads: each listing takes its own.
    own = os.open(".", DIRECTORY_FLAGS, dir_fd=directory)
    try:
        return os.listdir(own)
    finally:
        os.close(own)


def made(parent: int, name: str) -> int:
    """A descriptor of a directory, which is made (0700) when it is not there.

    Not synced: journals keep the order, so it is on the disk before any file that is placed in it and synced.
    """
    with contextlib.suppress(FileExistsError):
        os.mkdir(name, 0o700, dir_fd=parent)
    return os.open(name, DIRECTORY_FLAGS, dir_fd=parent)


def place(tmp: int, parts: Sequence[memoryview], folder: int, file: str, last_used_ns: int) -> None:
    """Write ``parts`` as ``folder``/``file``: whole and on the disk when this returns, nothing left when it raises.

    ``tmp`` is a directory of the same file system; the file is written there.
    """
    temp, fd = _new(tmp)
    try:
        with contextlib.suppress(OSError):  # a file system without locks: the name has to do
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _write_all(fd, parts)
        os.utime(fd, ns=(last_used_ns, last_used_ns))
        os.fsync(fd)
        os.rename(temp, file, src_dir_fd=tmp, dst_dir_fd=folder)
        os.fsync(folder)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temp, dir_fd=tmp)
        raise
    finally:
        os.close(fd)


def probe(tmp: int) -> None:
    """Raise what ``place`` would raise in a directory that cannot be written."""
    temp, fd = _new(tmp)
    os.close(fd)
    os.unlink(temp, dir_fd=tmp)


def is_left(tmp: int, name: str) -> bool:
    """Is this the unfinished file of a process that is gone?

    The name tells processes that this one can see, the lock those of other pid namespaces.
    """
    match = NAME.fullmatch(name)
    if match is None or (match["boot"] == boot_id() and start_time(match["pid"]) == int(match["start"])):
        return False
    try:
        fd = os.open(name, FILE_FLAGS, dir_fd=tmp)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    finally:
        os.close(fd)
    return True


def _new(tmp: int) -> tuple[str, int]:
    name = f"{boot_id()}-{os.getpid()}-{start_time('self') or 0}-{secrets.token_hex(8)}.tmp"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    return name, os.open(name, flags, 0o600, dir_fd=tmp)


def _write_all(fd: int, parts: Sequence[memoryview]) -> None:
    left = [part.cast("B") for part in parts if part.nbytes]
    while left:
        count = os.writev(fd, left)
        while left and count >= left[0].nbytes:
            count -= left.pop(0).nbytes
        if count:
            left[0] = left[0][count:]
