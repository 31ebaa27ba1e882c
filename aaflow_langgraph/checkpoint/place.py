"""Where a saver's own files lie, and when that place goes away again. Knows paths; knows no formats."""

from __future__ import annotations

import os
import shutil
import tempfile
import weakref
from pathlib import Path
from typing import Any

from langgraph.checkpoint.base import BaseCheckpointSaver
from langgraph.checkpoint.memory import InMemorySaver

from aaflow_langgraph._directory import expanded, make_private
from aaflow_langgraph.checkpoint.inner import sqlite_file
from aaflow_langgraph.errors import ConfigError


class Place:
    """A directory of a saver's own, there and writable.

    Raises:
        ConfigError: It must be named, cannot be made, belongs to somebody else or is open to others. Way out: fail.
    """

    def __init__(self, inner: BaseCheckpointSaver[Any], directory: str | os.PathLike[str] | None) -> None:
        named = _named(inner) if directory is None else directory
        if named is None:
            self.path = Path(tempfile.mkdtemp(prefix="aaflow-checkpoints-"))
            # Also when nobody closes the saver.
            self._remove: Any = weakref.finalize(self, shutil.rmtree, self.path, ignore_errors=True)
            return
        if not isinstance(named, (str, os.PathLike)) or not os.fspath(named) or "\0" in str(named):
            raise ConfigError(f"directory must be a path, got {named!r:.100}")
        self._remove = lambda: None
        self.path = expanded(named).absolute()
        try:
            make_private(self.path)
        except OSError as error:
            raise ConfigError(f"{self.path} cannot be made: {error}; name a directory that can be written") from error
        if not os.access(self.path, os.W_OK | os.X_OK):
            raise ConfigError(
                f"{self.path} cannot be written by uid {os.geteuid()}: change its mode, or name another directory"
            )

    def close(self) -> None:
        """Remove it, if it was a private one. Idempotent."""
        self._remove()


def _named(inner: BaseCheckpointSaver[Any]) -> str | None:
    """The directory that belongs to a saver; None for a private one."""
    if isinstance(inner, InMemorySaver):
        return None
    file = sqlite_file(inner)
    if file is None:
        raise ConfigError(
            f"where a {type(inner).__name__} keeps its checkpoints is not known here: pass directory=..., a local directory for "
            "the recipes and tensors of this saver"
        )
    return f"{file}.kv" if file else None
