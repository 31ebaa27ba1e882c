"""The files of one namespace in one directory that many processes share. Knows names, descriptors and crashes; no format.

    <directory>/                                  0700, ours alone
        aaflow-disk-pool.json                     what this directory is, and in which version
        tmp/<boot>-<pid>-<start>-<random>.tmp     being written; the name says by whom
        quarantine/<time>-<random>-<file>         damaged, kept for a look
        <namespace>/<first two digits>/<file>     whole: renamed here when every byte was on the disk

There are no locks between processes: a file is named by its content, appears whole by a rename, and is never written again,
so the last rename wins and both are right. Everything is reached from a directory's descriptor and no link is followed.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import secrets
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from aaflow_langgraph.errors import CapacityError, ConfigError
from aaflow_langgraph.pool import _placed
from aaflow_langgraph.pool._disk_root import claim
from aaflow_langgraph.pool._listing import FILE, FileFacts, Listing
from aaflow_langgraph.pool._reading import Reading

KEPT_IN_QUARANTINE = 8

_log = logging.getLogger("aaflow_langgraph")


class Shelf:
    """Opened once, used from any thread, between ``inside``. ``file`` is a name as ``_listing.FILE`` has it.

    Raises:
        ConfigError: The directory cannot be made or written, belongs to somebody else, holds something else, or was made by
            a newer version. Way out: fail.
    """

    def __init__(self, directory: Path, namespace: str) -> None:
        self.directory = directory
        self.closed = False
        self._namespace = namespace
        self._lock = threading.Lock()
        self._num_inside = 0
        self._inside = Inside(self._enter, self._leave)
        self._fds = contextlib.ExitStack()
        self._removed: list[contextlib.ExitStack] = []
        """Descriptors of what is not there any more, as long as somebody may be inside of it."""
        self._make()

    def close(self) -> None:
        """Give the descriptors back once nobody is inside any more. Idempotent."""
        with self._lock:
            last, self.closed = not self.closed and self._num_inside == 0, True
        if last:
            self._fds.close()

    def inside(self) -> Inside:
        """Keeps the descriptors open: a number that was closed may be somebody else's directory a moment later.

        Raises:
            ValueError: Closed.
        """
        return self._inside

    def reading(self, file: str, found_ns: int | None = None) -> Reading:
        """A file, open for reading. With ``found_ns``, one that is found damaged is moved to quarantine at that time."""
        return Reading(self._files, self._checked(file)[:2], file, self.where, self._to_quarantine, found_ns)

    @contextlib.contextmanager
    def writing(self, num_bytes: int = 0) -> Iterator[None]:
        """What the system refuses to a writer is a lack of room, whatever the reason: nothing was stored, all else works.

        Raises:
            CapacityError: It refused something inside of the block. Way out: retry.
        """
        try:
            yield
        except OSError as error:
            raise CapacityError(
                f"{self.directory} cannot be written ({num_bytes} bytes asked, {self._free_bytes()} free on its file system): "
                f"{error.strerror}. Free some, give uid {os.geteuid()} the right to write, or name another directory; until then "
                "KV is recomputed instead of read from disk"
            ) from error

    def write(self, file: str, parts: Sequence[memoryview], last_used_ns: int) -> None:
        """Put a file in its place: whole and on the disk when this returns, nothing left behind when it raises ``OSError``.

        A directory that was removed since it was opened is made again.

        Raises:
            CapacityError: It was, and cannot be. Way out: retry.
        """
        root = self._root
        try:
            self._place(file, parts, last_used_ns)
        except FileNotFoundError:
            with self._lock:
                if self._root == root:  # else another thread made it again meanwhile
                    if not any(os.fstat(fd).st_nlink == 0 for fd in (root, self._tmp, self._files)):
                        raise
                    self._make_again()
            self._place(file, parts, last_used_ns)

    def _place(self, file: str, parts: Sequence[memoryview], last_used_ns: int) -> None:
        if sum(part.nbytes for part in parts) > self._free_bytes():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))  # found out before anything is written
        folder = _placed.made(self._files, self._checked(file)[:2])
        try:
            _placed.place(self._tmp, parts, folder, file, last_used_ns)
        finally:
            os.close(folder)

    def remove(self, file: str) -> bool:
        """Take a file away; False when it was not there. Who has it open reads on."""
        try:
            with self._folder(file) as folder:
                os.unlink(file, dir_fd=folder)
        except FileNotFoundError:
            return False
        return True

    def facts(self, file: str) -> FileFacts | None:
        """Size and last use as they are now; None when it is gone."""
        try:
            with self._folder(file) as folder:
                status = os.stat(file, dir_fd=folder, follow_symlinks=False)
        except FileNotFoundError:
            return None
        facts = FileFacts(status.st_size, status.st_mtime_ns)
        self.listing.update(file, facts)
        return facts

    def foreign(self) -> list[str]:
        """What lies among our files, and is none of ours."""
        found = [f"{self._namespace}/{name}" for name in self.listing.foreign()]
        return sorted(found + [f"tmp/{name}" for name in _placed.names(self._tmp) if not _placed.NAME.fullmatch(name)])

    def quarantined(self) -> list[str]:
        """What is in quarantine, oldest first."""
        return sorted(_placed.names(self._quarantine))

    def leftovers(self) -> list[str]:
        """Unfinished files whose writers are gone."""
        return sorted(name for name in _placed.names(self._tmp) if _placed.is_left(self._tmp, name))

    def sweep(self) -> list[str]:
        """Remove the leftovers; their names."""
        swept = []
        for name in self.leftovers():
            with contextlib.suppress(FileNotFoundError):  # somebody else sweeps too
                os.unlink(name, dir_fd=self._tmp)
                swept.append(name)
        return swept

    def where(self, file: str) -> str:
        """A file's place, for people."""
        return f"{self.directory}/{self._namespace}/{file[:2]}/{file}"

    def _make(self) -> None:
        """Open all of it, made where it is not there."""
        with contextlib.ExitStack() as undo:

            def kept(fd: int) -> int:
                undo.callback(os.close, fd)
                return fd

            try:
                root = kept(claim(self.directory))
                tmp = kept(_placed.made(root, "tmp"))
                quarantine = kept(_placed.made(root, "quarantine"))
                files = kept(_placed.made(root, self._namespace))
                _placed.probe(tmp)
            except OSError as error:
                raise ConfigError(
                    f"{self.directory} cannot hold a disk pool: {error.strerror}; name a directory that uid {os.geteuid()} can "
                    "write"
                ) from error
            self._root, self._tmp, self._quarantine, self._files = root, tmp, quarantine, files
            self.listing = Listing(files)
            self._fds.enter_context(undo.pop_all())

    def _make_again(self) -> None:
        """The same for a directory that somebody removed. Others may be inside of what is left of it, and get an answer."""
        removed = self._fds.pop_all()
        try:
            self._make()
        except ConfigError as error:
            self._fds = removed
            raise CapacityError(f"{self.directory} was removed while it was in use: {error}") from error
        self._removed.append(removed)
        _log.warning(
            "%s was removed while it was in use, and made again; what it held is computed again", self.directory
        )

    def _free_bytes(self) -> int:
        """What the file system still gives to this user."""
        status = os.fstatvfs(self._root)
        return status.f_bavail * status.f_frsize

    @contextlib.contextmanager
    def _folder(self, file: str) -> Iterator[int]:
        fd = os.open(self._checked(file)[:2], _placed.DIRECTORY_FLAGS, dir_fd=self._files)
        try:
            yield fd
        finally:
            os.close(fd)

    def _checked(self, file: str) -> str:
        """S2: nothing but names of this form becomes a path."""
        if not FILE.fullmatch(file):
            raise ConfigError(f"{file!r:.100} is no name of a file of a disk pool")
        return file

    def _to_quarantine(self, file: str, now_ns: int) -> str:
        """Move a file, or what is in its place, away; the oldest in quarantine go for it. How that went."""
        name = f"{now_ns:020d}-{secrets.token_hex(4)}-{file}"
        try:
            with self._folder(file) as folder:
                os.rename(file, name, src_dir_fd=folder, dst_dir_fd=self._quarantine)
        except OSError as refused:  # somebody else moved it, or nothing can be moved
            return f"not moved to quarantine: {refused.strerror}"
        for old in self.quarantined()[:-KEPT_IN_QUARANTINE]:
            with contextlib.suppress(OSError):  # a directory stays: it is not ours
                os.unlink(old, dir_fd=self._quarantine)
        return "moved to quarantine/"

    def _enter(self) -> None:
        with self._lock:
            if self.closed:
                raise ValueError("the disk pool is closed")
            self._num_inside += 1

    def _leave(self) -> None:
        with self._lock:
            self._num_inside -= 1
            if self._num_inside:
                return
            unused, self._removed = self._removed, []
            if self.closed:
                unused.append(self._fds)
        for fds in unused:
            fds.close()


class Inside:
    """One for all who are inside: it keeps nothing of its own."""

    __slots__ = ("_enter", "_leave")

    def __init__(self, enter: Callable[[], None], leave: Callable[[], None]) -> None:
        self._enter = enter
        self._leave = leave

    def __enter__(self) -> None:
        self._enter()

    def __exit__(self, *error: object) -> None:
        self._leave()
