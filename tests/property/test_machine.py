"""One state machine over a real broker. Oracle: a plain dict of token ids, and the stock model on those ids (I14).

The pool holds about three contexts, so nearly every step evicts; leases run on a clock that the machine moves, also in the
middle of a generation.
"""

from __future__ import annotations

import threading

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from aaflow_langgraph import KVBroker, KVHandle, Sampling, TransformersEngine
from aaflow_langgraph.errors import Cancelled
from aaflow_langgraph.index.memory import MemoryIndex
from aaflow_langgraph.model import Receipt
from aaflow_langgraph.pool.host import HostPool
from aaflow_langgraph.results import TokenDelta
from aaflow_langgraph.store import LEASE_S
from aaflow_langgraph.testing.clock import ManualClock
from tests import tiny
from tests.oracle import Stock

POOL_TOKENS = 900
MAX_TOKENS = 700
# Sequences that share long fronts and part ways later: LINES[1] leaves LINES[0] in the middle of its second block.
LINES = [tiny.words(400, seed=0), [*tiny.words(400, seed=0)[:300], *tiny.words(100, seed=1)], tiny.words(400, seed=2)]

lines = st.integers(0, len(LINES) - 1)
sizes = st.sampled_from([400, 301, 300, 257, 256, 255, 40, 1])
small = st.sampled_from([1, 3, 30, 256])
flags = st.booleans()
counts = st.integers(1, 4)
prompts = st.sampled_from(["a", "so?", "tell me more"])

_engine: list[TransformersEngine] = []
_stock: list[Stock] = []


def engine() -> TransformersEngine:
    """One engine for every run of the machine: it holds no state between requests."""
    if not _engine:
        model = tiny.model("llama", num_hidden_layers=2, hidden_size=32, intermediate_size=64, head_dim=8)
        _stock.append(Stock(model, frozenset()))
        _engine.append(TransformersEngine(model, tiny.tokenizer()))
        _stock[0] = Stock(model, _engine[0].stop_ids)
    return _engine[0]


class BrokerMachine(RuleBasedStateMachine):
    handles = Bundle("handles")
    receipts = Bundle("receipts")

    def __init__(self) -> None:
        super().__init__()
        self.clock = ManualClock()
        self.engine = engine()
        self.broker = KVBroker(
            self.engine, MemoryIndex(self.clock), HostPool(POOL_TOKENS * self.engine.layout.token_bytes)
        )
        self.named: dict[str, tuple[int, ...]] = {}

    def know(self, handle: KVHandle, ids: tuple[int, ...]) -> KVHandle:
        """Equal tokens have the equal name, and a name never changes its tokens (I5)."""
        assert self.named.setdefault(handle.kv_id, ids) == ids
        assert [name for name, known in self.named.items() if known == ids] == [handle.kv_id]
        assert handle.kv_tokens == len(ids)
        assert self.broker.token_ids(handle) == ids
        return handle

    @rule(target=handles, line=lines, size=sizes, deterministic=flags)
    def materialize(self, line: int, size: int, deterministic: bool) -> KVHandle:
        ids = tuple(LINES[line][:size])
        return self.know(self.broker.materialize(ids, deterministic=deterministic), ids)

    @initialize(target=handles, deterministic=flags)
    def a_long_context(self, deterministic: bool) -> KVHandle:
        return self.materialize(0, 400, deterministic)

    @rule(target=handles, parent=handles, line=lines, size=small, deterministic=flags)
    def append(self, parent: KVHandle, line: int, size: int, deterministic: bool) -> KVHandle:
        new = LINES[line][:size]
        ids = (*self.named[parent.kv_id], *new)
        if len(ids) > MAX_TOKENS:
            return parent
        return self.know(self.broker.append(parent, new, deterministic=deterministic), ids)

    @rule(target=handles, parent=handles)
    def fork(self, parent: KVHandle) -> KVHandle:
        fork = self.broker.fork(parent.to_dict(), label="fork")
        assert fork == parent
        return self.know(fork, self.named[parent.kv_id])

    @rule(target=handles, parent=handles, prompt=prompts, count=counts, deterministic=flags)
    def continue_raw(self, parent: KVHandle, prompt: str, count: int, deterministic: bool) -> KVHandle:
        return self.generate(parent, prompt, count, raw=True, deterministic=deterministic)

    @rule(target=handles, parent=handles, prompt=prompts, count=counts, deterministic=flags)
    def chat(self, parent: KVHandle, prompt: str, count: int, deterministic: bool) -> KVHandle:
        return self.generate(parent, prompt, count, raw=False, deterministic=deterministic)

    @rule(target=handles, parent=handles, count=counts, deterministic=flags)
    def generate_with_pauses_beyond_the_lease(self, parent: KVHandle, count: int, deterministic: bool) -> KVHandle:
        """I7: after every token, while somebody else evicts the parent and fills the pool."""
        return self.generate(parent, "so?", count, raw=True, deterministic=deterministic, pause=LEASE_S + 1)

    def generate(
        self, parent: KVHandle, prompt: str, count: int, *, raw: bool, deterministic: bool, pause: float = 0.0
    ) -> KVHandle:
        before = self.named[parent.kv_id]
        if len(before) > MAX_TOKENS:
            return parent

        def on_token(_: TokenDelta) -> None:
            if pause:
                self.clock.advance(pause)
                self.broker.stats()  # sweeps
                self.broker.evict(parent)
                self.materialize(2, 400, False)
                self.broker.evict(parent)

        result = self.broker.generate(
            prompt,
            parent=parent,
            raw=raw,
            sampling=Sampling(max_tokens=count),
            deterministic=deterministic,
            on_token=on_token,
        )
        ids = self.broker.token_ids(result.handle)
        context = ids[: result.usage.num_context]
        assert context[: len(before)] == before
        assert len(context) > len(before)
        assert result.token_ids == _stock[0].greedy(context, count)
        assert ids[len(context) :][: len(result.token_ids)] == result.token_ids
        assert result.usage.num_reused + result.usage.num_prefilled == len(context)
        return self.know(result.handle, ids)

    @rule(parent=handles, prompt=prompts, after=st.integers(0, 2))
    def cancel(self, parent: KVHandle, prompt: str, after: int) -> None:
        if len(self.named[parent.kv_id]) > MAX_TOKENS:
            return
        recipes = self.broker.stats().num_recipes
        stop, seen = threading.Event(), [0]

        def on_token(_: TokenDelta) -> None:
            seen[0] += 1
            if seen[0] == after:
                stop.set()

        if after == 0:
            stop.set()
        try:
            result = self.broker.generate(
                prompt, parent=parent, raw=True, sampling=Sampling(max_tokens=9), cancel=stop, on_token=on_token
            )
        except Cancelled:
            assert self.broker.stats().num_recipes == recipes
        else:  # the model ended its turn before it could be stopped
            self.know(result.handle, self.broker.token_ids(result.handle))

    @rule(handle=handles)
    def evict(self, handle: KVHandle) -> None:
        used = self.broker.stats().pool_used_bytes
        freed = self.broker.evict(handle)
        assert self.broker.stats().pool_used_bytes == used - freed

    @rule(target=receipts, handle=handles)
    def lease(self, handle: KVHandle) -> Receipt:
        receipt = self.broker.lease(handle)
        held = {record.extent_id for record in self.broker._store.index.records()}
        assert set(receipt.extent_ids) <= held
        return receipt

    @rule(target=receipts, receipt=consumes(receipts), twice=flags)
    def release(self, receipt: Receipt, twice: bool) -> object:
        before = self.broker.stats().num_leases
        live = receipt.deadline_s > self.clock() and bool(receipt.extent_ids)
        released = self.broker.release(receipt)
        assert self.broker.stats().num_leases == before - (released and live)
        return receipt if twice else multiple()

    @rule(receipt=consumes(receipts))
    def lose_a_receipt(self, receipt: Receipt) -> None:
        """It leaks until its time is up, is counted then, and frees nothing else (I9)."""
        del receipt

    @rule(seconds=st.sampled_from([1.0, LEASE_S / 2, LEASE_S]))
    def wait(self, seconds: float) -> None:
        self.clock.advance(seconds)

    @rule(handle=handles)
    def a_leased_extent_is_not_evictable(self, handle: KVHandle) -> None:
        """I3."""
        receipt = self.broker.lease(handle)
        self.broker.evict(handle)
        held = {record.extent_id for record in self.broker._store.index.records()}
        assert set(receipt.extent_ids) <= held
        self.broker.release(receipt)

    @invariant()
    def nothing_is_broken(self) -> None:
        assert self.broker.check() == []
        stats = self.broker.stats()
        assert stats.pool_used_bytes <= stats.pool_peak_bytes <= stats.pool_capacity_bytes
        assert stats.overflow_bytes == 0
        published = sum(record.place.allocation.num_bytes for record in self.broker._store.index.records())
        assert stats.pool_used_bytes == published  # no request is running: every byte in use belongs to an extent
        assert stats.num_recipes == len(self.named)

    def teardown(self) -> None:
        self.clock.advance(LEASE_S)
        assert self.broker.stats().num_leases == 0
        for name, ids in self.named.items():
            self.broker.evict(KVHandle(name, self.engine.namespace.digest, len(ids)))
        assert self.broker.check() == []
        self.broker.close()


@pytest.mark.filterwarnings("default")  # Hypothesis' own notes about the machine are no faults of ours
class TestBrokerMachine(BrokerMachine.TestCase):  # type: ignore[misc, name-defined]
    settings = settings(
        max_examples=80,
        stateful_step_count=30,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
    )
