"""``compose_node``: joins handles that were not computed in each other's context, and says what it did.

Knows a broker and where handles lie in the state; knows no engine, and no rung but by name. Which rung is taken and what it
costs is the broker's matter. Which may be taken is decided here in one case, when a source was edited: whoever edits a
document looks for the change in the answers, and no approximation may stand between.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from aaflow_langgraph.composite import APPROXIMATE_RUNGS, ComposePolicy, KVComposite, Rung, coerce_segment
from aaflow_langgraph.errors import ConfigError, RecipeMissing, UsageError
from aaflow_langgraph.graph.gate import report_compose
from aaflow_langgraph.graph.node import KVNode, NodeCall, NodeOptions
from aaflow_langgraph.graph.prompt import Address
from aaflow_langgraph.handle import KVHandle

if TYPE_CHECKING:
    from aaflow_langgraph.broker import KVBroker


def compose_node(
    broker: KVBroker,
    *,
    reads: str | Sequence[str],
    writes: str,
    exact: bool = False,
    max_deviation: float | None = None,
    rung: Rung | None = None,
    k: int | None = None,
    r: float | None = None,
    audit: bool = False,
    label: str | None = None,
    deterministic: bool = False,
    kv: bool = True,
    report_to: str | None = None,
    name: str | None = None,
) -> KVNode:
    """A node that joins handles and writes the handle of the whole.

    ``builder.add_node("join", compose_node(broker, reads=["manual", "ticket"], writes="context"))``

    When ``writes`` holds a handle that was composed earlier and a segment of the same label has another id now, that source
    was edited: the join is exact, and the report's ``gate`` says so.

    Args:
        broker: Joins, computes and keeps the KV. The node closes over it.
        reads: Addresses in the order in which their handles are joined (``"key"`` or ``"key.branch"``), or one key: of a
            ``KVCompose``, joined in its order and under its policy, or of a ``KVBranches``, joined by branch name.
        writes: State key that gets the handle.
        exact: Take no approximate rung. So does a composite that asks for it.
        max_deviation: See ``ComposePolicy``. As the three that follow: what is left out is as the composite under ``reads``
            asks for, and where there is none, ``"auto"``, 16 and 0.15.
        rung: See ``ComposePolicy``.
        k: See ``ComposePolicy``.
        r: See ``ComposePolicy``.
        audit: Measure the next-token distribution against the dense one and against mismatched caches. Costs two dense runs.
        label: Name of the handle for people, at most 64 characters; the key it is written to unless given.
        deterministic: With ``exact=True``: compute alone and canonically, bit-equal to a run without any cache.
        kv: False computes the whole as one sequence and publishes nothing, for comparison.
        report_to: State key that gets the report as a plain dict. With it a source is also seen to be edited behind a join
            that was exact: what is exact is an ordinary handle, whose recipe does not say what it was joined of.
        name: Name of the runnable; ``add_node`` has its own.

    Raises:
        ConfigError: An option is wrong. When the node runs: nothing lies under one of ``reads``; in that case nothing is
            written. Way out: fail. The broker's errors pass through: ``IncompatibleHandle`` for handles of two models or
            tenants, ``NotComposable`` when the rung cannot be taken, ``ContextTooLong``.
    """
    named = [reads] if isinstance(reads, str) else reads
    if not isinstance(named, (list, tuple)) or not named:
        raise ConfigError(f"reads must be a state key or a list of them, at least one, got {ascii(reads)[:80]}")
    if writes is None:
        raise ConfigError("compose_node writes nothing: name the state key of the handle in writes=")
    if deterministic is True and not exact:
        raise ConfigError("deterministic=True promises bits, which no approximate rung keeps: pass exact=True with it")
    if not isinstance(audit, bool):
        raise ConfigError(f"audit must be True or False, got {audit!r}")
    given = {"rung": rung, "k": k, "r": r, "max_deviation": max_deviation}
    asked: dict[str, Any] = {option: value for option, value in given.items() if value is not None}
    ComposePolicy(exact=exact, **asked)
    # ``usage_to`` takes the report: any node's second kind of output, with the same rules for its key.
    options = NodeOptions(
        broker=broker, writes=writes, label=label, deterministic=deterministic, kv=kv, usage_to=report_to
    )
    addresses = tuple(Address.parse(address) for address in named)
    return _ComposeNode(options, addresses, {"exact": exact, **asked}, audit, name or f"compose_{writes}")


class _ComposeNode(KVNode):
    def __init__(
        self, options: NodeOptions, addresses: tuple[Address, ...], asked: Mapping[str, Any], audit: bool, name: str
    ) -> None:
        super().__init__(options, name)
        self.read_keys = tuple(dict.fromkeys(address.key for address in addresses))
        self._addresses = addresses
        self._asked = asked
        self._audit = audit

    def _body(self, call: NodeCall) -> dict[str, Any]:
        read = [address.segments(call.values) for address in self._addresses]
        segments = [child for value in read for child in _children_of(value)]
        policy = _policy(read, self._asked)
        gate = ""
        if edited := self._edited(call, segments):
            gate = f"edited: {', '.join(edited)}"
            policy = ComposePolicy(exact=True)
        composed = self.broker.compose(
            segments,
            exact=policy.exact,
            max_deviation=policy.max_deviation,
            rung=policy.rung,
            k=policy.k,
            r=policy.r,
            audit=self._audit,
            gate=gate,
            label=call.label,
            deterministic=self._options.deterministic,
            kv=self._options.kv,
        )
        report = report_compose(call.node, composed, segments)
        update: dict[str, Any] = {self._options.writes or "": composed.handle}
        if self._options.usage_to is not None:
            update[self._options.usage_to] = report
        return update

    def _edited(self, call: NodeCall, segments: Sequence[KVHandle]) -> list[str]:
        """Labels of segments that had another id when what lies under ``writes`` was composed."""
        earlier = call.values.get(self._options.writes or "")
        before: dict[str, set[str]] = {}
        for label, kv_id in () if earlier is None else (*self._reported(call), *self._recorded(earlier)):
            before.setdefault(label, set()).add(kv_id)
        now = Counter(child.kv_label for child in segments)
        # A label that several segments bear names none of them.
        labels = {
            child.kv_label
            for child in segments
            if now[child.kv_label] == 1 and child.kv_id not in before.get(child.kv_label, {child.kv_id})
        }
        return sorted(labels - {""})

    def _reported(self, call: NodeCall) -> list[tuple[str, str]]:
        """Labels and ids in the report of the join before. What lies there may have been edited by hand."""
        report = call.values.get(self._options.usage_to or "")
        segments = report.get("segments") if isinstance(report, Mapping) else None
        told = [item for item in segments if isinstance(item, Mapping)] if isinstance(segments, (list, tuple)) else []
        return [(str(item.get("label")), str(item.get("kv_id"))) for item in told]

    def _recorded(self, earlier: Any) -> list[tuple[str, str]]:
        """Labels and ids that the recipe of what was joined approximately names."""
        try:
            handle = coerce_segment(earlier)
            recipe = self.broker.recipe(handle) if isinstance(handle, KVHandle) else None
        except (RecipeMissing, UsageError):
            # Nobody knows what it was made of, or it is no handle of this broker: there is nothing to compare with.
            return []
        while recipe is not None and recipe.composition is None:
            recipe = None if recipe.parent is None else self.broker.find_recipe(recipe.parent)
        if recipe is None or recipe.composition is None:
            return []
        return list(zip(recipe.composition.labels, recipe.composition.children, strict=True))


def _children_of(value: KVHandle | KVComposite) -> tuple[KVHandle, ...]:
    return value.kv_children if isinstance(value, KVComposite) else (value,)


def _policy(read: Sequence[KVHandle | KVComposite], asked: Mapping[str, Any]) -> ComposePolicy:
    """What the node was told, else what the composite that it reads asks for; of several, only what each forbids."""
    policies = [value.policy for value in read if isinstance(value, KVComposite)]
    base = policies[0] if len(read) == len(policies) == 1 else ComposePolicy()
    rung = asked.get("rung", "auto" if "max_deviation" in asked else base.rung)
    own = ComposePolicy(
        exact=asked["exact"],
        rung="auto" if asked["exact"] and rung in APPROXIMATE_RUNGS else rung,
        k=asked.get("k", base.k),
        r=asked.get("r", base.r),
        max_deviation=asked.get("max_deviation"),
    )
    return own.stricter(policies)
