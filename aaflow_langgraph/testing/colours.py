"""The asynchronous colour of a contract: the same object, every call made from an event loop.

    class TestMyIndexAwaited(IndexContract):
        def make_index(self, clock):
            return Awaited(MyIndex(clock=clock))

Our classes have one body, the synchronous one, and async methods run it in a thread. So what a loop can break is found by
calling each method in another thread, from a fresh loop each time: state bound to a thread, a client bound to the first loop
that used it.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Callable
from typing import Any


class Awaited:
    """Stands for ``target``; calls of its methods are awaited in an event loop of their own. Attributes pass through."""

    def __init__(self, target: object) -> None:
        self._target = target

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._target, name)
        if not callable(found):
            return found

        def call(*args: object, **kwargs: object) -> object:
            return _in_a_loop(lambda: found(*args, **kwargs))

        return call


def _in_a_loop(call: Callable[[], object]) -> object:
    async def main() -> object:
        # A pool of its own, so that hardly ever two calls run in one thread.
        with concurrent.futures.ThreadPoolExecutor(1) as one:
            return await asyncio.get_running_loop().run_in_executor(one, call)

    with concurrent.futures.ThreadPoolExecutor(1) as outside:  # also where the caller has a loop already
        return outside.submit(asyncio.run, main()).result()
