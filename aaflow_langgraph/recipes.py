"""Recipes of handles: those this broker made or read, and where to look for the others.

A recipe stores only what it adds to its parent; sequences are put together along the parents. What comes from outside (an
index, a disk) is believed only if its tokens have the name that was asked for.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable

from aaflow_langgraph.composite import APPROXIMATE_RUNGS, joint_digest
from aaflow_langgraph.errors import CapacityError, PoolExhausted
from aaflow_langgraph.hashing import Joint
from aaflow_langgraph.model import BLOCK_TOKENS, Finding, Recipe
from aaflow_langgraph.nearest import Nearest, PrefixTable
from aaflow_langgraph.store import ExtentStore, TokenSequence

RECIPE_LEASE_S = 24 * 3600.0
"""A recipe that nobody asked a shared index for stays there for so long."""

_SEQUENCES_KEPT = 128
"""Assembled token sequences kept ready; older ones are put together again from their recipes."""

_log = logging.getLogger("aaflow_langgraph")


class RecipeBook:
    """Thread-safe. Local recipes live as long as the book."""

    def __init__(self, namespace: str, store: ExtentStore) -> None:
        self._namespace = namespace
        self._store = store
        self._lock = threading.RLock()
        self._recipes: dict[str, Recipe] = {}
        self._sequences: OrderedDict[str, TokenSequence] = OrderedDict()
        self._prefixes = PrefixTable()
        self._unsaved: dict[str, None] = {}
        self._sources: list[Callable[[str], Recipe | None]] = []
        self._shared: dict[str, tuple[Recipe, float]] = {}
        self._has_warned = False

    def __len__(self) -> int:
        return len(self._recipes)

    def known(self) -> tuple[Recipe, ...]:
        """Every recipe of this process, in the order in which it was made or read."""
        with self._lock:
            return tuple(self._recipes.values())

    def keep(self, recipe: Recipe, sequence: TokenSequence) -> None:
        """Enter a recipe and share it with whoever reads the same index or disk."""
        with self._lock:
            known = self._recipes.get(recipe.kv_id)
            # The same tokens may be reached by several routes; chat structure is worth more than none.
            is_new = known is None or (not known.has_chat and recipe.has_chat)
            if is_new:
                self._enter(recipe, sequence)
                if self._store.disk is not None and self._store.wants is None:
                    self._unsaved[recipe.kv_id] = None
            self._remember(recipe.kv_id, sequence)
        if self._store.index.shared:
            self._share(recipe)

    def find(self, kv_id: str) -> Recipe | None:
        """The recipe of a handle, from wherever it is known, with everything it stands on; None when it is nowhere."""
        with self._lock:
            known = self._recipes.get(kv_id)
        if known is not None:
            return known
        chain: list[Recipe] = []
        at: str | None = kv_id
        while at is not None and at not in self._recipes:
            recipe = self._read(at)
            if recipe is None or recipe.namespace != self._namespace or recipe.stop <= recipe.start:
                return None
            if chain and recipe.stop != chain[-1].start:
                return None
            chain.append(recipe)
            at = recipe.parent
        if chain[-1].parent is None and chain[-1].start != 0:
            return None
        with self._lock:
            base = self._sequence(at) if at is not None else TokenSequence((), ())
            if len(base.token_ids) != chain[-1].start:
                return None
            ids = base.token_ids + tuple(token for recipe in reversed(chain) for token in recipe.token_ids)
            joints = base.joints + tuple(joint for recipe in reversed(chain) for joint in self._joints(recipe))
            sequence = self._store.sequence(ids, base.hashes, joints)
            for recipe in reversed(chain):
                named = self._store.name(sequence, recipe.stop)
                if named != recipe.kv_id:
                    _log.warning(
                        "a recipe from outside names %s but rebuilds %s: ignored", recipe.kv_id[:12], named[:12]
                    )
                    return None
            for recipe in reversed(chain):
                self._enter(recipe, sequence)
            self._remember(kv_id, sequence)
            return chain[0]

    def nearest(self, sequence: TokenSequence) -> Nearest:
        """The handle known here that shares the longest prefix with ``sequence``; of equals the one that computed more of it."""
        with self._lock:
            found = self._prefixes.candidates(sequence.token_ids, sequence.hashes)
            return max(found, key=lambda one: (one.num_shared, self.num_computed(one)), default=Nearest(None, 0))

    def num_computed(self, near: Nearest) -> int:
        """How many of the shared tokens have been computed: a handle's last ones may be pending."""
        if near.kv_id is None:
            return 0
        recipe = self._recipes[near.kv_id]
        return min(near.num_shared, recipe.stop - recipe.num_pending)

    def add_source(self, find: Callable[[str], Recipe | None]) -> None:
        """One more place to ask for recipes that nobody else knows."""
        self._sources.append(find)

    def remove_source(self, find: Callable[[str], Recipe | None]) -> None:
        """Ask there no more. Idempotent."""
        if find in self._sources:
            self._sources.remove(find)

    def lineage(self, recipe: Recipe) -> tuple[Recipe, ...]:
        """What a recipe stands on, root first, itself last. What was composed stands on all that it was composed of."""
        found: dict[str, Recipe] = {}

        def visit(at: Recipe) -> None:
            line: list[Recipe] = []
            up: Recipe | None = at
            while up is not None and up.kv_id not in found:
                line.append(up)
                up = self.find(up.parent) if up.parent else None
            for one in reversed(line):
                for kv_id in one.composition.children if one.composition else ():
                    child = self.find(kv_id)
                    if child is not None:
                        visit(child)
                found[one.kv_id] = one

        visit(recipe)
        return tuple(found.values())

    def parents(self, recipe: Recipe) -> tuple[Recipe, ...]:
        """The recipes whose tokens begin a recipe's, root first, itself last."""
        line = [recipe]
        while line[-1].parent is not None:
            line.append(self._recipes[line[-1].parent])
        return tuple(reversed(line))

    def is_exact(self, recipe: Recipe) -> bool:
        """Did no approximate compose take part?"""
        return all(
            one.composition is None or one.composition.rung not in APPROXIMATE_RUNGS for one in self.parents(recipe)
        )

    def names_of(self, recipe: Recipe) -> tuple[str, ...]:
        """Names of the blocks and borders that a known recipe adds to its parent: by these its extents are found."""
        sequence = self.sequence(recipe.kv_id)
        inside = sorted({stop for stop in self._own_borders(recipe) if stop % BLOCK_TOKENS})
        ends = (self._store.name(sequence, stop) for stop in inside)
        return (*sequence.hashes[recipe.start // BLOCK_TOKENS : recipe.stop // BLOCK_TOKENS], *ends)

    def sequence(self, kv_id: str) -> TokenSequence:
        """Token ids and block hashes of a known recipe, put together along its parents."""
        with self._lock:
            return self._sequence(kv_id)

    def borders(self, recipe: Recipe) -> list[int]:
        """Positions where extents of a recipe and its parents end."""
        borders: list[int] = []
        at: Recipe | None = recipe
        while at is not None:
            borders += self._own_borders(at)
            at = self._recipes.get(at.parent) if at.parent else None
        return borders

    def _own_borders(self, recipe: Recipe) -> list[int]:
        borders = [recipe.stop - recipe.num_pending, recipe.stop]
        if recipe.operator == "generate":
            borders.append(recipe.turns[-1].content.start)  # the prompt was published before the answer was known
        return borders

    def share_again(self) -> None:
        """Give every local recipe to an index that forgot them."""
        with self._lock:
            recipes = list(self._recipes.values())
            self._shared.clear()
        for recipe in recipes:
            self._share(recipe)

    def save(self) -> None:
        """Write recipes that the disk does not have yet. What it cannot take now is tried again at the next call,
        unless the capacity can never hold it.
        """
        if self._store.disk is None:
            return
        with self._lock:
            unsaved = [self._recipes[kv_id] for kv_id in self._unsaved]
        for recipe in unsaved:
            try:
                self._store.disk.write_recipe(recipe)
            except (CapacityError, OSError) as error:
                if not self._has_warned:
                    self._has_warned = True
                    _log.warning("recipes cannot be written to disk now (said once): %s", error)
                if not isinstance(error, PoolExhausted):
                    return  # a full disk is full for the others, too; one that is too large is alone with that
            with self._lock:
                if self._recipes[recipe.kv_id] is recipe:  # else one with a chat structure came meanwhile
                    self._unsaved.pop(recipe.kv_id, None)

    def check(self) -> list[Finding]:
        """Recipes that rebuild something else than they are named for (I5), or are of another namespace (I6)."""
        found = []
        for recipe in list(self._recipes.values()):
            sequence = self.sequence(recipe.kv_id)
            named = self._store.name(sequence, len(sequence.token_ids))
            if named != recipe.kv_id:
                found.append(Finding("I5", f"recipe {recipe.kv_id[:12]} rebuilds {named[:12]}"))
            if recipe.namespace != self._namespace:
                found.append(Finding("I6", f"recipe {recipe.kv_id[:12]} belongs to namespace {recipe.namespace[:12]}"))
        return found

    def _joints(self, recipe: Recipe) -> tuple[Joint, ...]:
        """Where a recipe's own tokens begin to be composed."""
        if recipe.composition is None:
            return ()
        return (Joint(recipe.start, joint_digest(self._namespace, recipe.composition.composite_id)),)

    def _share(self, recipe: Recipe) -> None:
        """Tell a shared index of a recipe and of those it stands on: none of them may end before it does.

        What it was told lately it is not told again, so the lease is longer than promised by what "lately" means.
        """
        lately_s = RECIPE_LEASE_S / 8
        for at in reversed(self.lineage(recipe)):
            told, told_s = self._shared.get(at.kv_id, (None, 0.0))
            if told is not at or time.monotonic() - told_s > lately_s:
                self._shared[at.kv_id] = at, time.monotonic()
                self._store.index.put_recipe(at, RECIPE_LEASE_S + lately_s)

    def _enter(self, recipe: Recipe, sequence: TokenSequence) -> None:
        """Keep a recipe. ``sequence`` holds its tokens, and may go on behind them."""
        is_computed = all(recipe.stop <= joint.start for joint in sequence.joints)
        if recipe.kv_id not in self._recipes and is_computed:
            ids, stop = sequence.token_ids, recipe.stop
            self._prefixes.add(recipe.kv_id, ids if len(ids) == stop else ids[:stop], sequence.hashes, recipe.start)
        self._recipes[recipe.kv_id] = recipe

    def _read(self, kv_id: str) -> Recipe | None:
        recipe = self._store.index.recipe(kv_id) if self._store.index.shared else None
        if recipe is None and self._store.disk is not None:
            recipe = self._store.disk.read_recipe(kv_id)
        for source in self._sources if recipe is None else ():
            recipe = recipe or source(kv_id)
        return recipe

    def _sequence(self, kv_id: str) -> TokenSequence:
        kept = self._sequences.get(kv_id)
        if kept is not None:
            self._sequences.move_to_end(kv_id)
            return kept
        line = self.parents(self._recipes[kv_id])
        ids = tuple(token for recipe in line for token in recipe.token_ids)
        sequence = self._store.sequence(ids, joints=tuple(joint for recipe in line for joint in self._joints(recipe)))
        self._remember(kv_id, sequence)
        return sequence

    def _remember(self, kv_id: str, sequence: TokenSequence) -> None:
        self._sequences[kv_id] = sequence
        self._sequences.move_to_end(kv_id)
        while len(self._sequences) > _SEQUENCES_KEPT:
            self._sequences.popitem(last=False)
