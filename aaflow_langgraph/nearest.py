"""Which known sequence shares the longest prefix with a given one, token by token, not block by block.

    under the hash of blocks 0..i:   the up to 256 tokens that follow in some known sequence, sorted

The neighbours of a query among the sorted ones share its longest prefix. Knows token ids and block hashes; knows no KV.
"""

from __future__ import annotations

import sys
from array import array
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass

from aaflow_langgraph.model import BLOCK_TOKENS, BlockHash


@dataclass(frozen=True, slots=True)
class Nearest:
    """The known handle that shares the longest prefix, and how many tokens that is; None and 0 when none shares any."""

    kv_id: str | None
    num_shared: int


class PrefixTable:
    """Sequences by what follows their blocks. Not thread-safe."""

    def __init__(self) -> None:
        self._following: dict[str, list[tuple[bytes, str]]] = {}

    def add(self, kv_id: str, token_ids: Sequence[int], hashes: Sequence[BlockHash], start: int) -> None:
        """Enter ``token_ids`` under the name ``kv_id``. Another entry has the first ``start`` tokens already."""
        for block in range(start // BLOCK_TOKENS, -(-len(token_ids) // BLOCK_TOKENS)):
            key = hashes[block - 1] if block else ""
            packed = _sortable(token_ids[block * BLOCK_TOKENS : (block + 1) * BLOCK_TOKENS])
            insort(self._following.setdefault(key, []), (packed, kv_id))

    def candidates(self, token_ids: Sequence[int], hashes: Sequence[BlockHash]) -> list[Nearest]:
        """The sequences that share the most with ``token_ids``: one or both neighbours, or none."""
        block = len(hashes)
        while block and hashes[block - 1] not in self._following:
            block -= 1
        for at in (block, block - 1):  # where nothing follows block ``at - 1``, its own sequences end there
            if at < 0:
                break
            entries = self._following.get(hashes[at - 1] if at else "", [])
            asked = _sortable(token_ids[at * BLOCK_TOKENS : (at + 1) * BLOCK_TOKENS])
            place = bisect_left(entries, (asked, ""))
            found = [
                Nearest(kv_id, at * BLOCK_TOKENS + _common(asked, packed))
                for packed, kv_id in entries[max(0, place - 1) : place + 1]
            ]
            if any(one.num_shared > at * BLOCK_TOKENS for one in found):
                return [one for one in found if one.num_shared]
        return []


def _sortable(token_ids: Sequence[int]) -> bytes:
    """Token ids as bytes that sort as the ids do."""
    packed = array("I", token_ids)
    if sys.byteorder == "little":
        packed.byteswap()
    return packed.tobytes()


def _common(a: bytes, b: bytes) -> int:
    """Leading tokens in common."""
    size = min(len(a), len(b))
    if a[:size] == b[:size]:
        return size // 4
    low, high = 0, size
    while high - low > 1:
        middle = (low + high) // 2
        if a[:middle] == b[:middle]:
            low = middle
        else:
            high = middle
    return low // 4
