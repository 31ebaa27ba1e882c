"""Which handle was made from which, and what of it to draw when there are thousands. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from aaflow_langgraph.composite import APPROXIMATE_RUNGS
from aaflow_langgraph.journal import Entry
from aaflow_langgraph.model import Recipe
from aaflow_langgraph.studio.facts import Facts

Bond = Literal["extends", "rewrites", "composes"]
"""``extends``: the parent's tokens, then more. ``rewrites``: the chat template changed what the parent had, so only a common
prefix is shared. ``composes``: a segment of it.
"""


@dataclass(frozen=True, slots=True)
class Link:
    """``child`` was made from ``parent``."""

    parent: str
    child: str
    bond: Bond


class Lineage:
    """Handles and what they were made from, at one moment."""

    def __init__(self, facts: Facts) -> None:
        self._recipes = facts.recipes
        self._threads = facts.threads
        self.entries: dict[str, list[Entry]] = {}
        """Requests by the handle that they made, oldest first."""
        for entry in facts.entries:
            self.entries.setdefault(entry.kv_id, []).append(entry)
        self.links: dict[str, list[Link]] = {}
        """By child; the first one is where it is drawn."""
        for kv_id, recipe in facts.recipes.items():
            self.links[kv_id] = list(self._links_of(kv_id, recipe))
        self.children: dict[str, list[str]] = {}
        self._above: dict[str, str] = {}
        for kv_id in facts.recipes:
            parents = [link.parent for link in self.links[kv_id] if link.parent in facts.recipes]
            parent = next((parent for parent in parents if not self._is_above(kv_id, parent)), None)
            if parent is not None:
                self._above[kv_id] = parent
                self.children.setdefault(parent, []).append(kv_id)
        self._num_users: dict[str, int] = {}

    def above(self, kv_id: str) -> str | None:
        """Below which handle this one is drawn; None for a root."""
        return self._above.get(kv_id)

    def chain(self, kv_id: str) -> list[Recipe]:
        """The recipes whose tokens a handle consists of, from position 0 on; empty when one of them is not known."""
        found: list[Recipe] = []
        at: str | None = kv_id
        while at is not None:
            recipe = self._recipes.get(at)
            if recipe is None or len(found) > len(self._recipes):
                return []
            found.append(recipe)
            at = recipe.parent
        return found[::-1]

    def path(self, kv_id: str) -> list[str]:
        """What a handle is drawn below, root first, itself last."""
        found = [kv_id]
        while (parent := self._above.get(found[-1])) is not None:
            found.append(parent)
        return found[::-1]

    def num_users(self, kv_id: str) -> int:
        """How many handles are drawn at or below this one."""
        if not self._num_users:
            # Children before parents: a child is in the order of ``_postorder`` in front of its parent.
            for at in self._postorder():
                self._num_users[at] = 1 + sum(self._num_users[child] for child in self.children.get(at, ()))
        return self._num_users.get(kv_id, 1)

    def first(self, kv_id: str) -> Entry | None:
        """The request that made a handle, if it is remembered."""
        return self.entries[kv_id][0] if kv_id in self.entries else None

    def maker(self, kv_id: str | None) -> str:
        """The node that made a handle; its operator where no node said so; empty where nothing is known."""
        if kv_id is None:
            return ""
        entry = self.first(kv_id)
        if entry is not None:
            return entry.node or entry.operator
        return self._recipes[kv_id].operator if kv_id in self._recipes else ""

    def is_in(self, kv_id: str, thread: str) -> bool:
        """Did a request of a thread make a handle, or is it in one of its checkpoints?"""
        return thread in self._threads.get(kv_id, ()) or any(
            entry.thread == thread for entry in self.entries.get(kv_id, ())
        )

    def newest(self, thread: str = "", under: str | None = None) -> list[str]:
        """Handles, the last used first: those that a thread's requests made, those below a handle."""
        order = {kv_id: number for number, kv_id in enumerate(self._recipes)}
        found = [kv_id for kv_id in self._recipes if not thread or self.is_in(kv_id, thread)]
        if under is not None:
            inside = set(self._subtree(under))
            found = [kv_id for kv_id in found if kv_id in inside]
        return sorted(found, key=lambda at: (self._last_number(at), order[at]), reverse=True)

    def is_exact(self, kv_id: str) -> bool:
        """Did no approximate compose take part in a handle?"""
        return not any(is_approximate(recipe) for recipe in self.chain(kv_id))

    def _links_of(self, kv_id: str, recipe: Recipe) -> Iterator[Link]:
        if recipe.composition is not None:
            for child in dict.fromkeys((*filter(None, (recipe.parent,)), *recipe.composition.children)):
                yield Link(child, kv_id, "composes")
        elif recipe.parent is not None:
            yield Link(recipe.parent, kv_id, "extends")
        else:
            made_from = (entry.parent for entry in self.entries.get(kv_id, ()) if entry.parent != kv_id)
            parent = next((parent for parent in made_from if parent in self._recipes), None)
            if parent is not None:
                yield Link(parent, kv_id, "rewrites")

    def _is_above(self, kv_id: str, parent: str) -> bool:
        """Would drawing ``kv_id`` below ``parent`` close a circle?"""
        at: str | None = parent
        while at is not None and at != kv_id:
            at = self._above.get(at)
        return at == kv_id

    def _last_number(self, kv_id: str) -> int:
        return self.entries[kv_id][-1].number if kv_id in self.entries else 0

    def _subtree(self, kv_id: str) -> Iterator[str]:
        todo = [kv_id]
        while todo:
            at = todo.pop()
            yield at
            todo += self.children.get(at, ())

    def _postorder(self) -> list[str]:
        order: list[str] = []
        todo = [kv_id for kv_id in self._recipes if kv_id not in self._above]
        while todo:
            at = todo.pop()
            order.append(at)
            todo += self.children.get(at, ())
        return order[::-1]


def is_approximate(recipe: Recipe) -> bool:
    """Was KV moved without being computed anew?"""
    return recipe.composition is not None and recipe.composition.rung in APPROXIMATE_RUNGS


@dataclass(frozen=True, slots=True)
class Drawing:
    """What fits: some handles, and how many are left out below each of them (below None: roots)."""

    shown: tuple[str, ...]
    hidden: Mapping[str | None, int]


def fold(lineage: Lineage, wanted: Sequence[str], limit: int, top: str | None = None) -> Drawing:
    """The first of ``wanted`` with everything that they are drawn below, at most ``limit`` handles; ``top`` is drawn as the
    root. A path that does not fit as a whole is left out, except that the first one keeps its end.
    """
    shown: dict[str, None] = {}
    for kv_id in wanted:
        path = lineage.path(kv_id)
        if top is not None and top in path:
            path = path[path.index(top) :]
        new = [at for at in path if at not in shown]
        if not shown:
            new = new[-limit:]
        if len(shown) + len(new) > limit:
            break
        shown.update(dict.fromkeys(new))
    roots = {kv_id for kv_id in shown if lineage.above(kv_id) not in shown}
    hidden: dict[str | None, int] = {}
    for kv_id in shown:
        left_out = sum(lineage.num_users(child) for child in lineage.children.get(kv_id, ()) if child not in shown)
        if left_out:
            hidden[kv_id] = left_out
    if top is None:
        whole = sum(lineage.num_users(root) for root in roots)
        if num := len(lineage.links) - whole:
            hidden[None] = num
    order = {kv_id: number for number, kv_id in enumerate(lineage.links)}
    return Drawing(tuple(sorted(shown, key=order.__getitem__)), hidden)
