"""The checkpoints of a thread and the KV that each stands on, put together from outside: no saver, no model, no broker.

Knows how LangGraph names tasks and stores values in SQLite. Values are decoded with an allow-list that has handles in it and
nothing else: a state's own types come back as plain data, and none of their code runs.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

from langgraph.checkpoint.serde.jsonplus import JsonPlusSerializer
from langgraph.types import Send

from aaflow_langgraph.checkpoint.beside import Beside, Manifest, Row, SeenFile, covered
from aaflow_langgraph.checkpoint.find import find_handles
from aaflow_langgraph.checkpoint.sidecar import Key, Slot
from aaflow_langgraph.errors import ConfigError, IntegrityError, RecipeMissing
from aaflow_langgraph.handle import KVHandle
from aaflow_langgraph.model import Recipe

Tier = Literal["disk", "part", "recipe", "none"]

_SERDE = JsonPlusSerializer(allowed_msgpack_modules=((KVHandle.__module__, KVHandle.__qualname__),))
_PULL = re.compile(r"~__pregel_pull, (?P<node>.+)", re.DOTALL)
_PUSH = re.compile(r"~__pregel_push, (?P<index>\d+)(?:, .*)?", re.DOTALL)
_SHOWN = 8
"""Token ids on each side of a difference."""


@dataclass(frozen=True, slots=True)
class SeenHandle:
    """A handle in a checkpoint's state, or in what its tasks wrote.

    Attributes:
        place: The channel, with a key or a number where it holds several; empty where the values cannot be read.
        label: As the handle has it; empty likewise.
        kv_id: Its name.
        num_tokens: Tokens that it names.
        written_by: The node that wrote it first, subgraphs in front of it; None where that is not known.
        num_on_disk: So many of its first tokens have their tensors on disk.
        is_durable: Did the saver note that all of them were written? None when it did not try yet.
        tier: ``"disk"`` all tensors, ``"part"`` some, ``"recipe"`` none but they can be computed, ``"none"`` no recipe either.
    """

    place: str
    label: str
    kv_id: str
    num_tokens: int
    written_by: str | None
    num_on_disk: int
    is_durable: bool | None
    tier: Tier


@dataclass(frozen=True, slots=True)
class SeenCheckpoint:
    """One checkpoint.

    Attributes:
        checkpoint_id: Its id.
        checkpoint_ns: The subgraph it belongs to; empty for the graph itself.
        parent_id: The checkpoint that it was made from; None for the first one, and where that is not known.
        step: LangGraph's number of the step; None where it is not known.
        source: ``"input"``, ``"loop"``, ``"update"`` or ``"fork"``, as LangGraph has it; empty where it is not known.
        nodes: What ran in the step that made it.
        handles: Those in its state.
        pending: Those that its tasks wrote, as long as no checkpoint was made from it.
        shared_bytes: Files of tensors that its handles need and those of other checkpoints need, too.
        private_bytes: Files of tensors that only its handles need.
    """

    checkpoint_id: str
    checkpoint_ns: str
    parent_id: str | None
    step: int | None
    source: str
    nodes: tuple[str, ...]
    handles: tuple[SeenHandle, ...]
    pending: tuple[SeenHandle, ...]
    shared_bytes: int
    private_bytes: int


@dataclass(frozen=True, slots=True)
class Side:
    """One of two token sequences, from the first difference on. ``token_ids`` is empty where it ends there."""

    kv_id: str
    num_tokens: int
    written_by: str | None
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Difference:
    """What two checkpoints have at one place.

    Attributes:
        place: As in ``SeenHandle``.
        position: Of the first token that differs, or at which one of them ends; None when they are equal.
        before: The last token ids that they have in common.
        a: The first checkpoint's side.
        b: The second one's.
    """

    place: str
    position: int | None
    before: tuple[int, ...]
    a: Side
    b: Side


class History:
    """A thread at one moment.

    Raises:
        ConfigError: Nothing is known of the thread, or the files cannot be read. Way out: fail.
    """

    def __init__(self, beside: Beside, thread_id: str) -> None:
        self.thread_id = thread_id
        self._beside = beside
        self._manifest: Manifest = beside.manifest()
        self._rows: dict[Key, Row] = {row.key: row for row in beside.checkpoints(thread_id)}
        self._paths = beside.task_paths(thread_id)
        self._kept: dict[Key, dict[str, list[str]]] = {}  # of each checkpoint, by slot, the ids that it refers to
        for one in self._manifest.references:
            if one.slot.key.thread_id == thread_id:
                self._kept.setdefault(one.slot.key, {}).setdefault(one.slot.task_id, []).append(one.kv_id)
        if not self._rows and not self._kept:
            others = sorted({one.slot.key.thread_id for one in self._manifest.references})
            known = ", ".join(map(repr, others[:5])) + (" and more" if len(others) > 5 else "")
            raise ConfigError(f"no checkpoint of thread {thread_id!r} is there; threads with KV: {known or 'none'}")
        self._values = {key: _loaded(row) for key, row in self._rows.items()}
        self._writers = self._find_writers()
        self._files_of: dict[str, list[SeenFile]] = {}
        for file in beside.files():
            for kv_id in {kv_id for name in file.names for kv_id in self._manifest.names.get(name, ())}:
                self._files_of.setdefault(kv_id, []).append(file)

    def checkpoints(self) -> list[SeenCheckpoint]:
        """All of them, newest first."""
        parents = {(row.key.checkpoint_ns, row.parent_id) for row in self._rows.values()}
        last = {key for key in self._rows if key[1:] not in parents}
        needs = {
            key: {
                kv_id
                for task_id, ids in slots.items()
                if not task_id or key in last  # what else tasks wrote is the next checkpoint's state
                for one in ids
                for kv_id in self._manifest.lineage(one)
            }
            for key, slots in self._kept.items()
        }
        users = Counter(kv_id for its in needs.values() for kv_id in its)
        strangers = {
            kv_id
            for one in {one.kv_id for one in self._manifest.references if one.slot.key.thread_id != self.thread_id}
            for kv_id in self._manifest.lineage(one)
        }
        found = []
        for key in sorted({*self._rows, *self._kept}, key=lambda key: key.checkpoint_id, reverse=True):
            shared_bytes, private_bytes = self._bytes(needs.get(key, set()), users, strangers)
            slots = self._kept.get(key, {})
            wrote = [kv_id for task_id, ids in slots.items() if task_id and key in last for kv_id in ids]
            row = self._rows.get(key)
            told = _metadata(row)
            found.append(
                SeenCheckpoint(
                    key.checkpoint_id,
                    key.checkpoint_ns,
                    row.parent_id if row else None,
                    told.get("step"),
                    str(told.get("source", "")),
                    self._nodes(row, str(told.get("source", ""))),
                    tuple(self.handles(key)),
                    tuple(self._seen(kv_id, "", "", None) for kv_id in dict.fromkeys(wrote)),
                    shared_bytes,
                    private_bytes,
                )
            )
        return found

    def handles(self, key: Key) -> Iterator[SeenHandle]:
        """Handles in a checkpoint's state, by their places."""
        placed = list(_places(self._values.get(key) or {}))
        for place, handle in placed:
            yield self._seen(handle.kv_id, place, handle.kv_label, handle.kv_tokens)
        known = {handle.kv_id for _, handle in placed}
        for kv_id in self._kept.get(key, {}).get("", ()):
            if kv_id not in known:
                yield self._seen(kv_id, "", "", None)

    def find(self, name: str) -> Key:
        """The checkpoint with an id, or with one that begins or ends so.

        Raises:
            ConfigError: There is none, or several. Way out: fail.
        """
        keys = {*self._rows, *self._kept}
        exact = [key for key in keys if key.checkpoint_id == name]
        found = exact or [key for key in keys if name and key.checkpoint_id.startswith(name)]
        found = found or [key for key in keys if name and key.checkpoint_id.endswith(name)]
        if len(found) != 1:
            raise ConfigError(
                f"{len(found) or 'no'} checkpoints of thread {self.thread_id!r} have an id that is, begins or ends with {name!r}; "
                "aaflow history lists them"
            )
        return found[0]

    def diff(self, a: str, b: str) -> list[Difference]:
        """Where the token sequences of two checkpoints part, at every place that both have; of checkpoints whose values
        cannot be read, the longest of each.

        Raises:
            ConfigError: No such checkpoint; they have no place in common; a recipe cannot be read. Way out: fail.
        """
        sides = [{seen.place: seen for seen in self._longest_last(self.find(name))} for name in (a, b)]
        common = [place for place in sides[0] if place in sides[1]]
        if not common:
            names = [", ".join(map(repr, side)) or "no handle" for side in sides]
            raise ConfigError(f"the two checkpoints have no place in common: one has {names[0]}, the other {names[1]}")
        return [self._difference(place, sides[0][place], sides[1][place]) for place in common]

    # ---------------------------------------------------------------- inside

    def _longest_last(self, key: Key) -> list[SeenHandle]:
        return sorted(self.handles(key), key=lambda seen: seen.num_tokens)

    def _difference(self, place: str, a: SeenHandle, b: SeenHandle) -> Difference:
        chains = [self._chain(seen) for seen in (a, b)]
        ids = [tuple(token for recipe in chain for token in recipe.token_ids) for chain in chains]
        position = next((at for at, (x, y) in enumerate(zip(*ids, strict=False)) if x != y), min(map(len, ids)))
        if ids[0] == ids[1]:
            return Difference(place, None, (), *(Side(s.kv_id, s.num_tokens, s.written_by, ()) for s in (a, b)))
        sides = [
            Side(seen.kv_id, seen.num_tokens, self._writer_at(chain, position), its[position : position + _SHOWN])
            for seen, chain, its in zip((a, b), chains, ids, strict=True)
        ]
        return Difference(place, position, ids[0][max(0, position - _SHOWN) : position], sides[0], sides[1])

    def _chain(self, seen: SeenHandle) -> list[Recipe]:
        """Recipes that a handle stands on, root first."""
        chain = []
        for kv_id in reversed(self._manifest.lineage(seen.kv_id)):
            try:
                recipe = self._beside.recipe(kv_id)
            except (IntegrityError, RecipeMissing) as error:
                raise ConfigError(f"recipe {kv_id[:12]} cannot be read: {error}") from error
            if recipe is None:
                raise ConfigError(f"recipe {kv_id[:12]} is encrypted: its tokens cannot be compared from outside")
            chain.append(recipe)
        if not chain or chain[0].start != 0:
            raise ConfigError(f"the tokens of handle {seen.kv_id[:12]} are not known: it was stored without its recipe")
        return chain

    def _writer_at(self, chain: Sequence[Recipe], position: int) -> str | None:
        """Who wrote the first handle that has the token at a position."""
        behind = [recipe.kv_id for recipe in chain if recipe.stop > position]
        return next((self._writers[kv_id] for kv_id in behind if kv_id in self._writers), None)

    def _seen(self, kv_id: str, place: str, label: str, num_tokens: int | None) -> SeenHandle:
        lineage = self._manifest.lineage(kv_id)
        row = self._manifest.recipes.get(kv_id)
        tokens = num_tokens if row is None else row.num_tokens
        recipe = None
        with suppress(IntegrityError, RecipeMissing):  # check tells of those
            recipe = self._beside.recipe(kv_id)
        computed = (tokens or 0) - (recipe.num_pending if recipe else 0)
        files = [file for one in lineage for file in self._files_of.get(one, ())]
        wanted = set(lineage)
        names = {name for file in files for name in file.names if wanted & self._manifest.names.get(name, set())}
        on_disk = covered(files, names)
        tier: Tier = "part" if on_disk else "recipe"
        if row is None:
            tier = "none"
        elif on_disk >= computed:
            tier = "disk"
        return SeenHandle(
            place,
            label,
            kv_id,
            tokens or 0,
            self._writers.get(kv_id),
            on_disk,
            row.is_durable if row else None,
            tier,
        )

    def _bytes(self, needed: set[str], users: Counter[str], strangers: set[str]) -> tuple[int, int]:
        """(shared, private) bytes of the files that a checkpoint needs. A file is shared when others need one of its recipes."""
        shared_bytes = private_bytes = 0
        files = {file.extent.name: file for kv_id in needed for file in self._files_of.get(kv_id, ())}
        for file in files.values():
            owners = {kv_id for name in file.names for kv_id in self._manifest.names.get(name, ())}
            is_shared = any(kv_id in strangers or users[kv_id] > (kv_id in needed) for kv_id in owners)
            shared_bytes += file.num_bytes if is_shared else 0
            private_bytes += 0 if is_shared else file.num_bytes
        return shared_bytes, private_bytes

    def _nodes(self, row: Row | None, source: str) -> tuple[str, ...]:
        """What ran in the step that made a checkpoint: the tasks whose writes its parent has."""
        if row is None or row.parent_id is None or source != "loop":
            return ()
        parent = Key(self.thread_id, row.key.checkpoint_ns, row.parent_id)
        names = (self._node(slot, path) for slot, path in self._paths.items() if slot.key == parent)
        return tuple(sorted({name for name in names if name is not None and name != "update_state"}))

    def _node(self, slot: Slot, path: str) -> str | None:
        """The node of a task. A pushed one (``Send``) has only a number; its checkpoint knows the node."""
        if path.startswith("~__interrupt__"):
            return "update_state"
        if pulled := _PULL.fullmatch(path):
            return pulled["node"]
        sent = (self._values.get(slot.key) or {}).get("__pregel_tasks")
        if (pushed := _PUSH.fullmatch(path)) and isinstance(sent, list) and int(pushed["index"]) < len(sent):
            send = sent[int(pushed["index"])]
            return send.node if isinstance(send, Send) else None
        return None

    def _find_writers(self) -> dict[str, str]:
        """Who wrote each handle first; of a subgraph and the node that it is, the subgraph's node."""
        found: dict[str, tuple[int, str, str]] = {}
        for key, slots in self._kept.items():
            for task_id, ids in slots.items():
                slot = Slot(key, task_id)
                node = self._node(slot, self._paths.get(slot, "")) if task_id else None
                if node is None or node == "__start__":
                    continue
                above = [part.partition(":")[0] for part in key.checkpoint_ns.split("|") if part]
                rank = (-len(above), key.checkpoint_id, "/".join((*above, node)))
                for kv_id in ids:
                    found[kv_id] = min(found.get(kv_id, rank), rank)
        return {kv_id: name for kv_id, (_, _, name) in found.items()}


def _loaded(row: Row) -> dict[str, Any] | None:
    """The values of a checkpoint; None when they cannot be read: encrypted, pickled, damaged."""
    try:
        values = _SERDE.loads_typed((row.type, row.checkpoint))["channel_values"]
    except (NotImplementedError, ValueError, TypeError, KeyError, AttributeError):
        return None
    return values if isinstance(values, dict) else None


def _metadata(row: Row | None) -> dict[str, Any]:
    try:
        told = json.loads(row.metadata) if row else {}
    except ValueError:
        return {}
    return told if isinstance(told, dict) else {}


def _places(values: Mapping[str, Any]) -> Iterator[tuple[str, KVHandle]]:
    """Handles in a checkpoint's values, each with a name for where it is."""
    for channel, value in values.items():
        handles = find_handles(value)
        if len(handles) == 1:
            yield channel, handles[0]
        elif isinstance(value, Mapping) and all(len(find_handles(item)) <= 1 for item in value.values()):
            for key, item in value.items():
                yield from ((f"{channel}[{key}]", handle) for handle in find_handles(item))
        else:
            yield from ((f"{channel}#{number}", handle) for number, handle in enumerate(handles))
