"""The broker under pressure: a small pool, lost leases, forks, tenants. Cold = warm throughout (I14)."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from aaflow_langgraph import KVBroker, KVHandle, Sampling, TransformersEngine
from aaflow_langgraph.errors import Cancelled, ConfigError, IncompatibleHandle
from aaflow_langgraph.evict.base import Candidate
from aaflow_langgraph.index.memory import MemoryIndex
from aaflow_langgraph.pool.host import HostPool
from aaflow_langgraph.results import Generation, TokenDelta
from aaflow_langgraph.store import LEASE_S
from aaflow_langgraph.testing.clock import ManualClock
from tests import tiny
from tests.oracle import prose, stock_of
from tests.processes import wait_until

FEW = Sampling(max_tokens=6)


def encode(broker: KVBroker, text: str) -> tuple[int, ...]:
    return broker.engine.frame.encode_text(text, what="text")


def goes_on_like_stock(broker: KVBroker, handle: KVHandle, prompt: str = "so", *, deterministic: bool = False) -> bool:
    """Does a generation behind ``handle`` equal the stock model's over the same ids?"""
    result = broker.generate(prompt, parent=handle, raw=True, sampling=FEW, deterministic=deterministic)
    ids = broker.token_ids(handle) + encode(broker, prompt)
    return result.token_ids == stock_of(broker.engine).greedy(ids, 6)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def timed_broker(engines: Callable[..., TransformersEngine], clock: ManualClock) -> Iterator[Callable[..., KVBroker]]:
    """Brokers whose leases run on a clock that the test moves."""
    opened: list[KVBroker] = []

    def open_one(kind: str = "llama", *, pool_bytes: int = 8 << 20, **options: object) -> KVBroker:
        broker = KVBroker(engines(kind, **options), MemoryIndex(clock), HostPool(pool_bytes))
        opened.append(broker)
        return broker

    yield open_one
    for broker in opened:
        assert broker.check() == []
        assert broker.stats().num_leases == 0
        broker.close()


def counters(broker: KVBroker) -> dict[str, int]:
    """What is held, and every counter; the high-water marks may move."""
    return {
        name: value
        for name, value in asdict(broker.stats()).items()
        if "peak" not in name and not name.endswith(("_steps", "_forwards"))
    }


def scribble(broker: KVBroker) -> None:
    """Overwrite every free byte of the pool, as another request would: a stale read turns into NaN."""
    pool, taken = broker._pool, []
    for size in (1 << 20, 1 << 16, 1 << 12, 64):
        while (allocation := pool.reserve(size)) is not None:
            pool.tensor(allocation, torch.float32, (size // 4,)).fill_(float("nan"))
            taken.append(allocation)
    for allocation in taken:
        pool.free(allocation)


# ---------------------------------------------------------------------- pool smaller than the working set


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
@pytest.mark.parametrize("deterministic", [False, True])
def test_a_pool_smaller_than_the_working_set_evicts_and_recomputes(
    kind: str, deterministic: bool, open_broker: Callable[..., KVBroker]
) -> None:
    probe = open_broker(kind)
    token_bytes = probe.engine.layout.token_bytes
    broker = open_broker(kind, pool_bytes=1000 * token_bytes)
    handles = [broker.materialize(encode(broker, prose(400, seed=n)), deterministic=deterministic) for n in range(5)]
    for _ in range(2):
        for handle in handles:
            assert goes_on_like_stock(broker, handle, deterministic=deterministic)
            stats = broker.stats()
            assert stats.pool_used_bytes <= stats.pool_peak_bytes <= stats.pool_capacity_bytes
    stats = broker.stats()
    assert stats.num_evictions > 0
    assert stats.peak_overflow_bytes == 0
    assert deterministic or stats.num_recomputed_tokens > 0
    assert broker.check() == []


def test_a_policy_of_the_users_that_raises_fails_no_request_and_no_background_work(
    engines: Callable[..., TransformersEngine], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    asked: list[str] = []

    def raises(found: object, need_bytes: int) -> list[Candidate]:
        asked.append(threading.current_thread().name)
        raise KeyError("the user's own")

    engine = engines("llama")
    pool_bytes = 1000 * engine.layout.token_bytes
    with KVBroker.open(engine, pool_bytes=pool_bytes, disk=tmp_path / "kv", evict=raises) as broker:
        handles = [broker.materialize(encode(broker, prose(480, seed=n))) for n in range(4)]
        wait_until(lambda: "aaflow-keeper" in asked and broker.stats().pool_used_bytes < 0.95 * pool_bytes)
        assert threading.current_thread().name in asked
        assert all(goes_on_like_stock(broker, handle) for handle in handles)
        assert broker.stats().peak_overflow_bytes == 0
        assert broker.check() == []
    assert ["policy failed" in record.message for record in caplog.records] == [True]


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_a_pool_smaller_than_one_context_still_gives_right_answers(
    kind: str, open_broker: Callable[..., KVBroker]
) -> None:
    """Pool full: recompute without storing; the bytes outside of the pool are counted and given back."""
    probe = open_broker(kind)
    broker = open_broker(kind, pool_bytes=100 * probe.engine.layout.token_bytes)
    handle = broker.materialize(encode(broker, prose(300)))
    for _ in range(2):
        assert goes_on_like_stock(broker, handle)
    child = broker.append(handle, encode(broker, prose(40, seed=1)))
    assert goes_on_like_stock(broker, child)
    stats = broker.stats()
    assert stats.peak_overflow_bytes > 0
    assert stats.overflow_bytes == 0
    assert stats.pool_peak_bytes <= stats.pool_capacity_bytes


def test_a_generation_that_outgrows_the_pool_finishes(open_broker: Callable[..., KVBroker]) -> None:
    probe = open_broker("llama")
    broker = open_broker("llama", pool_bytes=350 * probe.engine.layout.token_bytes)
    ids = encode(broker, prose(30))
    result = broker.generate(prose(30), raw=True, sampling=Sampling(max_tokens=340))
    assert result.token_ids == stock_of(broker.engine).greedy(ids, 340)
    assert broker.stats().overflow_bytes == 0
    assert goes_on_like_stock(broker, result.handle)


def test_leased_extents_survive_pressure(timed_broker: Callable[..., KVBroker]) -> None:
    """I3: leased means not evictable, however full the pool is."""
    broker = timed_broker(pool_bytes=1000 * 768)
    held = broker.materialize(encode(broker, prose(400)))
    receipt = broker.lease(held)
    for seed in range(1, 5):
        broker.materialize(encode(broker, prose(500, seed=seed)))
    assert broker.stats().num_evictions > 0
    result = broker.generate("so", parent=held, raw=True, sampling=FEW)
    assert result.usage.num_reused == 400
    assert broker.evict(held) == 0
    assert broker.release(receipt)
    assert broker.evict(result.handle) > 0


def test_an_evicted_handle_stays_valid_and_gives_the_same_answer(open_broker: Callable[..., KVBroker]) -> None:
    broker = open_broker("llama")
    docs = broker.prefill(prose(300)).handle
    first = broker.generate("Why?", parent=docs, sampling=FEW)
    used = broker.stats().pool_used_bytes
    freed = broker.evict(first.handle)
    assert freed > 0
    assert broker.stats().pool_used_bytes == used - freed == 0
    assert broker.evict(docs) == 0
    again = broker.generate("Why?", parent=docs, sampling=FEW)
    assert (again.text, again.token_ids, again.handle) == (first.text, first.token_ids, first.handle)
    assert broker.stats().num_recomputed_tokens == docs.kv_tokens
    assert again.usage.num_reused == 0


def test_evicting_a_parent_leaves_what_children_build_on(open_broker: Callable[..., KVBroker]) -> None:
    """Leaf first: a shared front goes only after everything behind it."""
    broker = open_broker("llama")
    docs = broker.materialize(encode(broker, prose(300)))
    child = broker.append(docs, encode(broker, prose(50, seed=1)))
    assert broker.evict(docs) == 0
    assert broker.generate("so", parent=docs, raw=True, sampling=FEW).usage.num_reused == 300
    assert broker.evict(child) > 0
    assert broker.token_ids(child)[:300] == broker.token_ids(docs)


# ---------------------------------------------------------------------- forks


def test_a_fork_costs_no_bytes_and_is_the_same_name(open_broker: Callable[..., KVBroker]) -> None:
    broker = open_broker("llama")
    docs = broker.prefill(prose(300), label="docs").handle
    before = broker.stats()
    forks = [broker.fork(docs, label=f"branch {number}") for number in range(50)]
    assert set(forks) == {docs}
    assert [fork.kv_label for fork in forks[:2]] == ["branch 0", "branch 1"]
    assert broker.fork(docs).kv_label == "docs"
    assert broker.stats() == before


def test_sixteen_handles_on_one_context_hold_its_bytes_once(open_broker: Callable[..., KVBroker]) -> None:
    broker = open_broker("llama")
    docs = broker.materialize(encode(broker, prose(2000)))
    one = broker.stats().pool_used_bytes
    handles = [
        broker.generate(f"{number:02d}", parent=broker.fork(docs), raw=True, sampling=Sampling(max_tokens=8)).handle
        for number in range(16)
    ]
    assert len(set(handles)) == 16
    assert broker.stats().pool_used_bytes <= 1.15 * one
    assert broker.stats().num_extents == 17


def test_children_never_change_their_parent(open_broker: Callable[..., KVBroker]) -> None:
    """I5, down to the bytes, across appends inside a block and over its border."""
    broker = open_broker("llama")
    docs = broker.materialize(encode(broker, prose(250)))
    record = broker._store.index.records()[0]
    before = broker._store.piece(record, 0, 250).kv.clone()
    ids = broker.token_ids(docs)
    for size in (1, 5, 6, 7, 300):
        child = broker.append(docs, encode(broker, prose(size, seed=size)))
        assert goes_on_like_stock(broker, child)
        assert child != docs
        assert broker.token_ids(child)[:250] == ids
    assert broker.token_ids(docs) == ids
    assert torch.equal(broker._store.piece(record, 0, 250).kv, before)
    assert broker._store.intact(record)


# ---------------------------------------------------------------------- leases that run out


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("size", [40, 700, 2500])
@pytest.mark.parametrize("losses", [1, 12])
def test_a_lease_that_runs_out_while_its_reader_runs_costs_time_only(
    kind: str,
    deterministic: bool,
    size: int,
    losses: int,
    timed_broker: Callable[..., KVBroker],
    clock: ManualClock,
) -> None:
    """I7: a process paused beyond its lease must not go on with bytes that were given to somebody else."""
    broker = timed_broker(kind, pool_bytes=12 << 20)
    docs = broker.materialize(encode(broker, prose(size)), deterministic=deterministic)
    sampling = Sampling(max_tokens=12, logprobs=True)
    expected = broker.generate("so", parent=docs, raw=True, sampling=sampling, deterministic=deterministic)
    broker.evict(expected.handle)
    broker.append(docs, [5])
    lost = 0

    def lose(delta: TokenDelta) -> None:
        nonlocal lost
        if delta.token_id is not None and lost < losses:
            lost += 1
            clock.advance(LEASE_S + 1)
            broker.stats()  # sweeps
            for record in sorted(broker._store.index.records(), key=lambda r: -r.stop):
                broker._store.drop(record.extent_id)
            scribble(broker)

    before = broker.stats()
    result = broker.generate("so", parent=docs, raw=True, sampling=sampling, deterministic=deterministic, on_token=lose)
    assert lost == min(losses, len(expected.token_ids))
    assert result.token_ids == expected.token_ids
    assert result.logprobs is not None
    assert expected.logprobs is not None
    if deterministic:
        assert result.logprobs == expected.logprobs  # bit for bit
    else:
        assert result.logprobs == pytest.approx(expected.logprobs, abs=1e-4)
    after = broker.stats()
    if size > 256 or not deterministic:  # a canonical reader of less than a block holds no lease
        assert after.num_kv_load_failures > before.num_kv_load_failures
        assert after.num_lost_receipts > before.num_lost_receipts
    assert broker.check() == []
    assert goes_on_like_stock(broker, result.handle)


class Between(threading.Event):
    """Asked before every forward whether to stop; does something on the way, at the ``number``-th."""

    def __init__(self, number: int, act: Callable[[], None]) -> None:
        super().__init__()
        self._left = number
        self._act = act

    def is_set(self) -> bool:
        self._left -= 1
        if self._left == 0:
            self._act()
        return super().is_set()


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_lease_that_runs_out_during_a_prefill_costs_time_only(
    kind: str, deterministic: bool, number: int, timed_broker: Callable[..., KVBroker], clock: ManualClock
) -> None:
    """I7, before the first forward and between the chunks of a long prompt."""
    broker = timed_broker(kind)
    docs = broker.materialize(encode(broker, prose(600)), deterministic=deterministic)
    prompt = prose(700, seed=1)
    expected = stock_of(broker.engine).greedy(encode(broker, prose(600) + prompt), 6)

    def lose() -> None:
        clock.advance(LEASE_S + 1)
        broker.stats()
        assert broker.evict(docs) > 0
        scribble(broker)

    result = broker.generate(
        prompt, parent=docs, raw=True, sampling=FEW, deterministic=deterministic, cancel=Between(number, lose)
    )
    assert result.token_ids == expected
    assert broker.stats().num_kv_load_failures == 1
    assert goes_on_like_stock(broker, result.handle)


def test_a_lease_is_renewed_by_its_reader(timed_broker: Callable[..., KVBroker], clock: ManualClock) -> None:
    """A long generation outlives the length of a lease many times over."""
    broker = timed_broker()
    docs = broker.materialize(encode(broker, prose(300)))

    def wait(_: TokenDelta) -> None:
        clock.advance(LEASE_S - 1)
        broker.stats()

    broker.generate("so", parent=docs, raw=True, sampling=Sampling(max_tokens=10), on_token=wait)
    stats = broker.stats()
    assert (stats.num_lost_receipts, stats.num_kv_load_failures) == (0, 0)


def test_a_lost_receipt_leaks_until_its_time_and_is_reported(
    timed_broker: Callable[..., KVBroker], clock: ManualClock
) -> None:
    broker = timed_broker()
    docs = broker.materialize(encode(broker, prose(300)))
    broker.lease(docs)
    assert broker.evict(docs) == 0
    clock.advance(LEASE_S)
    assert broker.stats().num_lost_receipts == 1
    assert broker.evict(docs) > 0


def test_a_receipt_can_be_given_back_once(open_broker: Callable[..., KVBroker]) -> None:
    broker = open_broker("llama")
    docs = broker.materialize(encode(broker, prose(300)))
    mine, theirs = broker.lease(docs), broker.lease(docs)
    assert broker.release(mine)
    assert not broker.release(mine)
    assert broker.evict(docs) == 0
    assert broker.release(theirs)
    assert broker.evict(docs) > 0


# ---------------------------------------------------------------------- requests that do not finish


@pytest.mark.parametrize("after", [0, 1, 5])
def test_a_cancelled_generation_publishes_nothing(open_broker: Callable[..., KVBroker], after: int) -> None:
    broker = open_broker("llama")
    docs = broker.prefill(prose(300)).handle
    before = counters(broker)
    cancel = threading.Event()
    seen: list[TokenDelta] = []

    def watch(delta: TokenDelta) -> None:
        seen.append(delta)
        if len(seen) == after:
            cancel.set()

    if after == 0:
        cancel.set()
    with pytest.raises(Cancelled, match="nothing was published"):
        broker.generate("Go", parent=docs, sampling=Sampling(max_tokens=30), cancel=cancel, on_token=watch)
    assert len(seen) == after
    assert counters(broker) == before


def test_a_callback_that_raises_ends_the_request_and_its_leases(open_broker: Callable[..., KVBroker]) -> None:
    broker = open_broker("llama")
    docs = broker.prefill(prose(300)).handle
    before = counters(broker)

    def boom(_: TokenDelta) -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine") as caught:
        broker.generate("Go", parent=docs, sampling=FEW, on_token=boom)
    assert counters(broker) == before
    assert caught.value.args == ("mine",)  # the traceback is still alive here


@pytest.mark.parametrize("error", [StopIteration("mine"), StopAsyncIteration("mine")], ids=repr)
def test_a_callback_that_raises_the_end_of_an_iterator_ends_none_of_its_caller(
    open_broker: Callable[..., KVBroker], error: Exception
) -> None:
    broker = open_broker("llama")
    before = counters(broker)

    def boom(_: TokenDelta) -> None:
        raise error

    def ask(text: str) -> Generation:
        return broker.generate(text, sampling=FEW, on_token=boom)

    for asked in (
        lambda: list(map(ask, ["Go", "on"])),
        lambda: asyncio.run(broker.acomplete([1, 2, 3], sampling=FEW, on_token=boom)),
    ):
        with pytest.raises(RuntimeError, match=f"on_token raised {type(error).__name__}") as caught:
            asked()
        assert caught.value.__cause__ is error
    assert counters(broker) == before


def test_a_stream_that_is_closed_early_publishes_nothing(open_broker: Callable[..., KVBroker]) -> None:
    broker = open_broker("llama")
    docs = broker.prefill(prose(300)).handle
    before = counters(broker)
    stream = broker.stream("Go", parent=docs, sampling=FEW)
    next(stream)
    assert broker.stats().num_leases == 1
    stream.close()
    assert counters(broker) == before


def test_a_broker_closed_in_the_middle_ends_the_request_with_a_typed_error(
    open_broker: Callable[..., KVBroker],
) -> None:
    broker = open_broker("llama")
    docs = broker.prefill(prose(300)).handle
    with pytest.raises(Cancelled, match="closed"):
        broker.generate("Go", parent=docs, sampling=FEW, on_token=lambda _: broker.close())
    with pytest.raises(ConfigError, match="closed"):
        broker.generate("Go", sampling=FEW)


# ---------------------------------------------------------------------- tenants


def test_tenants_never_share_even_one_index() -> None:
    """I6: the salt is in every hash."""
    index = MemoryIndex()
    model = tiny.model("llama")
    one, two = (
        KVBroker(TransformersEngine(model, tiny.tokenizer(), tenant=tenant), index, HostPool(4 << 20))
        for tenant in ("one", "two")
    )
    ids = encode(one, prose(600))
    mine = one.materialize(ids)
    theirs = two.prefill(prose(600), raw=True)
    assert theirs.usage.num_reused == 0
    assert one.prefill(prose(600), raw=True).usage.num_reused == 600
    assert mine.kv_id != theirs.handle.kv_id
    for broker, foreign in ((one, theirs.handle), (two, mine)):
        with pytest.raises(IncompatibleHandle, match="tenant"):
            broker.fork(foreign)
    assert one.check() == two.check() == []


def test_one_model_behind_two_engines_is_right_in_both() -> None:
    model = tiny.model("llama")
    brokers = [
        KVBroker.open(TransformersEngine(model, tiny.tokenizer(), tenant=tenant), pool_bytes=1 << 20)
        for tenant in ("one", "two")
    ]
    assert brokers[0].engine.read_path == brokers[1].engine.read_path == "fast"
    for broker in brokers:
        assert goes_on_like_stock(broker, broker.materialize(encode(broker, prose(100))))
        broker.close()


# ---------------------------------------------------------------------- lineage


def test_a_long_chain_of_turns_goes_on_right_after_everything_was_evicted(open_broker: Callable[..., KVBroker]) -> None:
    """Recipes store what they add: a chain is put together again along its parents."""
    broker = open_broker("llama")
    handle = broker.prefill(prose(60)).handle
    chain = [handle]
    for number in range(12):
        handle = broker.generate(f"turn {number}", parent=handle, sampling=FEW).handle
        chain.append(handle)
    assert sum(len(broker.recipe(h).token_ids) for h in chain) == handle.kv_tokens
    expected = [broker.generate("and?", parent=h, sampling=FEW).token_ids for h in chain]
    broker._recipes._sequences.clear()

    def is_empty() -> bool:
        """Also of what is merged in the background while we evict."""
        for record in sorted(broker._store.index.records(), key=lambda r: -r.stop):
            broker._store.drop(record.extent_id)
        return broker.stats().pool_used_bytes == 0

    wait_until(is_empty)
    assert [broker.generate("and?", parent=h, sampling=FEW).token_ids for h in chain] == expected


def test_equal_tokens_give_the_equal_handle_by_every_route(open_broker: Callable[..., KVBroker]) -> None:
    broker, other = open_broker("llama"), open_broker("llama")
    ids = encode(broker, prose(600))
    whole = broker.materialize(ids)
    parts = broker.materialize(ids[:100])
    for a, b in ((100, 256), (256, 257), (257, 600)):
        parts = broker.append(parts, ids[a:b])
    assert parts == whole == other.materialize(ids) == broker.prefill(prose(600), raw=True).handle
    assert broker.materialize(ids, deterministic=True) == whole
    assert goes_on_like_stock(broker, parts)
