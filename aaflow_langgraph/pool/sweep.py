"""What dead owners left: sockets, and fallback files whose maker was killed between making and unnaming them.

Their memory needs no sweep: it has no name and goes with the last process that maps it.
"""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path

from aaflow_langgraph.pool import _memory
from aaflow_langgraph.pool._door import is_listening
from aaflow_langgraph.pool._rundir import PoolName, RunDir


def sweep(run_dir: Path | None = None) -> list[str]:
    """Remove what is certainly a dead owner's; the names removed. Safe at any time, from any process of the user.

    A leftover's process does not run (pid and start time of this boot) and nobody listens on its socket. Both are asked:
    the first cannot see into other pid namespaces, the second cannot tell a pool that is just being made.

    Raises:
        ConfigError: The run directory is not ours alone. Way out: fail.
    """
    removed = []
    for directory in _directories(run_dir):
        with directory.opened() as folder:
            for file in _left(folder):
                with contextlib.suppress(FileNotFoundError):  # another sweeper was faster
                    os.unlink(file, dir_fd=folder)
                    removed.append(file)
    return removed


def leftovers(run_dir: Path | None = None) -> dict[Path, int]:
    """What ``sweep`` would remove now, with the bytes that it takes.

    Raises:
        ConfigError: The run directory is not ours alone. Way out: fail.
    """
    found = {}
    for directory in _directories(run_dir):
        with directory.opened() as folder:
            for file in _left(folder):
                with contextlib.suppress(FileNotFoundError):
                    found[directory.path / file] = os.stat(file, dir_fd=folder, follow_symlinks=False).st_size
    return found


def _directories(run_dir: Path | None) -> list[RunDir]:
    fallback = RunDir(_memory.fallback_dir())
    return [RunDir.of(run_dir), *([fallback] if fallback.path.exists() else [])]


def _left(folder: int) -> list[str]:
    left = []
    for file in sorted(os.listdir(folder)):
        name = PoolName.parse(file)
        if name is not None and not name.is_running():
            with contextlib.suppress(FileNotFoundError):
                if _is_left(folder, file):
                    left.append(file)
    return left


def _is_left(folder: int, file: str) -> bool:
    status = os.stat(file, dir_fd=folder, follow_symlinks=False)
    if status.st_uid != os.geteuid():
        return False
    if file.endswith(".mem"):
        return stat.S_ISREG(status.st_mode)
    return stat.S_ISSOCK(status.st_mode) and not is_listening(folder, file)
