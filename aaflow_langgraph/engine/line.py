"""Who is next: first come, first served inside a priority, and nobody is passed by for ever.

Knows places in a line; knows neither steps nor requests.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import TypeVar

from aaflow_langgraph.errors import ConfigError

PATIENCE = 16
"""Whoever was passed by so often goes in front of every priority."""


def check_priority(priority: int) -> int:
    """The same.

    Raises:
        ConfigError: It is no int. Way out: fail.
    """
    if not isinstance(priority, int) or isinstance(priority, bool):
        raise ConfigError(f"priority must be a whole number, smaller ones first, got {priority!r:.80}")
    return priority


@dataclass(eq=False, slots=True)
class Waiting:
    """A place in a line. A smaller ``priority`` goes first; ``ticket`` counts arrivals."""

    priority: int
    ticket: int
    num_passed: int = 0

    @property
    def turn(self) -> tuple[bool, int, int]:
        """Smallest first."""
        out_of_patience = self.num_passed >= PATIENCE
        return not out_of_patience, 0 if out_of_patience else self.priority, self.ticket


Place = TypeVar("Place", bound=Waiting)


def leave(line: list[Place], taken: Collection[Place]) -> None:
    """Take some out of a line; those who came before one of them were passed by."""
    last = max(place.ticket for place in taken)
    line[:] = [place for place in line if place not in taken]
    for place in line:
        place.num_passed += place.ticket < last
