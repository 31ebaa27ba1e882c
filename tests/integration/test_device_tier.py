"""The tier on a device, with main memory in the device's place: everything that the model reads and writes is a copy there.

On CUDA the same paths run in tests/gpu. I14 throughout: cold = warm, whatever was dropped from where.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from aaflow_langgraph import KVBroker, KVHandle, Sampling, TransformersEngine
from aaflow_langgraph.engine.base import Piece, Run, Tail
from aaflow_langgraph.errors import CapacityError, ConfigError
from aaflow_langgraph.index.memory import MemoryIndex
from aaflow_langgraph.pool.device import DeviceTier
from aaflow_langgraph.pool.host import HostPool
from aaflow_langgraph.store import LEASE_S
from aaflow_langgraph.testing.clock import ManualClock
from tests import tiny
from tests.oracle import stock_of
from tests.servers import RealServer, redis_server, short_folder  # noqa: F401

CPU = torch.device("cpu")
FEW = Sampling(max_tokens=6)
TOKEN_BYTES = 768
IDS = tiny.words(600, seed=1)


class Device(DeviceTier):
    """A device that remembers what it gave, and that a test can make full."""

    def __init__(self, device: torch.device, capacity_bytes: int) -> None:
        super().__init__(device, capacity_bytes)
        self.given: list[weakref.ref[torch.Tensor]] = []
        self.addresses: set[int] = set()
        self.num_refused = 0
        self.is_full: Callable[[], bool] = lambda: False

    def _allocate(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        if self.is_full():
            self.num_refused += 1
            raise torch.OutOfMemoryError("the device is full")
        made = super()._allocate(shape, dtype).fill_(float("nan"))
        self.given.append(weakref.ref(made))
        self.addresses.add(made.untyped_storage().data_ptr())
        return made

    def holds(self, kv: torch.Tensor) -> bool:
        return kv.untyped_storage().data_ptr() in self.addresses

    @property
    def num_living(self) -> int:
        return sum(ref() is not None for ref in self.given)


def device_of(broker: KVBroker) -> Device:
    device = broker._store.device_tier
    assert isinstance(device, Device)
    return device


@pytest.fixture
def open_copying(
    engines: Callable[..., TransformersEngine], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., KVBroker]]:
    """Brokers whose model takes main memory for a device; each must be clean at the end."""
    opened: list[KVBroker] = []
    monkeypatch.setattr(DeviceTier, "of", Device)

    def open_one(
        kind: str = "llama", *, pool_tokens: int = 8000, device_tokens: int = 8000, **options: Any
    ) -> KVBroker:
        sizes = {"pool_bytes": pool_tokens * TOKEN_BYTES, "device_bytes": device_tokens * TOKEN_BYTES}
        opened.append(KVBroker.open(engines(kind), **sizes, **options))
        return opened[-1]

    yield open_one
    for broker in opened:
        if not broker.is_closed:
            assert broker.check() == []
            stats = broker.stats()
            assert (stats.num_leases, stats.overflow_bytes, stats.peak_overflow_bytes) == (0, 0, 0)
            broker.close()
        assert device_of(broker).used_bytes == 0


def goes_on_like_stock(broker: KVBroker, handle: KVHandle, **options: Any) -> bool:
    """Does a generation behind ``handle`` equal the stock model's over the same ids?"""
    result = broker.generate("so", parent=handle, raw=True, sampling=FEW, **options)
    ids = (*broker.token_ids(handle), *broker.engine.frame.encode_text("so", what="text"))
    return result.token_ids == stock_of(broker.engine).greedy(ids, 6)


# ---------------------------------------------------------------------- the tier alone


def rows(number: int, num_bytes: int = 64) -> torch.Tensor:
    return torch.full((num_bytes,), number, dtype=torch.uint8)


def read(tier: DeviceTier, number: int) -> torch.Tensor:
    return tier.rows(number, lambda: rows(number), lambda: True)


@pytest.mark.parametrize("capacity", [-1, 1.5, "1g", None, True])
def test_a_capacity_that_makes_no_sense_is_refused_by_name_on_every_device(capacity: Any) -> None:
    with pytest.raises(ConfigError, match="device_bytes"):
        DeviceTier.of(CPU, capacity)


def test_where_the_model_computes_in_main_memory_there_is_no_tier(open_broker: Callable[..., KVBroker]) -> None:
    broker = open_broker()
    assert broker._store.device_tier is None
    handle = broker.materialize(IDS[:20])
    assert broker.evict(handle, tier="device") == 0
    stats = broker.stats()
    assert (stats.device_capacity_bytes, stats.device_used_bytes, stats.num_device_copies) == (0, 0, 0)
    assert stats.pool_used_bytes > 0


def test_the_least_recently_used_copies_go_first_and_no_byte_is_held_beyond_the_capacity() -> None:
    tier = DeviceTier(CPU, 200)
    first = [read(tier, number) for number in (1, 2, 3)]
    assert read(tier, 1) is first[0]
    read(tier, 4)
    assert tier.used_bytes == 192
    assert [tier.find(number) is not None for number in (1, 2, 3, 4)] == [True, False, True, True]
    assert bool((first[1] == 2).all())  # whoever holds it reads on
    assert tier.num_copies == 4
    assert tier.check() == []


def test_what_is_larger_than_the_tier_is_copied_kept_by_nobody_and_drives_nobody_out() -> None:
    tier = DeviceTier(CPU, 100)
    kept = read(tier, 1)
    large = tier.rows("large", lambda: rows(9, 101), lambda: True)
    assert bool((large == 9).all())
    assert tier.find("large") is None
    assert tier.find(1) is kept
    assert tier.used_bytes == 64


def test_a_copy_is_counted_once_and_dropping_it_gives_its_bytes_back() -> None:
    tier = DeviceTier(CPU, 1000)
    copy = read(tier, 1)
    tier.keep(1, copy)
    assert tier.used_bytes == 64
    assert [tier.drop(1), tier.drop(1)] == [64, 0]
    assert (tier.used_bytes, tier.check()) == (0, [])


def test_threads_that_want_the_same_bytes_share_one_copy() -> None:
    tier, gate = DeviceTier(CPU, 1000), threading.Barrier(8)
    found: list[torch.Tensor] = []

    def run() -> None:
        gate.wait()
        found.append(read(tier, 7))

    threads = [threading.Thread(target=run) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({id(copy) for copy in found}) == 1
    assert tier.num_copies == 1


def test_a_copy_whose_source_was_lost_meanwhile_is_not_kept() -> None:
    tier = DeviceTier(CPU, 1000)
    copy = tier.rows(1, lambda: rows(1), lambda: False)
    assert bool((copy == 1).all())
    assert (tier.find(1), tier.used_bytes) == (None, 0)


def test_a_full_device_gives_up_its_copies_before_it_refuses() -> None:
    device = Device(CPU, 1000)
    device.keep(1, rows(1))
    device.is_full = lambda: device.used_bytes > 0
    assert device.empty((4,), torch.float32).shape == (4,)
    assert device.used_bytes == 0
    device.is_full = lambda: True
    with pytest.raises(CapacityError, match="no room on cpu for KV of 16 bytes") as refusal:
        device.empty((4,), torch.float32)
    assert refusal.value.recovery == "retry"
    assert device.num_refused == 3


def test_a_closed_tier_keeps_nothing_and_lets_the_last_request_finish() -> None:
    tier = DeviceTier(CPU, 1000)
    read(tier, 1)
    tier.close()
    tier.close()
    assert bool((read(tier, 2) == 2).all())
    assert (tier.used_bytes, tier.capacity_bytes, tier.find(2)) == (0, 0, None)


# ---------------------------------------------------------------------- under a broker


def test_the_next_reader_of_what_a_request_computed_needs_no_copy(open_copying: Callable[..., KVBroker]) -> None:
    broker = open_copying()
    docs = broker.materialize(IDS)
    child = broker.append(docs, tiny.words(31, seed=2))
    assert goes_on_like_stock(broker, child)
    stats = broker.stats()
    assert stats.num_device_copies == 0
    assert stats.device_used_bytes == stats.pool_used_bytes  # tails left nothing else behind
    dropped = broker.evict(child, tier="device")
    assert dropped == (600 + 32) * TOKEN_BYTES
    assert broker.stats().pool_used_bytes == stats.pool_used_bytes
    for _ in range(2):
        assert goes_on_like_stock(broker, child)
        assert broker.stats().num_device_copies == 2
    assert broker.evict(docs) == 0  # others build on it: here and there it stays
    assert broker.stats().device_used_bytes == broker.stats().pool_used_bytes


@pytest.mark.parametrize("device_tokens", [0, 610, 8000])
@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_the_model_reads_and_writes_on_the_device_only_and_says_what_it_says_without_a_cache(
    kind: str, device_tokens: int, open_copying: Callable[..., KVBroker], monkeypatch: pytest.MonkeyPatch
) -> None:
    broker = open_copying(kind, device_tokens=device_tokens)
    device, start, seen = device_of(broker), broker.engine.start, []

    def watched(past: Sequence[Piece], tail: Tail, **options: Any) -> Run:
        seen.append(all(device.holds(kv) for kv in (tail.kv, *(piece.kv for piece in past))))
        return start(past, tail, **options)

    monkeypatch.setattr(broker.engine, "start", watched)
    docs = broker.materialize(IDS)
    branches = [broker.append(broker.fork(docs), tiny.words(30 + n, seed=n)) for n in range(2)]
    deterministic = broker.materialize(tiny.words(700, seed=3), deterministic=True)
    for _ in range(2):
        for handle in (*branches, docs, deterministic):
            assert goes_on_like_stock(broker, handle)
            assert goes_on_like_stock(broker, handle, deterministic=True)
    # Leaves the first in its third block: what both share of it is copied to the front of a tail.
    beside = broker.complete((*IDS[:580], 7, 8, 9), sampling=FEW)
    assert beside.usage.num_reused >= 580
    assert beside.token_ids == stock_of(broker.engine).greedy((*IDS[:580], 7, 8, 9), 6)
    chat = broker.prefill("a question").handle
    for number in range(3):
        chat = broker.generate(f"turn {number}", parent=chat, sampling=FEW).handle
    assert goes_on_like_stock(broker, chat)
    broker.evict(branches[0])
    assert goes_on_like_stock(broker, branches[0])
    assert len(seen) > 20
    assert all(seen)
    stats = broker.stats()
    assert stats.device_used_bytes <= stats.device_capacity_bytes == device_tokens * TOKEN_BYTES
    assert (stats.num_device_copies > 0) == (device_tokens < 8000)


def test_main_memory_holds_each_extent_once_and_no_running_request(open_copying: Callable[..., KVBroker]) -> None:
    broker = open_copying()
    docs = broker.materialize(IDS)
    used = broker.stats().pool_used_bytes
    assert used == 600 * TOKEN_BYTES
    during: list[int] = []
    for number in range(3):
        broker.generate(
            f"{number}",
            parent=docs,
            raw=True,
            sampling=FEW,
            on_token=lambda _: during.append(broker._pool.used_bytes - used),
        )
    assert during[:6] == [0] * 6
    records = broker._store.index.records()
    sizes = [record.num_tokens + record.num_tokens % 2 for record in records]
    assert len(records) == 4
    assert broker.stats().pool_used_bytes == sum(sizes) * TOKEN_BYTES


def test_composed_kv_is_moved_on_the_device_and_made_again(open_copying: Callable[..., KVBroker]) -> None:
    answers = []
    for device_tokens in (8000, 0):
        broker = open_copying(device_tokens=device_tokens)
        parts = [broker.materialize(tiny.words(300, seed=n)) for n in range(3)]
        for options in ({"rung": "legolink", "k": 8}, {"rung": "blend", "r": 0.2}, {"exact": True}):
            broker.evict(parts[1], tier="device")
            handle = broker.compose(parts, audit="rung" in options, **options).handle  # type: ignore[arg-type]
            first = broker.generate("so", parent=handle, raw=True, sampling=FEW)
            broker.evict(first.handle)
            again = broker.generate("so", parent=handle, raw=True, sampling=FEW)
            assert again.token_ids == first.token_ids
            answers.append(first.token_ids)
        assert goes_on_like_stock(broker, handle)
    assert answers[:3] == answers[3:]


def test_a_small_pool_below_a_large_tier_forgets_the_copies_of_what_it_evicts(
    open_copying: Callable[..., KVBroker],
) -> None:
    broker = open_copying(pool_tokens=1000)
    handles = [broker.materialize(tiny.words(400, seed=n)) for n in range(4)]
    for handle in (*handles, *handles):
        assert goes_on_like_stock(broker, handle)
        stats = broker.stats()
        assert stats.device_used_bytes <= stats.pool_used_bytes
    assert stats.num_evictions > 0
    assert stats.num_recomputed_tokens > 0


def test_a_pool_smaller_than_one_context_stores_nothing_and_answers_right(
    open_copying: Callable[..., KVBroker],
) -> None:
    broker = open_copying(pool_tokens=100)
    handle = broker.materialize(IDS)
    for _ in range(2):
        assert goes_on_like_stock(broker, handle)
    assert broker.stats().num_recomputed_tokens > 0


def test_a_restart_fetches_from_disk_into_main_memory_and_copies_from_there(
    open_copying: Callable[..., KVBroker], tmp_path: Path
) -> None:
    broker = open_copying(disk=tmp_path / "kv")
    docs = broker.materialize(IDS)
    broker.evict(docs)
    stats = broker.stats()
    assert (stats.num_spills, stats.pool_used_bytes, stats.device_used_bytes) == (1, 0, 0)
    assert goes_on_like_stock(broker, docs)
    assert (broker.stats().num_fetches, broker.stats().num_device_copies) == (1, 1)
    broker.close()
    again = open_copying(disk=tmp_path / "kv", device_tokens=100)  # too small to keep it: copied for each request
    for number in (1, 2):
        assert goes_on_like_stock(again, docs)
        stats = again.stats()
        assert (stats.num_fetches, stats.num_recomputed_tokens) == (1, 0)
        assert stats.num_device_copies >= number


def test_over_a_shared_index_one_copy_in_main_memory_serves_whoever_computes_where(
    open_copying: Callable[..., KVBroker],
    redis_server: RealServer,
    monkeypatch: pytest.MonkeyPatch,
    engines: Callable[..., TransformersEngine],
) -> None:
    with short_folder() as run_dir, redis_server.client() as client:
        client.flushall()
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(run_dir))
        one, two = (open_copying(index=redis_server.url) for _ in range(2))
        monkeypatch.setattr(DeviceTier, "of", lambda *_: None)
        with KVBroker.open(engines("llama"), index=redis_server.url, pool_bytes=4 << 20) as in_place:
            docs = one.materialize(IDS)
            for broker, num_copies in ((one, 0), (two, 1), (in_place, 0), (two, 1)):
                known = broker.materialize(IDS)
                assert known == docs
                result = broker.generate("so", parent=known, raw=True, sampling=FEW)
                assert result.usage.num_reused >= 600
                ids = (*IDS, *broker.engine.frame.encode_text("so", what="text"))
                assert result.token_ids == stock_of(broker.engine).greedy(ids, 6)
                assert broker.stats().num_device_copies >= num_copies
            holders = [
                record.place.owner for record in one._store.index.records() if record.stop == 600 and record.place
            ]
            assert holders == [one._pool.owner]
            assert in_place.check() == []
        for broker in (two, one):
            assert broker.check() == []
            broker.close()


# ---------------------------------------------------------------------- what goes wrong


def test_a_slot_that_is_given_to_others_while_it_is_copied_costs_time_only(
    engines: Callable[..., TransformersEngine],
) -> None:
    """I7: the copy holds others' bytes; it is not kept, and what was computed from it is thrown away."""
    clock, device = ManualClock(), Device(CPU, 8000 * TOKEN_BYTES)
    pool = HostPool(8000 * TOKEN_BYTES)
    with KVBroker(engines("llama"), MemoryIndex(clock), pool, device_tier=device) as broker:
        docs = broker.materialize(IDS)
        broker.evict(docs, tier="device")
        [record] = broker._store.index.records()
        assert record.place is not None
        lost: list[int] = []

        def lose() -> bool:
            """The request that copies stood still beyond its lease: others got the bytes."""
            if not lost and device._copying.locked():  # a tail takes memory, too
                lost.append(1)
                clock.advance(LEASE_S + 1)
                broker.stats()
                assert broker.evict(docs) == 600 * TOKEN_BYTES
                taken = pool.reserve(600 * TOKEN_BYTES)
                assert taken is not None
                assert taken.offset == record.place.allocation.offset  # type: ignore[union-attr]
                pool.tensor(taken, torch.float32, (600 * TOKEN_BYTES // 4,)).fill_(float("nan"))
                pool.free(taken)
            return False

        device.is_full = lose
        assert goes_on_like_stock(broker, docs)
        assert lost
        stats = broker.stats()
        assert (stats.num_kv_load_failures, stats.num_lost_receipts) == (1, 1)
        assert device.find(record.place) is None
        assert goes_on_like_stock(broker, docs)
        assert broker.check() == []


def test_a_device_that_is_full_at_the_end_of_a_request_costs_a_recompute_and_at_its_begin_a_typed_error(
    open_copying: Callable[..., KVBroker],
) -> None:
    broker = open_copying()
    device, expected = device_of(broker), stock_of(broker.engine).greedy(IDS[:51], 6)
    device.is_full = lambda: True
    with pytest.raises(CapacityError, match="no room"):
        broker.materialize(IDS[:51])
    device.is_full = lambda: False
    assert broker.stats().num_leases == 0

    def fill(_: object) -> None:
        device.is_full = lambda: True

    result = broker.complete(IDS[:51], sampling=FEW, on_token=fill)
    device.is_full = lambda: False
    assert result.token_ids == expected
    assert device.num_refused == 4
    assert broker.stats().num_extents == 0
    assert goes_on_like_stock(broker, result.handle)


def test_nothing_stays_on_the_device_once_all_is_evicted(open_copying: Callable[..., KVBroker]) -> None:
    broker = open_copying(device_tokens=700)
    device = device_of(broker)
    docs = broker.materialize(IDS)
    for number in range(6):
        result = broker.generate(f"q{number}", parent=docs, raw=True, sampling=FEW)
        broker.evict(result.handle)
        stream = broker.stream(f"s{number}", parent=docs, raw=True, sampling=FEW)
        next(stream)
        stream.close()
    broker.evict(docs)
    stats = broker.stats()
    assert (stats.pool_used_bytes, stats.device_used_bytes, stats.num_extents) == (0, 0, 0)
    assert device.num_living == 0
