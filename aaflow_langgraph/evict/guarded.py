"""Somebody else's policy behind a guard: one that fails costs an order of eviction, never the request that needed room (I14).

Knows no broker. Where policies are compared they are called bare: there a failure is the result.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from aaflow_langgraph.evict.base import Candidate, Policy
from aaflow_langgraph.evict.lru import least_recently_used

_log = logging.getLogger("aaflow_langgraph")


class Guarded:
    """Asks ``policy``; where it raises, or names what is no candidate, what was used least recently goes instead.

    The next call asks it again. A failure is logged with its traceback, the first one only.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._has_failed = False

    def __call__(self, candidates: Sequence[Candidate], need_bytes: int, /) -> list[Candidate]:
        """As ``Policy``; ``KeyboardInterrupt`` and its like are handed on."""
        try:
            return self._asked(candidates, need_bytes)
        except Exception as error:  # it is anybody's code, and which victims go changes no token
            if not self._has_failed:
                self._has_failed = True
                _log.warning(
                    "the eviction policy failed, so what was used least recently goes (said once): %s: %s",
                    type(error).__name__,
                    error,
                    exc_info=error,
                )
        return least_recently_used(candidates, need_bytes)

    def _asked(self, candidates: Sequence[Candidate], need_bytes: int) -> list[Candidate]:
        known = {candidate.extent_id: candidate for candidate in candidates}
        return [known[victim.extent_id] for victim in self._policy(candidates, need_bytes)]
