"""Memory that other processes can map but not change: a sealed memfd or, where that is refused, a file without a name.

Knows how to get pages and to say no in time. Knows nothing of what they hold.

A page that cannot be had is a SIGBUS in the middle of a forward, or the kernel killing some process, if it is found out at
first touch; so every page is allocated here, and what cannot be is a ``ConfigError``.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from aaflow_langgraph.errors import ConfigError
from aaflow_langgraph.pool._rundir import RunDir

Kind = Literal["memfd", "file"]

_FALLBACK_PARENT = Path("/dev/shm")

# Linux's fcntl.h; Python 3.11 does not name F_SEAL_FUTURE_WRITE.
_F_ADD_SEALS, _F_GET_SEALS = 1033, 1034
_F_SEAL_SEAL, _F_SEAL_SHRINK, _F_SEAL_GROW, _F_SEAL_FUTURE_WRITE = 0x1, 0x2, 0x4, 0x10
_SEALS = _F_SEAL_SEAL | _F_SEAL_SHRINK | _F_SEAL_GROW | _F_SEAL_FUTURE_WRITE

_STEP_BYTES = 64 << 20
"""Pages are allocated in steps: an allocation that a signal interrupts starts again, and a long one might never end."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Pages, mapped writable here.

    ``fd`` is what others get: it cannot be mapped writable, written, grown or shrunk. It stays open until the owner closes
    it.
    """

    kind: Kind
    fd: int
    mapping: mmap.mmap


class _Refused(Exception):
    """This kernel or sandbox gives no sealed memfd."""


def create(num_bytes: int, name: str) -> Memory:
    """``num_bytes`` of zeroed, allocated, mapped memory. ``name`` is used for as long as a fallback file has one.

    Raises:
        ConfigError: The machine does not have them; says how many there are. Way out: fail.
    """
    available = available_bytes()
    if num_bytes > available:
        raise ConfigError(
            f"the pool needs {num_bytes} bytes of memory and {available} are available; pass a smaller pool_bytes"
        )
    try:
        return _sealed_memfd(num_bytes)
    except _Refused:
        return _unnamed_file(num_bytes, name)


def fallback_dir() -> Path:
    """Where fallback files are made."""
    return _FALLBACK_PARENT / f"aaflow-langgraph-{os.geteuid()}"


def is_protected(fd: int, kind: Kind) -> bool:
    """Can nobody who has this descriptor, its sender included, take pages from under a reader?

    A fallback file has no seals: it must be ours alone, without a name, and opened for reading. Its owner could still
    shrink it, which is why it is the fallback.
    """
    if kind == "memfd":
        try:
            return fcntl.fcntl(fd, _F_GET_SEALS) & _SEALS == _SEALS
        except OSError:
            return False
    status = os.fstat(fd)
    read_only = fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY
    ours = status.st_uid == os.geteuid() and status.st_mode & 0o077 == 0
    return read_only and ours and stat.S_ISREG(status.st_mode) and status.st_nlink == 0


def available_bytes() -> int:
    """What the kernel could give without killing anybody, limits of the control groups (v2) we are in included."""
    found = _number(Path("/proc/meminfo").read_text(encoding="ascii"), "MemAvailable:") * 1024
    groups = Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    own = next((line[3:] for line in groups if line.startswith("0::")), "/").lstrip("/")
    root = Path("/sys/fs/cgroup")
    for group in (root / own, *(root / own).parents):
        if group.is_relative_to(root):
            with contextlib.suppress(OSError, ValueError):  # no such controller here, or "max"
                limit = int((group / "memory.max").read_text(encoding="ascii"))
                used = int((group / "memory.current").read_text(encoding="ascii"))
                stats = (group / "memory.stat").read_text(encoding="ascii")
                cache = _number(stats, "file ") - _number(stats, "shmem ")  # goes when it is needed
                found = min(found, max(0, limit - used + cache))
    return found


def _number(text: str, label: str) -> int:
    return next(int(line[len(label) :].split()[0]) for line in text.splitlines() if line.startswith(label))


def _sealed_memfd(num_bytes: int) -> Memory:
    try:
        fd = os.memfd_create("aaflow-pool", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError as error:
        raise _Refused from error
    with _closing_on_error(fd):
        mapping = _allocate(fd, num_bytes, "memory")
        try:
            fcntl.fcntl(fd, _F_ADD_SEALS, _SEALS)  # the mapping made before stays writable, none made later will be
        except OSError as error:
            mapping.close()
            raise _Refused from error
        return Memory("memfd", fd, mapping)


def _unnamed_file(num_bytes: int, name: str) -> Memory:
    run_dir = RunDir(fallback_dir())
    with run_dir.opened() as folder:
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        writable = os.open(name, flags, 0o600, dir_fd=folder)
        try:
            fd = os.open(name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW, dir_fd=folder)
        finally:
            os.unlink(name, dir_fd=folder)  # from here on the pages go with their last user, however that ends
    try:
        with _closing_on_error(fd):
            return Memory("file", fd, _allocate(writable, num_bytes, str(_FALLBACK_PARENT)))
    finally:
        os.close(writable)


def _allocate(fd: int, num_bytes: int, where: str) -> mmap.mmap:
    status = os.fstatvfs(fd)
    free = status.f_bavail * status.f_frsize
    try:
        if status.f_blocks and free < num_bytes:  # known before gigabytes are filled in vain; 0 blocks: no limit
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.ftruncate(fd, num_bytes)
        for start in range(0, num_bytes, _STEP_BYTES):
            os.posix_fallocate(fd, start, min(_STEP_BYTES, num_bytes - start))
        return mmap.mmap(fd, num_bytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
    except OSError as error:
        where += f", where {free} are free" if error.errno == errno.ENOSPC else ""
        raise ConfigError(
            f"cannot take {num_bytes} bytes of {where}, for the pool: {error.strerror}; pass a smaller pool_bytes"
        ) from error


@contextlib.contextmanager
def _closing_on_error(fd: int) -> Iterator[None]:
    try:
        yield
    except BaseException:
        os.close(fd)
        raise
