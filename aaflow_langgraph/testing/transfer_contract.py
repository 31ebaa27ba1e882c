"""The contract of the operator ``transfer`` as tests, in both colours. Subclass and say how a broker is opened.

Examples:
    class TestMyTransfer(TransferContract):
        def open_broker(self, *, disk: bool = False) -> KVBroker:
            return KVBroker.open(engine(), index=URL, disk=folder if disk else None)

Brokers that ``open_broker`` returns in one test are of one namespace. Where their index is not shared, set ``shares_pools``
to False: what is between them then is the disk, and the tests about each other's pools are skipped.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import replace

import pytest

from aaflow_langgraph.broker import KVBroker
from aaflow_langgraph.errors import IncompatibleHandle, MalformedHandle, RecipeMissing
from aaflow_langgraph.handle import KVHandle
from aaflow_langgraph.results import Transfer
from aaflow_langgraph.testing.greedy import first_tokens

IDS = tuple(1 + (n * 7) % 90 for n in range(600))


@pytest.mark.parametrize("colour", ["sync", "async"])
class TransferContract(ABC):
    """Bytes come into reach by the cheapest way there is, and nothing but time depends on it."""

    shares_pools = True
    """Do brokers of ``open_broker`` read each other's pools?"""

    @abstractmethod
    def open_broker(self, *, disk: bool = False) -> KVBroker:
        """One more broker of the same model and tenant."""

    @pytest.fixture
    def first(self) -> Iterator[KVBroker]:
        """The broker that computes."""
        with self.open_broker() as broker:
            yield broker

    def transfer(self, broker: KVBroker, handle: object, colour: str) -> Transfer:
        """By either name."""
        moved = broker.transfer(handle) if colour == "sync" else asyncio.run(broker.atransfer(handle))  # type: ignore[arg-type]
        ways = moved.num_local + moved.num_in_place + moved.num_copied + moved.num_fetched + moved.num_missing
        assert ways == moved.num_tokens
        return moved

    def needs_sharing(self) -> None:
        """Skip where brokers do not see each other's pools."""
        if not self.shares_pools:
            pytest.skip("brokers of this index share no pools")

    def test_what_is_here_stays_where_it_is(self, first: KVBroker, colour: str) -> None:
        """Idempotent, and zero bytes."""
        handle = first.materialize(IDS)
        used = first.stats().pool_used_bytes
        for _ in range(2):
            moved = self.transfer(first, handle.to_dict(), colour)
            assert (moved.num_tokens, moved.num_local) == (600, 600)
        assert first.stats().pool_used_bytes == used
        assert first.stats().num_leases == 0

    def test_another_brokers_pool_is_read_in_place(self, first: KVBroker, colour: str) -> None:
        """One copy on the host."""
        self.needs_sharing()
        handle = first.materialize(IDS)
        with self.open_broker() as second:
            moved = self.transfer(second, handle, colour)
            assert (moved.num_in_place, moved.num_missing) == (600, 0)
            assert second.stats().pool_used_bytes == 0
            assert first_tokens(second, handle) == first_tokens(first, handle)

    def test_what_an_owner_leaves_behind_is_copied(self, colour: str) -> None:
        """The memory of a process that is gone lives as long as its readers; then it is theirs."""
        self.needs_sharing()
        with self.open_broker() as reader:
            writer = self.open_broker()
            handle = writer.materialize(IDS)
            expected = first_tokens(writer, handle)
            assert self.transfer(reader, handle, colour).num_in_place == 600
            writer.close()
            moved = self.transfer(reader, handle, colour)
            # The background may have copied it first; then it is simply here.
            assert moved.num_copied + moved.num_local == 600
            assert reader.stats().num_adoptions >= 1
            assert reader.stats().pool_used_bytes > 0
            assert first_tokens(reader, handle) == expected

    def test_what_is_on_disk_is_fetched(self, colour: str) -> None:
        """Also by a broker that starts after the writer ended."""
        with self.open_broker(disk=True) as writer:
            handle = writer.materialize(IDS)
            expected = first_tokens(writer, handle)
        with self.open_broker(disk=True) as reader:
            moved = self.transfer(reader, handle, colour)
            assert (moved.num_fetched, moved.num_missing) == (600, 0)
            assert self.transfer(reader, handle, colour).num_local == 600
            assert first_tokens(reader, handle) == expected
            assert reader.stats().num_recomputed_tokens == 0

    def test_what_is_nowhere_is_missing_and_is_computed_when_it_is_read(self, first: KVBroker, colour: str) -> None:
        """I14: a failed transfer is a miss."""
        handle = first.materialize(IDS)
        assert first.evict(handle, tier="disk") > 0
        assert self.transfer(first, handle, colour).num_missing == 600
        rebuilt = first_tokens(first, handle)
        assert first.stats().num_recomputed_tokens == 600
        assert first_tokens(first, handle) == rebuilt

    def test_a_handle_that_is_none_is_refused(self, first: KVBroker, colour: str) -> None:
        """Typed, and nothing happens."""
        handle = first.materialize(IDS)
        with pytest.raises(MalformedHandle):
            self.transfer(first, {"kv_id": "x"}, colour)
        with pytest.raises(IncompatibleHandle):
            self.transfer(first, replace(handle, kv_namespace="0" * 64), colour)
        with pytest.raises(RecipeMissing):
            self.transfer(first, KVHandle("0" * 64, handle.kv_namespace, 5), colour)
