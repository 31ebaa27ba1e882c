"""The contract of pools that other processes read in place, as tests. On top of ``PoolContract``.

Both sides live in one process here: what is promised about bytes and generations does not depend on where the reader runs.
What does (death, signals, other users) is tested with real processes, beside the pool.

Examples:
    class TestMySharedPool(SharedPoolContract):
        alignment_bytes = 4096

        def make_pool(self, capacity_bytes: int) -> SharedPool:
            return MySharedPool(capacity_bytes)

        def attach(self, pool: SharedPool) -> Attached:
            return my_reader.attach(pool.owner)
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from aaflow_langgraph.pool.arena import Allocation
from aaflow_langgraph.pool.peers import Attached
from aaflow_langgraph.pool.shared import SharedPool
from aaflow_langgraph.testing.pool_contract import PoolContract


class SharedPoolContract(PoolContract):
    """What a reader may rely on: it sees the owner's bytes in place, and a generation that is live only from ``publish``
    to ``free``, for exactly the range that was published.
    """

    @abstractmethod
    def make_pool(self, capacity_bytes: int) -> SharedPool:
        """A fresh, empty pool of ``capacity_bytes``."""

    @abstractmethod
    def attach(self, pool: SharedPool) -> Attached:
        """A reader of the pool."""

    @pytest.fixture
    def shared(self, pool: SharedPool) -> SharedPool:
        """The pool under test, by its own type."""
        return pool

    @pytest.fixture
    def reader(self, shared: SharedPool) -> Iterator[Attached]:
        """Attached before anything is in the pool."""
        reader = self.attach(shared)
        yield reader
        reader.close()

    def test_a_reader_knows_whose_pool_it_reads(self, shared: SharedPool, reader: Attached) -> None:
        """And how large it is."""
        assert (reader.owner, reader.capacity_bytes) == (shared.owner, shared.capacity_bytes)
        assert reader.is_alive()

    def test_nothing_is_live_for_readers_before_it_is_published(self, shared: SharedPool, reader: Attached) -> None:
        """I4: unpublished bytes are invisible."""
        allocation = _written(shared, 3 * self.alignment_bytes, 5)
        assert shared.is_live(allocation)
        assert not reader.is_live(allocation)

    def test_published_bytes_are_read_in_place(self, shared: SharedPool, reader: Attached) -> None:
        """Written after the reader attached; the second publish changes nothing."""
        allocation = _written(shared, 3 * self.alignment_bytes, 5)
        for _ in range(2):
            shared.publish(allocation)
            assert reader.is_live(allocation)
            view = reader.tensor(allocation, torch.uint8, (allocation.num_bytes,))
            assert bool((view == 5).all())
            assert shared.check() == []

    def test_a_freed_range_is_gone_for_readers_and_stays_gone_when_it_is_used_again(
        self, shared: SharedPool, reader: Attached
    ) -> None:
        """A paused reader must not take another's bytes for those it was promised."""
        old = _written(shared, self.capacity, 1)
        shared.publish(old)
        shared.free(old)
        assert not reader.is_live(old)
        new = _written(shared, self.capacity, 2)
        assert (new.offset, new.num_bytes) == (old.offset, old.num_bytes)
        assert not reader.is_live(new)
        shared.publish(new)
        assert reader.is_live(new)
        assert not reader.is_live(old)
        assert shared.check() == []

    def test_a_range_of_another_cut_shows_no_generation_of_before(self, shared: SharedPool, reader: Attached) -> None:
        """Large, then small in its place, then large again: no slot of the past remains."""
        for size in (6, 1, 2, 3, 6):
            allocation = _written(shared, size * self.alignment_bytes, size)
            shared.publish(allocation)
            assert reader.is_live(allocation)
            assert shared.check() == []
            shared.free(allocation)
            assert not reader.is_live(allocation)
            assert shared.check() == []

    @pytest.mark.parametrize("kept_units", [1, 2, 5, 6])
    def test_a_published_range_stays_published_when_it_shrinks(
        self, shared: SharedPool, reader: Attached, kept_units: int
    ) -> None:
        """Under the range that is kept; the bytes behind it can be another's."""
        whole = _written(shared, 6 * self.alignment_bytes, 7)
        shared.publish(whole)
        kept = shared.shrink(whole, kept_units * self.alignment_bytes)
        assert reader.is_live(kept)
        assert reader.is_live(whole) == (kept == whole)
        rest = _written(shared, self.capacity - kept.num_bytes, 8)
        shared.publish(rest)
        assert reader.is_live(kept)
        assert reader.is_live(rest)
        assert bool((reader.tensor(kept, torch.uint8, (kept.num_bytes,)) == 7).all())
        assert shared.check() == []
        shared.free(kept)
        assert not reader.is_live(kept)
        assert reader.is_live(rest)

    def test_a_range_that_shrinks_unpublished_stays_invisible(self, shared: SharedPool, reader: Attached) -> None:
        """Shrinking is no publishing."""
        kept = shared.shrink(_written(shared, 6 * self.alignment_bytes, 7), self.alignment_bytes)
        assert not reader.is_live(kept)
        assert shared.check() == []

    def test_what_is_not_live_cannot_be_published(self, shared: SharedPool, reader: Attached) -> None:
        """Freed, or with made-up numbers."""
        gone = _written(shared, self.alignment_bytes, 1)
        shared.free(gone)
        live = _written(shared, self.alignment_bytes, 1)
        for wrong in (gone, replace(live, num_bytes=2 * self.alignment_bytes), replace(live, generation=99)):
            with pytest.raises(ValueError, match="live"):
                shared.publish(wrong)
            assert not reader.is_live(wrong)
        assert not reader.is_live(live)

    def test_only_exactly_what_was_published_is_live(self, shared: SharedPool, reader: Attached) -> None:
        """The numbers come from an index: forged, stale or damaged ones must not be believed."""
        unit = self.alignment_bytes
        _written(shared, unit, 1)
        allocation = _written(shared, 4 * unit, 2)
        shared.publish(allocation)
        assert reader.is_live(allocation)
        for offset, num_bytes, generation in (
            (unit, 3 * unit, allocation.generation),
            (unit, 5 * unit, allocation.generation),
            (2 * unit, 3 * unit, allocation.generation),
            (0, 5 * unit, allocation.generation),
            (unit, 4 * unit, allocation.generation + 1),
            (0, 4 * unit, 0),
            (10 * unit, unit, 0),
            *_IMPOSSIBLE,
        ):
            assert not reader.is_live(Allocation(offset, num_bytes, generation))

    def test_a_view_outside_of_the_pool_or_its_range_is_refused(self, shared: SharedPool, reader: Attached) -> None:
        """Before any address is computed."""
        unit = self.alignment_bytes
        inside = Allocation(self.capacity - unit, unit, 1)
        assert reader.tensor(inside, torch.float32, (2, unit // 8)).shape == (2, unit // 8)
        for shape in ((unit + 1,), (1 << 40, 1 << 40), (-1,), (-unit, -1)):
            with pytest.raises(ValueError, match=r"needs|no shape"):
                reader.tensor(inside, torch.uint8, shape)
        outside = [Allocation(self.capacity, unit, 1), Allocation(self.capacity - unit, 2 * unit, 1)]
        for wrong in (*outside, *(Allocation(*numbers) for numbers in _IMPOSSIBLE if numbers[2] == 1)):
            with pytest.raises(ValueError, match="no range"):
                reader.tensor(wrong, torch.uint8, (1,))

    def test_a_view_outlives_the_owner_and_the_reader(self, shared: SharedPool) -> None:
        """Memory lives as long as a tensor from it does."""
        reader = self.attach(shared)
        allocation = _written(shared, self.alignment_bytes, 9)
        shared.publish(allocation)
        view = reader.tensor(allocation, torch.uint8, (self.alignment_bytes,))
        shared.close()
        assert reader.is_live(allocation)
        reader.close()
        reader.close()
        assert not reader.is_alive()
        assert reader.is_live(allocation)
        del reader
        assert bool((view == 9).all())

    def test_a_closed_pool_publishes_nothing(self, shared: SharedPool, reader: Attached) -> None:
        """A request that ends after close is no error."""
        allocation = _written(shared, self.alignment_bytes, 9)
        shared.close()
        shared.publish(allocation)
        assert not reader.is_live(allocation)
        shared.shrink(allocation, 1)
        shared.free(allocation)


_IMPOSSIBLE = (
    (-4096, 4096, 1),
    (0, 0, 1),
    (0, -4096, 1),
    (1, 4096, 1),
    (0, 4097, 1),
    ((1 << 64) - 4096, 8192, 1),
    (1 << 70, 4096, 1),
    (0, 1 << 70, 1),
    (0, 4096, -1),
    (0, 4096, 1 << 64),
)


def _written(pool: SharedPool, num_bytes: int, value: int) -> Allocation:
    allocation = pool.reserve(num_bytes)
    assert allocation is not None
    pool.tensor(allocation, torch.uint8, (num_bytes,)).fill_(value)
    return allocation
