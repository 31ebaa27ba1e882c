"""Which byte ranges of a fixed region are taken. Pure bookkeeping: no tensors, no I/O, not thread-safe by itself.

    offset   0        64                 256          capacity
             | taken  |   free           |   taken    |

First fit over a sorted free list, neighbours joined on free. Every allocation carries a generation that is never reused,
so a reader can tell that bytes under its lease were given to somebody else.
"""

from __future__ import annotations

import itertools
from bisect import insort
from dataclasses import dataclass

ALIGNMENT_BYTES = 64


@dataclass(frozen=True, slots=True)
class Allocation:
    """``[offset, offset + num_bytes)`` of a pool, for as long as ``generation`` is live."""

    offset: int
    num_bytes: int
    generation: int


class Arena:
    """Allocator over ``[0, capacity_bytes)``; offsets and sizes are multiples of ``alignment_bytes``."""

    def __init__(self, capacity_bytes: int, alignment_bytes: int = ALIGNMENT_BYTES) -> None:
        self.alignment_bytes = alignment_bytes
        self.capacity_bytes = capacity_bytes // alignment_bytes * alignment_bytes
        self.used_bytes = 0
        self.peak_bytes = 0
        self._free: list[tuple[int, int]] = [(0, self.capacity_bytes)] if self.capacity_bytes else []
        self._taken: dict[int, Allocation] = {}
        self._generations = itertools.count(1)

    @property
    def largest_free_bytes(self) -> int:
        """The most that one ``reserve`` could get now."""
        return max((size for _, size in self._free), default=0)

    def reserve(self, num_bytes: int) -> Allocation | None:
        """The first free range of ``num_bytes`` (rounded up to the alignment), or None."""
        size = self._aligned(num_bytes)
        if size < 1:
            raise ValueError(
                f"cannot reserve {num_bytes} bytes: an empty range would share its offset with the next one"
            )
        for number, (offset, free) in enumerate(self._free):
            if free >= size:
                if free == size:
                    del self._free[number]
                else:
                    self._free[number] = (offset + size, free - size)
                allocation = Allocation(offset, size, next(self._generations))
                self._taken[offset] = allocation
                self.used_bytes += size
                self.peak_bytes = max(self.peak_bytes, self.used_bytes)
                return allocation
        return None

    def is_live(self, allocation: Allocation) -> bool:
        """Does the allocation still own its bytes?"""
        live = self._taken.get(allocation.offset)
        return live is not None and live.generation == allocation.generation

    def shrink(self, allocation: Allocation, num_bytes: int) -> Allocation:
        """Keep the first ``num_bytes``; same generation."""
        self.require(allocation)
        size = self._aligned(num_bytes)
        if not 0 < size <= allocation.num_bytes:
            raise ValueError(f"cannot shrink {allocation.num_bytes} bytes to {num_bytes}")
        kept = Allocation(allocation.offset, size, allocation.generation)
        self._taken[allocation.offset] = kept
        self._give_back(allocation.offset + size, allocation.num_bytes - size)
        return kept

    def free(self, allocation: Allocation) -> None:
        """Give the range back. Freeing twice is a bug of ours and raises."""
        self.require(allocation)
        del self._taken[allocation.offset]
        self._give_back(allocation.offset, allocation.num_bytes)

    def check(self) -> list[str]:
        """Violations of I1 and I10: ranges overlap, leave gaps, or do not add up."""
        ranges = sorted(
            [(o, s, "free") for o, s in self._free] + [(a.offset, a.num_bytes, "used") for a in self.live()]
        )
        found = []
        at, was_free = 0, False
        for offset, size, kind in ranges:
            if offset != at:
                found.append(f"{'gap' if offset > at else 'overlap'} at byte {min(offset, at)} before a {kind} range")
            if kind == "free" and was_free:
                found.append(f"two free ranges meet at byte {offset} and were not joined")
            at, was_free = offset + size, kind == "free"
        if at != self.capacity_bytes:
            found.append(f"ranges end at byte {at}, capacity is {self.capacity_bytes}")
        used = sum(a.num_bytes for a in self.live())
        if used != self.used_bytes or used + sum(s for _, s in self._free) != self.capacity_bytes:
            found.append(f"used {used}, counted {self.used_bytes}, capacity {self.capacity_bytes} do not add up")
        return found

    def live(self) -> list[Allocation]:
        """Every live allocation."""
        return list(self._taken.values())

    def require(self, allocation: Allocation) -> None:
        """Raise ValueError unless exactly this range is live."""
        if self._taken.get(allocation.offset) != allocation:
            raise ValueError(f"{allocation} is not live")

    def _give_back(self, offset: int, size: int) -> None:
        if size == 0:
            return
        self.used_bytes -= size
        insort(self._free, (offset, size))
        at = self._free.index((offset, size))
        if at + 1 < len(self._free) and offset + size == self._free[at + 1][0]:
            self._free[at : at + 2] = [(offset, size + self._free[at + 1][1])]
        if at and sum(self._free[at - 1]) == offset:
            self._free[at - 1 : at + 1] = [(self._free[at - 1][0], self._free[at - 1][1] + self._free[at][1])]

    def _aligned(self, num_bytes: int) -> int:
        return -(-num_bytes // self.alignment_bytes) * self.alignment_bytes
