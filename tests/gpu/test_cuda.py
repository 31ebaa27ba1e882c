"""Cold = warm on a CUDA device: the device pool, the kernels that return the log-sum-exp, and the ones that do not."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from aaflow_langgraph import KVBroker, Sampling, TransformersEngine
from aaflow_langgraph.pool.base import Pool
from aaflow_langgraph.pool.device import DevicePool
from aaflow_langgraph.testing.pool_contract import PoolContract
from tests import tiny
from tests.oracle import Stock, prose

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; torch sees none"),
]

TWELVE = Sampling(max_tokens=12, logprobs=True)


class TestDevicePool(PoolContract):
    def make_pool(self, capacity_bytes: int) -> Pool:
        return DevicePool(capacity_bytes, torch.device("cuda"))


@pytest.fixture(params=["llama", "gemma3"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=[torch.float32, torch.bfloat16, torch.float16], ids=str)
def broker(request: pytest.FixtureRequest, kind: str) -> Iterator[KVBroker]:
    engine = TransformersEngine(tiny.model(kind, dtype=request.param).to("cuda"), tiny.tokenizer())
    with KVBroker.open(engine, pool_bytes=16 << 20) as made:
        assert made._pool.tier == "device"
        yield made
        assert made.check() == []
        assert made.stats().num_leases == 0


def test_deterministic_generation_is_bit_identical_with_and_without_cache(broker: KVBroker) -> None:
    docs = broker.materialize(broker.engine.frame.encode_text(prose(700), what="text"), deterministic=True)
    broker.evict(docs)
    cold = broker.generate("so", parent=docs, raw=True, sampling=TWELVE, deterministic=True)
    broker.append(docs, [5, 6, 7])
    warm = broker.generate("so", parent=docs, raw=True, sampling=TWELVE, deterministic=True)
    assert warm.usage.num_reused > 0
    assert (warm.token_ids, warm.logprobs) == (cold.token_ids, cold.logprobs)


def test_generation_behind_a_handle_equals_the_stock_model(broker: KVBroker) -> None:
    docs = broker.prefill(prose(600)).handle
    results = [broker.generate("Why?", parent=docs, sampling=TWELVE) for _ in range(2)]
    broker.evict(results[0].handle)
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


def test_a_small_device_pool_evicts_and_recomputes(broker: KVBroker) -> None:
    engine = broker.engine
    with KVBroker.open(engine, pool_bytes=1000 * engine.layout.token_bytes) as small:
        handles = [small.materialize(engine.frame.encode_text(prose(400, seed=n), what="text")) for n in range(4)]
        first = [small.generate("so", parent=h, raw=True, sampling=TWELVE, deterministic=True) for h in handles]
        again = [small.generate("so", parent=h, raw=True, sampling=TWELVE, deterministic=True) for h in handles]
        assert [g.logprobs for g in first] == [g.logprobs for g in again]
        assert small.stats().num_evictions > 0
        assert small.check() == []
