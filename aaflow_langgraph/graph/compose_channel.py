"""``KVCompose``: a channel that joins what several nodes write in one step, instead of calling it a conflict.

Knows handles, composites and LangGraph's channel protocol. Knows no broker, no pool and no I/O: channel methods run on the
event-loop thread, so concurrent handles become a ``KVComposite``, which the broker joins when a node first reads it. Which
children can be joined (one model, one tenant) is for that node to find out.

Laws, for a channel ``c``, well-formed handles ``a != b``, a value ``v`` (a handle or a composite) and any writes ``w``:

    c.update([])                no write                  nobody wrote in this step
    c.update([c.get(), *w]) == c.update(w)                parallel subgraphs echo keys that they never touch
    c.update([None])            no write, recorded        dataclass states write their None defaults
    c.update(["garbage"])       no write, recorded        an exception here would poison the thread's pending writes
    c.update([v])               v                         one write stays what it is and replaces what was there
    c.update([a, b])            composite of a and b      by label, then by id
    c.update([a, a, b]) == c.update([a, b])               retries and echoes write twice and mean once
    c.update([{"x": a, "y": a}])  composite of a and a    a name is given on purpose: named handles stand by name,
    c.update([{"x": a}, {"y": b}]) == c.update([{"x": a, "y": b}])   and are never echoes
    c.update([{"x": a}, {"x": b}])  InvalidUpdateError    a real conflict, as in ``KVBranches``
    c.update([composite, b])    composite of its different children and b, under the channel's policy and nothing that the
                                composite's own forbids
    c.update(w) == c.update(any order of w)
    c.update([Overwrite(v), b]) == c.update([v])
    c.update([Overwrite(None)])                           forgets: the only way to empty a channel
    c.from_checkpoint(c.checkpoint()) == c                also when a serialiser turned values into plain dicts

The composite's id follows from the children's ids and the policy, so a step that runs again gives the same one. Steps are
not joined with each other: branches of different length meet in a ``KVBranches``, which ``compose_node`` reads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from langgraph.channels.base import BaseChannel
from langgraph.errors import EmptyChannelError

from aaflow_langgraph.composite import (
    ComposePolicy,
    KVComposite,
    Rung,
    arranged,
    check_order,
    coerce_segment,
    is_composite_shaped,
)
from aaflow_langgraph.errors import ConfigError, MalformedHandle
from aaflow_langgraph.graph.rejected import reason_for, record
from aaflow_langgraph.graph.writes import MISSING, conflict, unwrapped
from aaflow_langgraph.handle import KVHandle, check_label

Segment = KVHandle | KVComposite


@dataclass(frozen=True, slots=True)
class _Write:
    """One well-formed write: a value, or handles by name."""

    value: Segment | None = None
    named: tuple[tuple[str, KVHandle], ...] = ()


class KVCompose(BaseChannel[Segment, Any, Segment]):
    """Joins the handles of one step: ``sources: Annotated[KVHandle | KVComposite, KVCompose]``.

    With a policy, use an instance: ``Annotated[KVHandle | KVComposite, KVCompose(rung="blend", r=0.2)]``. Nodes write a
    handle, or handles by name: ``{"sources": {"manual": handle}}``. One handle alone stays a handle.

    Args:
        order: Names, labels or ids of the children that stand first, in this order; the others stand by name or label.
        exact: As the options that follow, the requested policy: see ``ComposePolicy``.

    Raises:
        ConfigError: An option is wrong. Way out: fail.
    """

    __slots__ = ("order", "policy", "value")

    value: Any

    def __init__(
        self,
        typ: Any = KVHandle,
        key: str = "",
        *,
        order: Sequence[str] = (),
        exact: bool = False,
        rung: Rung = "auto",
        k: int = 16,
        r: float = 0.15,
        max_deviation: float | None = None,
    ) -> None:
        super().__init__(typ, key)
        self.order = check_order(order)
        self.policy = ComposePolicy(exact=exact, rung=rung, k=k, r=r, max_deviation=max_deviation)
        self.value = MISSING

    def __eq__(self, other: object) -> bool:
        return isinstance(other, KVCompose) and (other.policy, other.order) == (self.policy, self.order)

    def __hash__(self) -> int:
        return hash((KVCompose, self.policy, self.order))

    @property
    def ValueType(self) -> Any:
        """A handle or a composite: gives the JSON schema and the entries of LangGraph's strict allow-list."""
        return KVHandle | KVComposite

    @property
    def UpdateType(self) -> Any:
        """What a node may write: a handle, a composite, or handles by name."""
        return KVHandle | KVComposite | dict[str, KVHandle]

    def copy(self) -> Self:
        """A channel with the same value and policy. Copies references."""
        twin = self._empty()
        twin.value = self.value
        return twin

    def from_checkpoint(self, checkpoint: Any) -> Self:
        """A channel holding a stored value; a plain dict of its shape becomes a handle or a composite again."""
        channel = self._empty()
        if checkpoint is not MISSING and checkpoint is not None:
            value = channel._segment(checkpoint)
            channel.value = MISSING if value is None else value
        return channel

    def get(self) -> Segment:
        """The handle or the composite.

        Raises:
            EmptyChannelError: Nothing was written yet. LangGraph then leaves the key out of the state.
        """
        if self.value is MISSING:
            raise EmptyChannelError
        value: Segment = self.value
        return value

    def is_available(self) -> bool:
        """Was anything written?"""
        return self.value is not MISSING

    def update(self, values: Sequence[Any]) -> bool:
        """Take the writes of one step, in any order. True when the value changed.

        Raises:
            InvalidUpdateError: One name for two different handles, or two different ``Overwrite``. Way out: fail.
        """
        plain: list[_Write] = []
        forced: list[_Write | None] = []
        for value in values:
            is_overwrite, written = unwrapped(value)
            if is_overwrite and written is None:
                forced.append(None)
            elif (write := self._write(written)) is not None:
                (forced if is_overwrite else plain).append(write)
        current = self._current
        if forced:
            chosen = self._only([None if write is None else self._joined([write]) for write in forced])
        else:
            news = [write for write in plain if write.named or write.value != current]
            chosen = self._joined(news) if news else current
        if chosen == current:
            return False
        self.value = MISSING if chosen is None else chosen
        return True

    @property
    def _current(self) -> Segment | None:
        return None if self.value is MISSING else self.value

    def _empty(self) -> Self:
        twin = self.__class__(self.typ, self.key, order=self.order)
        twin.policy = self.policy
        return twin

    def _write(self, written: Any) -> _Write | None:
        """One write, or None after recording why nothing of it can be taken."""
        if not isinstance(written, Mapping) or "kv_id" in written or is_composite_shaped(written):
            value = self._segment(written)
            return None if value is None else _Write(value)
        named: list[tuple[str, KVHandle]] = []
        for name, value in written.items():
            try:
                label = check_label(name)
            except ConfigError:
                label = ""
            if not label:
                record(self.key, "a name that is not a non-empty string of at most 64 characters", kept=self._current)
            elif (handle := self._handle(value, label)) is not None:
                named.append((label, handle))
        if not written:
            record(self.key, "a dict without any handle", kept=self._current)
        return _Write(named=tuple(sorted(named, key=lambda item: item[0]))) if named else None

    def _joined(self, writes: Sequence[_Write]) -> Segment:
        """What well-formed writes come to, in whatever order they stand.

        Raises:
            InvalidUpdateError: One name for two different handles.
        """
        named: dict[str, KVHandle] = {}
        for name, handle in (item for write in writes for item in write.named):
            if named.setdefault(name, handle) != handle:
                raise conflict(f"{self.key}.{name}", sorted(map(_told, (named[name], handle))))
        values = [write.value for write in writes if write.value is not None]
        if not named and len(set(values)) == 1 and (only := _first(values)) is not None:
            return only
        children = arranged(named.items(), (child for value in values for child in _children_of(value)), self.order)
        policy = self.policy.stricter(value.policy for value in values if isinstance(value, KVComposite))
        return children[0] if len(children) == 1 else KVComposite.joined(children, policy)

    def _only(self, values: Sequence[Segment | None]) -> Segment | None:
        """The one value that every ``Overwrite`` of a step carries.

        Raises:
            InvalidUpdateError: There are several.
        """
        if len(set(values)) > 1:
            raise conflict(self.key, sorted(map(_told, set(values))))
        return _first([value for value in values if value is not None])

    def _segment(self, value: Any) -> Segment | None:
        """``value`` as a handle or a composite, or None after recording why it is neither."""
        try:
            return coerce_segment(value)
        except MalformedHandle as error:
            record(self.key, reason_for(value, error=error), kept=self._current)
            return None

    def _handle(self, value: Any, name: str) -> KVHandle | None:
        """``value`` as a handle, or None after recording why it is none."""
        try:
            return KVHandle.coerce(value)
        except MalformedHandle as error:
            record(f"{self.key}.{name}", reason_for(value, error=error), kept=self._current)
            return None


def _children_of(value: Segment) -> tuple[KVHandle, ...]:
    return value.kv_children if isinstance(value, KVComposite) else (value,)


def _first(equal: Sequence[Segment]) -> Segment | None:
    """Of equal values with different labels the one with the first label, whoever wrote first."""
    return min(equal, key=lambda value: (value.kv_label, value.kv_preview), default=None)


def _told(value: Segment | None) -> str:
    if value is None:
        return "nothing (a key to be emptied)"
    if isinstance(value, KVComposite):
        return f"{value.kv_label!r} {value.kv_composite_id[:12]} ({value.kv_preview})"
    return f"{value.kv_label or 'unlabelled'!r} {value.kv_id[:12]} ({value.kv_tokens} tokens)"
