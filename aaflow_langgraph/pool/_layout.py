"""What a shared pool's memory looks like from its first byte, and how a generation is read and written. No processes here.

    byte 0              4096                        header_bytes                     header_bytes + capacity_bytes
    | magic, numbers    | one 8-byte slot a granule | granule 0 | granule 1 | ...    |

A published allocation has its generation in the slots of its first and its last granule, every other slot is 0. So a
reader that is told (offset, size, generation) by somebody else sees in two loads whether exactly this range is still that.
Slots are cleared before a range can be taken again, and readers look at them after they read the bytes (a seqlock with
generations that never return).
"""

from __future__ import annotations

import struct
import threading
from dataclasses import dataclass

from aaflow_langgraph.pool.arena import Allocation

GRANULE_BYTES = 4096
"""Allocations of a shared pool begin and end at multiples of this: one page, one slot of the header."""

_FRONT_BYTES = 4096
_FRONT = struct.Struct("<8sQQQQ16s")  # magic, version, header_bytes, capacity_bytes, granule, owner
_MAGIC = b"AAFLOWKV"
_VERSION = 1
_MAX_GENERATION = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class Layout:
    """Sizes that follow from a capacity (a multiple of ``GRANULE_BYTES``) and the name of its owner."""

    owner: str
    capacity_bytes: int

    @property
    def header_bytes(self) -> int:
        """Bytes in front of the first granule."""
        slots = 8 * (self.capacity_bytes // GRANULE_BYTES)
        return _FRONT_BYTES + -(-slots // GRANULE_BYTES) * GRANULE_BYTES

    @property
    def total_bytes(self) -> int:
        """Header and capacity."""
        return self.header_bytes + self.capacity_bytes

    def front(self) -> bytes:
        """What the memory begins with."""
        return _FRONT.pack(
            _MAGIC, _VERSION, self.header_bytes, self.capacity_bytes, GRANULE_BYTES, bytes.fromhex(self.owner)
        )


class Slots:
    """The generations of a pool's granules, over its mapping (writable for the owner, read-only for everybody else)."""

    def __init__(self, mapping: memoryview, layout: Layout) -> None:
        self._capacity_bytes = layout.capacity_bytes
        end = _FRONT_BYTES + 8 * (layout.capacity_bytes // GRANULE_BYTES)
        self._slots = mapping[_FRONT_BYTES:end].cast("Q")  # every access is one aligned 8-byte load or store

    def publish(self, allocation: Allocation) -> None:
        """Let readers find the generation. The bytes are complete."""
        _fence()
        first, last = _ends(allocation)
        self._slots[last] = allocation.generation
        self._slots[first] = allocation.generation

    def clear(self, allocation: Allocation) -> None:
        """Let nobody find it any more. The bytes are still as they were. No effect on what is not published."""
        first, last = _ends(allocation)
        if self._slots[first] == allocation.generation:
            self._slots[first] = 0
            self._slots[last] = 0
        _fence()

    def shrink(self, allocation: Allocation, kept: Allocation) -> None:
        """Go on under a smaller range; at no moment is it not published. No effect on what is not published."""
        first, last = _ends(allocation)
        _, new_last = _ends(kept)
        if self._slots[first] == allocation.generation and new_last != last:
            self._slots[new_last] = allocation.generation
            if last != first:
                self._slots[last] = 0
        _fence()

    def holds(self, allocation: Allocation) -> bool:
        """Is exactly this range published under this generation? False for numbers that cannot be."""
        if not fits(allocation, self._capacity_bytes) or not 0 < allocation.generation <= _MAX_GENERATION:
            return False
        _fence()
        first, last = _ends(allocation)
        return self._slots[first] == allocation.generation and self._slots[last] == allocation.generation

    def taken(self) -> dict[int, int]:
        """Generation by granule, of every slot that is not 0."""
        return {granule: generation for granule, generation in enumerate(self._slots) if generation}


def expected_slots(allocation: Allocation) -> dict[int, int]:
    """What ``Slots.taken`` shows for one published allocation."""
    return dict.fromkeys(_ends(allocation), allocation.generation)


def fits(allocation: Allocation, capacity_bytes: int) -> bool:
    """Are these three numbers a range inside of the pool? They may come from anywhere."""
    numbers = (allocation.offset, allocation.num_bytes, allocation.generation)
    if any(type(number) is not int for number in numbers):
        return False
    offset, num_bytes, _ = numbers
    if offset < 0 or num_bytes <= 0 or offset % GRANULE_BYTES or num_bytes % GRANULE_BYTES:
        return False
    return offset + num_bytes <= capacity_bytes


def _ends(allocation: Allocation) -> tuple[int, int]:
    return allocation.offset // GRANULE_BYTES, (allocation.offset + allocation.num_bytes) // GRANULE_BYTES - 1


def _fence() -> None:
    """Order memory accesses before this line before those behind it, on CPUs that would not (x86 does by itself).

    Python has no fence. A lock's release orders what is before it, its acquisition what is behind it: released once and
    taken once again, both.
    """
    lock = threading.Lock()  # its own: a shared one could be held by another thread when the process forks
    for _ in range(2):
        with lock:
            pass
