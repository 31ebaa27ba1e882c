"""An index whose server may go away: what a caller gets then, how often it is asked, who is told.

An outage costs time, never a run (I14): what is asked is answered as by an empty index, and the caller goes on by recompute.
Only ``put`` and ``join`` say that they failed, because their callers hold bytes that nobody can find. Knows no server.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from aaflow_langgraph.errors import IndexFull, IndexUnavailable, IntegrityError
from aaflow_langgraph.evict.base import Candidate
from aaflow_langgraph.index.base import ExtentRecord, Index, Match, Place, Query, Swept
from aaflow_langgraph.model import Receipt, Recipe

PAUSE_S = 1.0
"""After a failure nobody asks for this long, so a server that hangs costs one timeout a second, whoever needs it."""

_logger = logging.getLogger("aaflow_langgraph")
T = TypeVar("T")


class GuardedIndex:
    """An index of the same contract that outlives its server.

    A full server (``IndexFull``) and an entry that is not what it says (``IntegrityError``) fail the one call; the server is
    asked again by the next.

    Args:
        index: The index behind it.
        clock: Seconds, for the pause after a failure.
        on_warning: Told once per outage; the logger ``aaflow_langgraph`` unless given.

    Attributes:
        num_outages: How often the server went away, or was too full to take anything.
        num_failed_calls: Calls that were answered without it.
    """

    def __init__(
        self,
        index: Index,
        *,
        clock: Callable[[], float] = time.monotonic,
        on_warning: Callable[[str], object] = _logger.warning,
    ) -> None:
        self.shared = index.shared
        self.num_outages = 0
        self.num_failed_calls = 0
        self._index = index
        self._clock = clock
        self._on_warning = on_warning
        self._lock = threading.Lock()
        self._is_out = False
        self._is_full = False
        self._has_warned_of_entry = False
        self._ask_at_s = 0.0

    @property
    def is_out(self) -> bool:
        """Has the server gone away and not answered since?"""
        return self._is_out

    # ---------------------------------------------------------------- owners

    def join(self, owner: str, lease_s: float) -> int:
        return self._ask(lambda: self._index.join(owner, lease_s))

    def heartbeat(self, owner: str, epoch: int, lease_s: float) -> bool:
        return self._or(False, lambda: self._index.heartbeat(owner, epoch, lease_s))

    def leave(self, owner: str) -> int:
        return self._or(0, lambda: self._index.leave(owner))

    def owners(self) -> dict[str, float]:
        return self._or({}, self._index.owners)

    # ---------------------------------------------------------------- extents

    def next_extent_id(self) -> int:
        return self._index.next_extent_id()

    def put(self, record: ExtentRecord, epoch: int, lease_s: float) -> tuple[ExtentRecord, Receipt]:
        """As in the contract; ``IndexUnavailable`` in an outage, and where an entry of equal key cannot be read."""
        try:
            kept = self._ask(lambda: self._index.put(record, epoch, lease_s))
        except IntegrityError as error:
            self._note_entry(error)
            raise IndexUnavailable(f"the index has an entry of equal key that cannot be used: {error}") from error
        self._is_full = False
        return kept

    def match(self, query: Query, limit: int, lease_s: float) -> Match:
        return self._or(Match((), 0, Receipt("", (), 0.0)), lambda: self._index.match(query, limit, lease_s))

    def covering(self, query: Query) -> list[ExtentRecord]:
        return self._or([], lambda: self._index.covering(query))

    def remove(self, extent_id: int, owner: str) -> ExtentRecord | None:
        return self._or(None, lambda: self._index.remove(extent_id, owner))

    def move(self, extent_id: int, old: Place | None, new: Place, epoch: int) -> bool:
        return self._or(False, lambda: self._index.move(extent_id, old, new, epoch))

    def take_over(self, extent_id: int, part_ids: Sequence[int]) -> bool:
        return self._or(False, lambda: self._index.take_over(extent_id, part_ids))

    def lose(self, extent_id: int, place: Place) -> bool:
        return self._or(False, lambda: self._index.lose(extent_id, place))

    def set_on_disk(self, extent_id: int, on_disk: bool) -> bool:
        return self._or(False, lambda: self._index.set_on_disk(extent_id, on_disk))

    def candidates(self, owner: str) -> list[Candidate]:
        return self._or([], lambda: self._index.candidates(owner))

    def records(self, owner: str | None = None) -> list[ExtentRecord]:
        return self._or([], lambda: self._index.records(owner))

    # ---------------------------------------------------------------- leases

    def renew(self, receipt: Receipt, lease_s: float) -> Receipt:
        """As in the contract; in an outage the receipt as it is, and the bytes' generations tell what was lost."""
        return self._or(receipt, lambda: self._index.renew(receipt, lease_s))

    def release(self, receipt: Receipt) -> bool:
        return self._or(False, lambda: self._index.release(receipt))

    def num_leases(self) -> int:
        return self._or(0, self._index.num_leases)

    def sweep(self) -> Swept:
        return self._or(Swept(0, 0, 0), self._index.sweep)

    # ---------------------------------------------------------------- claims and recipes

    def claim(self, name: str, holder: str, lease_s: float) -> bool:
        """As in the contract; in an outage True: there is nobody to wait for."""
        return self._or(True, lambda: self._index.claim(name, holder, lease_s))

    def unclaim(self, name: str, holder: str) -> bool:
        return self._or(False, lambda: self._index.unclaim(name, holder))

    def put_recipe(self, recipe: Recipe, lease_s: float) -> None:
        self._or(None, lambda: self._index.put_recipe(recipe, lease_s))

    def recipe(self, kv_id: str) -> Recipe | None:
        return self._or(None, lambda: self._index.recipe(kv_id))

    # ---------------------------------------------------------------- inspection

    def check(self) -> list[tuple[str, str]]:
        """As in the contract; nothing can be said in an outage: ``IndexUnavailable``."""
        return self._ask(self._index.check)

    def close(self) -> None:
        self._index.close()

    # ---------------------------------------------------------------- inside

    def _or(self, otherwise: T, call: Callable[[], T]) -> T:
        try:
            return self._ask(call)
        except IndexUnavailable:
            return otherwise
        except IntegrityError as error:
            self._note_entry(error)
            return otherwise

    def _ask(self, call: Callable[[], T]) -> T:
        if self._is_out:
            self._require_turn()
        try:
            answer = call()
        except IndexFull as error:
            self._count_failed()
            if not self._is_full:
                self._is_full = True
                with self._lock:
                    self.num_outages += 1
                self._on_warning(f"KV is computed and not shared while this lasts: {error}")
            raise
        except IndexUnavailable as error:
            self._note_failure(error)
            raise
        if self._is_out:
            self._note_recovery()
        return answer

    def _require_turn(self) -> None:
        """In an outage one call per pause asks the server; every other is refused here."""
        with self._lock:
            now = self._clock()
            if self._is_out and now < self._ask_at_s:
                self.num_failed_calls += 1
                raise IndexUnavailable("the index did not answer a moment ago and is asked again soon")
            self._ask_at_s = now + PAUSE_S

    def _note_failure(self, error: IndexUnavailable) -> None:
        with self._lock:
            is_new = not self._is_out
            self._is_out = True
            self._ask_at_s = self._clock() + PAUSE_S
            self.num_outages += is_new
            self.num_failed_calls += 1
        if is_new:
            self._on_warning(f"KV is recomputed where it is needed until the index is back: {error}")

    def _note_recovery(self) -> None:
        with self._lock:
            was_out, self._is_out, self._is_full = self._is_out, False, False
        if was_out:
            _logger.info("the index is back")

    def _note_entry(self, error: IntegrityError) -> None:
        self._count_failed()
        if not self._has_warned_of_entry:
            self._has_warned_of_entry = True
            self._on_warning(f"what the index says is not used: {error}")

    def _count_failed(self) -> None:
        with self._lock:
            self.num_failed_calls += 1
