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
    fallback = RunDir(_memory.fallback_dir())
    removed = _sweep(RunDir.of(run_dir))
    return removed + (_sweep(fallback) if fallback.path.exists() else [])


def _sweep(run_dir: RunDir) -> list[str]:
    removed = []
    with run_dir.opened() as folder:
        for file in sorted(os.listdir(folder)):
            name = PoolName.parse(file)
            if name is None or name.is_running():
                continue
            with contextlib.suppress(FileNotFoundError):  # another sweeper was faster
                if _is_left(folder, file):
                    os.unlink(file, dir_fd=folder)
                    removed.append(file)
    return removed


def _is_left(folder: int, file: str) -> bool:
    status = os.stat(file, dir_fd=folder, follow_symlinks=False)
    if status.st_uid != os.geteuid():
        return False
    if file.endswith(".mem"):
        return stat.S_ISREG(status.st_mode)
    return stat.S_ISSOCK(status.st_mode) and not is_listening(folder, file)
