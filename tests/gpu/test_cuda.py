"""Cold = warm on a CUDA device: the device tier, the kernels that return the log-sum-exp, and the ones that do not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from aaflow_langgraph import KVBroker, Sampling, TransformersEngine
from aaflow_langgraph.errors import CapacityError
from aaflow_langgraph.pool.device import DeviceTier
from tests import tiny
from tests.oracle import Stock, prose
from tests.servers import RealServer, redis_server  # noqa: F401

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; torch sees none"),
]

TWELVE = Sampling(max_tokens=12, logprobs=True)


@pytest.fixture(params=["llama", "gemma3"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=[torch.float32, torch.bfloat16, torch.float16], ids=str)
def engine(request: pytest.FixtureRequest, kind: str) -> TransformersEngine:
    return TransformersEngine(tiny.model(kind, dtype=request.param).to("cuda"), tiny.tokenizer())


@pytest.fixture
def open_broker(engine: TransformersEngine) -> Iterator[Callable[..., KVBroker]]:
    """Brokers on the device; each must be clean at the end, its copies included."""
    opened: list[KVBroker] = []

    def open_one(*, pool_bytes: int = 16 << 20, **options: object) -> KVBroker:
        opened.append(KVBroker.open(engine, pool_bytes=pool_bytes, **options))  # type: ignore[arg-type]
        return opened[-1]

    yield open_one
    for broker in opened:
        if not broker.is_closed:
            assert broker.check() == []
            assert broker.stats().num_leases == 0
            broker.close()


@pytest.fixture
def broker(open_broker: Callable[..., KVBroker]) -> KVBroker:
    return open_broker()


def ids(broker: KVBroker, count: int, seed: int = 0) -> tuple[int, ...]:
    return broker.engine.frame.encode_text(prose(count, seed=seed), what="text")


def test_kv_is_published_in_main_memory_and_read_on_the_device(broker: KVBroker) -> None:
    docs = broker.materialize(ids(broker, 700))
    stats = broker.stats()
    assert 0 < stats.device_used_bytes <= stats.pool_used_bytes
    assert stats.num_device_copies == 0  # the request that computed it left its own copy
    [record] = broker._store.index.records()
    assert broker._store.rows(record).device.type == "cpu"
    piece = broker._store.piece(record, 0, 700)
    assert piece.kv.device.type == "cuda"
    assert torch.equal(piece.kv.cpu(), broker._store.rows(record))
    assert broker.evict(docs, tier="device") == stats.device_used_bytes
    again = broker._store.piece(record, 0, 700)
    assert torch.equal(again.kv, piece.kv)
    assert broker.stats().num_device_copies == 1


def test_deterministic_generation_is_bit_identical_with_and_without_cache(broker: KVBroker) -> None:
    docs = broker.materialize(ids(broker, 700), deterministic=True)
    broker.evict(docs)
    cold = broker.generate("so", parent=docs, raw=True, sampling=TWELVE, deterministic=True)
    broker.append(docs, [5, 6, 7])
    warm = broker.generate("so", parent=docs, raw=True, sampling=TWELVE, deterministic=True)
    broker.evict(docs, tier="device")
    copied = broker.generate("so", parent=docs, raw=True, sampling=TWELVE, deterministic=True)
    assert warm.usage.num_reused > 0
    assert (warm.token_ids, warm.logprobs) == (cold.token_ids, cold.logprobs)
    assert (copied.token_ids, copied.logprobs) == (cold.token_ids, cold.logprobs)


def test_generation_behind_a_handle_equals_the_stock_model(broker: KVBroker) -> None:
    docs = broker.prefill(prose(600)).handle
    results = [broker.generate("Why?", parent=docs, sampling=TWELVE) for _ in range(2)]
    broker.evict(results[0].handle)
    results.append(broker.generate("Why?", parent=docs, sampling=TWELVE))
    broker.evict(docs, tier="device")
    results.append(broker.generate("Why?", parent=docs, sampling=TWELVE))
    context = broker.token_ids(results[0].handle)[: results[0].usage.num_context]
    stock = Stock(broker.engine.model, broker.engine.stop_ids)
    for result in results:
        assert result.logprobs is not None
        if broker.engine.model.dtype == torch.float32:
            assert result.token_ids == stock.greedy(context, 12)
        # In 16 bits the stock forward itself moves when tokens are cut differently: its best token must stay close.
        first = stock.logits(context).float().log_softmax(-1)
        tolerance = 1e-4 if broker.engine.model.dtype == torch.float32 else 0.25
        assert result.logprobs[0] == pytest.approx(float(first[result.token_ids[0]]), abs=tolerance)
        assert float(first.max()) - float(first[result.token_ids[0]]) <= tolerance


@pytest.mark.parametrize("device_tokens", [0, 500, 4000])
def test_a_small_pool_and_a_small_tier_evict_copy_and_recompute(
    open_broker: Callable[..., KVBroker], engine: TransformersEngine, device_tokens: int
) -> None:
    token_bytes = engine.layout.token_bytes
    small = open_broker(pool_bytes=1000 * token_bytes, device_bytes=device_tokens * token_bytes)
    handles = [small.materialize(ids(small, 400, seed=n)) for n in range(4)]
    first = [small.generate("so", parent=h, raw=True, sampling=TWELVE, deterministic=True) for h in handles]
    again = [small.generate("so", parent=h, raw=True, sampling=TWELVE, deterministic=True) for h in handles]
    assert [g.logprobs for g in first] == [g.logprobs for g in again]
    stats = small.stats()
    assert stats.num_evictions > 0
    assert stats.device_used_bytes <= stats.device_capacity_bytes == device_tokens * token_bytes


def test_a_restart_fetches_from_disk_and_copies_to_the_device(
    open_broker: Callable[..., KVBroker], tmp_path: Path
) -> None:
    broker = open_broker(disk=tmp_path / "kv")
    docs = broker.materialize(ids(broker, 700), deterministic=True)
    cold = broker.generate("so", parent=docs, raw=True, sampling=TWELVE)
    broker.close()
    again = open_broker(disk=tmp_path / "kv")
    warm = again.generate("so", parent=docs, raw=True, sampling=TWELVE)
    assert warm.token_ids == cold.token_ids
    stats = again.stats()
    assert stats.num_recomputed_tokens == 0
    assert (stats.num_fetches, stats.num_device_copies) == (1, 1)


def test_two_brokers_on_a_shared_index_read_one_copy_in_main_memory(
    open_broker: Callable[..., KVBroker],
    redis_server: RealServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    one, two = open_broker(index=redis_server.url), open_broker(index=redis_server.url)
    docs = one.materialize(ids(one, 700))
    expected = one.generate("so", parent=docs, raw=True, sampling=TWELVE)
    found = two.generate("so", parent=docs, raw=True, sampling=TWELVE)
    assert found.usage.num_reused >= 700
    assert found.token_ids == expected.token_ids
    assert two.stats().num_device_copies > 0


def test_composed_kv_is_moved_on_the_device(broker: KVBroker, kind: str) -> None:
    if kind != "llama":
        pytest.skip("keys of windowed layers are not moved")
    parts = [broker.materialize(ids(broker, 300, seed=n)) for n in range(3)]
    broker.evict(parts[1], tier="device")
    composed = broker.compose(parts, rung="legolink", k=8)
    assert composed.report.num_reused > 0
    result = broker.generate("so", parent=composed.handle, raw=True, sampling=TWELVE)
    broker.evict(composed.handle)
    again = broker.generate("so", parent=composed.handle, raw=True, sampling=TWELVE)
    if broker.engine.model.dtype == torch.float32:
        assert again.token_ids == result.token_ids


def test_a_device_that_is_full_drops_its_copies_and_then_says_so() -> None:
    tier = DeviceTier(torch.device("cuda"), 1 << 20)
    tier.keep("a", torch.empty(1 << 20, dtype=torch.uint8, device="cuda"))
    with pytest.raises(CapacityError, match="no room on cuda"):
        tier.empty((1 << 50,), torch.uint8)
    assert tier.used_bytes == 0
