"""One file of a shelf, open for reading. Knows what to do when it cannot be read; knows no format.

Context managers here and in _shelf.py are classes: made by ``contextlib`` each takes as long as a system call, twice that when
KV has just gone through the processor's caches, and a small extent is opened in ten calls.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from types import TracebackType
from typing import NamedTuple, NoReturn

from aaflow_langgraph.errors import Evicted, IntegrityError, KVMissing
from aaflow_langgraph.pool import _placed

DAMAGED = frozenset({errno.EIO, errno.EFAULT, errno.EBADMSG, errno.EUCLEAN})
"""What a file system answers when the bytes are lost; everything else may pass."""
_NO_FILE = frozenset({errno.ELOOP, errno.ENOTDIR, errno.ENXIO})


class OpenFile(NamedTuple):
    """A regular file, and its size when it was opened."""

    fd: int
    num_bytes: int


class Reading:
    """Opens a file below a directory that holds folders. What goes wrong inside of the block is told with the file's name.

    Args:
        directory: Descriptor of the directory. No link below it is followed.
        folder: The file's folder.
        file: Its name.
        where: Its place, for people.
        quarantine: Moves what was found damaged, or what is in its place, away at a time; says how that went.
        found_ns: That time; None to leave it where it is.

    Raises:
        Evicted: It is not there. Way out: recompute.
        KVMissing: It cannot be read now. Way out: recompute.
        IntegrityError: The disk lost it, it is no file, or what the block says. Way out: fail.
    """

    __slots__ = ("_directory", "_fd", "_file", "_folder", "_found_ns", "_quarantine", "_where")

    def __init__(
        self,
        directory: int,
        folder: str,
        file: str,
        where: Callable[[str], str],
        quarantine: Callable[[str, int], str],
        found_ns: int | None,
    ) -> None:
        self._directory = directory
        self._folder = folder
        self._file = file
        self._where = where
        self._quarantine = quarantine
        self._found_ns = found_ns
        self._fd = -1

    def __enter__(self) -> OpenFile:
        try:
            folder = os.open(self._folder, _placed.DIRECTORY_FLAGS, dir_fd=self._directory)
            try:
                self._fd = os.open(self._file, _placed.FILE_FLAGS, dir_fd=folder)
            finally:
                os.close(folder)
            status = os.fstat(self._fd)
        except FileNotFoundError as error:
            where = self._where(self._file)
            raise Evicted(f"{where} is not there: it was never written, or removed to make room") from error
        except OSError as error:
            if error.errno in _NO_FILE:
                self._damaged("a link or something else, no file; not followed", error)
            self._unreadable(error)
        if not stat.S_ISREG(status.st_mode):
            self._damaged("a directory or something else, no file", None)
        return OpenFile(self._fd, status.st_size)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, IntegrityError):
            self._damaged(str(error), error)
        if isinstance(error, OSError):
            self._unreadable(error)
        self._close()

    def _unreadable(self, error: OSError) -> NoReturn:
        what = f"cannot be read: {error.strerror}"
        if error.errno in DAMAGED:
            self._damaged(what, error)
        self._close()
        raise KVMissing(f"{self._where(self._file)}: {what}; it is recomputed") from error

    def _damaged(self, what: str, error: BaseException | None) -> NoReturn:
        self._close()
        moved = "" if self._found_ns is None else f"; {self._quarantine(self._file, self._found_ns)}"
        raise IntegrityError(f"{self._where(self._file)}: {what}{moved}") from error

    def _close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
