"""The private, growing end of one request, in the pool while it has room, or on the device that the model computes on.
Becomes an extent when it is sealed.
"""

from __future__ import annotations

import torch

from aaflow_langgraph.errors import CapacityError
from aaflow_langgraph.index.base import ExtentRecord, Place
from aaflow_langgraph.model import Receipt
from aaflow_langgraph.pool.arena import Allocation
from aaflow_langgraph.pool.device import DeviceTier
from aaflow_langgraph.store import ExtentStore, TokenSequence, even


class PoolTail:
    """A tail in the pool, or on the heap when the pool cannot give room: cache pressure never kills a request.

    Heap bytes are counted as overflow and the tail is not published unless room appears when it is sealed. On an accelerator
    a tail is in none of the two: it takes its range of the pool when it is sealed, and what is sealed is copied there.

    Raises:
        CapacityError: The accelerator is full. Way out: retry.
    """

    def __init__(self, store: ExtentStore, start: int, capacity: int) -> None:
        self.start = start
        self.length = 0
        self._store = store
        self._allocation: Allocation | None = None
        self._heap_bytes = 0
        self.kv = self._take(capacity)

    def ensure(self, num_tokens: int) -> None:
        """See ``Tail.ensure``. Grows by half, so that long generations copy little."""
        if num_tokens <= self.kv.shape[3]:
            return
        old, old_allocation, old_heap = self.kv, self._allocation, self._heap_bytes
        self._allocation, self._heap_bytes = None, 0
        self.kv = self._take(max(num_tokens, self.kv.shape[3] * 3 // 2))
        self.kv[..., : self.length, :] = old[..., : self.length, :]
        self._give_back(old_allocation, old_heap)

    def seal(
        self, sequence: TokenSequence, skip: int, canonical_stop: int, parent: int | None
    ) -> tuple[ExtentRecord, Receipt] | None:
        """Publish the tail without its first ``skip`` tokens as one extent; None when the pool has no room for it or the
        index does not answer.

        The tail takes no more tokens either way; its ``kv`` stays readable only when None is returned, until ``drop``.
        """
        store = self._store
        start, stop = self.start + skip, self.start + self.length
        if skip == 0 and self._allocation is not None:
            if even(self.length) < self.kv.shape[3]:
                self._compact()
            self._allocation = store.shrink(self._allocation, self.length)
            self.kv = store.tensor(self._allocation, self.length)
            sealed = store.publish(sequence, start, stop, self._allocation, canonical_stop, parent)
            if sealed is not None:
                self._allocation = None
            return sealed
        # Bytes in front that belong to other extents, or a tail elsewhere: copy what is new into its own range.
        tier, new = store.device_tier, self.kv[..., skip : self.length, :]
        if tier is not None:
            try:
                new = self._whole(tier, skip)
            except CapacityError:
                return None
        allocation = store.reserve(stop - start)
        if allocation is None:
            return None
        store.tensor(allocation, new.shape[3]).copy_(new)
        sealed = store.publish(sequence, start, stop, allocation, canonical_stop, parent)
        if sealed is None:
            store.free(allocation)
            return None
        if tier is not None and sealed[0].place == Place(store.pool.owner, allocation):
            tier.keep(sealed[0].place, new)  # the next reader needs no copy
        self.drop()
        return sealed

    def drop(self) -> None:
        """Give the memory back unpublished. Idempotent."""
        self._give_back(self._allocation, self._heap_bytes)
        self._allocation, self._heap_bytes = None, 0

    def _compact(self) -> None:
        """Close the gap behind every head: ``[L, 2, H, capacity, D]`` becomes ``[L, 2, H, length, D]`` in place.

        Layer by layer through a copy: a layer's target ends before the next layer's source begins.
        """
        flat, rows = self.kv.view(-1), even(self.length)
        size = self.kv[0].numel() // self.kv.shape[3] * rows
        for layer in range(self.kv.shape[0]):
            flat[layer * size : (layer + 1) * size] = self.kv[layer, :, :, :rows].reshape(-1).clone()

    def _whole(self, tier: DeviceTier, skip: int) -> torch.Tensor:
        """All but the first ``skip`` tokens of a tail on a device, as an extent's rows lie in the pool: moved in one go."""
        num_new = self.length - skip
        rows = self.kv
        if skip or rows.shape[3] != even(num_new):
            rows = tier.empty(self._store.layout.shape(even(num_new)), self._store.dtype)
            rows[..., :num_new, :] = self.kv[..., skip : self.length, :]
        rows[..., num_new:, :] = 0
        return rows

    @torch.inference_mode(False)
    def _take(self, num_tokens: int) -> torch.Tensor:
        """Memory for tokens. Also taken inside a forward, in inference mode, and written to outside of it afterwards."""
        store = self._store
        num_tokens = even(num_tokens)
        shape = store.layout.shape(num_tokens)
        self._allocation = store.reserve(num_tokens) if store.device_tier is None else None
        if store.device_tier is not None:
            kv = store.device_tier.empty(shape, store.dtype)
        elif self._allocation is not None:
            kv = store.pool.tensor(self._allocation, store.dtype, shape)
        else:
            self._heap_bytes = store.layout.num_bytes(num_tokens)
            store.note_overflow(self._heap_bytes)
            kv = torch.empty(shape, dtype=store.dtype, device="cpu")
        kv[..., -1:, :] = 0  # may be read, with no weight, as the row that rounds an odd length up: must not be NaN
        return kv

    def _give_back(self, allocation: Allocation | None, heap_bytes: int) -> None:
        if allocation is not None:
            self._store.free(allocation)
        if heap_bytes:
            self._store.note_overflow(-heap_bytes)
