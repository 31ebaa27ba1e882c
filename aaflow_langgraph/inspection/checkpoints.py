"""The manifest beside a saver against its files and rows: what contradicts itself, and what nothing needs any more.

Knows what each belongs to; opens nothing (checkpoint/beside.py does) and loads no model. Tensors are evictable, so what is
named and not there is worth a note, never a finding.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial

from aaflow_langgraph.checkpoint.beside import MANIFEST, Beside, Manifest, SeenFile
from aaflow_langgraph.checkpoint.locks import ThreadLocks
from aaflow_langgraph.checkpoint.sidecar import CONFIRMED, Key, Sidecar, Slot
from aaflow_langgraph.errors import IntegrityError, RecipeMissing

GRACE_S = 3600.0
"""What was written ahead in the last hour may still be on its way."""

WHERE = "checkpoints"


def findings(beside: Beside, clock: Callable[[], float] = time.time) -> Iterator[tuple[str, str]]:
    """(invariant, what) of everything that is wrong with a manifest, its files and the saver's rows."""
    manifest = beside.manifest()
    yield from _of_recipes(beside, manifest)
    for slot, num in stray(beside, manifest, clock() - GRACE_S).items():
        where = "the writes of a task" if slot.task_id else "the state"
        yield "I12", f"{num} references belong to {where} of {_shown(slot.key)}, which the saver does not have"
    for file in unneeded(beside, manifest):
        yield "I11", f"file {file.extent.name} ({file.num_bytes} bytes) holds tensors that no recipe needs"


def notes(beside: Beside) -> Iterator[str]:
    """What is no fault, and what could not be looked at."""
    manifest = beside.manifest()
    if not beside.has_rows:
        yield "the saver's own rows are not known here: whether it has what the references are for was not looked at"
    foreign = Counter(one.namespace for one in manifest.references if one.kv_id not in manifest.recipes)
    for namespace, num in foreign.items():
        yield f"{num} references to handles of {namespace[:12]} have no recipe: no broker of the saver could account for them"
    if sealed := sum(recipe.type != "json" for recipe in manifest.recipes.values()):
        yield f"{sealed} recipes are encrypted and were not read"
    if beside.inventory is None:
        return
    on_disk = {name for file in beside.files() for name in file.names}
    there = {kv_id for name in on_disk & manifest.names.keys() for kv_id in manifest.names[name]}
    if absent := len(manifest.recipes.keys() - there):
        yield f"the tensors of {absent} of {len(manifest.recipes)} recipes are not on disk: they are computed when needed"


def unneeded(beside: Beside, manifest: Manifest) -> list[SeenFile]:
    """Files that no recipe needs."""
    return [file for file in beside.files() if not any(name in manifest.names for name in file.names)]


def unreferred(manifest: Manifest) -> list[str]:
    """Recipes that neither a reference nor another recipe needs; with them everything that only they need goes."""
    needed = {kv_id for one in manifest.references for kv_id in manifest.lineage(one.kv_id)}
    return sorted(manifest.recipes.keys() - needed)


def stray(beside: Beside, manifest: Manifest, before_s: float) -> Counter[Slot]:
    """References of what the saver does not have, by their slots; those written ahead after ``before_s`` are left alone."""
    if not beside.has_rows:
        return Counter()
    old = Counter(one.slot for one in manifest.references if one.state == CONFIRMED or one.created_s <= before_s)
    return Counter({slot: num for slot, num in old.items() if not beside.is_stored(slot)})


def _of_recipes(beside: Beside, manifest: Manifest) -> Iterator[tuple[str, str]]:
    if unused := unreferred(manifest):
        yield "I11", f"{len(unused)} recipes are needed by no checkpoint, the first is {unused[0][:12]}"
    for kv_id, recipe in manifest.recipes.items():
        if recipe.parent is not None and recipe.parent not in manifest.recipes:
            yield "I12", f"recipe {kv_id[:12]} stands on {recipe.parent[:12]}, which is not there"
        if recipe.type != "json":
            continue
        try:
            stored = beside.recipe(kv_id)
        except (IntegrityError, RecipeMissing) as error:
            yield "I5", f"recipe {kv_id[:12]} cannot be read: {error}"
            continue
        told = (recipe.namespace, recipe.parent, recipe.num_tokens)
        if stored is not None and (stored.namespace, stored.parent, stored.stop) != told:
            yield "I5", f"recipe {kv_id[:12]} says something else than its row"


def _shown(key: Key) -> str:
    return f"checkpoint {key.checkpoint_id} of thread {key.thread_id!r}" + (
        f" in {key.checkpoint_ns!r}" if key.checkpoint_ns else ""
    )


# ---------------------------------------------------------------- what can be removed


class Removal:
    """Takes out of a manifest and its files what nothing needs, one thing at a time. A context manager.

    Every removal looks again, under the thread's lock or in the manifest's own transaction: what is needed by then stays.

    Raises:
        ConfigError: The manifest cannot be opened to write. Way out: fail.
    """

    def __init__(self, beside: Beside) -> None:
        self._beside = beside
        self._undo = ExitStack()
        self._sidecar: Sidecar | None = None

    def __enter__(self) -> Removal:
        return self

    def __exit__(self, *exc: object) -> None:
        self._undo.close()

    def steps(self, clock: Callable[[], float] = time.time) -> Iterator[tuple[str, int, Callable[[], bool]]]:
        """(what, bytes, how) of each thing."""
        beside, manifest = self._beside, self._beside.manifest()
        before_s = clock() - GRACE_S
        for slot in stray(beside, manifest, before_s):
            yield f"references of {_shown(slot.key)}, which the saver does not have", 0, partial(self._drop, slot)
        if unused := unreferred(manifest):
            yield f"recipes that no checkpoint needs: {len(unused)}", 0, self._drop_recipes
        for file in unneeded(beside, manifest):
            yield f"extents/{file.extent.name}, which no recipe needs", file.num_bytes, partial(self._unlink, file)

    def _drop(self, slot: Slot) -> bool:
        with ThreadLocks(self._beside.directory / "locks").acquire([slot.key.thread_id]):
            if self._beside.is_stored(slot):
                return False
            self._opened().drop([slot])
            return True

    def _drop_recipes(self) -> bool:
        self._opened().drop_orphans()
        return True

    def _unlink(self, file: SeenFile) -> bool:
        if self._beside.inventory is None or self._opened().needs(file.names):
            return False
        return self._beside.inventory.remove_extent(file.namespace, file.extent.name)

    def _opened(self) -> Sidecar:
        if self._sidecar is None:
            self._sidecar = Sidecar(self._beside.directory / MANIFEST)
            self._undo.callback(self._sidecar.close)
        return self._sidecar
