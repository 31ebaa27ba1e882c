"""The device tier: copies of extents in the memory of an accelerator, so that KV is read where the model computes.

    pool in main memory (the truth: published, leased, shared, spilled)
            | copied at the first read          ^ copied when a request ends
            v                                   |
    device: copies, the least recently used first out; and the tails of running requests

Knows tensors and the names of their bytes; knows no index, no lease and no pool. What is dropped here costs a copy later.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable

import torch

from aaflow_langgraph.errors import CapacityError, ConfigError


class DeviceTier:
    """At most ``capacity_bytes`` of copies on one device. Thread-safe.

    A key names bytes for good: other bytes never get it. A copy that was dropped stays as long as somebody holds its tensor,
    and is not counted any more.

    Raises:
        ConfigError: ``capacity_bytes`` is no size. Way out: fail.
    """

    def __init__(self, device: torch.device, capacity_bytes: int) -> None:
        if type(capacity_bytes) is not int or capacity_bytes < 0:
            raise ConfigError(f"device_bytes must be an int of at least 0, got {capacity_bytes!r}")
        self.device = device
        self.capacity_bytes = capacity_bytes
        self.used_bytes = 0
        self.num_copies = 0
        self._copies: OrderedDict[Hashable, torch.Tensor] = OrderedDict()
        self._lock = threading.Lock()
        self._copying = threading.Lock()

    @classmethod
    def of(cls, device: torch.device, capacity_bytes: int) -> DeviceTier | None:
        """The tier of the device that a model computes on; None for the CPU, where KV is read in the pool itself."""
        tier = cls(device, capacity_bytes)
        return None if device.type == "cpu" else tier

    def rows(self, key: Hashable, host: Callable[[], torch.Tensor], is_live: Callable[[], bool]) -> torch.Tensor:
        """The copy of the bytes called ``key``; made from ``host()`` where there is none.

        One that ``is_live()`` does not vouch for afterwards is not kept: its source may have become somebody else's while it
        was copied. The caller, who verifies what it read after it read it, finds out as it would in the pool itself.

        Raises:
            CapacityError: The device is full, this cache left aside. Way out: retry.
        """
        copy = self.find(key)
        if copy is not None:
            return copy
        with self._copying:  # one at a time: they share the bus, and readers who want the same bytes share the copy
            copy = self.find(key)
            if copy is not None:
                return copy
            rows = host()
            with self._lock:
                self._make_room(rows.nbytes)
            copy = self.empty(tuple(rows.shape), rows.dtype)
            copy.copy_(rows)  # blocks until it is done, so what is asked next is asked after the reading
            self.num_copies += 1
            if is_live():
                self.keep(key, copy)
            return copy

    def find(self, key: Hashable) -> torch.Tensor | None:
        """The copy that is here, as the most recently used; None where there is none."""
        with self._lock:
            copy = self._copies.get(key)
            if copy is not None:
                self._copies.move_to_end(key)
            return copy

    def keep(self, key: Hashable, copy: torch.Tensor) -> None:
        """Keep a whole tensor that nobody writes to any more. One that is larger than the tier is not kept."""
        with self._lock:
            if key in self._copies or copy.nbytes > self.capacity_bytes:
                return
            self._make_room(copy.nbytes)
            self._copies[key] = copy
            self.used_bytes += copy.nbytes

    def drop(self, key: Hashable) -> int:
        """Forget a copy; bytes freed."""
        with self._lock:
            copy = self._copies.pop(key, None)
            num_bytes = 0 if copy is None else copy.nbytes
            self.used_bytes -= num_bytes
            return num_bytes

    @torch.inference_mode(False)
    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Memory on the device, for a copy or a tail; all copies go before it is refused. Also asked for inside a forward.

        Raises:
            CapacityError: There is none even so. Way out: retry.
        """
        try:
            return self._allocate(shape, dtype)
        except torch.OutOfMemoryError:
            freed = self._clear()
        try:
            return self._allocate(shape, dtype)
        except torch.OutOfMemoryError as error:
            raise CapacityError(
                f"no room on {self.device} for KV of {torch.Size(shape).numel() * dtype.itemsize:,} bytes, though {freed:,} "
                "bytes of copies were dropped: run fewer or shorter requests at once"
            ) from error

    def check(self) -> list[str]:
        """Violations of I1 and I10, in words."""
        with self._lock:
            held = sum(copy.nbytes for copy in self._copies.values())
            if held == self.used_bytes <= self.capacity_bytes:
                return []
            return [
                f"{held} bytes of copies on {self.device}, counted {self.used_bytes}, capacity {self.capacity_bytes}"
            ]

    def close(self) -> None:
        """Forget all copies and keep no more. Idempotent; memory can still be taken."""
        with self._lock:
            self.capacity_bytes = 0
        self._clear()

    def _allocate(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=self.device)

    def _clear(self) -> int:
        with self._lock:
            freed, self.used_bytes = self.used_bytes, 0
            self._copies.clear()
            return freed

    def _make_room(self, num_bytes: int) -> None:
        """Drop the least recently used until so many bytes fit; nothing where they never do. Under the lock."""
        if num_bytes > self.capacity_bytes:
            return
        while self.used_bytes + num_bytes > self.capacity_bytes:
            _, oldest = self._copies.popitem(last=False)
            self.used_bytes -= oldest.nbytes
