"""``KVCheckpointSaver``: any LangGraph checkpointer, and beside it what its handles need to be read again.

Knows LangGraph's contract of savers, in both colours. What the operations do stands in operations.py; what lies beside the
saver in sidecar.py (references, recipes) and ledger.py (tensors). The saver inside stores nothing but its usual rows.
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
from collections.abc import AsyncIterator, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.base import (
    BaseCheckpointSaver,
    ChannelVersions,
    Checkpoint,
    CheckpointMetadata,
    CheckpointTuple,
    DeltaChannelHistory,
)
from langgraph.checkpoint.serde.base import SerializerProtocol
from langgraph.checkpoint.serde.encrypted import EncryptedSerializer

from aaflow_langgraph._directory import expanded, make_private
from aaflow_langgraph.broker import KVBroker
from aaflow_langgraph.checkpoint.admission import Waiting
from aaflow_langgraph.checkpoint.colours import BothColours
from aaflow_langgraph.checkpoint.inner import Inner
from aaflow_langgraph.checkpoint.ledger import Codec, Durability, Ledger
from aaflow_langgraph.checkpoint.locks import ThreadLocks
from aaflow_langgraph.checkpoint.operations import GRACE_S, LateWrites, Operations, Swept
from aaflow_langgraph.checkpoint.place import Place
from aaflow_langgraph.checkpoint.sidecar import ManifestCounts
from aaflow_langgraph.checkpoint.steps import arun, run
from aaflow_langgraph.errors import ConfigError


@dataclass(frozen=True, slots=True)
class SaverStats:
    """What lies beside a saver, and what went wrong since it was opened.

    Attributes:
        manifest: Rows of the manifest, and bytes of its recipes.
        tensor_bytes: Files of tensors.
        num_late_writes: Writes to a deleted thread that were dropped.
        num_tensor_failures: Tensors that could not be written; tried again with the next checkpoint that needs them.
    """

    manifest: ManifestCounts
    tensor_bytes: int
    num_late_writes: int
    num_tensor_failures: int


class KVCheckpointSaver(BaseCheckpointSaver[Any]):
    """Wraps ``inner``, any LangGraph checkpointer: checkpoints keep working, and the KV behind their handles comes back.

    Before a checkpoint is stored, the recipe of every handle in it (and in pending writes) is: its KV can be rebuilt in any
    later process that opens the same model. Tensors are stored as ``durability`` says, once, however many checkpoints and
    threads share them; they may be lost at any time, which costs time and nothing else. What only deleted checkpoints needed is
    deleted with them. Thread-safe; processes may share ``directory``. Use as a context manager, inside the brokers'.

    Args:
        inner: Stores the checkpoints; used by nobody else from now on.
        broker: Whose handles the state carries; a sequence where a graph uses several models.
        durability: ``"recipe"``: no tensors. ``"evict"``: when they leave the broker's pool, and at ``close``. ``"sync"``:
            before ``put`` returns. ``"async"``: in the background, the rest at ``close``.
        directory: Where recipes, references and tensors lie. None: ``<file>.kv`` beside the file of a ``SqliteSaver`` or an
            ``AsyncSqliteSaver``; a private temporary directory, removed at ``close``, for a saver in memory.

    Raises:
        ConfigError: Something else than a saver or a broker; a directory that must be named, cannot be written or holds
            something else; a newer version's manifest; tensors asked for although the saver encrypts. Way out: fail.
    """

    def __init__(
        self,
        inner: BaseCheckpointSaver[Any],
        broker: KVBroker | Sequence[KVBroker],
        *,
        durability: Durability = "evict",
        directory: str | os.PathLike[str] | None = None,
    ) -> None:
        brokers = list(broker) if isinstance(broker, Sequence) else [broker]
        if not isinstance(inner, BaseCheckpointSaver) or isinstance(inner, KVCheckpointSaver):
            raise ConfigError(
                f"inner must be a LangGraph checkpointer without KV of its own, got {type(inner).__name__}"
            )
        if not brokers or not all(isinstance(one, KVBroker) for one in brokers):
            raise ConfigError(f"broker must be a KVBroker or a sequence of them, got {broker!r:.100}")
        if len({one.namespace.digest for one in brokers}) < len(brokers):
            raise ConfigError("two of the brokers serve the same model: pass one of them")
        if durability not in get_args(Durability):
            raise ConfigError(f"durability must be one of {', '.join(get_args(Durability))}, got {durability!r}")
        self.inner = inner
        self._inner = Inner(inner)
        super().__init__(serde=inner.serde)
        encrypts = isinstance(inner.serde, EncryptedSerializer) or hasattr(inner.serde, "cipher")
        if encrypts and durability != "recipe":
            raise ConfigError(
                f"this saver encrypts what it stores, and durability={durability!r} would write tensors in the clear: pass "
                "durability='recipe', which stores recipes through the same cipher and no tensors"
            )
        self._undo = ExitStack()
        self._must_sweep = [False]
        with ExitStack() as undo:
            place = Place(inner, directory)
            undo.callback(place.close)
            self._late = LateWrites()
            try:
                locks = ThreadLocks(place.path / "locks")
            except OSError as error:
                raise ConfigError(f"{place.path} cannot be written: {error}; name another directory") from error
            self._ledger = Ledger(place.path, brokers, durability, _codec(inner.serde, encrypts=encrypts))
            undo.callback(self._ledger.close)
            self._operations = Operations(self._inner, self._ledger, locks, Waiting(), self._late)
            if self._ledger.sidecar.threads(only_open=True):
                if self._inner.is_bound_to_a_loop():
                    self._must_sweep[0] = True  # its rows can be asked for on its loop only
                else:
                    run(self._operations.sweep(GRACE_S, verify=False))
            self._undo = undo.pop_all()

    @classmethod
    def local(
        cls, path: str | os.PathLike[str], broker: KVBroker | Sequence[KVBroker], *, durability: Durability = "evict"
    ) -> BothColours[KVCheckpointSaver]:
        """Everything in one directory: LangGraph's ``SqliteSaver`` on ``path/checkpoints.sqlite``, the rest beside it.

        For ``with`` and ``async with``; the saver works with sync and async graphs.

        Raises:
            ConfigError: langgraph-checkpoint-sqlite is not installed, or as the class; others can reach what ``path`` holds.
                Way out: fail.
        """
        return BothColours(cls._local(path, broker, durability))

    @classmethod
    @contextmanager
    def _local(
        cls, path: str | os.PathLike[str], broker: KVBroker | Sequence[KVBroker], durability: Durability
    ) -> Iterator[KVCheckpointSaver]:
        try:
            from langgraph.checkpoint.sqlite import SqliteSaver
        except ImportError as error:
            raise ConfigError("local() needs SQLite's saver: pip install langgraph-checkpoint-sqlite") from error
        if not isinstance(path, str | os.PathLike) or not os.fspath(path) or "\0" in str(path):
            raise ConfigError(f"path must name a directory, got {path!r:.100}")
        folder = expanded(path)
        try:
            make_private(folder)
            connection = sqlite3.connect(folder / "checkpoints.sqlite", check_same_thread=False)
        except (OSError, sqlite3.Error) as error:
            raise ConfigError(
                f"{folder} cannot hold checkpoints: {error}; name a directory that can be written"
            ) from error
        with closing(connection), cls(SqliteSaver(connection), broker, durability=durability) as saver:
            yield saver

    def __enter__(self) -> KVCheckpointSaver:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    async def __aenter__(self) -> KVCheckpointSaver:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()

    def close(self) -> None:
        """Write what the policy wants on disk, then let the brokers and the directory go. The inner saver stays open.

        Idempotent. Close the brokers afterwards: what they hold is written here.
        """
        self._undo.close()

    async def aclose(self) -> None:
        """Async ``close``."""
        await asyncio.to_thread(self.close)

    @property
    def directory(self) -> Path:
        """Where recipes, references and tensors lie."""
        return self._ledger.sidecar.path.parent

    # ---------------------------------------------------------------- what the inner saver is asked

    @property
    def serde(self) -> SerializerProtocol:
        """The inner saver's serialiser."""
        return self.inner.serde

    @serde.setter
    def serde(self, serde: SerializerProtocol) -> None:
        self.inner.serde = serde

    @property
    def config_specs(self) -> list[Any]:
        """The inner saver's."""
        return self.inner.config_specs

    def get_next_version(self, current: Any, channel: None) -> Any:
        """The inner saver's."""
        return self.inner.get_next_version(current, channel)

    def with_allowlist(self, extra_allowlist: Collection[tuple[str, ...]]) -> KVCheckpointSaver:
        """A clone around the inner saver's clone; everything else is shared."""
        inner = self.inner.with_allowlist(extra_allowlist)
        if inner is self.inner:
            return self
        clone = copy(self)
        clone.inner, clone._inner = inner, Inner(inner, self._inner.stubs)
        clone._operations = self._operations.around(clone._inner)
        return clone

    def get_tuple(self, config: RunnableConfig) -> CheckpointTuple | None:
        """As the inner saver."""
        return self.inner.get_tuple(_text_id(config))

    async def aget_tuple(self, config: RunnableConfig) -> CheckpointTuple | None:
        """Async ``get_tuple``."""
        found: CheckpointTuple | None = await self._inner.call("get_tuple", _text_id(config)).arun()
        return found

    def list(
        self,
        config: RunnableConfig | None,
        *,
        filter: dict[str, Any] | None = None,
        before: RunnableConfig | None = None,
        limit: int | None = None,
    ) -> Iterator[CheckpointTuple]:
        """As the inner saver."""
        return self.inner.list(_text_id(config), filter=filter, before=before, limit=limit)

    async def alist(
        self,
        config: RunnableConfig | None,
        *,
        filter: dict[str, Any] | None = None,
        before: RunnableConfig | None = None,
        limit: int | None = None,
    ) -> AsyncIterator[CheckpointTuple]:
        """Async ``list``."""
        async for found in self._inner.alist(_text_id(config), filter=filter, before=before, limit=limit):
            yield found

    def get_delta_channel_history(
        self, *, config: RunnableConfig, channels: Sequence[str]
    ) -> Mapping[str, DeltaChannelHistory]:
        """As the inner saver."""
        return self.inner.get_delta_channel_history(config=_text_id(config), channels=channels)

    async def aget_delta_channel_history(
        self, *, config: RunnableConfig, channels: Sequence[str]
    ) -> Mapping[str, DeltaChannelHistory]:
        """Async ``get_delta_channel_history``."""
        call = self._inner.call("get_delta_channel_history", config=_text_id(config), channels=channels)
        found: Mapping[str, DeltaChannelHistory] = await call.arun()
        return found

    # ---------------------------------------------------------------- writing

    def put(
        self,
        config: RunnableConfig,
        checkpoint: Checkpoint,
        metadata: CheckpointMetadata,
        new_versions: ChannelVersions,
    ) -> RunnableConfig:
        """Store a checkpoint, after the recipes of its handles. One that comes late to a deleted thread is dropped.

        Raises:
            PersistenceError: A recipe cannot be written; the checkpoint was not stored. Way out: fail.
        """
        return run(self._operations.put(_text_id(config), checkpoint, metadata, new_versions))

    async def aput(
        self,
        config: RunnableConfig,
        checkpoint: Checkpoint,
        metadata: CheckpointMetadata,
        new_versions: ChannelVersions,
    ) -> RunnableConfig:
        """Async ``put``."""
        await self._sweep_first()
        return await arun(self._operations.put(_text_id(config), checkpoint, metadata, new_versions))

    def put_writes(
        self, config: RunnableConfig, writes: Sequence[tuple[str, Any]], task_id: str, task_path: str = ""
    ) -> None:
        """Store the writes of a task, after the recipes of their handles. Late ones are dropped, as by ``put``.

        Raises:
            PersistenceError: A recipe cannot be written; the writes were not stored. Way out: fail.
        """
        run(self._operations.put_writes(_text_id(config), writes, task_id, task_path))

    async def aput_writes(
        self, config: RunnableConfig, writes: Sequence[tuple[str, Any]], task_id: str, task_path: str = ""
    ) -> None:
        """Async ``put_writes``."""
        await self._sweep_first()
        await arun(self._operations.put_writes(_text_id(config), writes, task_id, task_path))

    # ---------------------------------------------------------------- deleting, copying

    def delete_thread(self, thread_id: str) -> None:
        """Delete a thread, and what only it needed. It stays deleted: what a run of it still writes is dropped."""
        run(self._operations.delete_thread(str(thread_id), ("delete_thread", str(thread_id))))

    async def adelete_thread(self, thread_id: str) -> None:
        """Async ``delete_thread``."""
        await arun(self._operations.delete_thread(str(thread_id), ("delete_thread", str(thread_id))))

    def copy_thread(self, source_thread_id: str, target_thread_id: str) -> None:
        """Copy a thread's checkpoints. Their KV is shared, so the copy takes no room and outlives the source."""
        run(self._operations.copy_thread(str(source_thread_id), str(target_thread_id)))

    async def acopy_thread(self, source_thread_id: str, target_thread_id: str) -> None:
        """Async ``copy_thread``."""
        await arun(self._operations.copy_thread(str(source_thread_id), str(target_thread_id)))

    def delete_for_runs(self, run_ids: Sequence[str]) -> None:
        """Delete the checkpoints of runs, and what only they needed.

        Raises:
            NotImplementedError: The inner saver cannot, and its storage is not known.
        """
        run(self._operations.delete_for_runs(run_ids))

    async def adelete_for_runs(self, run_ids: Sequence[str]) -> None:
        """Async ``delete_for_runs``."""
        await arun(self._operations.delete_for_runs(run_ids))

    def prune(self, thread_ids: Sequence[str], *, strategy: str = "keep_latest") -> None:
        """Delete old checkpoints, and what only they needed.

        ``"keep_latest"`` keeps the last one of each namespace, with the ancestors that its ``DeltaChannel`` values are replayed
        from; ``"delete"`` keeps none.

        Raises:
            NotImplementedError: The inner saver cannot, and its storage is not known.
            ConfigError: A strategy that neither the inner saver nor this one knows.
        """
        for thread_id in thread_ids:
            run(self._operations.prune(str(thread_id), strategy))

    async def aprune(self, thread_ids: Sequence[str], *, strategy: str = "keep_latest") -> None:
        """Async ``prune``."""
        for thread_id in thread_ids:
            await arun(self._operations.prune(str(thread_id), strategy))

    # ---------------------------------------------------------------- sweeping, looking

    def sweep(self, *, grace_s: float = GRACE_S, verify: bool = False) -> Swept:
        """Drop references of checkpoints that the inner saver does not have, and tensors that nothing needs.

        Runs by itself when a saver is opened. Safe beside others that use the same directory.

        Args:
            grace_s: Leave references alone that were written ahead, and not confirmed, in the last so many seconds.
            verify: Ask about every reference, not only those that nobody confirmed: finds what was deleted behind this
                saver's back, by the inner saver itself or by a database's time to live.
        """
        return run(self._operations.sweep(grace_s, verify=verify))

    async def asweep(self, *, grace_s: float = GRACE_S, verify: bool = False) -> Swept:
        """Async ``sweep``."""
        return await arun(self._operations.sweep(grace_s, verify=verify))

    def stats(self) -> SaverStats:
        """What lies beside the inner saver now."""
        ledger = self._ledger
        return SaverStats(ledger.sidecar.counts(), ledger.tensor_bytes(), self._late.count, ledger.num_tensor_failures)

    async def _sweep_first(self) -> None:
        """The sweep that an async saver could not be asked for when it was opened."""
        if self._must_sweep[0]:
            self._must_sweep[0] = False
            await self.asweep()


def _codec(serde: SerializerProtocol, *, encrypts: bool) -> Codec:
    """How recipes are stored: as they are, or through the saver's cipher."""
    if encrypts:
        return Codec(True, serde.dumps_typed, serde.loads_typed)
    return Codec(False, lambda body: ("json", body), lambda stored: stored[1])


def _text_id(config: Any) -> Any:
    """``config`` with its ``thread_id`` as text, as the manifest has it; not every saver takes 1 and "1" for the same thread."""
    place = (config or {}).get("configurable", {})
    if isinstance(place.get("thread_id", ""), str):
        return config
    return {**config, "configurable": {**place, "thread_id": str(place["thread_id"])}}
