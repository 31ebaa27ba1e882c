"""Blocking calls for async callers: results, errors and cancellation arrive, and nothing runs on behind a task's end."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from typing import Any

import pytest

from aaflow_langgraph.threads import in_thread

VARIABLE: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="unset")


async def test_a_call_runs_in_a_thread_of_its_own_with_the_callers_context() -> None:
    VARIABLE.set("the caller's")
    name, value = await in_thread(lambda: (threading.current_thread().name, VARIABLE.get()), threading.Event())
    assert (name, value) == ("aaflow-request", "the caller's")


async def test_more_calls_than_an_executor_has_threads_run_at_once() -> None:
    """They meet: none of them would go on if one of them waited for a thread."""
    meeting = threading.Barrier(40)
    await asyncio.gather(*(in_thread(lambda: meeting.wait(20), threading.Event()) for _ in range(40)))


class Fault(BaseException):
    """As a KeyboardInterrupt."""


@pytest.mark.parametrize("error", [KeyError("x"), Fault("x")], ids=repr)
async def test_what_a_call_raises_is_its_callers(error: BaseException) -> None:
    def call() -> None:
        raise error

    with pytest.raises(type(error)):
        await in_thread(call, threading.Event())


@pytest.mark.parametrize("error", [StopIteration("x"), StopAsyncIteration("x")], ids=repr)
async def test_a_call_that_raises_the_end_of_an_iterator_ends_its_task_and_no_iterator(error: Exception) -> None:
    """No future takes a ``StopIteration``: its caller would wait for ever. The other would end an ``async for`` silently."""

    def call() -> Any:
        raise error

    with pytest.raises(RuntimeError, match=type(error).__name__) as caught:
        await asyncio.wait_for(in_thread(call, threading.Event()), 20)
    assert caught.value.__cause__ is error


async def test_a_cancelled_task_ends_when_its_call_has_ended_however_often_it_is_cancelled() -> None:
    cancel, begun, ended, may_end = (threading.Event() for _ in range(4))

    def call() -> None:
        begun.set()
        assert cancel.wait(20)
        assert may_end.wait(20)
        ended.set()
        raise KeyError("nobody asks")

    task = asyncio.create_task(in_thread(call, cancel))
    while not begun.is_set():
        await asyncio.sleep(0)
    for _ in range(3):
        task.cancel()
        for _ in range(5):
            await asyncio.sleep(0)
        assert not task.done()
    assert cancel.is_set()
    may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended.is_set()


async def test_the_loop_serves_a_cancelled_call_on_its_way_out() -> None:
    """A node tells the callbacks of its graph, on the graph's loop, that it was cancelled."""
    cancel, begun = threading.Event(), threading.Event()
    loop = asyncio.get_running_loop()
    told: list[str] = []

    async def tell() -> None:
        told.append("cancelled")

    def call() -> None:
        begun.set()
        assert cancel.wait(20)
        asyncio.run_coroutine_threadsafe(tell(), loop).result(20)

    task = asyncio.create_task(in_thread(call, cancel))
    while not begun.is_set():
        await asyncio.sleep(0)
    task.cancel()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert told == ["cancelled"]
