"""What a saver owes to the handles in its checkpoints: their recipes, as far as wanted their tensors, and an end of both.

Knows brokers, the manifest and a disk pool; knows no LangGraph saver. All of it is synchronous and may wait for a disk.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

from aaflow_langgraph.broker import KVBroker
from aaflow_langgraph.checkpoint.sidecar import Key, NoRoom, RecipeRow, Reference, Sidecar, Slot
from aaflow_langgraph.errors import (
    AAFlowError,
    CapacityError,
    ConfigError,
    IncompatibleHandle,
    IntegrityError,
    PersistenceError,
    RecipeMissing,
)
from aaflow_langgraph.handle import KVHandle
from aaflow_langgraph.model import Finding, Recipe
from aaflow_langgraph.pool._recipe_file import decode, encode
from aaflow_langgraph.pool.disk import DiskPool

Durability = Literal["recipe", "evict", "sync", "async"]

EXTENTS_BYTES = 16 << 30
"""The most that the tensors of one model may take beside a saver; those used least recently go first. A broker that was
opened with ``disk=`` keeps them there instead, by its own ``disk_bytes``."""

Result = TypeVar("Result")

_UNREMOVED = "tensors could not be removed and stay until the next sweep: %s"
_UNCONFIRMED = "references stay unconfirmed until the next sweep: %s"
_MAX_TRIES = 4
_MAX_UNWRITTEN = _MAX_SAID = 4096
_log = logging.getLogger("aaflow_langgraph")


@dataclass(frozen=True, slots=True)
class Codec:
    """How a recipe's file becomes the ``(type, body)`` of a row, and back: plain, or through a saver's cipher.

    With ``hides`` block hashes are left out, too: no tensors are found by them, and they tell who can guess a text that it is
    there.
    """

    hides: bool
    dumps: Callable[[bytes], tuple[str, bytes]]
    loads: Callable[[tuple[str, bytes]], bytes]


class Ledger:
    """Thread-safe. One per open saver; several may share a directory.

    Raises:
        ConfigError: The directory cannot hold a manifest or extents. Way out: fail.
    """

    def __init__(self, directory: Path, brokers: Sequence[KVBroker], durability: Durability, codec: Codec) -> None:
        self.sidecar = Sidecar(directory / "manifest.sqlite")
        self.num_tensor_failures = 0
        self._brokers = {broker.namespace.digest: broker for broker in brokers}
        self._durability = durability
        self._codec = codec
        self._lock = threading.Lock()
        self._said: set[str] = set()
        self._unwritten: dict[str, KVHandle] = {}
        """Handles whose tensors could not be written: tried again at the end."""
        self._disks: dict[str, DiskPool] = {}
        self._closed = False
        self._undo = ExitStack()
        self._undo.callback(self.sidecar.close)
        try:
            self.forget(self.with_room(self.sidecar.drop_orphans))
            for broker in brokers:
                self._attach(broker, directory / "extents")
        except BaseException:
            self._undo.close()
            raise

    def close(self) -> None:
        """Write the tensors that are wanted, then let the brokers go. Idempotent."""
        self._persist([handle for handle in self._unwritten.values() if not self._closed and self._is_kept(handle)])
        self._closed = True
        self._undo.close()

    # ---------------------------------------------------------------- a checkpoint's handles

    def note(self, slot: Slot, handles: Sequence[KVHandle], *, again: bool) -> None:
        """Before the saver stores what holds ``handles``: recipes and references first, durable; then tensors, by policy.

        ``again``: something was stored there before, so ``keep_only`` is owed when the saver has both. A handle that no broker
        here can account for is referred to and logged once, nothing more: it was as unreadable before it was checkpointed.

        Raises:
            PersistenceError: A recipe cannot be written, or a broker of this saver was closed before its handle's recipe
                was. Way out: fail.
        """
        if not handles and not again:
            return
        # A composite can be made again from its segments only, so they stay as long as it does.
        parts = [part for handle in handles for part in self._segments(handle)]
        references = sorted({Reference(handle.kv_id, handle.kv_namespace) for handle in (*handles, *parts)})
        for attempt in range(_MAX_TRIES):
            rows: dict[str, RecipeRow] = {}
            accounted: set[str] = set()
            for handle in handles:
                missing = self._missing_rows(handle, everything=attempt > 0)
                if missing is not None:
                    accounted.add(handle.kv_id)
                    rows |= {row.kv_id: row for row in missing if row.kv_id not in rows}
            note = partial(self.sidecar.note, again=again)
            if self.with_room(note, slot, references, list(rows.values()), accounted):
                break
        else:
            raise PersistenceError(
                f"recipes for {slot.key.thread_id!r} were deleted {_MAX_TRIES} times while they were written; run again"
            )
        if self._durability == "sync":
            undone = self.sidecar.not_durable(accounted)
            self._persist([handle for handle in handles if handle.kv_id in undone])

    def with_room(self, change: Callable[..., Result], *details: Any) -> Result:
        """A change of the manifest; on a full disk tensors make room for it, as long as there are any.

        Raises:
            PersistenceError: It cannot be written. Way out: fail.
        """
        while True:
            try:
                return change(*details)
            except NoRoom as error:
                if not self._make_room():
                    raise
                self._say(
                    "room", "the disk is full: tensors are removed so that the manifest can be written (%s)", error
                )

    def confirm(self, slots: Collection[Slot]) -> None:
        """The saver has what these references are for. A failure costs a look at the saver at the next sweep, no more."""
        if not slots:
            return
        try:
            self.sidecar.confirm(slots)
        except PersistenceError as error:
            self._say("confirm", _UNCONFIRMED, error)

    def confirm_checkpoint(self, key: Key) -> list[Slot]:
        """The saver has this checkpoint, and so the writes that came ahead of it. Returns slots of which it must be asked."""
        try:
            ahead, again = self.sidecar.open_slots_of(key), self.sidecar.slots_again(key)
        except PersistenceError as error:
            self._say("confirm", _UNCONFIRMED, error)
            return []
        self.confirm([slot for slot in ahead if slot not in again])
        return sorted(again)

    def keep_only(self, slot: Slot, handles: Sequence[KVHandle]) -> None:
        """The saver has these in a slot that was written again: what it did not keep is not referred to any more.

        In doubt, as where a handle's model is not loaded, all of it stays: bytes until the checkpoint is deleted.
        """
        kept = {handle.kv_id for handle in handles}
        try:
            for handle in handles:
                broker = self._broker(handle)
                if broker is None:
                    return
                kept.update(part.kv_id for part in broker.segments_of(handle))
            self.forget(self.with_room(self.sidecar.keep_only, slot, kept))
        except (RecipeMissing, IncompatibleHandle, ConfigError):
            return
        except PersistenceError as error:
            self._say("confirm", _UNCONFIRMED, error)

    def forget(self, freed: Mapping[str, Sequence[str]]) -> int:
        """Remove the tensors that only deleted recipes had; bytes."""
        removed = 0
        for namespace, names in freed.items():
            broker = self._brokers.get(namespace)
            if broker is None:
                self._say(
                    "unloaded",
                    "tensors of a model that is not loaded stay until a sweep with its broker: %s",
                    namespace,
                )
                continue
            try:
                removed += broker.forget_names(names, self._is_needed)
            except (CapacityError, ValueError) as error:  # ValueError: the broker was closed, and its disk with it
                self._say("forget", _UNREMOVED, error)
        return removed

    def sweep_extents(self) -> int:
        """Remove tensors that no recipe needs, and what dead writers left; damaged files go to quarantine. Bytes removed."""
        removed = 0
        for namespace, disk in self._disks.items():
            before = disk.used_bytes
            try:
                disk.sweep()
                damaged: list[Finding] = []
                extents = list(disk.scan(damaged, quarantine=True))
                for finding in damaged:
                    self._say("damaged", "tensors cannot be read and are computed again (said once): %s", finding.what)
                for extent in extents:
                    names = (*extent.hashes, extent.end_id)
                    if not self._is_needed(names):
                        self.forget({namespace: names})
                        disk.remove(extent.name)
            except (CapacityError, ValueError) as error:
                self._say("forget", _UNREMOVED, error)
                continue
            removed += max(0, before - disk.used_bytes)
        return removed

    def tensor_bytes(self) -> int:
        """What the files of tensors take, for the brokers that keep them beside this saver."""
        return sum(disk.used_bytes for disk in self._disks.values())

    # ---------------------------------------------------------------- inside

    def _make_room(self) -> bool:
        """Remove some tensors; False when there are none, or none can be removed."""
        for namespace, disk in self._disks.items():
            with contextlib.suppress(CapacityError, ValueError):
                for extent in disk.scan():
                    self._brokers[namespace].forget_names((*extent.hashes, extent.end_id), lambda names: False)
                    disk.remove(extent.name)  # the broker may not know a file of another process
                    return True
        return False

    def _attach(self, broker: KVBroker, extents: Path) -> None:
        broker.add_recipe_source(self._find)
        self._undo.callback(broker.remove_recipe_source, self._find)
        # What an earlier session wrote is read, and can be deleted, under "recipe" too.
        if broker.has_disk or (self._durability == "recipe" and not extents.exists()):
            return
        disk = DiskPool(extents, broker.namespace.digest, broker.engine.layout, EXTENTS_BYTES)
        self._undo.callback(disk.close)
        self._disks[broker.namespace.digest] = disk
        self.sweep_extents()
        wants = (lambda names: False) if self._durability == "recipe" else self._wants
        try:
            broker.attach_disk(disk, write="behind" if self._durability == "async" else "evict", wants=wants)
        except ConfigError:  # somebody else attached one since we looked
            del self._disks[broker.namespace.digest]
            return
        self._undo.callback(broker.detach_disk)

    def _broker(self, handle: KVHandle) -> KVBroker | None:
        return self._brokers.get(handle.kv_namespace)

    def _is_kept(self, handle: KVHandle) -> bool:
        return self.sidecar.has_recipe(handle.kv_id)

    def _wants(self, names: Sequence[str]) -> bool:
        """What a broker asks while it makes room: an answer, whatever the manifest's state."""
        try:
            return self.sidecar.needs(names)
        except (PersistenceError, ConfigError) as error:
            self._say("wants", "tensors are not written while the manifest cannot be read: %s", error)
            return False

    def _is_needed(self, names: Sequence[str]) -> bool:
        """What is asked before tensors are removed: in doubt they stay."""
        try:
            return self.sidecar.needs(names)
        except PersistenceError as error:
            self._say("needed", "tensors are not removed while the manifest cannot be read: %s", error)
            return True

    def _find(self, kv_id: str) -> Recipe | None:
        """What brokers ask for recipes that they do not know."""
        try:
            stored = self.sidecar.recipe(kv_id)
            return None if stored is None else decode(self._codec.loads(stored))
        except (PersistenceError, ConfigError, IntegrityError, RecipeMissing) as error:
            self._say(f"find {kv_id}", "the recipe of %s beside the saver cannot be read: %s", kv_id[:12], error)
            return None

    def _segments(self, handle: KVHandle) -> tuple[KVHandle, ...]:
        """What a handle was composed of, as far as somebody here knows."""
        broker = self._broker(handle)
        try:
            return () if broker is None else broker.segments_of(handle)
        except (RecipeMissing, IncompatibleHandle, ConfigError):
            return ()  # ``_missing_rows`` says what is wrong with it

    def _missing_rows(self, handle: KVHandle, *, everything: bool) -> list[RecipeRow] | None:
        """Recipes that a handle stands on and the manifest lacks, root first; None when nobody here can account for it."""
        broker = self._broker(handle)
        is_stored = self.sidecar.has_recipe(handle.kv_id)
        if broker is None:
            if not is_stored:
                self._say(
                    f"foreign {handle.kv_namespace}",
                    "handles of namespace %s belong to no broker of this saver: they are stored without recipes, and can be "
                    "read as long as their own broker lives. Pass that broker, too: KVCheckpointSaver(inner, [broker, other])",
                    handle.kv_namespace[:12],
                )
            return None
        try:
            lineage = broker.lineage(handle)
        except (RecipeMissing, IncompatibleHandle) as error:
            if not is_stored:
                self._say(
                    f"unknown {handle.kv_id}",
                    "a handle is stored that nothing can rebuild: %s. Was it made by a second broker of the same model, "
                    "opened by a file that ran twice, as langgraph dev runs them? Open the broker in a module that is imported",
                    error,
                )
            return None
        except ConfigError as error:  # the broker is closed
            if is_stored:
                return []
            raise PersistenceError(
                f"the recipe of handle {handle.kv_label or handle.kv_id[:12]!r} cannot be stored, so its checkpoint was not: "
                f"{error}. Close the broker after the saver"
            ) from error
        wanted: list[Recipe] = []
        is_line = all(recipe.composition is None for recipe in lineage)
        for recipe in reversed(lineage):
            if not everything and self.sidecar.has_recipe(recipe.kv_id, with_chat=recipe.has_chat):
                if is_line:
                    break
                continue
            wanted.append(recipe)
        return [self._row(broker, recipe) for recipe in reversed(wanted)]

    def _row(self, broker: KVBroker, recipe: Recipe) -> RecipeRow:
        kind, body = self._codec.dumps(encode(recipe))
        return RecipeRow(
            recipe.kv_id,
            recipe.namespace,
            recipe.parent,
            recipe.stop,
            recipe.has_chat,
            kind,
            body,
            () if self._codec.hides else broker.names_of(recipe),
        )

    def _persist(self, handles: Sequence[KVHandle]) -> None:
        """Write tensors now; what cannot be written is counted, marked, and tried again with the next checkpoint."""
        is_durable: dict[str, bool] = {}
        for handle in handles:
            broker = self._broker(handle)
            if broker is None:
                continue
            try:
                is_durable[handle.kv_id] = broker.persist(handle)
                if not is_durable[handle.kv_id]:
                    self._say(
                        "persist",
                        "tensors of %d tokens are not all on disk: some left the pool before they could be written, or never "
                        "fitted into it (pool_bytes), or the disk cannot take them; they will be computed again",
                        handle.kv_tokens,
                    )
            except (ConfigError, ValueError) as error:  # closed meanwhile; it wrote what was wanted then
                self._say("persist", "the broker is closed, so whether tensors are on disk is not known: %s", error)
            except AAFlowError as error:
                is_durable[handle.kv_id] = False
                self._say(f"persist {type(error).__name__}", "tensors could not be written: %s", error)
        if not is_durable:
            return
        with self._lock:
            self.num_tensor_failures += sum(not is_on for is_on in is_durable.values())
            for handle in handles:
                if is_durable.get(handle.kv_id, True):
                    self._unwritten.pop(handle.kv_id, None)
                elif len(self._unwritten) < _MAX_UNWRITTEN:
                    self._unwritten[handle.kv_id] = handle
        try:
            self.sidecar.mark_durable(is_durable)
        except PersistenceError as error:
            self._say("mark", "which tensors are on disk was not noted: %s", error)

    def _say(self, kind: str, message: str, *details: object) -> None:
        with self._lock:
            said = kind in self._said or len(self._said) == _MAX_SAID
            if len(self._said) < _MAX_SAID:
                self._said.add(kind)
        if not said:
            _log.warning(message, *details)
