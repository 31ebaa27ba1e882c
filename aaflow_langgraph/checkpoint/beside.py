"""What lies beside a saver, seen from outside: its manifest, the files of its tensors, and the rows of an SQLite saver.

Opened read-only, while others work on it; loads no model. Knows the tables; decodes no checkpoint and judges nothing.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

from aaflow_langgraph._directory import expanded
from aaflow_langgraph.checkpoint.sidecar import _APPLICATION_ID, FORMAT_VERSION, Key, Slot
from aaflow_langgraph.errors import ConfigError, IntegrityError
from aaflow_langgraph.model import BLOCK_TOKENS, Recipe
from aaflow_langgraph.pool._recipe_file import decode
from aaflow_langgraph.pool._safetensors import StoredExtent
from aaflow_langgraph.pool.inventory import Inventory

MANIFEST = "manifest.sqlite"
LOCAL = "checkpoints.sqlite"
_BUSY_S = 30.0


@dataclass(frozen=True, slots=True)
class SeenRecipe:
    """A recipe's row, without its body. ``is_durable``: None when nobody tried to write its tensors and said so."""

    kv_id: str
    namespace: str
    parent: str | None
    num_tokens: int
    is_durable: bool | None
    type: str


class SeenReference(NamedTuple):
    """A handle that a checkpoint's state, or a task's writes, hold."""

    slot: Slot
    kv_id: str
    namespace: str
    state: int
    created_s: float


@dataclass(frozen=True, slots=True)
class Manifest:
    """All of it at one moment. ``names``: which recipes have a block hash or a border's id."""

    recipes: dict[str, SeenRecipe]
    names: dict[str, set[str]]
    references: list[SeenReference]

    def lineage(self, kv_id: str) -> list[str]:
        """What a handle stands on as far as it is there, itself first."""
        found: dict[str, None] = {}
        at: str | None = kv_id
        while at is not None and at in self.recipes and at not in found:
            found[at] = None
            at = self.recipes[at].parent
        return list(found)


class SeenFile(NamedTuple):
    """A whole file of tensors."""

    namespace: str
    extent: StoredExtent
    num_bytes: int

    @property
    def names(self) -> tuple[str, ...]:
        """What its extent is known by."""
        return (*self.extent.hashes, self.extent.end_id)

    def usable_stop(self, names: set[str]) -> int:
        """Up to which position a sequence with these names can read it; its start when it cannot."""
        extent = self.extent
        if extent.end_id in names:
            return extent.stop
        known = [number for number, name in enumerate(extent.hashes) if name in names]
        return (extent.start // BLOCK_TOKENS + known[-1] + 1) * BLOCK_TOKENS if known else extent.start


class Row(NamedTuple):
    """A checkpoint as an SQLite saver stores it."""

    key: Key
    parent_id: str | None
    type: str
    checkpoint: bytes
    metadata: bytes


class Beside:
    """Opened to look. A context manager.

    Args:
        path: What ``KVCheckpointSaver.local`` made, the ``directory=`` of a saver, or the file of an SQLite saver.

    Raises:
        ConfigError: No manifest is there, it cannot be read, is another program's or a newer version's. Way out: fail.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.directory, self.rows_file = _places(expanded(path))
        self._undo = ExitStack()
        with ExitStack() as undo:
            self._manifest = _opened(self.directory / MANIFEST, undo)
            _require_manifest(self._manifest, self.directory / MANIFEST)
            self._rows = None if self.rows_file is None else _opened(self.rows_file, undo)
            self.inventory = (
                undo.enter_context(Inventory(self.directory / "extents")) if self.extents is not None else None
            )
            self._undo = undo.pop_all()

    def __enter__(self) -> Beside:
        return self

    def __exit__(self, *exc: object) -> None:
        self._undo.close()

    @property
    def extents(self) -> Path | None:
        """The disk pool of its tensors; None when it has none: the policy is ``"recipe"``, or the broker has its own."""
        folder = self.directory / "extents"
        return folder if folder.is_dir() else None

    def manifest(self) -> Manifest:
        """All rows, as of one moment.

        Raises:
            ConfigError: It cannot be read. Way out: fail.
        """
        db = self._manifest
        try:
            db.execute("BEGIN")
            try:
                recipes = {
                    kv_id: SeenRecipe(
                        kv_id, namespace, parent, num_tokens, None if durable is None else bool(durable), kind
                    )
                    for kv_id, namespace, parent, num_tokens, durable, kind in db.execute(
                        "SELECT kv_id, namespace, parent, num_tokens, is_durable, type FROM recipes"
                    )
                }
                names: dict[str, set[str]] = {}
                for name, kv_id in db.execute("SELECT name, kv_id FROM names"):
                    names.setdefault(name, set()).add(kv_id)
                references = [
                    SeenReference(Slot(Key(*row[:3]), row[3]), *row[4:])
                    for row in db.execute(
                        "SELECT thread_id, checkpoint_ns, checkpoint_id, slot, kv_id, namespace, state, created_s FROM refs"
                    )
                ]
            finally:
                db.execute("COMMIT")
        except sqlite3.Error as error:
            raise ConfigError(f"{self.directory / MANIFEST} cannot be read: {error}") from error
        return Manifest(recipes, names, references)

    def threads(self) -> list[tuple[str, int, float]]:
        """(thread id, checkpoints with KV, when the last of them came) of every thread, the last one first."""
        query = "SELECT thread_id, COUNT(DISTINCT checkpoint_ns || char(0) || checkpoint_id), MAX(created_s) FROM refs"
        return self._asked(self._manifest, f"{query} GROUP BY thread_id ORDER BY MAX(created_s) DESC")

    def recipe(self, kv_id: str) -> Recipe | None:
        """A recipe; None when it is not there, or only a saver with its key can read it.

        Raises:
            IntegrityError: It is damaged. Way out: fail.
            RecipeMissing: A newer version wrote it. Way out: upgrade.
            ConfigError: The manifest cannot be read. Way out: fail.
        """
        rows = self._asked(self._manifest, "SELECT type, body FROM recipes WHERE kv_id = ?", kv_id)
        if not rows or rows[0][0] != "json":
            return None
        recipe = decode(rows[0][1])
        if recipe.kv_id != kv_id:
            raise IntegrityError(f"the row of recipe {kv_id[:12]} holds that of {recipe.kv_id[:12]}")
        return recipe

    def files(self) -> list[SeenFile]:
        """Whole files of tensors whose headers can be read."""
        if self.inventory is None:
            return []
        return [
            SeenFile(namespace, extent, num_bytes)
            for namespace in self.inventory.namespaces()
            for extent, num_bytes in self.inventory.heads(namespace)
        ]

    @property
    def has_rows(self) -> bool:
        """Are the saver's own rows known?"""
        return self._rows is not None

    def checkpoints(self, thread_id: str) -> list[Row]:
        """The checkpoints of a thread, newest first; none when the saver's rows are not known."""
        rows = self._from_saver(
            "SELECT checkpoint_ns, checkpoint_id, parent_checkpoint_id, type, checkpoint, metadata FROM checkpoints "
            "WHERE thread_id = ? ORDER BY checkpoint_id DESC",
            thread_id,
        )
        return [Row(Key(thread_id, row[0], row[1]), row[2], row[3], row[4], row[5] or b"{}") for row in rows]

    def task_paths(self, thread_id: str) -> dict[Slot, str]:
        """Who wrote: the path of each task whose writes a thread has."""
        path = (
            "task_path" if ("task_path",) in self._from_saver("SELECT name FROM pragma_table_info('writes')") else "''"
        )
        rows = self._from_saver(
            f"SELECT DISTINCT checkpoint_ns, checkpoint_id, task_id, {path} FROM writes WHERE thread_id = ?", thread_id
        )
        return {Slot(Key(thread_id, ns, checkpoint_id), task): path for ns, checkpoint_id, task, path in rows}

    def is_stored(self, slot: Slot) -> bool:
        """Does the saver have what a reference is for? Only asked where its rows are known."""
        if not self._from_saver(
            "SELECT 1 FROM checkpoints WHERE thread_id = ? AND checkpoint_ns = ? AND checkpoint_id = ?", *slot.key
        ):
            return False
        return not slot.task_id or bool(
            self._from_saver(
                "SELECT 1 FROM writes WHERE thread_id = ? AND checkpoint_ns = ? AND checkpoint_id = ? AND task_id = ?",
                *slot.key,
                slot.task_id,
            )
        )

    def _from_saver(self, query: str, *values: str) -> list[Any]:
        if self._rows is None or not self._asked(self._rows, "SELECT 1 FROM sqlite_master WHERE name = 'writes'"):
            return []
        return self._asked(self._rows, query, *values)

    def _asked(self, db: sqlite3.Connection, query: str, *values: str) -> list[Any]:
        try:
            return db.execute(query, values).fetchall()
        except sqlite3.Error as error:
            where = self.directory / MANIFEST if db is self._manifest else self.rows_file
            raise ConfigError(f"{where} cannot be read: {error}") from error


def covered(files: Sequence[SeenFile], names: set[str]) -> int:
    """How many of the first tokens of a sequence with these names the files hold together."""
    spans = sorted((file.extent.start, file.usable_stop(names)) for file in files)
    stop = 0
    for start, its_stop in spans:
        if start <= stop:
            stop = max(stop, its_stop)
    return stop


def _places(path: Path) -> tuple[Path, Path | None]:
    """Directory of the manifest, and the file of the rows where that is known."""
    for directory, rows in _candidates(path.absolute()):
        if os.path.lexists(directory / MANIFEST):
            return directory, rows if rows is not None and rows.is_file() else None
    raise ConfigError(
        f"{path} has no {MANIFEST}: --checkpoints takes what was passed to KVCheckpointSaver.local(), the directory= of a saver, "
        "or the file of an SQLite saver"
    )


def _candidates(path: Path) -> Iterator[tuple[Path, Path | None]]:
    yield path / f"{LOCAL}.kv", path / LOCAL
    yield path, path.with_name(path.name.removesuffix(".kv")) if path.name.endswith(".kv") else None
    yield Path(f"{path}.kv"), path


def _opened(path: Path, undo: ExitStack) -> sqlite3.Connection:
    try:
        db = sqlite3.connect(
            f"file:{quote(str(path.absolute()))}?mode=ro", timeout=_BUSY_S, isolation_level=None, uri=True
        )
    except sqlite3.Error as error:
        raise ConfigError(f"{path} cannot be opened: {error}") from error
    undo.callback(db.close)
    return db


def _require_manifest(db: sqlite3.Connection, path: Path) -> None:
    try:
        (application,) = db.execute("PRAGMA application_id").fetchone()
        (version,) = db.execute("PRAGMA user_version").fetchone()
    except sqlite3.Error as error:
        raise ConfigError(f"{path} cannot be read: {error}. It is damaged, or not a manifest") from error
    if application != _APPLICATION_ID:
        raise ConfigError(f"{path} is another program's database")
    if version > FORMAT_VERSION:
        raise ConfigError(
            f"{path} was made by a newer version (format {version}, this one knows {FORMAT_VERSION}): upgrade"
        )
