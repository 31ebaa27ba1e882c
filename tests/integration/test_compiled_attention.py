"""Engines on the compiled attention: the bits of deterministic requests, neighbours, and models it knows only from outside."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from aaflow_langgraph import KVBroker, Sampling, TransformersEngine, native
from aaflow_langgraph.engine import kernel
from aaflow_langgraph.engine.base import Piece
from aaflow_langgraph.engine.batch import Step
from aaflow_langgraph.engine.mixed import Mixed
from aaflow_langgraph.engine.scattered import Rows
from aaflow_langgraph.errors import ConfigError
from tests import tiny
from tests.integration.test_cold_warm import broker_text, letters

pytestmark = pytest.mark.skipif(
    native.library() is None, reason="the compiled attention is not built, or this CPU has no AVX512-BF16"
)
# Heads of 64, as real models have them; the tiny models' own 16 are left to torch.
WIDE: dict[str, dict[str, Any]] = {
    "llama": {"head_dim": 64},
    "qwen3": {"head_dim": 64},
    "phi": {"hidden_size": 256},
    "gpt2": {},
}


class Tail:
    """A tail outside any pool."""

    def __init__(self, engine: TransformersEngine, start: int) -> None:
        self.start, self.length = start, 0
        self.kv = torch.zeros(engine.layout.shape(400), dtype=engine.model.dtype, device="cpu")

    def ensure(self, num_tokens: int) -> None:
        assert num_tokens <= self.kv.shape[3]


@pytest.mark.parametrize("cut", [1, 300, 512, 2047, 2048, 2200])
def test_deterministic_generation_across_the_grid_has_the_same_bits_with_and_without_cache(
    cut: int, open_broker: Callable[..., KVBroker]
) -> None:
    ids = letters(2301, seed=3)
    sampling = Sampling(max_tokens=12, logprobs=True)
    last = broker_text(ids[-1])
    cold_broker = open_broker("llama", dtype=torch.bfloat16, pool_bytes=32 << 20, **WIDE["llama"])
    assert dict(cold_broker.engine.namespace.facts)["attention"] == "native"
    front = cold_broker.materialize(ids[:-1], deterministic=True)
    assert cold_broker.evict(front) > 0
    cold = cold_broker.generate(last, parent=front, raw=True, sampling=sampling, deterministic=True)
    assert cold.usage.num_reused == 0

    warm_broker = open_broker("llama", dtype=torch.bfloat16, pool_bytes=32 << 20, **WIDE["llama"])
    prefix = warm_broker.materialize(ids[:cut])
    warm_broker.generate(broker_text(ids[cut]), parent=prefix, raw=True, sampling=Sampling(max_tokens=40))
    warm_broker.append(prefix, ids[cut:-1])
    handle = warm_broker.materialize(ids[:-1])
    for _ in range(2):
        warm = warm_broker.generate(last, parent=handle, raw=True, sampling=sampling, deterministic=True)
        assert (warm.token_ids, warm.logprobs) == (cold.token_ids, cold.logprobs)
    assert warm.usage.num_reused > 0


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_a_deterministic_request_does_not_notice_its_neighbours(
    kind: str, open_broker: Callable[..., KVBroker]
) -> None:
    broker = open_broker(kind, dtype=torch.bfloat16, pool_bytes=32 << 20, **WIDE[kind])
    handle = broker.materialize(letters(700, seed=1), deterministic=True)
    sampling = Sampling(max_tokens=16, logprobs=True)

    def ask() -> tuple[Any, ...]:
        made = broker.generate("abc", parent=handle, raw=True, sampling=sampling, deterministic=True, kv=False)
        return made.token_ids, made.logprobs

    alone = ask()
    done = threading.Event()

    def neighbour(number: int) -> None:
        while not done.is_set():
            broker.generate(f"n{number}", parent=handle, raw=True, sampling=Sampling(max_tokens=8), kv=False)

    with ThreadPoolExecutor(4) as pool:
        others = [pool.submit(neighbour, number) for number in range(4)]
        try:
            together = [ask() for _ in range(5)]
        finally:
            done.set()
        for other in others:
            other.result()
    assert together == [alone] * 5


@pytest.mark.parametrize("kind", sorted(WIDE))
def test_it_computes_what_torch_does_alone_and_together(
    kind: str, engines: Callable[..., TransformersEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """bf16 rounds at other places on every path, so logits are compared to within some of its steps."""
    if kind == "gpt2":
        model = tiny.model("gpt2", dtype=torch.bfloat16)
        model = type(model)(type(model.config)(**{**model.config.to_dict(), "n_embd": 256}))
        engine = TransformersEngine(model.to(torch.bfloat16), tiny.tokenizer())
    else:
        engine = engines(kind, dtype=torch.bfloat16, **WIDE[kind])
    assert engine.kernel is not None
    assert engine.batches
    assert (engine.lean is not None) == (kind in ("llama", "qwen3"))
    context = letters(600, seed=2)
    past = Tail(engine, 0)
    past.kv = torch.zeros(engine.layout.shape(600), dtype=torch.bfloat16)
    engine.start((), past, grid=None).prefill(context)

    def forward(counts: list[int]) -> torch.Tensor:
        steps: list[Step] = []
        for number, count in enumerate(counts):
            run = engine.start([Piece(past.kv, 0, 600)], Tail(engine, 600), grid=None)
            run.prefill(letters(5 + number, seed=number))
            steps.append(run.next_step(letters(count, seed=20 + number)))  # type: ignore[union-attr]
        with engine.lock:
            return torch.stack(engine._forward_steps(steps)).float()

    calls: list[int] = []
    counted = engine.kernel.prepare

    def prepare(plan: native.Plan) -> None:
        calls.append(plan.num_rows)
        counted(plan)

    monkeypatch.setattr(engine.kernel, "prepare", prepare)
    found = [forward([1]), forward([9]), forward([1, 1, 30, 2])]
    assert calls[-1] == 34
    monkeypatch.setattr(engine, "kernel", None)
    for mine, wanted in zip(found, [forward([1]), forward([9]), forward([1, 1, 30, 2])], strict=True):
        assert (mine - wanted).abs().max() < 0.05 * wanted.std()


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "mistral", "phi", "cohere", "glm", "smollm3"])
def test_every_architecture_takes_the_read_path_that_it_takes_without(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = {"head_dim": 64} if kind in ("glm", "qwen3") else {"hidden_size": 256}
    model = tiny.model(kind, dtype=torch.bfloat16, **changes)
    engine = TransformersEngine(model, tiny.tokenizer())
    assert engine.kernel is not None
    monkeypatch.setattr(kernel.Kernel, "of", lambda *_: None)
    plain = TransformersEngine(model, tiny.tokenizer())
    assert (engine.read_path, engine.batches) == (plain.read_path, plain.batches)
    assert plain.attention == "torch"
    ids = letters(300, seed=6)
    found = []
    for each in (engine, plain):
        each.select(each.read_path)
        tail = Tail(each, 0)
        run = each.start((), tail, grid=None)
        run.prefill(ids)
        found.append(run.decode(ids[0]).float())
    assert (found[0] - found[1]).abs().max() < 0.08 * found[1].std()


@pytest.mark.parametrize("kind", ["llama", "qwen3", "phi"])
def test_tokens_at_scattered_positions_see_what_they_see_on_torch(
    kind: str, engines: Callable[..., TransformersEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engines(kind, dtype=torch.bfloat16, **WIDE[kind])
    ids = letters(900, seed=4)
    whole = Rows(torch.zeros(engine.layout.shape(900), dtype=torch.bfloat16), 0)
    engine.start((), whole, grid=None).prefill(ids)
    chosen = [301, 302, 303, 340, *range(400, 800, 3), 850]
    results = []
    for compiled in (engine.kernel, None):
        monkeypatch.setattr(engine, "kernel", compiled)
        rows = whole.kv[..., 300:, :].clone()
        rows[..., 551:, :] = float("nan")  # behind what any of them sees
        mixed = Mixed([Piece(whole.kv[..., :300, :], 0, 300)], rows, 300)
        logits = engine.run_at([ids[at] for at in chosen], chosen, mixed)
        results.append((logits.float(), rows[..., :551, :].float()))
    (logits, rows), (wanted, wanted_rows) = results
    assert (logits - wanted).abs().max() < 0.05 * wanted.std()
    assert (rows - wanted_rows).abs().max() < 0.05 * wanted_rows.std()
    untouched = [at - 300 for at in range(300, 851) if at not in set(chosen)]
    assert torch.equal(rows[..., untouched, :], whole.kv[..., 300:, :][..., untouched, :].float())


@pytest.mark.parametrize("kind", ["llama", "phi"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_another_default_device_of_torch_changes_nothing(
    kind: str, dtype: torch.dtype, open_broker: Callable[..., KVBroker]
) -> None:
    broker = open_broker(kind, dtype=dtype, pool_bytes=32 << 20, **WIDE[kind])
    handle = broker.materialize(letters(600, seed=8))
    sampling = Sampling(max_tokens=6, temperature=0.7, seed=1, logprobs=True)

    def ask() -> list[tuple[Any, ...]]:
        made = []
        for deterministic in (True, False):
            one = broker.generate(
                "abc", parent=handle, raw=True, sampling=sampling, deterministic=deterministic, kv=False
            )
            made.append((one.token_ids, one.logprobs))
        runs = [broker.engine.start([], Tail(broker.engine, 0), grid=None) for _ in range(2)]
        steps = [run.next_step(range(40, 43 + number)) for number, run in enumerate(runs)]  # type: ignore[union-attr]
        with broker.engine.lock:
            return [*made, *(tuple(logits.tolist()) for logits in broker.engine._forward_steps(steps))]

    usual = ask()
    with torch.device("meta"):
        assert ask() == usual


def test_a_model_cast_after_it_was_opened_is_refused_instead_of_read_as_something_else() -> None:
    model = tiny.model("phi", dtype=torch.bfloat16, **WIDE["phi"])
    with KVBroker.open(TransformersEngine(model, tiny.tokenizer()), pool_bytes=8 << 20) as broker:
        handle = broker.materialize(letters(300))
        before = broker.stats().num_extents
        model.float()
        with pytest.raises(ConfigError, match=r"torch\.float32 .* was opened in torch\.bfloat16"):
            broker.generate("abc", parent=handle, raw=True, sampling=Sampling(max_tokens=2))
        assert broker.stats().num_extents == before
        model.bfloat16()
        assert broker.generate("abc", parent=handle, raw=True, sampling=Sampling(max_tokens=2)).usage.num_reused == 300


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_a_lean_model_whose_widths_the_kernel_does_not_take_keeps_its_bits_on_torch(
    kind: str, open_broker: Callable[..., KVBroker]
) -> None:
    broker = open_broker(kind, dtype=torch.bfloat16, pool_bytes=64 << 20, intermediate_size=136, **WIDE[kind])
    assert broker.engine.lean is not None
    assert broker.engine.attention == "torch"
    handle = broker.append(broker.materialize(letters(2049)), letters(256, seed=1))
    sampling = Sampling(max_tokens=3, logprobs=True)
    answers = [
        broker.generate("abc", parent=handle, raw=True, deterministic=True, kv=kv, sampling=sampling)
        for kv in (True, False, True)
    ]
    assert [answer.usage.num_reused > 0 for answer in answers] == [True, False, True]
    assert len({(answer.token_ids, answer.logprobs) for answer in answers}) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_lean_model_cast_after_it_was_opened_is_refused(dtype: torch.dtype) -> None:
    model = tiny.model("llama", dtype=torch.bfloat16, **WIDE["llama"])
    with KVBroker.open(TransformersEngine(model, tiny.tokenizer()), pool_bytes=8 << 20) as broker:
        model.to(dtype)
        with pytest.raises(ConfigError, match=rf"{dtype} and was opened in bfloat16"):
            broker.generate("abc", raw=True, sampling=Sampling(max_tokens=2))
