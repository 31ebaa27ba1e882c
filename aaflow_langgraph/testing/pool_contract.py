"""The contract of ``Pool`` as tests. Subclass, say how a pool is made, and let pytest collect the subclass.

Example:
    class TestMyPool(PoolContract):
        def make_pool(self, capacity_bytes: int) -> Pool:
            return MyPool(capacity_bytes)
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import replace

import pytest
import torch

from aaflow_langgraph.pool.arena import Allocation
from aaflow_langgraph.pool.base import Pool

CAPACITY = 4096


class PoolContract(ABC):
    """What every pool promises: fixed capacity, disjoint ranges, views without copies, generations that never repeat."""

    @abstractmethod
    def make_pool(self, capacity_bytes: int) -> Pool:
        """A fresh, empty pool of ``capacity_bytes``."""

    @pytest.fixture
    def pool(self) -> Pool:
        """A pool of 4096 bytes."""
        return self.make_pool(CAPACITY)

    def test_an_empty_pool_holds_nothing(self, pool: Pool) -> None:
        """Capacity is what was asked for."""
        assert (pool.capacity_bytes, pool.used_bytes, pool.peak_bytes) == (CAPACITY, 0, 0)
        assert pool.tier in ("device", "host")
        assert pool.check() == []

    def test_every_byte_can_be_taken_and_none_beyond(self, pool: Pool) -> None:
        """I10: bytes in use never exceed the capacity."""
        taken = [_take(pool, CAPACITY // 4) for _ in range(4)]
        assert pool.used_bytes == pool.peak_bytes == CAPACITY
        assert pool.reserve(1) is None
        assert pool.used_bytes == CAPACITY
        for allocation in taken:
            pool.free(allocation)
        assert (pool.used_bytes, pool.peak_bytes) == (0, CAPACITY)
        assert pool.check() == []

    def test_what_can_never_fit_changes_nothing(self, pool: Pool) -> None:
        """Mutates only on success."""
        assert pool.reserve(CAPACITY + 1) is None
        assert (pool.used_bytes, pool.peak_bytes) == (0, 0)
        assert pool.check() == []

    def test_free_and_used_always_add_up(self, pool: Pool) -> None:
        """I1, over holes of every size."""
        taken = [_take(pool, 64 * size) for size in (1, 5, 2, 7, 3)]
        for number in (1, 3, 0, 4, 2):
            pool.free(taken[number])
            assert pool.check() == []
        assert _take(pool, CAPACITY).num_bytes == CAPACITY

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
        allocation = _take(pool, 64)
        pool.tensor(allocation, torch.float32, (16,))
        with pytest.raises(ValueError, match="bytes"):
            pool.tensor(allocation, torch.float32, (allocation.num_bytes // 4 + 1,))

    def test_shrinking_keeps_the_bytes_in_front_and_gives_the_rest_back(self, pool: Pool) -> None:
        """Same generation: readers of the front need not notice."""
        allocation = _take(pool, CAPACITY)
        view = pool.tensor(allocation, torch.uint8, (CAPACITY,))
        view.copy_(torch.arange(CAPACITY) % 251)
        kept = pool.shrink(allocation, 512)
        assert (kept.num_bytes, kept.generation) == (512, allocation.generation)
        assert pool.is_live(kept)
        assert pool.used_bytes == 512
        pool.tensor(_take(pool, CAPACITY - 512), torch.uint8, (CAPACITY - 512,)).zero_()
        front = pool.tensor(kept, torch.uint8, (512,)).cpu()
        assert torch.equal(front, (torch.arange(512) % 251).to(torch.uint8))
        assert pool.check() == []

    def test_a_freed_range_is_not_live_even_when_its_place_is_taken_again(self, pool: Pool) -> None:
        """Generations are never reused: that is what fences a reader that was paused beyond its lease."""
        old = _take(pool, CAPACITY)
        pool.free(old)
        assert not pool.is_live(old)
        new = _take(pool, CAPACITY)
        assert new.offset == old.offset
        assert pool.is_live(new)
        assert not pool.is_live(old)

    def test_freeing_what_is_not_live_is_an_error_and_frees_nothing(self, pool: Pool) -> None:
        """Twice, or with made-up numbers."""
        live, gone = _take(pool, 128), _take(pool, 128)
        pool.free(gone)
        for wrong in (gone, replace(live, generation=live.generation + 999), replace(live, offset=64)):
            with pytest.raises(ValueError, match="live"):
                pool.free(wrong)
        assert pool.used_bytes == 128
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
