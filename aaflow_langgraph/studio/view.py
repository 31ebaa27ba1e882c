"""What the page asks for, as JSON-ready documents. Blocks; knows no HTTP.

With ``metadata_only`` no token id, no text and no preview is in any document: they are never put in, not taken out.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from aaflow_langgraph.errors import RecipeMissing, UsageError
from aaflow_langgraph.model import Recipe
from aaflow_langgraph.studio.coverage import WHERE, Coverage, Extents
from aaflow_langgraph.studio.facts import Facts, Source, tokens_along
from aaflow_langgraph.studio.lineage import Drawing, Lineage, fold
from aaflow_langgraph.studio.tally import MOST_CHARS as MOST_NAME
from aaflow_langgraph.studio.tally import by_edge, by_node, entry_document, num_missed, sums

FRESH_S = 0.5
"""So long an answer may be old: a page asks several things at once."""

MOST_CHARS = 2_000
"""Of a turn's text this much is shown from its front, and a quarter of it from its end."""

_AROUND = 40
"""Token ids on each side of a difference."""

FEWEST_TOKENS = 16
"""Fewer tokens that could have been reused are no miss: templates begin alike, and tokens at the seams are always run again."""

_BUCKETS = 240
"""Cells of the map of a pool."""


class UnknownHandle(UsageError):
    """No handle of that id is known here."""


class View:
    """Documents over one source. Thread-safe."""

    def __init__(
        self, source: Source, *, metadata_only: bool = False, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.source = source
        self.metadata_only = metadata_only
        self._clock = clock
        self._lock = threading.Lock()
        self._seen: tuple[float, Facts, Lineage] | None = None
        self._names: dict[str, tuple[str, ...]] = {}

    # ---------------------------------------------------------------- documents

    def overview(self) -> dict[str, Any]:
        """Who this is, and its counters; asked for every second or two."""
        return {**self.source.overview(), "schema": 1, "metadata_only": self.metadata_only}

    def graph(self, *, limit: int, focus: str = "", thread: str = "") -> dict[str, Any]:
        """Handles to draw, and what is left out."""
        facts, lineage = self._look()
        top = self._known(facts, focus) if focus else None
        drawing = fold(lineage, lineage.newest(thread, top), limit, top)
        return {
            "schema": 1,
            "num_handles": len(facts.recipes),
            "top": top,
            "above": lineage.above(top) if top else None,
            "nodes": self._described(facts, lineage, drawing.shown),
            "links": self._links(lineage, drawing),
            "hidden": [{"parent": parent, "num_hidden": num} for parent, num in drawing.hidden.items()],
        }

    def handles(self, *, offset: int, limit: int, thread: str = "", text: str = "") -> dict[str, Any]:
        """Handles, the last used first; those whose label, node or id holds ``text``."""
        facts, lineage = self._look()
        found = lineage.newest(thread)
        if text:
            wanted = text.casefold()
            found = [at for at in found if wanted in self._searched(facts, lineage, at)]
        page = found[offset : offset + limit]
        return {
            "schema": 1,
            "offset": offset,
            "num_found": len(found),
            "handles": self._described(facts, lineage, page),
        }

    def handle(self, kv_id: str) -> dict[str, Any]:
        """Everything about one: its recipe, where its KV is, who made and used it."""
        facts, lineage = self._look()
        recipe = facts.recipes[self._known(facts, kv_id)]
        (described,) = self._described(facts, lineage, (kv_id,))
        coverage = self._extents(facts, lineage).coverage(lineage.chain(kv_id))
        made = lineage.entries.get(kv_id, [])
        users = [entry for entry in facts.entries if entry.parent == kv_id]
        return {
            "schema": 1,
            **described,
            "namespace": recipe.namespace,
            "num_pending": recipe.num_pending,
            "spans": [{"start": start, "stop": stop, "where": where} for start, stop, where in coverage.spans],
            "turns": self._turns(facts, recipe),
            "report": _report(recipe),
            "path": self._described(facts, lineage, lineage.path(kv_id)[-30:]),
            "num_children": len(lineage.children.get(kv_id, ())),
            "made_by": [entry_document(entry, lineage) for entry in made[-20:]],
            "used_by": [entry_document(entry, lineage) for entry in users[-20:]],
            "num_uses": len(users),
        }

    def diff(self, a: str, b: str) -> dict[str, Any]:
        """Where two handles part: the first token that differs, and the text around it on both sides."""
        facts, lineage = self._look()
        ids = [tokens_along(facts.recipes, self._known(facts, kv_id)) for kv_id in (a, b)]
        shared = next((at for at, (x, y) in enumerate(zip(*ids, strict=False)) if x != y), min(map(len, ids)))
        described = self._described(facts, lineage, (a, b))
        return {
            "schema": 1,
            "num_shared": shared,
            "is_equal": ids[0] == ids[1],
            "before": self._around(ids[0][max(0, shared - _AROUND) : shared]),
            "sides": [
                {
                    **one,
                    "after": self._around(its[shared : shared + _AROUND]),
                    "turn": self._turn_at(facts, one, shared),
                }
                for one, its in zip(described, ids, strict=True)
            ],
        }

    def profile(self, *, thread: str = "") -> dict[str, Any]:
        """Sums by node and by edge."""
        facts, lineage = self._look()
        entries = [entry for entry in facts.entries if not thread or entry.thread == thread]
        return {
            "schema": 1,
            "total": sums(entries) if entries else None,
            "nodes": by_node(entries),
            "edges": by_edge(entries, lineage),
        }

    def requests(self, *, offset: int, limit: int, thread: str = "", missed: bool = False) -> dict[str, Any]:
        """Requests, newest first; with ``missed`` only those that could have reused more."""
        facts, lineage = self._look()
        found = [entry for entry in reversed(facts.entries) if not thread or entry.thread == thread]
        if missed:
            found = [entry for entry in found if num_missed(entry) >= FEWEST_TOKENS]
        return {
            "schema": 1,
            "offset": offset,
            "num_found": len(found),
            "requests": [entry_document(entry, lineage) for entry in found[offset : offset + limit]],
        }

    def movements(self, *, offset: int, limit: int) -> dict[str, Any]:
        """Evictions, spills, fetches, adoptions, newest first: whose extent, and which node's request moved it."""
        facts, lineage = self._look()
        page = facts.movements[::-1][offset : offset + limit]
        owners = self._owners(facts, {movement.end_id for movement in page})
        return {
            "schema": 1,
            "offset": offset,
            "num_found": len(facts.movements),
            "movements": [
                {
                    **asdict(movement),
                    "node": movement.node[:MOST_NAME],
                    "thread": movement.thread[:MOST_NAME],
                    "kv_id": owners.get(movement.end_id),
                    "label": self._label(lineage, owners.get(movement.end_id)),
                    "made_by": lineage.maker(owners.get(movement.end_id))[:MOST_NAME],
                }
                for movement in page
            ],
        }

    def rejected(self) -> dict[str, Any]:
        """Kinds of values that channels did not take, newest first: what is wrong with them, never what they say."""
        found = self.source.rejected()[::-1]
        return {"schema": 1, "num_found": len(found), "rejected": [asdict(one) for one in found]}

    def pool(self, *, kv_id: str = "") -> dict[str, Any]:
        """The pool of this process as a row of cells: how much of each is taken, and by the handle ``kv_id``."""
        facts, lineage = self._look()
        pool = self.source.overview().get("pool") or {}
        capacity = int(pool.get("capacity_bytes", 0))
        taken, picked = [0.0] * _BUCKETS, [0.0] * _BUCKETS
        names: set[str] = set()
        for recipe in lineage.chain(self._known(facts, kv_id)) if kv_id else ():
            names.update(self._names_of(recipe))
        for record in facts.extents:
            if record.place is None or record.place.owner != facts.owner or not capacity:
                continue
            its = record.place.allocation
            for cells in (taken, picked) if not names.isdisjoint(record.names) else (taken,):
                _fill(cells, its.offset / capacity, (its.offset + its.num_bytes) / capacity)
        return {
            "schema": 1,
            "capacity_bytes": capacity,
            "taken": [round(min(1.0, cell), 3) for cell in taken],
            "picked": [round(min(1.0, cell), 3) for cell in picked],
        }

    def why_missed(self, number: int) -> dict[str, Any]:
        """Why a request reused no more."""
        told = self.source.why_missed(number, with_text=not self.metadata_only)
        if told is None:
            raise UnknownHandle(f"request {number} is not remembered (any more), or nobody counts requests here")
        return {"schema": 1, **told}

    # ---------------------------------------------------------------- inside

    def _look(self) -> tuple[Facts, Lineage]:
        with self._lock:
            now = self._clock()
            if self._seen is None or now - self._seen[0] > FRESH_S:
                facts = self.source.facts()
                self._seen = now, facts, Lineage(facts)
            return self._seen[1], self._seen[2]

    def _known(self, facts: Facts, kv_id: str) -> str:
        if kv_id not in facts.recipes:
            raise UnknownHandle(f"no handle {kv_id[:12]} is known here: it was made elsewhere, or its recipe is gone")
        return kv_id

    def _names_of(self, recipe: Recipe) -> tuple[str, ...]:
        if recipe.kv_id not in self._names:
            self._names[recipe.kv_id] = tuple(self.source.names_of(recipe))
        return self._names[recipe.kv_id]

    def _extents(self, facts: Facts, lineage: Lineage) -> Extents:
        return Extents(facts, self._names_of, lineage.num_users)

    def _described(self, facts: Facts, lineage: Lineage, kv_ids: Sequence[str]) -> list[dict[str, Any]]:
        extents = self._extents(facts, lineage)
        return [self._one(facts, lineage, extents, kv_id) for kv_id in kv_ids]

    def _one(self, facts: Facts, lineage: Lineage, extents: Extents, kv_id: str) -> dict[str, Any]:
        recipe = facts.recipes[kv_id]
        chain = lineage.chain(kv_id)
        coverage = extents.coverage(chain) if chain else Coverage((), 0, 0, 0)
        entries = lineage.entries.get(kv_id, [])
        there = {where: coverage.num_tokens(where) for where in WHERE}
        return {
            "kv_id": kv_id,
            "label": self._label(lineage, kv_id),
            "operator": recipe.operator,
            "parent": recipe.parent,
            "above": lineage.above(kv_id),
            "is_exact": lineage.is_exact(kv_id),
            "num_tokens": recipe.stop,
            "num_added": recipe.stop - recipe.start,
            "num_children": len(lineage.children.get(kv_id, ())),
            "node": entries[0].node[:MOST_NAME] if entries else "",
            "thread": entries[0].thread[:MOST_NAME] if entries else "",
            "num_requests": len(entries),
            "num_reused": entries[0].num_reused if entries else None,
            "num_prefilled": entries[0].num_context - entries[0].num_reused if entries else None,
            "num_decoded": entries[0].num_decoded if entries else None,
            "num_missed": num_missed(entries[0]) if entries else 0,
            "ttft_s": entries[0].ttft_s if entries else None,
            "at_s": entries[0].at_s if entries else None,
            "where": {**there, "gone": max(0, recipe.stop - recipe.num_pending - sum(there.values()))},
            "own_bytes": coverage.own_bytes,
            "shared_bytes": coverage.shared_bytes,
            "private_bytes": coverage.private_bytes,
        }

    def _links(self, lineage: Lineage, drawing: Drawing) -> list[dict[str, Any]]:
        shown = set(drawing.shown)
        return [
            {**asdict(link), "is_drawn": lineage.above(kv_id) == link.parent}
            for kv_id in drawing.shown
            for link in lineage.links[kv_id]
            if link.parent in shown
        ]

    def _turns(self, facts: Facts, recipe: Recipe) -> list[dict[str, Any]]:
        """Its chat turns; text only where it may be shown and there is a tokenizer."""
        ids = None if self.metadata_only else _tokens_or_none(facts, recipe.kv_id)
        turns = []
        for turn in recipe.turns:
            told: dict[str, Any] = {
                "role": turn.role,
                "start": turn.content.start,
                "stop": turn.content.stop,
                "is_open": turn.open,
                "is_own": turn.content.stop > recipe.start,
            }
            if ids is not None:
                told |= self._excerpt(ids[turn.content.start : turn.content.stop])
            turns.append(told)
        return turns

    def _excerpt(self, ids: Sequence[int]) -> dict[str, Any]:
        """The text of a turn, its middle left out when it is long; a token is at least about one character."""
        if len(ids) > 2 * MOST_CHARS:
            front, back = self.source.decode(ids[:MOST_CHARS]), self.source.decode(ids[-MOST_CHARS // 4 :])
        else:
            front, back = self.source.decode(ids), ""
        if front is None or back is None:
            return {}
        if not back and len(front) <= MOST_CHARS + MOST_CHARS // 4:
            return {"text": front, "text_end": "", "is_cut": False}
        return {"text": front[:MOST_CHARS], "text_end": (back or front)[-MOST_CHARS // 4 :], "is_cut": True}

    def _around(self, ids: Sequence[int]) -> dict[str, Any]:
        if self.metadata_only:
            return {}
        text = self.source.decode(ids)
        is_special = bool(ids) and text == ""  # nothing but what texts leave out: here it is what is equal or differs
        if is_special:
            text = self.source.spell(ids)
        told = {"token_ids": list(ids), "is_special": is_special}
        return told | ({} if text is None else {"text": text[: 4 * MOST_CHARS]})

    def _turn_at(self, facts: Facts, described: dict[str, Any], position: int) -> str:
        """Role of the turn in which a position is."""
        turns = facts.recipes[described["kv_id"]].turns
        return next((turn.role or "text" for turn in turns if turn.content.start <= position < turn.content.stop), "")

    def _label(self, lineage: Lineage, kv_id: str | None) -> str:
        if kv_id is None:
            return ""
        entry = lineage.first(kv_id)
        return entry.label if entry is not None else ""

    def _searched(self, facts: Facts, lineage: Lineage, kv_id: str) -> str:
        nodes = {entry.node for entry in lineage.entries.get(kv_id, ())}
        return " ".join((kv_id, self._label(lineage, kv_id), facts.recipes[kv_id].operator, *nodes)).casefold()

    def _owners(self, facts: Facts, end_ids: set[str]) -> dict[str, str]:
        """The first known handle that an extent belongs to, by the extent's end."""
        found = {end_id: end_id for end_id in end_ids if end_id in facts.recipes}
        for kv_id, recipe in facts.recipes.items():
            if len(found) == len(end_ids):
                break
            for name in end_ids.intersection(self._names_of(recipe)):
                found.setdefault(name, kv_id)
        return found


def _tokens_or_none(facts: Facts, kv_id: str) -> tuple[int, ...] | None:
    try:
        return tokens_along(facts.recipes, kv_id)
    except RecipeMissing:
        return None


def _report(recipe: Recipe) -> dict[str, Any] | None:
    """How a compose went: what it was asked for, what it did, predicted and actual seconds."""
    if recipe.composition is None or not recipe.composition.report:
        return None
    try:
        told = json.loads(recipe.composition.report)
    except ValueError:
        return None
    return told if isinstance(told, dict) else None


def _fill(cells: list[float], start: float, stop: float) -> None:
    """Add a range of ``[0, 1)`` to the cells that it lies in."""
    width = 1.0 / len(cells)
    for number in range(int(start / width), min(len(cells), int(stop / width) + 1)):
        inside = min(stop, (number + 1) * width) - max(start, number * width)
        cells[number] += max(0.0, inside) / width
