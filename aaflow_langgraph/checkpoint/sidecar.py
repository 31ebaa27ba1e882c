"""The manifest beside a saver: which checkpoint needs which recipe. One SQLite file that many processes may have open.

Knows rows and transactions; knows no brokers, no tensors and nothing of LangGraph but three names. What is in it:

    recipes   what rebuilds a handle's KV, and whether its tensors are known to be on disk
    names     block hashes and border ids that a recipe adds to its parent: extents are found, and kept, by them
    refs      (thread, namespace, checkpoint, slot) -> kv_id; the slot is ``""`` for state, else the task that wrote
    threads   tombstones: the threads that were deleted at least once, and how often

A recipe stays while a reference or another recipe's ``parent`` names it, a name while a recipe has it.
"""

from __future__ import annotations

import errno
import os
import sqlite3
import stat
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from aaflow_langgraph.checkpoint.locks import ThreadLock
from aaflow_langgraph.errors import ConfigError, PersistenceError

FORMAT_VERSION = 1
_APPLICATION_ID = 0x61616B76  # "aakv", so that no other SQLite file is taken for a manifest
_BUSY_S = 30.0
_MANY = 500  # below SQLite's limit of bound parameters in every build

AHEAD, CONFIRMED, DOUBTFUL, AGAIN = 0, 1, 2, 3
"""A reference is written ahead of the saver's row, confirmed when that row is known to be there, in doubt since a deletion
began. Where a slot is written again the saver keeps some of the old and some of the new: it has to be asked which handles. Only
confirmed ones need no look at the saver after a crash."""

_SCHEMA = """
CREATE TABLE threads (thread_id TEXT PRIMARY KEY, generation INTEGER NOT NULL, deleted_s REAL NOT NULL) WITHOUT ROWID;
CREATE TABLE recipes (
    kv_id TEXT PRIMARY KEY, namespace TEXT NOT NULL, parent TEXT, num_tokens INTEGER NOT NULL, has_chat INTEGER NOT NULL,
    is_durable INTEGER, type TEXT NOT NULL, body BLOB NOT NULL
);
CREATE INDEX recipes_by_parent ON recipes (parent);
CREATE TABLE names (name TEXT NOT NULL, kv_id TEXT NOT NULL, PRIMARY KEY (name, kv_id)) WITHOUT ROWID;
CREATE INDEX names_by_recipe ON names (kv_id);
CREATE TABLE refs (
    thread_id TEXT NOT NULL, checkpoint_ns TEXT NOT NULL, checkpoint_id TEXT NOT NULL, slot TEXT NOT NULL, kv_id TEXT NOT NULL,
    namespace TEXT NOT NULL, state INTEGER NOT NULL, created_s REAL NOT NULL,
    PRIMARY KEY (thread_id, checkpoint_ns, checkpoint_id, slot, kv_id)
) WITHOUT ROWID;
CREATE INDEX refs_by_recipe ON refs (kv_id);
CREATE INDEX refs_open ON refs (created_s) WHERE state != 1;
"""


class NoRoom(PersistenceError):
    """The manifest's file system is full."""


class Key(NamedTuple):
    """One checkpoint."""

    thread_id: str
    checkpoint_ns: str
    checkpoint_id: str


class Slot(NamedTuple):
    """Where a checkpoint holds handles: its state (``""``), or the pending writes of one task."""

    key: Key
    task_id: str

    @property
    def thread_id(self) -> str:
        """The checkpoint's."""
        return self.key.thread_id


@dataclass(frozen=True, slots=True)
class RecipeRow:
    """A recipe as it is stored; ``type`` and ``body`` are its serialised form."""

    kv_id: str
    namespace: str
    parent: str | None
    num_tokens: int
    has_chat: bool
    type: str
    body: bytes
    names: tuple[str, ...]


class Reference(NamedTuple):
    """What a slot needs."""

    kv_id: str
    namespace: str


@dataclass(frozen=True, slots=True)
class ManifestCounts:
    """Rows, and bytes of the recipes."""

    num_recipes: int
    num_names: int
    num_references: int
    num_tombstones: int
    num_not_durable: int
    num_foreign: int
    recipe_bytes: int


class Sidecar:
    """Thread-safe. Every change is one transaction; those that a checkpoint relies on are on the disk when they return.

    Raises:
        ConfigError: The file is no manifest, damaged, of a newer version, or cannot be written. Way out: fail.
    """

    def __init__(self, path: Path, *, clock: Callable[[], float] = time.time) -> None:
        self.path = path
        self._clock = clock
        self._lock = threading.RLock()
        self._closed = False
        try:
            with ThreadLock() as making:  # changing a new file to WAL does not wait for others who do the same
                making.take(path.with_suffix(".lock"), wait=True)
                self._db = self._opened()
        except OSError as error:
            raise ConfigError(f"{path} cannot be opened: {error}; name a directory that this user can write") from error
        except sqlite3.Error as error:
            raise ConfigError(
                f"{path} cannot be used as a manifest: {error}. It is damaged, not ours, or not writable: name another directory"
            ) from error

    def close(self) -> None:
        """Idempotent."""
        with self._lock:
            self._closed = True
            self._db.close()

    def check_open(self) -> None:
        """Raises ConfigError when ``close`` was called."""
        if self._closed:
            raise ConfigError("this checkpoint saver is closed; open another one")

    # ---------------------------------------------------------------- reading

    def recipe(self, kv_id: str) -> tuple[str, bytes] | None:
        """``(type, body)`` of a recipe."""
        rows = self._rows("SELECT type, body FROM recipes WHERE kv_id = ?", (kv_id,))
        return (rows[0][0], rows[0][1]) if rows else None

    def has_recipe(self, kv_id: str, *, with_chat: bool = False) -> bool:
        """Is it stored, with the chat structure where that matters?"""
        return bool(self._rows("SELECT 1 FROM recipes WHERE kv_id = ? AND has_chat >= ?", (kv_id, with_chat)))

    def needs(self, names: Sequence[str]) -> bool:
        """Does a recipe have one of these names? Then extents with them are kept."""
        return any(
            self._rows(f"SELECT 1 FROM names WHERE name IN ({_marks(part)}) LIMIT 1", part) for part in _parts(names)
        )

    def generation(self, thread_id: str) -> int | None:
        """How often a thread was deleted; None when it never was."""
        rows = self._rows("SELECT generation FROM threads WHERE thread_id = ?", (thread_id,))
        return rows[0][0] if rows else None

    def not_durable(self, kv_ids: Iterable[str]) -> set[str]:
        """Those of which the tensors are not known to be on disk."""
        return {
            kv_id
            for part in _parts(list(kv_ids))
            for (kv_id,) in self._rows(
                f"SELECT kv_id FROM recipes WHERE kv_id IN ({_marks(part)}) AND is_durable IS NOT 1", part
            )
        }

    def has_references(self, slot: Slot) -> bool:
        """Did something with a handle go there before?"""
        return bool(self._rows(f"SELECT 1 FROM refs WHERE {_IN_SLOT} LIMIT 1", (*slot.key, slot.task_id)))

    def open_slots(self, thread_id: str, before_s: float) -> list[Slot]:
        """References of a thread that nobody confirmed: in doubt, or written ahead, or again, before ``before_s``."""
        rows = self._rows(
            "SELECT DISTINCT checkpoint_ns, checkpoint_id, slot FROM refs "
            "WHERE thread_id = ? AND (state = ? OR (state IN (?, ?) AND created_s <= ?))",
            (thread_id, DOUBTFUL, AHEAD, AGAIN, before_s),
        )
        return [Slot(Key(thread_id, ns, checkpoint_id), slot) for ns, checkpoint_id, slot in rows]

    def open_slots_of(self, key: Key) -> list[Slot]:
        """References of a checkpoint that nobody confirmed."""
        rows = self._rows(
            "SELECT DISTINCT slot FROM refs WHERE thread_id = ? AND checkpoint_ns = ? AND checkpoint_id = ? AND state != 1",
            key,
        )
        return [Slot(key, slot) for (slot,) in rows]

    def slots_again(self, key: Key) -> set[Slot]:
        """Those of a checkpoint that were written again since the saver was asked what it has."""
        rows = self._rows(
            "SELECT DISTINCT slot FROM refs WHERE thread_id = ? AND checkpoint_ns = ? AND checkpoint_id = ? AND state = ?",
            (*key, AGAIN),
        )
        return {Slot(key, slot) for (slot,) in rows}

    def slots(self, thread_id: str, *, state: int | None = None) -> list[Slot]:
        """Every slot of a thread that holds a handle, or a reference in this state."""
        where = "" if state is None else f"AND state = {state}"
        rows = self._rows(
            f"SELECT DISTINCT checkpoint_ns, checkpoint_id, slot FROM refs WHERE thread_id = ? {where}", (thread_id,)
        )
        return [Slot(Key(thread_id, ns, checkpoint_id), slot) for ns, checkpoint_id, slot in rows]

    def threads(self, *, only_open: bool) -> list[str]:
        """Threads with references; with ``only_open`` those with unconfirmed ones."""
        where = f"WHERE state != {CONFIRMED}" if only_open else ""
        return [thread_id for (thread_id,) in self._rows(f"SELECT DISTINCT thread_id FROM refs {where}", ())]

    def counts(self) -> ManifestCounts:
        """What is in it now."""
        ((recipes, body_bytes, not_durable),) = self._rows(
            "SELECT COUNT(*), COALESCE(SUM(LENGTH(body)), 0), COALESCE(SUM(is_durable = 0), 0) FROM recipes", ()
        )
        ((names,),) = self._rows("SELECT COUNT(*) FROM names", ())
        ((references,),) = self._rows("SELECT COUNT(*) FROM refs", ())
        ((tombstones,),) = self._rows("SELECT COUNT(*) FROM threads", ())
        ((foreign,),) = self._rows(
            "SELECT COUNT(DISTINCT kv_id) FROM refs WHERE kv_id NOT IN (SELECT kv_id FROM recipes)", ()
        )
        return ManifestCounts(recipes, names, references, tombstones, not_durable, foreign, body_bytes)

    # ---------------------------------------------------------------- writing

    def note(
        self,
        slot: Slot,
        references: Sequence[Reference],
        recipes: Sequence[RecipeRow],
        expected: Collection[str],
        *,
        again: bool = False,
    ) -> bool:
        """Write references ahead, with the recipes that are not stored yet, root first; on the disk when this returns.

        ``again``: the slot was written before, so that all references of it are open until the saver was asked.

        Returns:
            False, and nothing was written, when a recipe lacks its parent, or one of the ``expected`` is not there: it was
            deleted since the caller looked. Ask again, and pass all of them.
        """
        now_s = self._clock()
        with self._writing(durable=True) as db:
            for row in recipes:
                db.execute(
                    "INSERT INTO recipes (kv_id, namespace, parent, num_tokens, has_chat, type, body) "
                    "VALUES (?, ?, ?, ?, ?, ?, ?) ON CONFLICT (kv_id) DO UPDATE SET parent = excluded.parent, "
                    "has_chat = excluded.has_chat, type = excluded.type, body = excluded.body "
                    "WHERE excluded.has_chat > has_chat",
                    (row.kv_id, row.namespace, row.parent, row.num_tokens, row.has_chat, row.type, row.body),
                )
                db.executemany("INSERT OR IGNORE INTO names VALUES (?, ?)", [(name, row.kv_id) for name in row.names])
            needed = {*expected, *(row.parent for row in recipes if row.parent is not None)}
            if any(not db.execute("SELECT 1 FROM recipes WHERE kv_id = ?", (kv_id,)).fetchone() for kv_id in needed):
                db.execute("ROLLBACK")
                return False
            if again:
                db.execute(f"UPDATE refs SET state = ? WHERE {_IN_SLOT}", (AGAIN, *slot.key, slot.task_id))
            state = AGAIN if again else AHEAD
            db.executemany(
                "INSERT INTO refs VALUES (?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO NOTHING",
                [(*slot.key, slot.task_id, *reference, state, now_s) for reference in references],
            )
        return True

    def confirm(self, slots: Collection[Slot]) -> None:
        """The saver has these: their references need no look after a crash."""
        with self._writing(durable=False) as db:
            db.executemany(
                f"UPDATE refs SET state = 1 WHERE {_IN_SLOT}",
                [(*slot.key, slot.task_id) for slot in slots],
            )

    def mark_durable(self, is_durable: dict[str, bool]) -> None:
        """Note of which recipes the tensors are on disk."""
        with self._writing(durable=False) as db:
            db.executemany(
                "UPDATE recipes SET is_durable = ? WHERE kv_id = ?",
                [(is_on, kv_id) for kv_id, is_on in is_durable.items()],
            )

    def bury(self, thread_id: str) -> None:
        """Close a thread's generation, and put its references in doubt: what comes late finds a tombstone."""
        with self._writing(durable=True) as db:
            db.execute(
                "INSERT INTO threads VALUES (?, 1, ?) ON CONFLICT (thread_id) DO UPDATE SET generation = generation + 1, "
                "deleted_s = excluded.deleted_s",
                (thread_id, self._clock()),
            )
            # What was written again still is after a deletion that failed; it has to be asked about at once, too.
            db.execute("UPDATE refs SET created_s = 0 WHERE thread_id = ? AND state = ?", (thread_id, AGAIN))
            db.execute("UPDATE refs SET state = ? WHERE thread_id = ? AND state != ?", (DOUBTFUL, thread_id, AGAIN))

    def doubt(self, thread_id: str) -> None:
        """Some of a thread's checkpoints are about to be deleted."""
        with self._writing(durable=True) as db:
            db.execute("UPDATE refs SET state = ? WHERE thread_id = ? AND state = ?", (DOUBTFUL, thread_id, CONFIRMED))

    def copy(self, source: str, target: str) -> None:
        """Give a thread's references to another one, written ahead; again where the other one had some already."""
        with self._writing(durable=True) as db:
            again = db.execute("UPDATE refs SET state = ? WHERE thread_id = ?", (AGAIN, target)).rowcount
            db.execute(
                "INSERT OR IGNORE INTO refs SELECT ?, checkpoint_ns, checkpoint_id, slot, kv_id, namespace, "
                "CASE WHEN state = ? THEN state ELSE ? END, ? FROM refs WHERE thread_id = ?",
                (target, AGAIN, AGAIN if again else AHEAD, self._clock(), source),
            )

    def drop_thread(self, thread_id: str) -> dict[str, list[str]]:
        """Forget a thread's references and what only they needed; the names that are gone, by namespace."""
        with self._writing(durable=True) as db:
            kv_ids = db.execute("DELETE FROM refs WHERE thread_id = ? RETURNING kv_id", (thread_id,)).fetchall()
            return _collect(db, {kv_id for (kv_id,) in kv_ids})

    def drop(self, slots: Collection[Slot]) -> dict[str, list[str]]:
        """Forget the references of slots and what only they needed; the names that are gone, by namespace."""
        with self._writing(durable=True) as db:
            kv_ids: set[str] = set()
            for slot in slots:
                rows = db.execute(
                    f"DELETE FROM refs WHERE {_IN_SLOT} RETURNING kv_id", (*slot.key, slot.task_id)
                ).fetchall()
                kv_ids.update(kv_id for (kv_id,) in rows)
            return _collect(db, kv_ids)

    def keep_only(self, slot: Slot, kv_ids: Collection[str]) -> dict[str, list[str]]:
        """Forget the references of a slot to all but these, and what only they needed; the names that are gone, by namespace."""
        with self._writing(durable=True) as db:
            had = db.execute(f"SELECT kv_id FROM refs WHERE {_IN_SLOT}", (*slot.key, slot.task_id)).fetchall()
            gone = {kv_id for (kv_id,) in had}.difference(kv_ids)
            db.executemany(
                f"DELETE FROM refs WHERE {_IN_SLOT} AND kv_id = ?", [(*slot.key, slot.task_id, kv_id) for kv_id in gone]
            )
            return _collect(db, gone)

    def drop_orphans(self) -> dict[str, list[str]]:
        """Forget recipes that nothing refers to; the names that are gone, by namespace."""
        with self._writing(durable=True) as db:
            return _collect(db, {kv_id for (kv_id,) in db.execute(f"SELECT kv_id FROM recipes WHERE {_UNUSED}")})

    def drop_tombstones(self, before_s: float) -> int:
        """Forget deletions that are older than anything late can be; how many."""
        with self._writing(durable=False) as db:
            return db.execute("DELETE FROM threads WHERE deleted_s <= ?", (before_s,)).rowcount

    def shrink(self) -> None:
        """Give pages that nothing uses back to the file system."""
        with self._lock:
            self.check_open()
            try:
                self._db.executescript("PRAGMA incremental_vacuum")  # execute() would do one page
                self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
            except sqlite3.Error as error:
                raise PersistenceError(f"{self.path} cannot be written: {error}") from error

    # ---------------------------------------------------------------- inside

    def _opened(self) -> sqlite3.Connection:
        """The file's connection, after the file was made ours or proven to be."""
        if not self.path.exists():
            # Made without being opened: closing a descriptor would end the locks that other connections of this process have.
            os.mknod(self.path, 0o600 | stat.S_IFREG)
        if not stat.S_ISREG(os.lstat(self.path).st_mode):
            raise OSError(errno.EINVAL, "no file; links are not followed")
        db = sqlite3.connect(self.path, timeout=_BUSY_S, isolation_level=None, check_same_thread=False)
        try:
            self._claim(db)
        except BaseException:
            db.close()
            raise
        return db

    def _claim(self, db: sqlite3.Connection) -> None:
        db.execute("PRAGMA secure_delete = ON")  # token ids of deleted threads do not stay in free pages
        if self._is_new(db):  # nothing of others is touched before this
            db.execute("PRAGMA auto_vacuum = INCREMENTAL")
            db.execute("PRAGMA journal_mode = WAL")
            db.execute("BEGIN IMMEDIATE")
            for statement in _SCHEMA.split(";"):
                db.execute(statement)
            db.execute(f"PRAGMA application_id = {_APPLICATION_ID}")
            db.execute(f"PRAGMA user_version = {FORMAT_VERSION}")
            db.execute("COMMIT")

    def _is_new(self, db: sqlite3.Connection) -> bool:
        """Is the file empty, not a manifest yet?"""
        (application,) = db.execute("PRAGMA application_id").fetchone()
        (version,) = db.execute("PRAGMA user_version").fetchone()
        if application == _APPLICATION_ID and version <= FORMAT_VERSION:
            return False
        if application == _APPLICATION_ID:
            raise ConfigError(
                f"{self.path} was made by a newer version (format {version}, this one knows {FORMAT_VERSION}): upgrade, or "
                "name another directory"
            )
        if application or version or db.execute("SELECT 1 FROM sqlite_master").fetchone():
            raise ConfigError(
                f"{self.path} is another program's database; nothing in it was touched: name another directory"
            )
        return True

    def _rows(self, query: str, values: Sequence[object]) -> list[Any]:
        with self._lock:
            self.check_open()
            try:
                return self._db.execute(query, values).fetchall()
            except sqlite3.Error as error:
                raise PersistenceError(f"{self.path} cannot be read: {error}") from error

    @contextmanager
    def _writing(self, *, durable: bool) -> Iterator[sqlite3.Connection]:
        """One transaction; with ``durable`` it survives a power cut, without it survives the death of the process."""
        with self._lock:
            self.check_open()
            try:
                self._db.execute(f"PRAGMA synchronous = {'FULL' if durable else 'NORMAL'}")
                self._db.execute("BEGIN IMMEDIATE")
                try:
                    yield self._db
                    if self._db.in_transaction:
                        self._db.execute("COMMIT")
                finally:
                    if self._db.in_transaction:
                        self._db.execute("ROLLBACK")
            except sqlite3.Error as error:
                raise (NoRoom if _is_for_lack_of_room(error) else PersistenceError)(
                    f"{self.path} cannot be written: {error}. Nothing was changed; free some room on its file system, or give "
                    f"uid {os.geteuid()} the right to write, and run again"
                ) from error


_IN_SLOT = "thread_id = ? AND checkpoint_ns = ? AND checkpoint_id = ? AND slot = ?"

_UNUSED = (
    "NOT EXISTS (SELECT 1 FROM refs WHERE refs.kv_id = recipes.kv_id) "
    "AND NOT EXISTS (SELECT 1 FROM recipes AS child WHERE child.parent = recipes.kv_id)"
)


def _collect(db: sqlite3.Connection, kv_ids: set[str]) -> dict[str, list[str]]:
    """Delete those of ``kv_ids`` that nothing refers to, then their parents; the names that no recipe has any more."""
    freed: dict[str, set[str]] = {}
    todo = sorted(kv_ids)
    while todo:
        kv_id = todo.pop()
        rows = db.execute(
            f"DELETE FROM recipes WHERE kv_id = ? AND {_UNUSED} RETURNING namespace, parent", (kv_id,)
        ).fetchall()
        if not rows:
            continue
        ((namespace, parent),) = rows
        names = db.execute("DELETE FROM names WHERE kv_id = ? RETURNING name", (kv_id,)).fetchall()
        freed.setdefault(namespace, set()).update(name for (name,) in names)
        if parent is not None:
            todo.append(parent)
    return {
        namespace: gone
        for namespace, names in freed.items()
        if (
            gone := [
                name
                for name in sorted(names)
                if not db.execute("SELECT 1 FROM names WHERE name = ?", (name,)).fetchone()
            ]
        )
    }


def _is_for_lack_of_room(error: sqlite3.Error) -> bool:
    """Full, or an I/O error as it comes from a file that cannot grow."""
    return getattr(error, "sqlite_errorcode", 0) & 0xFF in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR)


def _parts(values: Sequence[str]) -> Iterator[Sequence[str]]:
    for start in range(0, len(values), _MANY):
        yield values[start : start + _MANY]


def _marks(values: Sequence[str]) -> str:
    return ", ".join("?" * len(values))
