"""The contract of ``Pool`` as tests. Subclass, say how a pool is made, and let pytest collect the subclass.

Examples:
    class TestMyPool(PoolContract):
        def make_pool(self, capacity_bytes: int) -> Pool:
            return MyPool(capacity_bytes)
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import replace
from typing import ClassVar

import pytest
import torch

from aaflow_langgraph.pool.arena import Allocation
from aaflow_langgraph.pool.base import Pool


class PoolContract(ABC):
    """What every pool promises: fixed capacity, disjoint ranges, views without copies, generations that never repeat."""

    alignment_bytes: ClassVar[int] = 64
    """What ranges of this pool are rounded up to."""

    @property
    def capacity(self) -> int:
        """Bytes of the pool under test: room for 64 of the smallest ranges."""
        return 64 * self.alignment_bytes

    @abstractmethod
    def make_pool(self, capacity_bytes: int) -> Pool:
        """A fresh, empty pool of ``capacity_bytes``."""

    @pytest.fixture
    def pool(self) -> Iterator[Pool]:
        """A pool of ``capacity`` bytes, closed when the test ends."""
        pool = self.make_pool(self.capacity)
        yield pool
        pool.close()

    def test_an_empty_pool_holds_nothing(self, pool: Pool) -> None:
        """Capacity is what was asked for."""
        assert (pool.capacity_bytes, pool.used_bytes, pool.peak_bytes) == (self.capacity, 0, 0)
        assert pool.tier == "host"
        assert pool.check() == []

    def test_every_byte_can_be_taken_and_none_beyond(self, pool: Pool) -> None:
        """I10: bytes in use never exceed the capacity."""
        taken = [_take(pool, self.capacity // 4) for _ in range(4)]
        assert pool.used_bytes == pool.peak_bytes == self.capacity
        assert pool.reserve(1) is None
        assert pool.used_bytes == self.capacity
        for allocation in taken:
            pool.free(allocation)
        assert (pool.used_bytes, pool.peak_bytes) == (0, self.capacity)
        assert pool.check() == []

    def test_what_can_never_fit_changes_nothing(self, pool: Pool) -> None:
        """Mutates only on success."""
        assert pool.reserve(self.capacity + 1) is None
        assert (pool.used_bytes, pool.peak_bytes) == (0, 0)
        assert pool.check() == []

    def test_free_and_used_always_add_up(self, pool: Pool) -> None:
        """I1, over holes of every size."""
        taken = [_take(pool, self.alignment_bytes * size) for size in (1, 5, 2, 7, 3)]
        for number in (1, 3, 0, 4, 2):
            pool.free(taken[number])
            assert pool.check() == []
        assert _take(pool, self.capacity).num_bytes == self.capacity

    def test_bytes_that_were_written_are_read_back(self, pool: Pool) -> None:
        """Whatever the dtype."""
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            allocation = _take(pool, 2 * 3 * 8 * dtype.itemsize)
            view = pool.tensor(allocation, dtype, (2, 3, 8))
            written = torch.arange(48, device=view.device).reshape(2, 3, 8).to(dtype)
            view.copy_(written)
            assert view.is_contiguous()
            assert torch.equal(pool.tensor(allocation, dtype, (2, 3, 8)), written)
            pool.free(allocation)

    def test_two_views_of_one_range_share_its_bytes(self, pool: Pool) -> None:
        """Zero copy."""
        allocation = _take(pool, 256)
        a, b = (pool.tensor(allocation, torch.float32, (64,)) for _ in range(2))
        a.fill_(3.0)
        assert torch.equal(b, torch.full_like(b, 3.0))
        assert a.data_ptr() == b.data_ptr()

    def test_ranges_never_share_a_byte(self, pool: Pool) -> None:
        """Sixteen ranges, each with a pattern of its own."""
        taken = [_take(pool, 100 + number) for number in range(16)]
        for number, allocation in enumerate(taken):
            pool.tensor(allocation, torch.uint8, (100 + number,)).fill_(number)
        for number, allocation in enumerate(taken):
            assert bool((pool.tensor(allocation, torch.uint8, (100 + number,)) == number).all())

    def test_a_view_larger_than_its_range_is_refused(self, pool: Pool) -> None:
        """A wrong length must not reach the neighbour."""
        allocation = _take(pool, self.alignment_bytes)
        pool.tensor(allocation, torch.float32, (self.alignment_bytes // 4,))
        with pytest.raises(ValueError, match="bytes"):
            pool.tensor(allocation, torch.float32, (allocation.num_bytes // 4 + 1,))

    def test_shrinking_keeps_the_bytes_in_front_and_gives_the_rest_back(self, pool: Pool) -> None:
        """Same generation: readers of the front need not notice."""
        allocation = _take(pool, self.capacity)
        view = pool.tensor(allocation, torch.uint8, (self.capacity,))
        view.copy_(torch.arange(self.capacity) % 251)
        front_bytes = 8 * self.alignment_bytes
        kept = pool.shrink(allocation, front_bytes)
        assert (kept.num_bytes, kept.generation) == (front_bytes, allocation.generation)
        assert pool.is_live(kept)
        assert pool.used_bytes == front_bytes
        rest_bytes = self.capacity - front_bytes
        pool.tensor(_take(pool, rest_bytes), torch.uint8, (rest_bytes,)).zero_()
        front = pool.tensor(kept, torch.uint8, (front_bytes,)).cpu()
        assert torch.equal(front, (torch.arange(front_bytes) % 251).to(torch.uint8))
        assert pool.check() == []

    def test_a_freed_range_is_not_live_even_when_its_place_is_taken_again(self, pool: Pool) -> None:
        """Generations are never reused: that is what fences a reader that was paused beyond its lease."""
        old = _take(pool, self.capacity)
        pool.free(old)
        assert not pool.is_live(old)
        new = _take(pool, self.capacity)
        assert new.offset == old.offset
        assert pool.is_live(new)
        assert not pool.is_live(old)

    def test_freeing_what_is_not_live_is_an_error_and_frees_nothing(self, pool: Pool) -> None:
        """Twice, or with made-up numbers."""
        size = 2 * self.alignment_bytes
        live, gone = _take(pool, size), _take(pool, size)
        pool.free(gone)
        for wrong in (
            gone,
            replace(live, generation=live.generation + 999),
            replace(live, offset=self.alignment_bytes),
        ):
            with pytest.raises(ValueError, match="live"):
                pool.free(wrong)
        assert pool.used_bytes == size
        assert pool.is_live(live)

    def test_a_closed_pool_gives_nothing_and_lets_the_last_request_finish(self, pool: Pool) -> None:
        """Close is idempotent; a view that was handed out stays readable, and its range can still be given back."""
        allocation = _take(pool, 256)
        view = pool.tensor(allocation, torch.uint8, (256,))
        view.fill_(7)
        pool.close()
        pool.close()
        assert (pool.capacity_bytes, pool.used_bytes) == (0, 0)
        assert pool.reserve(1) is None
        assert bool((view == 7).all())
        pool.free(allocation)
        assert not pool.is_live(allocation)


def _take(pool: Pool, num_bytes: int) -> Allocation:
    allocation = pool.reserve(num_bytes)
    assert allocation is not None
    return allocation
