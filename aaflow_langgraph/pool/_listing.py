"""What lies in the folders of a namespace, listed again only where something changed. Knows names and sizes; no contents."""

from __future__ import annotations

import contextlib
import os
import re
import stat
import threading
import time
from dataclasses import dataclass, field
from typing import NamedTuple

from aaflow_langgraph.pool import _placed

FILE = re.compile(r"[0-9a-f]{64}\.(?:safetensors|json)")
_FOLDER = re.compile(r"[0-9a-f]{2}")
_SETTLED_NS = 50_000_000
_SETTLED_COARSE_NS = 2_000_000_000
"""A folder that changed this shortly before it was listed may change again without a new time stamp: clocks of file systems
tick every few milliseconds, and some, told by their whole numbers, every one or two seconds."""


class FileFacts(NamedTuple):
    """Size, and when it was last used (its modification time)."""

    num_bytes: int
    last_used_ns: int


@dataclass(slots=True)
class _Folder:
    """What one folder held when it was listed."""

    changed_ns: int
    listed_ns: int
    files: dict[str, FileFacts] = field(default_factory=dict)
    foreign: list[str] = field(default_factory=list)


class Listing:
    """The files below one directory, ``<first two digits>/<name>``, whoever writes them. Safe from any thread."""

    def __init__(self, directory: int) -> None:
        self._directory = directory
        self._lock = threading.Lock()
        self._folders: dict[str, _Folder] = {}

    def files(self) -> dict[str, FileFacts]:
        """Every regular file with one of our names. Using a file does not change its folder, so ``last_used_ns`` may be older
        than it is: ``update`` it before you rely on it.
        """
        with self._lock:
            self._refresh()
            return {name: facts for folder in self._folders.values() for name, facts in folder.files.items()}

    def foreign(self) -> list[str]:
        """Everything else, by its path from here."""
        with self._lock:
            self._refresh()
            found = [f"{name}/{inside}" for name, folder in self._folders.items() for inside in folder.foreign]
        return found + [name for name in _placed.names(self._directory) if not _FOLDER.fullmatch(name)]

    def update(self, file: str, facts: FileFacts) -> None:
        """Correct what is known of a listed file."""
        with self._lock:
            folder = self._folders.get(file[:2])
            if folder is not None and file in folder.files:
                folder.files[file] = facts

    def _refresh(self) -> None:
        known, self._folders = self._folders, {}
        for name in filter(_FOLDER.fullmatch, _placed.names(self._directory)):
            try:
                status = os.stat(name, dir_fd=self._directory, follow_symlinks=False)
            except FileNotFoundError:  # somebody removes all of it
                continue
            changed_ns, now_ns = status.st_mtime_ns, time.time_ns()
            folder = known.get(name)
            settled_ns = _SETTLED_NS if changed_ns % 1_000_000_000 else _SETTLED_COARSE_NS
            if folder is None or changed_ns != folder.changed_ns or changed_ns > folder.listed_ns - settled_ns:
                folder = _listed(self._directory, name, _Folder(changed_ns, now_ns))
            self._folders[name] = folder


def _listed(directory: int, prefix: str, folder: _Folder) -> _Folder:
    try:
        fd = os.open(prefix, _placed.DIRECTORY_FLAGS, dir_fd=directory)
    except FileNotFoundError:
        return folder
    except OSError:  # a link or a file where a folder belongs
        folder.foreign.append("")
        return folder
    try:
        for name in os.listdir(fd):
            with contextlib.suppress(FileNotFoundError):  # gone in between
                status = os.stat(name, dir_fd=fd, follow_symlinks=False)
                if FILE.fullmatch(name) and name.startswith(prefix) and stat.S_ISREG(status.st_mode):
                    folder.files[name] = FileFacts(status.st_size, status.st_mtime_ns)
                else:
                    folder.foreign.append(name)
    finally:
        os.close(fd)
    return folder
