"""The leases that running requests of this process hold: renewed while in use, whatever their forward takes.

Knows an index and a clock; knows no bytes. Receipts that a user took with ``KVBroker.lease`` are not here: they end by
themselves.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from aaflow_langgraph.errors import LeaseExpired
from aaflow_langgraph.index.base import ExtentRecord, Index
from aaflow_langgraph.model import Receipt


@dataclass(slots=True)
class _Held:
    """A receipt, when it was renewed last (this process' clock), and who owns what is read under it."""

    receipt: Receipt
    renewed_s: float
    owners: frozenset[str]


class Leases:
    """Thread-safe. ``renew_old`` is called by the store's keeper; without one, ``check`` renews by itself."""

    def __init__(self, index: Index, lease_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.lease_s = lease_s
        self._index = index
        self._clock = clock
        self._lock = threading.Lock()
        self._held: dict[str, _Held] = {}

    def hold(self, receipt: Receipt, records: Sequence[ExtentRecord]) -> None:
        """Keep a lease alive until it is released."""
        if receipt.extent_ids:
            owners = frozenset(record.place.owner for record in records if record.place)
            with self._lock:
                self._held[receipt.lease_id] = _Held(receipt, self._clock(), owners)

    def release(self, receipt: Receipt) -> bool:
        """Give a lease back; see ``Index.release``."""
        with self._lock:
            self._held.pop(receipt.lease_id, None)
        return self._index.release(receipt)

    def check(self, receipt: Receipt) -> None:
        """Make sure that a lease still stands, renewing it when it was not for long.

        Raises:
            LeaseExpired: It does not. Way out: recompute what was read under it.
        """
        if not receipt.extent_ids:
            return
        with self._lock:
            held = self._held.get(receipt.lease_id)
        if held is None:
            raise LeaseExpired(f"the lease on {len(receipt.extent_ids)} extents was lost while they were read")
        # A keeper renews every third of the time. Where it could not, because the process stood still or there is none in
        # this process, the lease is asked for here.
        if not self._index.shared or self._clock() - held.renewed_s > self.lease_s / 2:
            self._renew(held)

    def renew_old(self) -> None:
        """Renew every lease that is older than a third of its time; what cannot be renewed is lost (see ``check``)."""
        with self._lock:
            old = [held for held in self._held.values() if self._clock() - held.renewed_s > self.lease_s / 3]
        for held in old:
            try:
                self._renew(held)
            except LeaseExpired:
                continue  # its request finds out after its forward, before a token is shown

    def unless_read(self, owner: str, action: Callable[[], None]) -> None:
        """Run ``action`` if no running request reads from the pool of ``owner``; none begins to meanwhile."""
        with self._lock:
            if not any(owner in held.owners for held in self._held.values()):
                action()

    def _renew(self, held: _Held) -> None:
        now = self._clock()  # before the call: a slow answer must not make the lease look younger than it is
        try:
            held.receipt = self._index.renew(held.receipt, self.lease_s)
            held.renewed_s = now
        except LeaseExpired:
            with self._lock:
                self._held.pop(held.receipt.lease_id, None)
            raise
