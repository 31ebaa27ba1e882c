"""What the broker asks of a pool: bytes by tier. Tensors yes; no index, no policy, no Redis.

A pool has a fixed capacity and never exceeds it (I1, I10). It does not decide what to evict: ``reserve`` answers None
when nothing fits and the broker makes room. Calls are made under the broker's lock; readers of tensors need none.
"""

from __future__ import annotations

from typing import Protocol

import torch

from aaflow_langgraph.model import Tier
from aaflow_langgraph.pool.arena import Allocation


class PoolClosed(ValueError):
    """A pool was used after it was closed. Internal: to a request it is the end of its broker."""


class Pool(Protocol):
    """Main memory that holds extents.

    ``tensor`` is a view, valid while the allocation is live; after ``free`` its bytes may be anyone's, which
    ``is_live`` tells (generations are never reused).
    """

    tier: Tier
    owner: str
    """Name of the pool in an index, never used by another pool."""

    @property
    def capacity_bytes(self) -> int:
        """Bytes the pool may hold."""

    @property
    def used_bytes(self) -> int:
        """Bytes taken now; at most ``capacity_bytes`` at every step."""

    @property
    def peak_bytes(self) -> int:
        """The most ever taken."""

    def reserve(self, num_bytes: int) -> Allocation | None:
        """A contiguous range of at least one byte, or None when no free range is large enough. Mutates only on success."""

    def shrink(self, allocation: Allocation, num_bytes: int) -> Allocation:
        """Keep the first ``num_bytes`` of a live allocation and give the rest back."""

    def free(self, allocation: Allocation) -> None:
        """Give a live allocation back."""

    def publish(self, allocation: Allocation) -> None:
        """The allocation's bytes are complete: from now on readers in other processes, where there can be any, may check
        that they are still its own.
        """

    def is_live(self, allocation: Allocation) -> bool:
        """Does the allocation still own its bytes? Safe without the lock."""

    def tensor(self, allocation: Allocation, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        """The allocation's first bytes as a contiguous tensor. Zero copy."""

    def check(self) -> list[str]:
        """Violated invariants, in words; empty when all is well."""

    def close(self) -> None:
        """Give the memory back. Idempotent. Afterwards ``reserve`` answers None, capacity and use are 0, ``free`` still works
        and views that were handed out before stay readable as long as they live.
        """
