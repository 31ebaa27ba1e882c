"""Who evicted what a request would have read. Knows a broker's movements; knows no text."""

from __future__ import annotations

from aaflow_langgraph.broker import KVBroker
from aaflow_langgraph.explain.divergence import Prompt
from aaflow_langgraph.hashing import block_hashes, prefix_id
from aaflow_langgraph.journal import Entry

_MOST_MOVEMENTS = 500
"""So many evictions before a request are looked at."""


def evicted_for(broker: KVBroker, entry: Entry, asked: Prompt) -> tuple[bool, tuple[str, ...]]:
    """Was part of a prompt's KV evicted before it was asked for, and the nodes whose requests took its place."""
    namespace, ids = broker.namespace.digest, asked.token_ids
    hashes = block_hashes(namespace, ids)
    moves = [move for move in broker.movements() if move.move == "evict" and move.at_s <= entry.at_s]
    found = [
        move
        for move in moves[-_MOST_MOVEMENTS:]
        if move.stop <= len(ids) and prefix_id(namespace, ids, move.stop, hashes) == move.end_id
    ]
    return bool(found), tuple(dict.fromkeys(move.node for move in found if move.node))
