"""The checkpoints of a thread, as documents. Opened read-only for each question, so that nobody is held up."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from aaflow_langgraph.checkpoint.beside import Beside
from aaflow_langgraph.checkpoint.history import History, SeenCheckpoint


class Threads:
    """Threads that have KV beside a saver.

    Args:
        path: What ``Beside`` takes; None where no saver is known: then there are none.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path

    @property
    def is_known(self) -> bool:
        """Is there a saver to look at?"""
        return self._path is not None

    def listed(self, *, offset: int, limit: int) -> dict[str, Any]:
        """Their ids, the one used last first.

        Raises:
            ConfigError: The files cannot be read (any more).
        """
        found: list[tuple[str, int, float]] = []
        if self._path is not None and self._path.exists():  # the first run makes it
            with Beside(self._path) as beside:
                found = beside.threads()
        page = found[offset : offset + limit]
        return {
            "schema": 1,
            "offset": offset,
            "num_found": len(found),
            "threads": [
                {"thread_id": thread_id, "num_checkpoints": num, "last_s": last_s} for thread_id, num, last_s in page
            ],
        }

    def one(self, thread_id: str, *, offset: int, limit: int) -> dict[str, Any]:
        """Checkpoints of a thread, newest first.

        Raises:
            ConfigError: Nothing is known of the thread, or the files cannot be read.
        """
        found: list[SeenCheckpoint] = []
        if self._path is not None:
            with Beside(self._path) as beside:
                found = History(beside, thread_id).checkpoints()
        return {
            "schema": 1,
            "thread_id": thread_id,
            "offset": offset,
            "num_found": len(found),
            "checkpoints": [asdict(one) for one in found[offset : offset + limit]],
        }
