"""How much a namespace's files may take, and which of them go for it. Knows sizes and a policy; knows no contents."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

from aaflow_langgraph.errors import PoolExhausted
from aaflow_langgraph.evict.base import Candidate, Policy
from aaflow_langgraph.pool._shelf import Shelf

EXTENT, RECIPE = ".safetensors", ".json"

RECIPE_SHARE = 16
"""Recipes take at most one part in this many of the capacity: small, and worth more than the KV that they rebuild."""

_LISTING_LASTS_S = 1.0
_SAFE_SHARE = 0.9
"""Far from full, a listing is good for a second: listing at every write would cost small extents as much as writing them."""


class Room:
    """Bytes of a shelf, and bytes promised to writers of this process."""

    def __init__(
        self, shelf: Shelf, capacity_bytes: int, token_bytes: int, policy: Policy, on_evict: Callable[[str], None]
    ) -> None:
        self.capacity_bytes = capacity_bytes
        self.num_evictions = 0
        self._shelf = shelf
        self._token_bytes = token_bytes
        self._policy = policy
        self.on_evict = on_evict
        self._lock = threading.Lock()
        self._promised_bytes = 0
        self._known_bytes = 0  # used when last listed, and written here since
        self._listed_s = -_LISTING_LASTS_S

    @contextlib.contextmanager
    def of(self, num_bytes: int, suffix: str) -> Iterator[None]:
        """Hold ``num_bytes`` for a file that is written inside of the block, by removing files if need be (I10).

        Raises:
            PoolExhausted: It cannot be had, whatever is removed; nothing was. Way out: retry with a larger pool.
            OSError: A file cannot be removed.
        """
        removed: list[str] = []
        try:
            with self._lock:
                if suffix == RECIPE:
                    self._shrink(suffix, self.capacity_bytes // RECIPE_SHARE, num_bytes, removed)
                if not self._surely_fits(num_bytes):
                    self._shrink(EXTENT, self.capacity_bytes - self._promised_bytes, num_bytes, removed)
                self._promised_bytes += num_bytes
                self._known_bytes += num_bytes
            try:
                yield
            finally:
                with self._lock:
                    self._promised_bytes -= num_bytes
        finally:
            for file in removed:
                if file.endswith(EXTENT):
                    self.num_evictions += 1
                    self.on_evict(file.removesuffix(EXTENT))

    def _surely_fits(self, num_bytes: int) -> bool:
        fresh = time.monotonic() - self._listed_s < _LISTING_LASTS_S
        return fresh and self._known_bytes + num_bytes <= self.capacity_bytes * _SAFE_SHARE

    def _shrink(self, suffix: str, limit_bytes: int, need_bytes: int, removed: list[str]) -> None:
        """Remove files of one kind until ``need_bytes`` fit below the limit. Recipes have a limit of their own."""
        while True:
            listing = self._shelf.listing.files()
            files = [file for file in listing if file.endswith(suffix)]
            evictable_bytes = sum(listing[file].num_bytes for file in files)
            used_bytes = evictable_bytes if suffix == RECIPE else sum(facts.num_bytes for facts in listing.values())
            if suffix == EXTENT:
                self._known_bytes, self._listed_s = used_bytes + self._promised_bytes, time.monotonic()
            excess_bytes = used_bytes + need_bytes - limit_bytes
            if excess_bytes <= 0:
                return
            candidates = [
                Candidate(
                    number,
                    listing[file].num_bytes,
                    self._num_tokens(listing[file].num_bytes),
                    listing[file].last_used_ns,
                )
                for number, file in enumerate(files)
            ]
            victims = self._policy(candidates, excess_bytes) if excess_bytes <= evictable_bytes else []
            if not victims:
                raise PoolExhausted(
                    f"{need_bytes} bytes asked on disk; of {self.capacity_bytes} capacity {limit_bytes} are for this, {used_bytes} "
                    f"are used, {evictable_bytes} of them can be evicted: pass a larger disk_bytes"
                )
            for victim in victims:
                file = files[victim.extent_id]
                # What was used since it was listed is not what the policy took it for: look again, choose again.
                if self._shelf.facts(file) == listing[file] and self._shelf.remove(file):
                    removed.append(file)

    def _num_tokens(self, num_bytes: int) -> int:
        """Close enough for a policy: the header's page is neglected."""
        return num_bytes // (self._token_bytes + 4)
