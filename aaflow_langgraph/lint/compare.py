"""From requests to findings: what two starts of an app render differently, and what one run of it misses."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

from aaflow_langgraph.broker import KVBroker
from aaflow_langgraph.engine.turns import common_prefix
from aaflow_langgraph.explain.divergence import Prompt, divergence
from aaflow_langgraph.explain.mend import mend_of, why_differs
from aaflow_langgraph.explain.miss import FEWEST_BEHIND, FEWEST_TOKENS, Explainer
from aaflow_langgraph.explain.report import Difference
from aaflow_langgraph.lint.dry_run import Room
from aaflow_langgraph.lint.finding import PrefixBreak
from aaflow_langgraph.lint.rendering import Request


def within_one_run(brokers: Sequence[KVBroker]) -> list[PrefixBreak]:
    """What the requests of one run missed, as ``explain_miss`` says."""
    found = []
    for broker in brokers:
        others = [other for other in brokers if other.namespace.digest != broker.namespace.digest]
        explainer = Explainer(broker, others, text=True)
        for report in map(explainer.report, broker.journal.entries()):
            # kv=False is meant; what a dry pool lacks, the real one may have (without_room).
            if report.is_miss and report.cause not in ("off", "evicted"):
                found.append(
                    PrefixBreak(
                        source=report.source,
                        node=report.node or report.label,
                        cause=report.cause,
                        why=report.why,
                        mend=report.mend,
                        num_lost=report.num_lost,
                        num_context=report.num_context,
                        seen="run",
                        difference=report.difference,
                    )
                )
    return found


def between_starts(
    brokers: Sequence[KVBroker], first: Sequence[Request], second: Sequence[Request]
) -> list[PrefixBreak]:
    """What differs between two starts with the same input: time, chance and the order of sets made it.

    A difference that a request has from an earlier one of its own run, in its history, is told of that one only.
    """
    found = []
    before = _by_place(first)
    serving = {broker.namespace.digest: broker for broker in brokers}
    earlier: dict[str, list[Prompt]] = defaultdict(list)
    for place, request in _by_place(second).items():
        one = before.get(place)
        if one is not None:
            inherited = max(
                (common_prefix(request.prompt.token_ids, known.token_ids) for known in earlier[request.namespace]),
                default=0,
            )
            finding = _difference(serving[request.namespace], one, request, inherited)
            if finding is not None:
                found.append(finding)
        earlier[request.namespace].append(request.prompt)
    return found


def without_room(rooms: Mapping[KVBroker, Room]) -> list[PrefixBreak]:
    """Does what one run computes fit into the pool? Without a disk below, what it reuses may be evicted before, if not."""
    found = []
    for broker, room in rooms.items():
        num_bytes = 0
        for entry in () if room.has_disk else broker.journal.entries():
            num_new = entry.num_context - entry.num_reused + entry.num_decoded
            if num_bytes > room.pool_bytes and entry.num_reused:
                found.append(
                    PrefixBreak(
                        source="",
                        node=entry.node or entry.label,
                        cause="evicted",
                        why=(
                            f"the run up to here makes {num_bytes:,} bytes of KV ({room.token_bytes:,} a token), the pool "
                            f"has {room.pool_bytes:,}: the {entry.num_reused:,} tokens that this reuses may be gone"
                        ),
                        mend=mend_of("evicted"),
                        num_lost=entry.num_reused,
                        num_context=entry.num_context,
                        seen="run",
                        difference=None,
                    )
                )
                break
            num_bytes += num_new * room.token_bytes
    return found


def _by_place(requests: Sequence[Request]) -> dict[tuple[str, str, int], Request]:
    """Requests by namespace, node and how often that node had asked before."""
    counts: dict[tuple[str, str], int] = defaultdict(int)
    found = {}
    for request in requests:
        key = (request.namespace, request.node)
        found[(*key, counts[key])] = request
        counts[key] += 1
    return found


def _difference(broker: KVBroker, first: Request, second: Request, num_inherited: int) -> PrefixBreak | None:
    tokenizer = broker.engine.tokenizer
    where = divergence(second.prompt, first.prompt, lambda ids: str(tokenizer.decode(list(ids))), same_asker=True)
    if where is None or where.position < num_inherited:
        return None
    num_behind = min(len(first.prompt.token_ids), len(second.prompt.token_ids)) - where.position
    if num_behind < (FEWEST_BEHIND if where.is_last_turn else FEWEST_TOKENS):
        return None
    if where.cause in ("none", "history"):
        # The input was the same: something drew lots, or asked for the time in words of its own.
        where = replace(where, cause="volatile", what="text that changes from start to start")
    return PrefixBreak(
        source=second.source,
        node=second.node,
        cause=where.cause,
        why=why_differs(where.cause, where.what, where.role, where.position, num_behind),
        mend=mend_of(where.cause),
        num_lost=num_behind,
        num_context=len(second.prompt.token_ids),
        seen="start",
        difference=Difference(
            position=where.position,
            role=where.role,
            asked_id=where.asked_id,
            known_id=where.known_id,
            known_kv_id="",
            known_node=first.node,
            before=where.before,
            asked=where.asked,
            known=where.known,
        ),
    )
