"""One context manager for ``with`` and ``async with``."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from aaflow_langgraph.checkpoint.colours import BothColours


class Opened:
    """Says in which threads it was entered and left, and with what."""

    def __init__(self) -> None:
        self.threads: list[str] = []
        self.seen: list[BaseException] = []
        self.may_open = threading.Event()
        self.is_opening = threading.Event()

    @contextmanager
    def opening(self) -> Iterator[Opened]:
        self.is_opening.set()
        self.may_open.wait()
        self.threads.append(threading.current_thread().name)
        try:
            yield self
        except ValueError as error:
            self.seen.append(error)
            raise
        finally:
            self.threads.append(threading.current_thread().name)


@pytest.fixture
def opened() -> Opened:
    made = Opened()
    made.may_open.set()
    return made


def test_with_stays_on_its_thread_and_passes_errors_on(opened: Opened) -> None:
    with pytest.raises(ValueError, match="inside"), BothColours(opened.opening()) as entered:
        raise ValueError(f"inside {entered is opened}")
    assert [str(error) for error in opened.seen] == ["inside True"]
    assert opened.threads == [threading.current_thread().name] * 2


async def test_async_with_works_in_threads_and_passes_errors_on(opened: Opened) -> None:
    with pytest.raises(ValueError, match="inside"):
        async with BothColours(opened.opening()) as entered:
            raise ValueError(f"inside {entered is opened}")
    assert [str(error) for error in opened.seen] == ["inside True"]
    assert len(opened.threads) == 2
    assert threading.current_thread().name not in opened.threads


async def test_what_opens_while_its_entry_is_cancelled_is_closed_again() -> None:
    opened = Opened()
    entry = asyncio.ensure_future(BothColours(opened.opening()).__aenter__())
    assert await asyncio.to_thread(opened.is_opening.wait, 60)
    entry.cancel()
    await asyncio.sleep(0)
    assert opened.threads == []
    opened.may_open.set()
    with pytest.raises(asyncio.CancelledError):
        await entry
    assert len(opened.threads) == 2
