"""Which directory is a disk pool, and whose. Knows its marker and its owner; knows no files of it."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

from aaflow_langgraph._directory import require_private
from aaflow_langgraph.errors import ConfigError
from aaflow_langgraph.pool import _placed

MARKER = "aaflow-disk-pool.json"
FORMAT = "aaflow-langgraph disk pool"
FORMAT_VERSION = 1


def claim(directory: Path) -> int:
    """A descriptor of a directory that is a disk pool, or that was empty and becomes one.

    Raises:
        ConfigError: It belongs to somebody else, holds something else, or was made by a newer version. Way out: fail.
        OSError: It cannot be made, opened or written.
    """
    os.makedirs(directory, mode=0o700, exist_ok=True)
    # The directory itself may be named through a link: whoever configures it says so. What it holds may not.
    root = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        require_private(root, directory)
        if not _is_marked(root, directory):
            _mark(root, directory)
    except BaseException:
        os.close(root)
        raise
    return root


def _mark(root: int, directory: Path) -> None:
    foreign = set(_placed.names(root)) - {"tmp"}
    if not foreign:
        tmp = _placed.made(root, "tmp")
        try:
            # Unfinished files of ours may be there: of a process that is claiming the directory at this moment.
            foreign = {f"tmp/{name}" for name in _placed.names(tmp) if not _placed.NAME.fullmatch(name)}
            if not foreign:
                text = json.dumps({"format": FORMAT, "version": FORMAT_VERSION}).encode() + b"\n"
                _placed.place(tmp, [memoryview(text)], root, MARKER, time.time_ns())
                return
        finally:
            os.close(tmp)
    if not _is_marked(root, directory):  # it may have been claimed in between
        raise ConfigError(
            f"{directory} holds {', '.join(sorted(foreign)[:3])} and no {MARKER}, so it is no disk pool, and nothing in it was "
            "touched: name an empty or a new directory"
        )


def _is_marked(root: int, directory: Path) -> bool:
    try:
        fd = os.open(MARKER, _placed.FILE_FLAGS, dir_fd=root)
    except FileNotFoundError:
        return False
    with open(fd, "rb") as file:
        text = file.read(4096)
    try:
        marker = json.loads(text)
        known, version = marker["format"] == FORMAT, marker["version"]
    except (ValueError, KeyError, TypeError, RecursionError):
        known, version = False, None
    if not known or type(version) is not int or version < 1:
        raise ConfigError(f"{directory}/{MARKER} is damaged or not ours: name another directory, or empty this one")
    if version > FORMAT_VERSION:
        raise ConfigError(
            f"{directory} was made by a newer version (format {version}, this one knows {FORMAT_VERSION}): "
            "upgrade, or name another directory"
        )
    return True
