"""Many threads, event loops, brokers and engines at once: everything equals the stock model, nothing is left behind."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import pytest

from aaflow_langgraph import Generation, KVBroker, KVHandle, Sampling
from aaflow_langgraph.results import TokenDelta
from tests.oracle import prose, stock_of

TWELVE = Sampling(max_tokens=12)


def at_once(calls: Sequence[Callable[[], Any]]) -> list[Any]:
    """Run every call in a thread of its own, all released together; their results in order."""
    results: list[Any] = [None] * len(calls)
    barrier = threading.Barrier(len(calls))

    def work(number: int) -> None:
        barrier.wait()
        try:
            results[number] = calls[number]()
        except BaseException as error:
            results[number] = error

    threads = [threading.Thread(target=work, args=(number,)) for number in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


def equals_stock(broker: KVBroker, result: Generation) -> bool:
    ids = broker.token_ids(result.handle)[: result.usage.num_context]
    return result.token_ids == stock_of(broker.engine).greedy(ids, len(result.token_ids))


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
@pytest.mark.parametrize("deterministic", [False, True])
def test_eight_forks_decode_in_eight_threads(
    kind: str, deterministic: bool, open_broker: Callable[..., KVBroker]
) -> None:
    """I5: the parent's bytes are the same before and after, and every child equals a cold run."""
    broker = open_broker(kind)
    docs = broker.prefill(prose(500), deterministic=deterministic).handle
    before = {record.extent_id: record.checksum for record in broker._store.index.records()}

    def child(number: int) -> Callable[[], Generation]:
        fork = broker.fork(docs)
        return lambda: broker.generate(f"Q{number}?", parent=fork, sampling=TWELVE, deterministic=deterministic)

    results = at_once([child(number) for number in range(8)])
    assert len({result.handle for result in results}) == 8
    for result in results:
        assert equals_stock(broker, result)
        assert result.usage.num_reused >= 256
    records = {record.extent_id: record for record in broker._store.index.records()}
    for extent_id, checksum in before.items():
        assert records[extent_id].checksum == checksum
        assert broker._store.intact(records[extent_id])


def test_threads_that_miss_one_parent_rebuild_it_once(open_broker: Callable[..., KVBroker]) -> None:
    broker = open_broker("llama")
    docs = broker.materialize(broker.engine.frame.encode_text(prose(600), what="text"))
    broker.evict(docs)
    results = at_once([lambda n=n: broker.generate(f"{n}", parent=docs, raw=True, sampling=TWELVE) for n in range(8)])
    assert all(equals_stock(broker, result) for result in results)
    assert broker.stats().num_recomputed_tokens == 600
    assert sum(1 for record in broker._store.index.records() if record.start == 0) == 1


def test_threads_that_write_the_same_tokens_leave_one_copy(open_broker: Callable[..., KVBroker]) -> None:
    """I8."""
    broker = open_broker("llama")
    handles = at_once([lambda: broker.prefill(prose(600), raw=True).handle for _ in range(8)])
    assert len(set(handles)) == 1
    records = broker._store.index.records()
    assert sum(len(record.token_ids) for record in records) == 600
    assert broker.stats().pool_used_bytes == sum(record.place.allocation.num_bytes for record in records)


def test_eight_threads_in_a_pool_too_small_for_them(open_broker: Callable[..., KVBroker]) -> None:
    """Leases, eviction, overflow and recompute at once: still right, never above capacity, nothing left."""
    token_bytes = open_broker("llama").engine.layout.token_bytes
    broker = open_broker("llama", pool_bytes=900 * token_bytes)
    docs = [broker.materialize(broker.engine.frame.encode_text(prose(280, seed=n), what="text")) for n in range(4)]

    def work(number: int) -> list[Generation]:
        made = []
        for turn in range(4):
            parent = docs[(number + turn) % 4]
            if (number + turn) % 3 == 0:
                broker.evict(parent)
            made.append(
                broker.generate(
                    f"{number}", parent=parent, raw=True, sampling=Sampling(max_tokens=5), deterministic=number % 4 == 0
                )
            )
        return made

    for made in at_once([lambda n=n: work(n) for n in range(8)]):
        assert all(equals_stock(broker, result) for result in made)
    stats = broker.stats()
    assert stats.num_evictions > 0
    assert (stats.overflow_bytes, stats.num_leases) == (0, 0)
    assert stats.pool_peak_bytes <= stats.pool_capacity_bytes


def test_brokers_of_different_models_work_side_by_side(open_broker: Callable[..., KVBroker]) -> None:
    """No global state: two engines on the fast path, one on the universal one, from six threads."""
    brokers = [open_broker("llama"), open_broker("qwen3"), open_broker("gemma3")]
    assert [broker.engine.read_path for broker in brokers] == ["fast", "fast", "universal"]

    def talk(broker: KVBroker, number: int) -> list[Generation]:
        made, parent = [], None
        for turn in range(3):
            made.append(broker.generate(f"{number} {turn}", parent=parent, sampling=TWELVE))
            parent = made[-1].handle
        return made

    calls = [lambda b=b, n=n: (b, talk(b, n)) for b in brokers for n in range(2)]
    for broker, made in at_once(calls):
        assert all(equals_stock(broker, result) for result in made)


async def test_generations_are_gathered_on_one_loop(open_broker: Callable[..., KVBroker]) -> None:
    broker = open_broker("llama")
    docs = (await broker.aprefill(prose(300))).handle
    results = await asyncio.gather(*(broker.agenerate(f"Q{n}", parent=docs, sampling=TWELVE) for n in range(6)))
    assert all(equals_stock(broker, result) for result in results)
    assert [result.handle for result in results] == [
        broker.generate(f"Q{n}", parent=docs, sampling=TWELVE).handle for n in range(6)
    ]


def test_every_async_operator_does_what_its_twin_does_in_any_loop(open_broker: Callable[..., KVBroker]) -> None:
    """langgraph#5790, #4218: two event loops, one after the other, on one broker."""
    broker = open_broker("llama")
    ids = broker.engine.frame.encode_text(prose(40), what="text")

    async def tour() -> KVHandle:
        handle = await broker.amaterialize(ids, label="docs")
        assert handle == broker.materialize(ids)
        child = await broker.aappend(handle, [5, 6])
        assert child == broker.append(handle, [5, 6])
        assert (await broker.afork(handle, label="x")).kv_label == "x"
        receipt = await broker.alease(handle)
        assert await broker.arelease(receipt)
        assert not await broker.arelease(receipt)
        assert await broker.aevict(child) > 0
        assert await broker.acheck() == []
        return handle

    assert asyncio.run(tour()) == asyncio.run(tour())
    closing = open_broker("llama")
    asyncio.run(closing.aclose())
    assert closing.stats().pool_capacity_bytes == 0


async def test_the_loop_is_free_while_a_generation_runs(open_broker: Callable[..., KVBroker]) -> None:
    """The worker waits for the loop in its first token: a loop that was blocked would never answer."""
    broker = open_broker("llama")
    loop, answered = asyncio.get_running_loop(), threading.Event()

    def on_token(_: TokenDelta) -> None:
        loop.call_soon_threadsafe(answered.set)
        assert answered.wait(timeout=30)

    await broker.agenerate("Hi", sampling=Sampling(max_tokens=3), on_token=on_token)
    assert answered.is_set()


def test_cancelling_the_task_stops_the_generation_and_publishes_nothing(open_broker: Callable[..., KVBroker]) -> None:
    broker = open_broker("llama")
    docs = broker.prefill(prose(300)).handle

    def counters() -> dict[str, int]:
        return {
            name: value
            for name, value in asdict(broker.stats()).items()
            if "peak" not in name and not name.endswith(("_steps", "_forwards"))
        }

    before = counters()
    tokens: list[TokenDelta] = []

    async def main() -> None:
        loop, running, cancelled = asyncio.get_running_loop(), asyncio.Event(), threading.Event()

        def on_token(delta: TokenDelta) -> None:
            tokens.append(delta)
            loop.call_soon_threadsafe(running.set)
            assert cancelled.wait(timeout=30)

        task = asyncio.create_task(
            broker.agenerate("Go", parent=docs, sampling=Sampling(max_tokens=200), on_token=on_token)
        )
        await running.wait()
        task.cancel()
        task.cancel()
        await asyncio.sleep(0)  # the task has seen it and waits for the thread
        assert not task.done()
        cancelled.set()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert len(tokens) == 1
    assert counters() == before
