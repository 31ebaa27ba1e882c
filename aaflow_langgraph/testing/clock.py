"""A clock that stands still until a test moves it."""

from __future__ import annotations


class ManualClock:
    """Seconds, as ``time.monotonic`` returns them, moved by hand."""

    def __init__(self, now_s: float = 1000.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        """The time now."""
        return self.now_s

    def advance(self, seconds: float) -> None:
        """Let ``seconds`` pass."""
        self.now_s += seconds
