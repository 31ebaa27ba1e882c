"""Channels for KV handles in LangGraph state: ``KVChannel`` holds one handle, ``KVBranches`` handles by branch name.

Knows handles and LangGraph's channel protocol. Deliberately knows no broker, no pool and no I/O: channel methods run on
the event-loop thread, and whether a well-formed handle can be read is for the reading node to find out.

Laws, for a channel ``c``, well-formed handles ``a != b`` and any list of writes ``w``:

    c.update([])               no write                 nobody wrote in this step
    c.update([c.get()])        no write                 parallel subgraphs echo keys that they never touch
    c.update([None])           no write, recorded       dataclass states write their None defaults
    c.update(["garbage"])      no write, recorded       an exception here would poison the thread's pending writes
    c.update([a, a]) == c.update([a])
    c.update(w) == c.update(any order of w)
    c.update([a, b])           InvalidUpdateError       a real conflict: both well-formed, both new
    c.update([Overwrite(a), b]) == c.update([a])
    c.update([Overwrite(None)])                         forgets: the only way to empty a channel
    c.from_checkpoint(c.checkpoint()) == c              also when a serialiser turned handles into plain dicts
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Self

from langgraph.channels.base import BaseChannel
from langgraph.errors import EmptyChannelError

from aaflow_langgraph.errors import MalformedHandle
from aaflow_langgraph.graph.rejected import reason_for, record
from aaflow_langgraph.graph.writes import MISSING, conflict, unwrapped
from aaflow_langgraph.handle import KVHandle


class KVChannel(BaseChannel[KVHandle, KVHandle, KVHandle]):
    """Holds the last handle written: ``docs: Annotated[KVHandle, KVChannel]``.

    In a dataclass or pydantic state write ``Annotated[KVHandle | None, KVChannel] = None``.
    """

    __slots__ = ("value",)

    value: Any

    def __init__(self, typ: Any = KVHandle, key: str = "") -> None:
        super().__init__(typ, key)
        self.value = MISSING

    def __eq__(self, other: object) -> bool:
        return isinstance(other, KVChannel)

    def __hash__(self) -> int:
        return hash(KVChannel)

    @property
    def ValueType(self) -> type[KVHandle]:
        """``KVHandle``: gives the JSON schema and the entry of LangGraph's strict allow-list."""
        return KVHandle

    @property
    def UpdateType(self) -> type[KVHandle]:
        """``KVHandle``, as ``ValueType``."""
        return KVHandle

    def copy(self) -> Self:
        """A channel with the same value. Copies a reference."""
        twin = self.__class__(self.typ, self.key)
        twin.value = self.value
        return twin

    def from_checkpoint(self, checkpoint: Any) -> Self:
        """A channel holding a stored handle; a plain dict of its shape becomes a handle again."""
        channel = self.__class__(self.typ, self.key)
        if checkpoint is not MISSING and checkpoint is not None:
            handle = _well_formed(checkpoint, self.key, kept=None)
            channel.value = MISSING if handle is None else handle
        return channel

    def get(self) -> KVHandle:
        """The handle.

        Raises:
            EmptyChannelError: Nothing was written yet. LangGraph then leaves the key out of the state.
        """
        if self.value is MISSING:
            raise EmptyChannelError
        handle: KVHandle = self.value
        return handle

    def is_available(self) -> bool:
        """Was a handle written?"""
        return self.value is not MISSING

    def update(self, values: Sequence[Any]) -> bool:
        """Take the writes of one step, in any order. True when the handle changed.

        Raises:
            InvalidUpdateError: Two different well-formed handles in one step. Way out: fail; the message says how to
                keep both or choose one.
        """
        current = self.value if self.is_available() else None
        plain: list[KVHandle] = []
        forced: list[KVHandle | None] = []
        for value in values:
            is_overwrite, written = unwrapped(value)
            if is_overwrite and written is None:
                forced.append(None)
            elif (handle := _well_formed(written, self.key, kept=current)) is not None:
                (forced if is_overwrite else plain).append(handle)
        if forced:
            chosen = _only(set(forced), self.key)
        else:
            chosen = _only({handle for handle in plain if handle != current} or {current}, self.key)
        if chosen == current:
            return False
        self.value = MISSING if chosen is None else chosen
        return True


class KVBranches(BaseChannel[dict[str, KVHandle], Mapping[str, Any], dict[str, KVHandle]]):
    """Holds handles by branch name: ``drafts: Annotated[dict[str, KVHandle], KVBranches]``.

    Each write is ``{branch: handle}`` and is merged in; parallel nodes that write their own branches never conflict.
    The laws of ``KVChannel`` hold for each branch. ``Overwrite(mapping)`` replaces all branches. Starts as ``{}``, like
    LangGraph's own reducers on a dict, and is kept sorted by branch name, so that equal content gives equal bytes.
    """

    __slots__ = ("value",)

    value: dict[str, KVHandle]

    def __init__(self, typ: Any = dict[str, KVHandle], key: str = "") -> None:
        super().__init__(typ, key)
        self.value = {}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, KVBranches)

    def __hash__(self) -> int:
        return hash(KVBranches)

    @property
    def ValueType(self) -> Any:
        """``dict[str, KVHandle]``: gives the JSON schema and the entry of LangGraph's strict allow-list."""
        return dict[str, KVHandle]

    @property
    def UpdateType(self) -> Any:
        """``dict[str, KVHandle]``, as ``ValueType``."""
        return dict[str, KVHandle]

    def copy(self) -> Self:
        """A channel with the same branches. Shares the dict, which is replaced and never changed in place."""
        twin = self.__class__(self.typ, self.key)
        twin.value = self.value
        return twin

    def from_checkpoint(self, checkpoint: Any) -> Self:
        """A channel holding stored branches; plain dicts of a handle's shape become handles again."""
        channel = self.__class__(self.typ, self.key)
        if checkpoint is not MISSING and checkpoint is not None:
            channel.value = _sorted(channel._branches(checkpoint) or {})
        return channel

    def get(self) -> dict[str, KVHandle]:
        """A new dict, sorted by branch name: a node that changes it does not change the channel."""
        return dict(self.value)

    def is_available(self) -> bool:
        """Always: no branch is ``{}``."""
        return True

    def update(self, values: Sequence[Any]) -> bool:
        """Merge the writes of one step, in any order. True when a branch changed.

        Raises:
            InvalidUpdateError: Two different well-formed handles for one branch, or two different ``Overwrite``, in
                one step. Nothing is written. Way out: fail; the message says how to keep both or choose one.
        """
        plain: list[dict[str, KVHandle]] = []
        forced: list[dict[str, KVHandle]] = []
        for value in values:
            is_overwrite, written = unwrapped(value)
            if is_overwrite and written is None:
                forced.append({})
            elif (branches := self._branches(written, replaces=is_overwrite)) is not None:
                (forced if is_overwrite else plain).append(branches)
        if any(other != forced[0] for other in forced):
            raise conflict(self.key, [f"Overwrite of {len(branches)} branches" for branches in forced])
        chosen = forced[0] if forced else {**self.value, **self._agreed(map(self._news, plain))}
        if chosen == self.value:
            return False
        self.value = _sorted(chosen)
        return True

    def _news(self, branches: Mapping[str, KVHandle]) -> dict[str, KVHandle]:
        """What differs from the current value: the rest is an echo."""
        return {branch: handle for branch, handle in branches.items() if handle != self.value.get(branch)}

    def _agreed(self, writes: Iterable[Mapping[str, KVHandle]]) -> dict[str, KVHandle]:
        """All branches of ``writes``, which may not name two handles for one branch."""
        named: dict[str, set[KVHandle]] = {}
        for branches in writes:
            for branch, handle in branches.items():
                named.setdefault(branch, set()).add(handle)
        return {branch: _only(handles, f"{self.key}.{branch}") for branch, handles in sorted(named.items())}

    def _branches(self, written: Any, *, replaces: bool = False) -> dict[str, KVHandle] | None:
        """The well-formed branches of one write, or None when it is no mapping of branches.

        Where a write ``replaces`` all branches, the current handle stands in for a malformed one.
        """
        if not isinstance(written, Mapping):
            record(self.key, reason_for(written, expected="a dict of handles by branch name"))
            return None
        if "kv_id" in written:
            record(self.key, "a handle without its branch: write {branch: handle}")
            return None
        taken: dict[str, KVHandle] = {}
        for branch, value in written.items():
            if not isinstance(branch, str) or not branch:
                record(self.key, "a branch name that is not a non-empty string")
                continue
            current = self.value.get(branch)
            handle = _well_formed(value, f"{self.key}.{branch}", kept=current) or (current if replaces else None)
            if handle is not None:
                taken[branch] = handle
        return taken


def _sorted(branches: Mapping[str, KVHandle]) -> dict[str, KVHandle]:
    return dict(sorted(branches.items()))


def _only(handles: set[Any], key: str) -> Any:
    """The one member of ``handles``.

    Raises:
        InvalidUpdateError: There are several.
    """
    if len(handles) == 1:
        return next(iter(handles))
    raise conflict(key, sorted(map(_named, handles)))


def _named(handle: KVHandle | None) -> str:
    if handle is None:
        return "nothing (a key to be emptied)"
    return f"{handle.kv_label or 'unlabelled'!r} {handle.kv_id[:12]} ({handle.kv_tokens} tokens)"


def _well_formed(value: Any, key: str, *, kept: KVHandle | None) -> KVHandle | None:
    """``value`` as a handle, or None after recording why it is none."""
    try:
        return KVHandle.coerce(value)
    except MalformedHandle as error:
        record(key, reason_for(value, error=error), kept=kept)
        return None
