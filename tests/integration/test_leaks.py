"""A thousand requests, finished, walked away from, cancelled and failed, leave what one round of them leaves."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from aaflow_langgraph import KVBroker, KVHandle, Sampling
from aaflow_langgraph.errors import Cancelled
from aaflow_langgraph.results import Generation
from tests import tiny
from tests.crowd import together, until

ROUND = 25
THREE = Sampling(max_tokens=3)
RECORDS = ("Entry", "Origin", "Movement")
"""What a broker remembers on purpose, of so many requests and no more."""


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def num_tasks() -> int:
    """Threads as the system counts them, those of OpenMP among them."""
    return len(os.listdir("/proc/self/task"))


def num_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def ours() -> Counter[str]:
    """Living objects of this package, by type."""
    gc.collect()
    names = (
        type(one).__qualname__ for one in gc.get_objects() if str(type(one).__module__).startswith("aaflow_langgraph")
    )
    return Counter(name for name in names if name not in RECORDS)


class Failed(Exception):
    """A callback's own."""


def fails(_: object) -> None:
    raise Failed


def one_round(broker: KVBroker, docs: KVHandle) -> list[KVHandle]:
    """Five requests of five kinds, all at once."""

    def generate(number: int) -> Generation:
        return broker.generate(f"q{number}", parent=docs, raw=True, sampling=THREE)

    def walk_away(number: int) -> None:
        stream = broker.stream(f"q{number}", parent=docs, raw=True, sampling=THREE)
        next(stream)
        stream.close()

    def cancel(number: int) -> None:
        stop = threading.Event()
        broker.generate(f"q{number}", parent=docs, raw=True, sampling=THREE, cancel=stop, on_token=lambda _: stop.set())

    def fail(number: int) -> None:
        broker.generate(f"q{number}", parent=docs, raw=True, sampling=THREE, on_token=fails)

    async def tasks(number: int) -> None:
        begun, loop = asyncio.Event(), asyncio.get_running_loop()
        task = asyncio.create_task(
            broker.agenerate(
                f"q{number}",
                parent=docs,
                raw=True,
                sampling=Sampling(max_tokens=500),
                on_token=lambda _: loop.call_soon_threadsafe(begun.set) and None,
            )
        )
        await begun.wait()
        task.cancel()
        try:
            await task
        except asyncio.CancelledError:
            return
        raise AssertionError("a cancelled task ended otherwise")

    kinds: list[Callable[[int], Any]] = [generate, walk_away, cancel, fail, lambda number: asyncio.run(tasks(number))]
    ends = together(lambda n=n: kinds[n % 5](n) for n in range(ROUND))  # type: ignore[misc]
    for number, end in enumerate(ends):
        wanted: Any = (Generation, type(None), Cancelled, Failed, type(None))[number % 5]
        assert isinstance(end, wanted), end
    return [end.handle for end in ends[::5]]


def test_a_thousand_requests_leave_nothing_behind(open_broker: Callable[..., KVBroker]) -> None:
    broker = open_broker(pool_bytes=4 << 20)
    docs = broker.materialize(tiny.words(200))
    resident: list[int] = []

    def rounds(count: int) -> tuple[dict[str, int], Counter[str]]:
        """What is there after so many of them, once what they made on purpose is evicted."""
        for _ in range(count):
            for handle in one_round(broker, docs):
                broker.evict(handle)
        broker.materialize(tiny.words(200))
        until(lambda: not [thread for thread in threading.enumerate() if thread.name == "aaflow-request"])
        stats = broker.stats()
        assert (stats.num_running_requests, stats.num_waiting_requests) == (0, 0)
        assert (stats.num_leases, stats.overflow_bytes) == (0, 0)
        assert not broker.engine.batcher._line
        assert not broker.engine.batcher.is_busy
        resident.append(resident_bytes())
        return {
            "pool": stats.pool_used_bytes,
            "extents": stats.num_extents,
            "recipes": stats.num_recipes,
            "files": num_files(),
            "threads": threading.active_count(),
        }, ours()

    first, objects = rounds(4)
    tasks = num_tasks()
    for _ in range(2):
        held, living = rounds(18)
        assert held == first
        assert not living - objects
    until(lambda: num_tasks() <= tasks)
    assert resident[2] - resident[1] < 8 << 20, resident
