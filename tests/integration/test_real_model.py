"""The real model (SmolLM2-135M-Instruct) against its stock self: cold = warm on real weights and real text."""

from __future__ import annotations

import copy

import pytest
import torch

from aaflow_langgraph import KVBroker, Sampling, TransformersEngine
from aaflow_langgraph.assets import demo_model
from tests.real import real_cache  # noqa: F401 - the fixture

FACTS = (
    "Nairobi is the capital of Kenya. Mombasa is its largest port. Mount Kenya is its highest point. "
    "The coastline of Chile is 6,435 km long. Fuji is the highest mountain of Japan. Berlin is the capital of Germany. "
)
PROMPT = "List, one per line, every city that is named above, and say of each what it is."

pytestmark = pytest.mark.slow


@pytest.fixture
def engine(request: pytest.FixtureRequest, real_cache: None) -> TransformersEngine:
    return TransformersEngine.load(demo_model(), dtype=request.param, device="cpu")


@pytest.mark.parametrize("engine", ["float32"], indirect=True)
def test_64_greedy_tokens_behind_a_handle_equal_stock_generate(engine: TransformersEngine) -> None:
    stock = copy.deepcopy(engine.model)
    stock.set_attn_implementation("sdpa")
    with KVBroker.open(engine, pool_bytes=1 << 28) as broker:
        docs = broker.prefill(FACTS * 6)
        warm = broker.generate(PROMPT, parent=docs.handle, sampling=Sampling(max_tokens=64))
        assert warm.usage.num_reused == docs.handle.kv_tokens
        ids = broker.token_ids(warm.handle)[: warm.usage.num_context]
        with torch.no_grad():
            expected = stock.generate(
                torch.tensor([ids]), attention_mask=torch.ones(1, len(ids)), max_new_tokens=64, do_sample=False
            )[0, len(ids) :].tolist()
        expected = [token_id for token_id in expected if token_id not in engine.stop_ids]
        assert list(warm.token_ids) == expected
        assert len(expected) > 30
        assert broker.check() == []


@pytest.mark.parametrize("engine", ["float32", "bfloat16"], indirect=True)
def test_deterministic_answers_are_bit_identical_with_and_without_cache(engine: TransformersEngine) -> None:
    sampling = Sampling(max_tokens=12, logprobs=True)
    with KVBroker.open(engine, pool_bytes=1 << 28) as empty:
        docs = empty.prefill(FACTS * 6)
        assert empty.evict(docs.handle) > 0
        cold = empty.generate(PROMPT, parent=docs.handle, sampling=sampling, deterministic=True)
        assert cold.usage.num_reused == 0
        cold_ids = empty.token_ids(cold.handle)
    with KVBroker.open(engine, pool_bytes=1 << 28) as broker:
        docs = broker.prefill(FACTS * 6)
        broker.generate("Name one mountain.", parent=docs.handle, sampling=Sampling(max_tokens=8))
        warm = broker.generate(PROMPT, parent=docs.handle, sampling=sampling, deterministic=True)
        assert broker.token_ids(warm.handle) == cold_ids
        assert warm.usage.num_reused > 0
        assert warm.logprobs == cold.logprobs  # bit for bit
        assert warm.token_ids == cold.token_ids


@pytest.mark.parametrize("engine", ["float32"], indirect=True)
def test_composed_documents_equal_the_dense_forward_when_everything_is_recomputed(engine: TransformersEngine) -> None:
    """And when nothing is, layer 0, which needs no context, is still right: keys were moved to where they stand."""
    with KVBroker.open(engine, pool_bytes=256 << 20) as broker:
        docs = [broker.prefill(f"{text} " * 12).handle for text in ("The river is long.", "A dog barks.", "Who won?")]
        dense = broker.compose(docs, exact=True).handle
        right = broker.first_logits(dense, [30])
        for options in ({"rung": "legolink", "k": 10_000}, {"rung": "blend", "r": 1.0}):
            composed = broker.compose(docs, **options)  # type: ignore[arg-type]
            assert torch.allclose(broker.first_logits(composed.handle, [30]), right, atol=1e-4 * float(right.std()))
        moved = broker.compose(docs, rung="legolink", k=0, audit=True)
        assert moved.report.audit is not None
        assert moved.report.audit.kl > 1e-6
        assert moved.report.num_recomputed == 0
