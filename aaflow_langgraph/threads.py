"""Blocking requests for async callers: each in a thread of its own.

An event loop's own executor has four threads more than there are cores: of sixteen agents on two cores ten would wait for a
thread instead of sharing a forward. How many run at once is ``admission.py``'s matter. Knows asyncio, nothing else.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from contextvars import copy_context
from typing import TypeVar

Result = TypeVar("Result")


class Stop(threading.Event):
    """An event that is also set while the caller's own is; setting it leaves that alone, which may stop others as well."""

    def __init__(self, callers: threading.Event | None) -> None:
        super().__init__()
        self._callers = callers

    def is_set(self) -> bool:
        """Is it, or the caller's?"""
        return super().is_set() or (self._callers is not None and self._callers.is_set())


async def in_thread(call: Callable[[], Result], cancel: threading.Event) -> Result:
    """``call()`` in a thread of its own, with the caller's context variables.

    Cancelling the task sets ``cancel`` and waits for the call to end, however often it is cancelled: nothing of it runs on once
    its task is over, so it may still need the loop on its way out.
    """
    done: Future[Result] = Future()
    done.set_running_or_notify_cancel()
    context = copy_context()

    def run() -> None:
        try:
            done.set_result(context.run(call))
        except (StopIteration, StopAsyncIteration) as error:  # a future takes not the one; the other ends an iterator
            wrapped = RuntimeError(f"the call raised {type(error).__name__}")
            wrapped.__cause__ = error
            done.set_exception(wrapped)
        except BaseException as error:  # it belongs to the caller
            done.set_exception(error)

    threading.Thread(target=run, name="aaflow-request").start()
    body = asyncio.wrap_future(done)
    try:
        return await asyncio.shield(body)
    except asyncio.CancelledError:
        cancel.set()
        while not body.done():
            with suppress(asyncio.CancelledError):
                await asyncio.wait({body})
        if not body.cancelled():
            body.exception()  # looked at: the task was cancelled, whatever the call ended with
        raise
