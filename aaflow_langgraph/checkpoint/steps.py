"""One body for both colours: an operation is a generator that yields the calls which differ between them.

    def put(...) -> Steps[Result]:
        lock = yield Call(...)          wait for a lock: blocking, or polling with a free event loop
        with lock:
            ...                         manifest and files: run where the generator is advanced
            return (yield Call(...))    the saver's own row: its sync or its async method

``run`` advances it on the calling thread. ``arun`` advances it in worker threads and awaits the calls on the loop. An
operation that began is finished, or fails, also when whoever awaits it is cancelled: otherwise a lock would be given back
while the saver's row is still on its way.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Generator
from dataclasses import dataclass
from typing import Any, TypeVar

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Call:
    """Something that is done differently in the two colours."""

    run: Callable[[], Any]
    arun: Callable[[], Awaitable[Any]]


Steps = Generator[Call, Any, Result]


def run(steps: Steps[Result]) -> Result:
    """Everything on this thread."""
    try:
        call = next(steps)
        while True:
            try:
                answer = call.run()
            except BaseException as error:
                call = steps.throw(error)
            else:
                call = steps.send(answer)
    except StopIteration as stop:
        result: Result = stop.value
        return result
    finally:
        steps.close()


async def arun(steps: Steps[Result]) -> Result:
    """The same with a free event loop."""
    task = asyncio.ensure_future(_AsyncRun(steps).run())
    _running.add(task)
    task.add_done_callback(_running.discard)
    result: Result = await asyncio.shield(task)
    return result


_running: set[asyncio.Future[Any]] = set()
"""Loops keep weak references to their tasks only."""


class _AsyncRun:
    """Advances a generator in worker threads, and closes it when the last of them has left it."""

    def __init__(self, steps: Steps[Any]) -> None:
        self._steps = steps
        self._lock = threading.Lock()
        self._is_inside = self._is_over = False

    async def run(self) -> Any:
        try:
            is_done, value = await asyncio.to_thread(self._advance, self._steps.send, None)
            while not is_done:
                try:
                    answer = await value.arun()
                except asyncio.CancelledError:
                    raise
                except BaseException as error:
                    is_done, value = await asyncio.to_thread(self._advance, self._steps.throw, error)
                else:
                    is_done, value = await asyncio.to_thread(self._advance, self._steps.send, answer)
            return value
        finally:
            with self._lock:
                self._is_over, is_free = True, not self._is_inside
            if is_free:
                self._steps.close()

    def _advance(self, how: Callable[[Any], Call], what: Any) -> tuple[bool, Any]:
        """The next call, or the end and its result. A future cannot carry ``StopIteration``."""
        with self._lock:
            if self._is_over:
                return True, None
            self._is_inside = True
        try:
            return False, how(what)
        except StopIteration as stop:
            return True, stop.value
        finally:
            with self._lock:
                self._is_inside, is_over = False, self._is_over
            if is_over:
                self._steps.close()
