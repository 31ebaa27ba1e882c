"""Of several requests that miss the same tokens one computes them; the others wait until it published them.

Works across threads and, through a shared index, across processes. A claim is a right with a deadline: who dies or stands
still loses it, and the next one computes. Nothing but time depends on it.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable

from aaflow_langgraph.index.base import Index

CLAIM_S = 10.0
"""A claim is renewed before every forward; a holder that is silent for longer is passed by."""

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.001, 0.02


class Claim:
    """The sole right to compute something, until it is released or ``CLAIM_S`` after its last renewal."""

    def __init__(self, index: Index, name: str, holder: str) -> None:
        self._index = index
        self._name = name
        self._holder = holder
        self._renewed_s = time.monotonic()

    def renew(self) -> None:
        """Keep it; asks the index only when a third of its time is over."""
        now = time.monotonic()
        if now - self._renewed_s > CLAIM_S / 3:
            self._renewed_s = now
            self._index.claim(self._name, self._holder, CLAIM_S)

    def release(self) -> None:
        """Give it back. Idempotent."""
        self._index.unclaim(self._name, self._holder)


class InFlight:
    """What is being computed now, by name. Thread-safe."""

    def __init__(self, index: Index) -> None:
        self._index = index

    def acquire(self, name: str, is_done: Callable[[], bool], tick: Callable[[], None]) -> Claim | None:
        """A claim on ``name``, or None once ``is_done``. Waits while somebody else holds it.

        Args:
            name: What is going to be computed: 64 hexadecimal digits.
            is_done: Has somebody published it?
            tick: Called while waiting; may raise to stop.
        """
        holder = secrets.token_hex(16)
        pause_s = _FIRST_PAUSE_S
        while True:
            if self._index.claim(name, holder, CLAIM_S):
                claim = Claim(self._index, name, holder)
                # Asked after the claim: whoever held it before published first and gave it back then.
                if not is_done():
                    return claim
                claim.release()
                return None
            tick()
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            if is_done():
                return None

    def unless_done(self, name: str, is_done: Callable[[], bool], tick: Callable[[], None]) -> Claim | None:
        """``acquire``, but without a claim where it is done already, as it mostly is."""
        return None if is_done() else self.acquire(name, is_done, tick)
