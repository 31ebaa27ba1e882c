"""The policies by name. Options and command lines read this table; a policy is in use once it stands here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from aaflow_langgraph.errors import ConfigError
from aaflow_langgraph.evict.base import Candidate, Order
from aaflow_langgraph.evict.fifo import first_in_first_out
from aaflow_langgraph.evict.gdsf import greedy_dual_size_frequency
from aaflow_langgraph.evict.lfu import least_frequently_used
from aaflow_langgraph.evict.lru import least_recently_used


class NamedPolicy(Protocol):
    """A ``Policy`` whose tie rule can be chosen."""

    def __call__(self, candidates: Sequence[Candidate], need_bytes: int, /, ties: Order = ...) -> list[Candidate]:
        """As ``Policy``; candidates of one rank go in the order of ``ties``."""


POLICIES: dict[str, NamedPolicy] = {
    "lru": least_recently_used,
    "lfu": least_frequently_used,
    "fifo": first_in_first_out,
    "gdsf": greedy_dual_size_frequency,
}


def policy(name: str) -> NamedPolicy:
    """The policy of that name.

    Raises:
        ConfigError: There is none; the message lists the names.
    """
    try:
        return POLICIES[name]
    except KeyError:
        raise ConfigError(f"no eviction policy is called {name!r}; there are {', '.join(sorted(POLICIES))}") from None
