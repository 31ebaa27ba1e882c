"""A context manager for ``with`` and for ``async with``. Knows nothing of savers."""

from __future__ import annotations

import asyncio
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Generic, TypeVar

Opened = TypeVar("Opened")


class BothColours(Generic[Opened]):
    """``with`` enters and leaves ``manager`` where it stands; ``async with`` does so in a thread, with a free event loop.

    Good for one entry, as what ``contextlib.contextmanager`` makes. An entry that is cancelled is left again.
    """

    def __init__(self, manager: AbstractContextManager[Opened]) -> None:
        self._manager = manager

    def __enter__(self) -> Opened:
        return self._manager.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        return self._manager.__exit__(kind, error, trace)

    async def __aenter__(self) -> Opened:
        entry = asyncio.ensure_future(asyncio.to_thread(self._manager.__enter__))
        try:
            return await asyncio.shield(entry)
        except asyncio.CancelledError:
            await asyncio.wait({entry})
            if entry.exception() is None:
                await asyncio.to_thread(self._manager.__exit__, None, None, None)
            raise

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        return await asyncio.to_thread(self._manager.__exit__, kind, error, trace)
