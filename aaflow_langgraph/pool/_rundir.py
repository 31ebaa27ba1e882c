"""Where the processes of one user on one host meet: a private directory, and file names that say whose they are.

Knows processes and names. Knows no sockets' protocol and no memory.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from aaflow_langgraph._directory import expanded
from aaflow_langgraph.errors import ConfigError

_NAME = re.compile(
    r"pool-(?P<boot>[0-9a-f]{16})-(?P<pid>[1-9][0-9]{0,9})-(?P<start>[0-9]{1,20})-(?P<owner>[0-9a-f]{32})"
    r"\.(?P<suffix>sock|new|mem)"
)
_OWNER = re.compile(r"[0-9a-f]{32}")


def is_owner(text: object) -> bool:
    """Is this what the name of a pool looks like? Names come from an index, so they may be anything."""
    return isinstance(text, str) and _OWNER.fullmatch(text) is not None


@dataclass(frozen=True, slots=True)
class PoolName:
    """Who made a pool. Boot and start time tell a process from a later one with the same pid."""

    boot: str
    pid: int
    start: int
    owner: str

    @classmethod
    def of_this_process(cls, owner: str) -> PoolName:
        """The name of a pool that this process makes."""
        return cls(boot_id(), os.getpid(), start_time("self") or 0, owner)

    @classmethod
    def parse(cls, name: str) -> PoolName | None:
        """What a file name says; None for files that are not ours."""
        match = _NAME.fullmatch(name)
        return match and cls(match["boot"], int(match["pid"]), int(match["start"]), match["owner"])

    def file(self, suffix: str) -> str:
        """``sock``: listens. ``new``: does not yet. ``mem``: fallback memory that is being made."""
        return f"pool-{self.boot}-{self.pid}-{self.start}-{self.owner}.{suffix}"

    def is_running(self) -> bool:
        """Does the process that made the pool still run, as far as can be seen from this pid namespace?"""
        return self.boot == boot_id() and start_time(self.pid) == self.start


@dataclass(frozen=True, slots=True)
class RunDir:
    """A directory that is ours alone."""

    path: Path

    @classmethod
    def of(cls, path: Path | None) -> RunDir:
        """``path``, or ``$XDG_RUNTIME_DIR/aaflow-langgraph``, or ``/tmp/aaflow-langgraph-<uid>``."""
        if path is not None:
            return cls(expanded(path).absolute())  # the process may go elsewhere and must still find its socket
        configured = os.environ.get("XDG_RUNTIME_DIR", "")
        if os.path.isabs(configured):
            return cls(Path(configured) / "aaflow-langgraph")
        return cls(Path(f"/tmp/aaflow-langgraph-{os.geteuid()}"))

    @contextlib.contextmanager
    def opened(self) -> Iterator[int]:
        """Its descriptor; made (0700) when it is not there. Everything in it is reached from this descriptor, so what was
        checked is what is used, and a socket's path is short however deep the directory lies.

        Raises:
            ConfigError: It cannot be made, is no directory, or others have a right to it. Way out: fail.
        """
        with contextlib.suppress(FileExistsError), self._explained():
            os.mkdir(self.path, 0o700)
        with self._explained():
            fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            status = os.fstat(fd)
            if status.st_uid != os.geteuid() or status.st_mode & 0o077:
                raise ConfigError(
                    f"{self.path} must belong to uid {os.geteuid()} with no rights for others; it belongs to uid "
                    f"{status.st_uid} with mode {stat.S_IMODE(status.st_mode):04o}: remove it, or name another directory"
                )
            yield fd
        finally:
            os.close(fd)

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except FileExistsError:
            raise
        except OSError as error:
            what = (
                "is no directory (a link is none)" if error.errno in (errno.ENOTDIR, errno.ELOOP) else "cannot be used"
            )
            raise ConfigError(
                f"{self.path} {what}: {error.strerror}; remove it, set XDG_RUNTIME_DIR, or name another directory"
            ) from error


def reached(folder: int, name: str) -> str:
    """A path of at most 100 bytes for a file of an opened directory (a socket address holds 108)."""
    return f"/proc/self/fd/{folder}/{name}"


@cache
def boot_id() -> str:
    """Half of the kernel's boot id: enough to tell boots of one host apart, short enough for a socket's name."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").replace("-", "")[:16]


def start_time(pid: int | str) -> int | None:
    """When a process started, in clock ticks since boot; None when it does not run (a zombie does not)."""
    try:
        status = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    fields = status[status.rindex(b")") + 2 :].split()  # a process may have called itself "a) R 1 1"
    return None if fields[0] in (b"Z", b"X") else int(fields[19])
