"""What a store does besides serving requests: heartbeats, renewals, sweeps, write-behind, merging, watermarks, adoption.

One daemon thread a broker, only where there is something to keep: a shared index, a disk, or a chain of extents that grew
long. It never raises: what fails is logged and tried again at the next tick.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

from aaflow_langgraph.compaction import Compactor
from aaflow_langgraph.errors import AAFlowError, Fenced, IndexUnavailable
from aaflow_langgraph.evict.base import Policy
from aaflow_langgraph.index.base import Match
from aaflow_langgraph.store import OWNER_LEASE_S, ExtentStore, TokenSequence

TICK_S = 0.5
"""How often the thread looks around: the longest that an extent waits for its copy on disk, or a dead owner to be noticed."""

RECONCILED_EVERY = 10
"""After so many heartbeats (half a minute) the pool is compared with what the index says of it."""

HIGH_WATER, LOW_WATER = 0.95, 0.85
"""Above the first share of the pool, extents that are on disk leave it until the second is reached, so that a request seldom
waits for room."""

_log = logging.getLogger("aaflow_langgraph")


class Keeper:
    """Call ``start`` once and ``stop`` at the end; tests call ``tick`` by hand instead."""

    def __init__(
        self,
        store: ExtentStore,
        policy: Policy,
        *,
        chores: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.compactor = Compactor(store)
        store.when_long = self._note_long
        self._store = store
        self._policy = policy
        self._chores = chores
        self._clock = clock
        self._starting = threading.Lock()
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._beaten_s = clock()
        self._num_beats = 0
        self._lock = threading.Lock()

    def start(self) -> None:
        """Begin ticking in the background. Idempotent; no effect after ``stop``."""
        with self._starting:
            if self._thread is not None or self._stopping.is_set():
                return
            self._thread = threading.Thread(target=self._run, name="aaflow-keeper", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """End the thread, after the tick that runs. Idempotent."""
        with self._starting:
            self._stopping.set()
            thread, self._thread = self._thread, None
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def tick(self) -> None:
        """Everything that is due now."""
        with self._lock:
            store = self._store
            if store.index.shared:
                if self._clock() - self._beaten_s > OWNER_LEASE_S / 5:
                    self._beaten_s = self._clock()
                    store.beat()
                    store.sweep()
                    self._num_beats += 1
                    if store.knows_less_than_disk or self._num_beats % RECONCILED_EVERY == 0:
                        self._reconcile()
                store.leases.renew_old()
                self._adopt()
            self.write_behind()
            self.compactor.tick()
            self._lower()
            self._chores()

    def write_behind(self) -> None:
        """Give every published extent its copy on disk."""
        store = self._store
        if store.disk is None or not store.writes_behind:
            return
        for extent_id in list(store.unsaved):
            if self._stopping.is_set():
                return
            store.spill(extent_id)

    def _note_long(self, sequence: TokenSequence, borders: Sequence[int], match: Match) -> None:
        """A lookup found a long chain: merge it soon."""
        self.compactor.note(sequence, borders, match)
        self.start()

    def _reconcile(self) -> None:
        with suppress(Fenced, IndexUnavailable):  # the next heartbeat joins again and announces everything
            self._store.reconcile()

    def _adopt(self) -> None:
        """Take over what dead owners left, and let their memory go once nobody here reads it."""
        store = self._store
        for peer in store.peers.attached() if store.peers is not None else ():
            if peer.is_alive():
                continue
            if store.index.records(peer.owner):
                store.adopt(peer)
            elif store.peers is not None:
                store.leases.unless_read(peer.owner, partial(store.peers.detach, peer.owner))

    def _lower(self) -> None:
        """Make room before somebody asks for it, without losing anything."""
        store = self._store
        capacity = store.pool.capacity_bytes
        if store.disk is None or store.pool.used_bytes <= HIGH_WATER * capacity:
            return
        need = store.pool.used_bytes - int(LOW_WATER * capacity)
        saved = [
            candidate
            for candidate in store.index.candidates(store.pool.owner)
            if candidate.extent_id in store.mine and store.is_saved(store.mine[candidate.extent_id])
        ]
        for victim in self._policy(saved, need):
            store.drop(victim.extent_id)

    def _run(self) -> None:
        while not self._stopping.wait(TICK_S):
            try:
                self.tick()
            except (AAFlowError, OSError) as error:
                _log.warning("background work failed and is tried again: %s", error)
