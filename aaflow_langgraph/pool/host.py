"""The host pool: one pre-touched region of main memory.

Pre-touching costs once what page faults would cost in the middle of a request: writing fresh pages runs at a third to a
quarter of the speed of touched ones.
"""

from __future__ import annotations

import math
import secrets

import torch

from aaflow_langgraph.errors import ConfigError
from aaflow_langgraph.model import Tier
from aaflow_langgraph.pool.arena import ALIGNMENT_BYTES, Allocation, Arena
from aaflow_langgraph.pool.base import PoolClosed


class RegionPool:
    """A pool over one region of bytes, wherever it lies: an arena beside a tensor. See ``Pool`` for the contract.

    Subclasses set ``_bytes``, a uint8 tensor of the arena's capacity.

    Raises:
        ConfigError: ``capacity_bytes`` is below one alignment unit. Way out: fail.
    """

    tier: Tier = "host"

    def __init__(self, capacity_bytes: int, alignment_bytes: int) -> None:
        if type(capacity_bytes) is not int or not alignment_bytes <= capacity_bytes < 1 << 62:
            raise ConfigError(f"pool_bytes must be an int of at least {alignment_bytes}, got {capacity_bytes!r}")
        self._arena = Arena(capacity_bytes, alignment_bytes)
        self.owner = secrets.token_hex(16)
        self._closed = False
        self._bytes = torch.empty(0, dtype=torch.uint8, device="cpu")

    @property
    def capacity_bytes(self) -> int:
        return 0 if self._closed else self._arena.capacity_bytes

    @property
    def used_bytes(self) -> int:
        return 0 if self._closed else self._arena.used_bytes

    @property
    def peak_bytes(self) -> int:
        return self._arena.peak_bytes

    def reserve(self, num_bytes: int) -> Allocation | None:
        return None if self._closed else self._arena.reserve(num_bytes)

    def shrink(self, allocation: Allocation, num_bytes: int) -> Allocation:
        return self._arena.shrink(allocation, num_bytes)

    def free(self, allocation: Allocation) -> None:
        self._arena.free(allocation)

    def publish(self, allocation: Allocation) -> None:
        """Nothing to do: nobody else reads this memory."""

    def is_live(self, allocation: Allocation) -> bool:
        return self._arena.is_live(allocation)

    def tensor(self, allocation: Allocation, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        if self._closed:
            raise PoolClosed("the pool is closed")
        num_bytes = math.prod(shape) * dtype.itemsize
        if num_bytes > allocation.num_bytes:
            raise ValueError(f"{shape} of {dtype} needs {num_bytes} bytes, the allocation has {allocation.num_bytes}")
        return self._bytes[allocation.offset : allocation.offset + num_bytes].view(dtype).view(shape)

    def check(self) -> list[str]:
        return self._arena.check()

    def close(self) -> None:
        # The bookkeeping stays: a request that still runs gives its ranges back into it, its views keep the memory until then.
        self._closed = True
        self._bytes = torch.empty(0, dtype=torch.uint8, device="cpu")


class HostPool(RegionPool):
    """A pool in main memory that only this process reads. See ``Pool`` for the contract.

    Raises:
        ConfigError: ``capacity_bytes`` is below one alignment unit or more than the machine gives. Way out: fail.
    """

    def __init__(self, capacity_bytes: int) -> None:
        super().__init__(capacity_bytes, ALIGNMENT_BYTES)
        try:
            self._bytes = torch.zeros(self._arena.capacity_bytes, dtype=torch.uint8, device="cpu")
            self._bytes.fill_(1)  # zeros() may map one shared page; writing makes every page ours
        except RuntimeError as error:  # torch raises RuntimeError for out of memory
            raise ConfigError(
                f"cannot take {capacity_bytes} bytes of memory for the pool; pass a smaller pool_bytes"
            ) from error
