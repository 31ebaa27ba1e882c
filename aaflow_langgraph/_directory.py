"""A directory that a user names: what ``~`` in it means, and that nobody else can reach what it holds. Private."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from aaflow_langgraph.errors import ConfigError


def expanded(path: str | os.PathLike[str]) -> Path:
    """The path with ``~`` or ``~user`` in front replaced by a home directory; no shell does it for a string in Python.

    Raises:
        ConfigError: Nobody knows that home. Way out: fail, write the whole path.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise ConfigError(
            f"{os.fspath(path)!r:.100} has no home to start from: {error}; write the whole path"
        ) from error


def make_private(directory: Path) -> None:
    """The directory, with those above it, as ``require_private`` wants it.

    Raises:
        ConfigError: As ``require_private``.
        OSError: It cannot be made or opened.
    """
    os.makedirs(directory, mode=0o700, exist_ok=True)
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        require_private(fd, directory)
    finally:
        os.close(fd)


def require_private(fd: int, directory: Path) -> None:
    """Ours, with no rights for others (S5); they are taken away where it is empty.

    Not where it holds something: whoever gave the rights may rely on them.

    Raises:
        ConfigError: It belongs to somebody else, or others can reach what it holds. Way out: fail.
    """
    status = os.fstat(fd)
    if status.st_uid != os.geteuid():
        raise ConfigError(
            f"{directory} belongs to uid {status.st_uid}, this process is uid {os.geteuid()}: name another directory"
        )
    if not status.st_mode & 0o077:
        return
    with os.scandir(fd) as entries:
        is_empty = next(entries, None) is None
    if not is_empty:
        raise ConfigError(
            f"{directory} has mode {stat.S_IMODE(status.st_mode):04o}, so others can reach what it holds: chmod it to 700, "
            "or name another directory"
        )
    os.fchmod(fd, 0o700)
