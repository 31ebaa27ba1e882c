"""The private, growing end of one request, in the pool while it has room. Becomes an extent when it is sealed."""

from __future__ import annotations

import torch

from aaflow_langgraph.index.base import ExtentRecord
from aaflow_langgraph.model import Receipt
from aaflow_langgraph.pool.arena import Allocation
from aaflow_langgraph.store import ExtentStore, TokenSequence, even


class PoolTail:
    """A tail in the pool, or on the heap when the pool cannot give room: cache pressure never kills a request.

    Heap bytes are counted as overflow and the tail is not published unless room appears when it is sealed.
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
        # Bytes in front that belong to other extents, or a tail on the heap: copy what is new into its own range.
        allocation = store.reserve(stop - start)
        if allocation is None:
            return None
        store.tensor(allocation, stop - start).copy_(self.kv[..., skip : self.length, :])
        sealed = store.publish(sequence, start, stop, allocation, canonical_stop, parent)
        if sealed is None:
            store.free(allocation)
        else:
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

    @torch.inference_mode(False)
    def _take(self, num_tokens: int) -> torch.Tensor:
        """Memory for tokens. Also taken inside a forward, in inference mode, and written to outside of it afterwards."""
        store = self._store
        num_tokens = even(num_tokens)
        shape = store.layout.shape(num_tokens)
        self._allocation = store.reserve(num_tokens)
        if self._allocation is not None:
            kv = store.pool.tensor(self._allocation, store.dtype, shape)
        else:
            self._heap_bytes = store.layout.num_bytes(num_tokens)
            store.note_overflow(self._heap_bytes)
            kv = torch.empty(shape, dtype=store.dtype, device=store.device)
        kv[..., -1:, :] = 0  # may be read, with no weight, as the row that rounds an odd length up: must not be NaN
        return kv

    def _give_back(self, allocation: Allocation | None, heap_bytes: int) -> None:
        if allocation is not None:
            self._store.free(allocation)
        if heap_bytes:
            self._store.note_overflow(-heap_bytes)
