"""What the inspector can know without a broker: from a shared index, a disk pool's directory, and what lies beside a saver.

Nobody counts requests there, so there are no times and no misses: handles, their lineage, where their KV is, and how full
the pools are.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import Any

from aaflow_langgraph.checkpoint.beside import Beside
from aaflow_langgraph.errors import AAFlowError, ConfigError, IntegrityError, RecipeMissing
from aaflow_langgraph.graph.rejected import RejectedWrite
from aaflow_langgraph.hashing import block_hashes, prefix_id
from aaflow_langgraph.index.base import ExtentKey, ExtentRecord
from aaflow_langgraph.index.census import shared_recipes
from aaflow_langgraph.inspection.history import tokenizer_of
from aaflow_langgraph.inspection.view import MEMORY, Outside, document, file_of
from aaflow_langgraph.model import BLOCK_TOKENS, Recipe
from aaflow_langgraph.pool.inventory import Inventory
from aaflow_langgraph.studio.facts import Facts, tokens_along

LOOK_S = 3.0
"""So long a look is good for: it reads directories and whole indexes."""


class FromOutside:
    """A ``Source``. A context manager.

    Args:
        index: A URL, or ``"memory://"`` for none.
        disk: A disk pool's directory.
        checkpoints: What ``Beside`` takes.
        model: Whose tokenizer turns ids into text; None: no text.

    Raises:
        ConfigError: Nothing to look at, or it is something else. Way out: fail.
    """

    def __init__(
        self,
        index: str,
        disk: str | None,
        checkpoints: str | None,
        model: str | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if (index, disk, checkpoints) == (MEMORY, None, None):
            raise ConfigError(
                "nothing to look at: give --index URL, --disk DIR or --checkpoints PATH. A broker whose index is in memory is "
                "seen by its own process only: mount inspector_app(broker) there"
            )
        self._named = {"index": index if index != MEMORY else None, "disk": disk, "checkpoints": checkpoints}
        self._checkpoints = checkpoints
        self._clock = clock
        self._lock = threading.RLock()
        self._looked_s = -LOOK_S - 1
        self._facts = Facts({}, ())
        self._pools: list[dict[str, Any]] = []
        self._files = {"num_extents": 0, "num_recipes": 0, "num_bytes": 0}
        self._problem = ""
        self._recipes: dict[str, Recipe] = {}
        self._decode = None if model is None else tokenizer_of(model)
        with ExitStack() as undo:
            looks = [] if (index, disk) == (MEMORY, None) else [Outside(index, disk)]
            if checkpoints is not None:
                with Beside(checkpoints) as beside:
                    looks += [] if beside.extents is None else [Outside(MEMORY, str(beside.extents))]
            self._outsides = [undo.enter_context(one) for one in looks]
            self._closing = undo.pop_all()

    def __enter__(self) -> FromOutside:
        return self

    def __exit__(self, *exc: object) -> None:
        self._closing.close()

    def facts(self) -> Facts:
        """As of the last look.

        Raises:
            ConfigError, IndexUnavailable: It cannot be looked at now.
        """
        with self._lock:
            if self._clock() - self._looked_s > LOOK_S:
                try:
                    self._facts = self._look()
                    self._problem = ""
                except AAFlowError as error:
                    self._problem = str(error)
                    raise
                finally:
                    self._looked_s = self._clock()
            elif self._problem:
                raise ConfigError(self._problem)
            return self._facts

    def overview(self) -> dict[str, Any]:
        """What is looked at, and how full the pools are."""
        with suppress(AAFlowError):
            self.facts()
        with self._lock:
            return {
                "kind": "outside",
                "state": "unreachable" if self._problem else "open",
                "problem": self._problem,
                "looks_at": self._named | {"index": (self._named["index"] or "").partition("://")[0]},
                "pools": self._pools,
                "files": self._files,
                "num_handles": len(self._facts.recipes),
                "num_requests": 0,
                "num_movements": 0,
                "num_rejected": 0,
                "threads": [],
                "stats": None,
                "pool": None,
            }

    def names_of(self, recipe: Recipe) -> Sequence[str]:
        """As ``RecipeBook`` names them, hashed here."""
        with self._lock:
            ids = tokens_along(self._recipes, recipe.kv_id)
        hashes = block_hashes(recipe.namespace, ids)
        stops = {recipe.stop - recipe.num_pending, recipe.stop}
        if recipe.operator == "generate" and recipe.turns:
            stops.add(recipe.turns[-1].content.start)
        inside = [stop for stop in sorted(stops) if stop % BLOCK_TOKENS and stop > recipe.start]
        ends = [prefix_id(recipe.namespace, ids, stop, hashes) for stop in inside]
        return (*hashes[recipe.start // BLOCK_TOKENS : recipe.stop // BLOCK_TOKENS], *ends)

    def decode(self, token_ids: Sequence[int]) -> str | None:
        """By the tokenizer of ``model``."""
        return None if self._decode is None else self._decode(token_ids)

    def spell(self, token_ids: Sequence[int]) -> str | None:
        """The same: it leaves out nothing."""
        return self.decode(token_ids)

    def rejected(self) -> Sequence[RejectedWrite]:
        """Channels tell only their own process."""
        return ()

    def why_missed(self, number: int, *, with_text: bool) -> dict[str, Any] | None:
        """Nobody counts requests here."""
        return None

    # ---------------------------------------------------------------- inside

    def _look(self) -> Facts:
        records: dict[ExtentKey, ExtentRecord] = {}
        recipes: dict[str, Recipe] = {}
        token_bytes = 0
        self._pools = []
        self._files = dict.fromkeys(self._files, 0)
        for outside in self._outsides:
            seen = outside.look()
            for one, told in zip(seen, document(seen)["namespaces"], strict=True):
                self._pools += [{"namespace": one.namespace, **owner} for owner in told["owners"]]
                for name in self._files if told["files"] is not None else ():
                    self._files[name] += told["files"][name]
                for record in one.records():
                    records[record.key] = record
                if one.index is not None:
                    recipes.update((recipe.kv_id, recipe) for recipe in shared_recipes(one.index, one.namespace))
                if one.stock is not None and one.stock.layout is not None:
                    token_bytes = token_bytes or one.stock.layout.token_bytes
            if outside.inventory is not None:
                self._from_disk(outside.inventory, records, recipes)
        threads: dict[str, set[str]] = {}
        if self._checkpoints is not None:
            self._from_saver(recipes, threads)
        self._recipes = _rooted(recipes)
        numbered = tuple(replace(record, extent_id=number) for number, record in enumerate(records.values()))
        return Facts(self._recipes, numbered, token_bytes=token_bytes, threads=threads)

    def _from_disk(
        self,
        inventory: Inventory,
        records: dict[ExtentKey, ExtentRecord],
        recipes: dict[str, Recipe],
    ) -> None:
        known = {file_of(record) for record in records.values()}
        for namespace in inventory.namespaces():
            for recipe in inventory.recipes(namespace):
                recipes[recipe.kv_id] = recipe
            for stored, _ in inventory.heads(namespace):
                if stored.name in known:
                    continue
                record = ExtentRecord(
                    extent_id=0,
                    start=stored.start,
                    stop=stored.stop,
                    token_ids=(),
                    end_id=stored.end_id,
                    hashes=stored.hashes,
                    canonical_stop=stored.canonical_stop,
                    parent=None,
                    place=None,
                    checksum=stored.checksum,
                    on_disk=True,
                )
                records[record.key] = record

    def _from_saver(self, recipes: dict[str, Recipe], threads: dict[str, set[str]]) -> None:
        assert self._checkpoints is not None
        with Beside(self._checkpoints) as beside:
            manifest = beside.manifest()
            for one in manifest.references:
                threads.setdefault(one.kv_id, set()).add(one.slot.key.thread_id)
            for kv_id in manifest.recipes:
                if kv_id in recipes:
                    continue
                known = self._recipes.get(kv_id)
                if known is None:
                    with suppress(IntegrityError, RecipeMissing):  # aaflow check tells of those
                        known = beside.recipe(kv_id)
                if known is not None:
                    recipes[kv_id] = known


def _rooted(recipes: dict[str, Recipe]) -> dict[str, Recipe]:
    """Parents before children, in an order that does not depend on where they were found."""
    ordered: dict[str, Recipe] = {}
    for kv_id in sorted(recipes, key=lambda at: (recipes[at].stop, at)):
        ordered[kv_id] = recipes[kv_id]
    return ordered
