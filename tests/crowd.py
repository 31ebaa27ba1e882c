"""Many requests at once, each in a thread of its own, and what became of them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any

import pytest

PATIENCE_S = 120
"""A test that waits for longer has found a deadlock."""


def until(condition: Callable[[], bool]) -> None:
    """Wait for a condition."""
    pause = threading.Event()
    for _ in range(PATIENCE_S * 200):
        if condition():
            return
        pause.wait(0.005)
    pytest.fail("waited in vain")


class Crowd:
    """Calls in threads; ``results`` in the order of the calls, errors among them."""

    def __init__(self) -> None:
        self.results: list[Any] = []
        self._threads: list[threading.Thread] = []

    def add(self, calls: Iterable[Callable[[], Any]]) -> None:
        """Start more."""
        for call in calls:
            self.results.append("did not end")
            number = len(self._threads)
            self._threads.append(threading.Thread(target=self._run, args=(number, call), daemon=True))
            self._threads[-1].start()

    def join(self) -> list[Any]:
        """Wait for all of them; their results."""
        for thread in self._threads:
            thread.join(PATIENCE_S)
        assert "did not end" not in [result for result in self.results if isinstance(result, str)]
        return self.results

    def _run(self, number: int, call: Callable[[], Any]) -> None:
        try:
            self.results[number] = call()
        except BaseException as error:
            self.results[number] = error


def together(calls: Iterable[Callable[[], Any]]) -> list[Any]:
    """Run all calls at once; their results."""
    crowd = Crowd()
    crowd.add(calls)
    return crowd.join()
