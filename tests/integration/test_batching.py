"""Requests that run at the same moment share forwards and read shared extents once; each gets what it gets alone."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from aaflow_langgraph import KVBroker, KVHandle, Sampling, TransformersEngine
from aaflow_langgraph.engine import shared_attention
from aaflow_langgraph.engine.attention import Past
from aaflow_langgraph.engine.base import Piece
from aaflow_langgraph.engine.batch import Step
from aaflow_langgraph.errors import Cancelled
from aaflow_langgraph.results import Generation
from tests import tiny
from tests.oracle import Stock, prose

KINDS = ["llama", "qwen2", "qwen3", "mistral", "phi", "cohere", "glm", "smollm3", "gpt2", "opt"]
BY_MODULES = ("phi", "cohere", "glm", "smollm3", "gpt2", "opt")
LEAN = {"mistral": {"sliding_window": None}}


class HeapTail:
    """A tail outside any pool, with something in it."""

    def __init__(self, engine: TransformersEngine, start: int) -> None:
        self.start, self.length = start, 0
        self.kv = torch.zeros(engine.layout.shape(1200), dtype=engine.model.dtype)

    def ensure(self, num_tokens: int) -> None:
        assert num_tokens <= self.kv.shape[3]


class Request:
    """One request at the level of the engine: pieces, a tail, new tokens."""

    def __init__(
        self, engine: TransformersEngine, pieces: list[Piece], tail_ids: list[int], new_ids: list[int]
    ) -> None:
        self.engine, self.pieces, self.new_ids = engine, pieces, new_ids
        self.tail = HeapTail(engine, pieces[-1].stop if pieces else 0)
        if tail_ids:
            engine.start(pieces, self.tail, grid=2048).prefill(tail_ids)

    def step(self) -> Step:
        unused: Any = None
        return Step(self.new_ids, self.tail.start + self.tail.length, Past(self.pieces, self.tail, None), unused)

    def alone(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits and new KV, with a grid so that it is not batched."""
        kept = self.tail.kv.clone(), self.tail.length
        logits = self.engine.start(self.pieces, self.tail, grid=1 << 20).prefill(self.new_ids)
        written = self.tail.kv[..., kept[1] : self.tail.length, :].clone()
        self.tail.kv, self.tail.length = kept
        return logits, written


def piece(engine: TransformersEngine, before: list[Piece], ids: list[int]) -> Piece:
    """An extent behind others."""
    start = before[-1].stop if before else 0
    tail = HeapTail(engine, start)
    engine.start(before, tail, grid=2048).prefill(ids)
    return Piece(tail.kv[..., : len(ids), :], start, start + len(ids))


@pytest.mark.parametrize("kind", KINDS)
def test_a_forest_of_requests_equals_each_alone(kind: str, engines: Callable[..., TransformersEngine]) -> None:
    """Shared roots, shared branches, private extents, ragged tails, tails longer than a block, one or many new tokens."""
    engine = engines(kind, **LEAN.get(kind, {}))
    assert engine.batches
    assert (engine.lean is None) == (kind in BY_MODULES)
    root, other = piece(engine, [], tiny.words(300)), piece(engine, [], tiny.words(70, seed=9))
    branch = piece(engine, [root], tiny.words(40, seed=1))
    private = piece(engine, [root, branch], tiny.words(20, seed=2))
    words = tiny.words(700, seed=3)
    requests = [
        Request(engine, [root], [], words[:1]),
        Request(engine, [root], words[:5], words[5:6]),
        Request(engine, [root, branch], words[:255], words[255:256]),
        Request(engine, [root, branch], words[:256], words[256:257]),
        Request(engine, [root, branch, private], words[:600], words[600:603]),
        Request(engine, [other], [], words[:17]),
        Request(engine, [], words[:30], words[30:31]),
        Request(engine, [other], words[:3], words[3:4]),
        Request(engine, [Piece(root.kv[..., :120, :], 0, 120)], words[:3], words[3:4]),  # forks inside of an extent
        Request(engine, [Piece(root.kv[..., :290, :], 0, 290)], [], words[:2]),
    ]
    expected = [request.alone() for request in requests]
    lengths = [request.tail.length for request in requests]
    logits = engine._forward_steps([request.step() for request in requests])
    for request, length, got, (want, kv) in zip(requests, lengths, logits, expected, strict=True):
        torch.testing.assert_close(got, want, atol=2e-5, rtol=1e-4)
        new = request.tail.kv[..., length : length + len(request.new_ids), :]
        torch.testing.assert_close(new, kv, atol=2e-5, rtol=1e-4)


def test_readers_of_one_extent_that_fork_at_several_positions_read_what_they_share_once(
    engines: Callable[..., TransformersEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As forks of handles do whose chain was merged."""
    engine = engines()
    root = piece(engine, [], tiny.words(300))
    pasts = [Piece(root.kv[..., :stop, :], 0, stop) for stop in (100, 250, 250, 300)]
    read: list[tuple[int, int]] = []
    over_extent = shared_attention._over_extent

    def counted(query: torch.Tensor, keys: torch.Tensor, *rest: Any) -> Any:
        read.append((keys.shape[2], len(query)))
        return over_extent(query, keys, *rest)

    monkeypatch.setattr(shared_attention, "_over_extent", counted)
    requests = [Request(engine, [past], [], [7]) for past in pasts]
    expected = [request.alone() for request in requests]
    logits = engine._forward_steps([request.step() for request in requests])
    assert sorted(set(read)) == [(50, 1), (100, 4), (150, 3)]
    assert len(read) == 3 * engine.layout.num_layers
    for got, (want, _) in zip(logits, expected, strict=True):
        torch.testing.assert_close(got, want, atol=2e-5, rtol=1e-4)


def together(calls: list[Callable[[], Generation]]) -> list[Generation | BaseException]:
    """All calls at once, each in a thread."""
    results: list[Generation | BaseException] = [RuntimeError("did not run")] * len(calls)
    start = threading.Barrier(len(calls))

    def one(number: int) -> None:
        start.wait()
        try:
            results[number] = calls[number]()
        except BaseException as error:
            results[number] = error

    threads = [threading.Thread(target=one, args=(number,)) for number in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def is_cold(broker: KVBroker, result: Generation, stock: Stock) -> bool:
    """Are a generation's tokens those of the stock model behind the same context?"""
    context = broker.token_ids(result.handle)[: result.usage.num_context]
    return result.token_ids == stock.greedy(context, len(result.token_ids))


@pytest.mark.parametrize("kind", ["llama", "phi", "cohere"])
def test_sixteen_forks_share_their_forwards_and_answer_as_alone(
    kind: str, open_broker: Callable[..., KVBroker]
) -> None:
    broker = open_broker(kind)
    stock = Stock(broker.engine.model, broker.engine.stop_ids)
    docs = broker.materialize(tiny.words(300))
    batcher = broker.engine.batcher
    before = batcher.num_steps, batcher.num_forwards, batcher.num_repeated
    calls = [
        lambda n=n: broker.generate(f"question {n}", parent=docs, raw=True, sampling=Sampling(max_tokens=20))
        for n in range(16)
    ]
    for result in together(calls):
        assert isinstance(result, Generation)
        assert is_cold(broker, result, stock)
    steps, forwards, repeated = (
        now - was
        for now, was in zip((batcher.num_steps, batcher.num_forwards, batcher.num_repeated), before, strict=True)
    )
    assert forwards < steps / 2
    assert repeated == 0


def test_a_deterministic_request_runs_alone_among_others(open_broker: Callable[..., KVBroker]) -> None:
    """Bit-equal to a run without anybody else."""
    broker = open_broker("llama")
    docs = broker.materialize(tiny.words(600))

    def exact() -> Generation:
        return broker.generate(
            "so", parent=docs, raw=True, sampling=Sampling(max_tokens=12, logprobs=True), deterministic=True
        )

    alone = exact()
    others = [
        lambda n=n: broker.generate(f"question {n}", parent=docs, raw=True, sampling=Sampling(max_tokens=12))
        for n in range(5)
    ]
    among = together([exact, *others])[0]
    assert isinstance(among, Generation)
    assert (among.token_ids, among.logprobs) == (alone.token_ids, alone.logprobs)


def test_who_is_cancelled_or_fails_disturbs_nobody(open_broker: Callable[..., KVBroker]) -> None:
    broker = open_broker("llama")
    stock = Stock(broker.engine.model, broker.engine.stop_ids)
    docs = broker.materialize(tiny.words(300))
    stop = threading.Event()

    def raising(_: object) -> None:
        raise KeyError("the user's own fault")

    def stopping(_: object) -> None:
        stop.set()

    def ask(text: str, **options: Any) -> Callable[[], Generation]:
        return lambda: broker.generate(text, parent=docs, raw=True, sampling=Sampling(max_tokens=15), **options)

    results = together(
        [
            ask("one"),
            ask("two", on_token=raising),
            ask("three", cancel=stop, on_token=stopping),
            ask("four"),
            ask("five"),
        ]
    )
    assert isinstance(results[1], KeyError)
    assert isinstance(results[2], Cancelled)
    for result in (results[0], results[3], results[4]):
        assert isinstance(result, Generation)
        assert is_cold(broker, result, stock)


@settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
)
@given(
    st.lists(
        st.tuples(
            st.integers(0, 3),  # which parent
            st.integers(1, 60),  # prompt words
            st.integers(1, 12),  # tokens
            st.sampled_from(["go on", "cancel", "fork"]),
        ),
        min_size=2,
        max_size=7,
    )
)
def test_cold_equals_warm_under_churn(
    engines: Callable[..., TransformersEngine], requests: list[tuple[int, int, int, str]]
) -> None:
    """Requests that come, fork, go on and are cancelled at random: each finished one equals a fresh solo run in fp32."""
    engine = engines("llama")
    stock = Stock(engine.model, engine.stop_ids)
    with KVBroker.open(engine, pool_bytes=2 << 20) as broker:
        docs = broker.materialize(tiny.words(400))
        parents: list[KVHandle | None] = [None, docs, broker.append(docs, tiny.words(30, seed=4)), broker.fork(docs)]

        def run(parent: int, size: int, count: int, how: str) -> Generation:
            stop = threading.Event()
            if how == "cancel":
                stop.set()
            prompt = " ".join("abcdefg"[n % 7] for n in range(size))
            sampling = Sampling(max_tokens=count)
            result = broker.generate(prompt, parent=parents[parent], raw=True, sampling=sampling, cancel=stop)
            if how == "fork":
                result = broker.generate("b", parent=broker.fork(result.handle), raw=True, sampling=sampling)
            return result

        results = together([lambda r=request: run(*r) for request in requests])
        for request, result in zip(requests, results, strict=True):
            if request[3] == "cancel":
                assert isinstance(result, Cancelled)
            else:
                assert isinstance(result, Generation), result
                assert is_cold(broker, result, stock)
        assert broker.check() == []
        assert broker.stats().num_leases == 0
        assert engine.batcher.num_repeated == 0


def test_tails_that_outgrow_their_room_in_a_shared_forward_are_sealed_like_others(
    open_broker: Callable[..., KVBroker],
) -> None:
    """Room is made in the middle of a forward, and what lies in it is published after the last."""
    broker = open_broker()
    prompts = [prose(300, seed=seed) for seed in range(3)]
    gate = threading.Barrier(len(prompts))
    long = Sampling(max_tokens=300)
    found: dict[int, Any] = {}

    def ask(number: int) -> None:
        gate.wait()
        found[number] = broker.generate(prompts[number], raw=True, sampling=long)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == [0, 1, 2]
    for number, generation in found.items():
        again = broker.complete(broker.token_ids(generation.handle)[:-1], sampling=Sampling(max_tokens=1))
        assert again.usage.num_reused >= generation.handle.kv_tokens - 2
        alone = broker.generate(prompts[number], raw=True, sampling=long, kv=False)
        assert alone.token_ids == generation.token_ids
