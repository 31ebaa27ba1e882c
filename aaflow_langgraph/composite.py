"""``KVComposite``: handles that are to be joined, in order, and how; what a reducer can say that has no broker.

Knows handles and the options of a compose. Knows no broker and no tensors: what is joined, and by which rung, is decided by
the broker that first reads it. A composite is a request, so its identity is H(ids of the children, requested policy): the
same in any order of arrival, in any process, on any machine, whatever rung is chosen there.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Literal, get_args

from aaflow_langgraph.errors import ConfigError, MalformedHandle
from aaflow_langgraph.handle import MAX_LABEL_CHARS, MAX_PREVIEW_CHARS, MAX_TOKENS, KVHandle, check_label
from aaflow_langgraph.hashing import digest

Rung = Literal["auto", "prefix", "suffix", "legolink", "blend", "dense"]
RUNGS: tuple[Rung, ...] = get_args(Rung)
EXACT_RUNGS: frozenset[Rung] = frozenset({"prefix", "suffix", "dense"})
APPROXIMATE_RUNGS: frozenset[Rung] = frozenset({"legolink", "blend"})

MAX_CHILD_LABEL_BYTES = 96
"""A child's label as UTF-8 JSON, quotes included: with eight of the longest labels a composite stays below 2 kB."""

_LARGEST = 1e300
COMPOSITE_REQUIRED = ("kv_child_ids", "kv_child_namespaces", "kv_child_tokens", "kv_exact_only")


@dataclass(frozen=True, slots=True, kw_only=True)
class ComposePolicy:
    """How segments may be joined.

    Attributes:
        exact: Take no approximate rung.
        rung: ``"auto"`` (the cheapest that is allowed), or the one to take.
        k: For ``"legolink"``: how many tokens are recomputed at the front of each segment but the first, at least 0.
        r: For ``"blend"``: the share of tokens that are recomputed, in [0, 1].
        max_deviation: With ``"auto"``: leave no moved token whose values at the check layer deviate by more. A threshold on a
            measured proxy, not a bound on the output. None sets none.

    Raises:
        ConfigError: A field has the wrong type or is out of range, or ``exact`` contradicts ``rung``. Way out: fail.
    """

    exact: bool = False
    rung: Rung = "auto"
    k: int = 16
    r: float = 0.15
    max_deviation: float | None = None

    def __post_init__(self) -> None:
        if type(self.exact) is not bool:
            raise ConfigError(f"exact must be True or False, got {_shown(self.exact)}")
        if not isinstance(self.rung, str) or self.rung not in RUNGS:
            raise ConfigError(f"rung must be one of {', '.join(RUNGS)}, got {_shown(self.rung)}")
        if type(self.k) is not int or not 0 <= self.k < MAX_TOKENS:
            raise ConfigError(f"k must be an int in [0, {MAX_TOKENS}), got {_shown(self.k)}")
        if not _is_number(self.r) or not 0 <= self.r <= 1:
            raise ConfigError(f"r must be a number in [0, 1], got {_shown(self.r)}")
        if self.max_deviation is not None and (not _is_number(self.max_deviation) or self.max_deviation < 0):
            raise ConfigError(f"max_deviation must be None or a number of at least 0, got {_shown(self.max_deviation)}")
        if self.exact and self.rung in APPROXIMATE_RUNGS:
            raise ConfigError(f"exact=True takes no approximate rung, got rung={self.rung!r}; leave one of the two out")
        if self.max_deviation is not None and self.rung != "auto":
            raise ConfigError(
                f"max_deviation chooses the rung, got rung={self.rung!r} with it; leave one of the two out (rung='auto')"
            )
        # JavaScript writes 1.0 as 1, and -0.0 equals 0.0: one number, one identity.
        object.__setattr__(self, "r", float(self.r) + 0.0)
        if self.max_deviation is not None:
            object.__setattr__(self, "max_deviation", float(self.max_deviation) + 0.0)

    def effective(self) -> dict[str, Any]:
        """The options that decide something: what a rung does not look at makes no other composite of it."""
        if self.exact or self.rung in EXACT_RUNGS:
            return {"exact": True, "rung": self.rung}
        shown = {"rung": self.rung, "max_deviation": self.max_deviation}
        if self.rung in ("auto", "legolink"):
            shown["k"] = self.k
        if self.rung in ("auto", "blend"):
            shown["r"] = self.r
        return shown

    def stricter(self, others: Iterable[ComposePolicy]) -> ComposePolicy:
        """This policy, and nothing that one of the others forbids."""
        all_of = [self, *others]
        limits = [policy.max_deviation for policy in all_of if policy.max_deviation is not None]
        exact, limit = any(policy.exact for policy in all_of), min(limits, default=None)
        rung = "auto" if (exact or limit is not None) and self.rung in APPROXIMATE_RUNGS else self.rung
        return replace(self, exact=exact, rung=rung, max_deviation=limit if rung == "auto" else None)


@dataclass(frozen=True, slots=True)
class KVComposite:
    """Handles to be joined, in order, with the requested policy. Immutable, hashable, under 2 kB with 8 children as
    msgpack or UTF-8 JSON.

    Made by ``of`` and by the channel ``KVCompose``. Every broker entry and every node that takes a handle takes it, too. Two
    composites are equal when they name the same children in the same order under the same policy; labels are for people.
    Children are stored by field, not as handles, so that a namespace is stored once and previews not at all.

    Attributes:
        kv_child_ids: Ids of the children, in the order in which they are joined; one may appear more than once.
        kv_child_namespaces: Their namespace, or one for each child when they differ (no broker joins those).
        kv_child_tokens: Number of tokens of each.
        kv_child_exact: False for a child that an approximate compose took part in.
        kv_child_labels: Their names, cut to 96 bytes of JSON.
        kv_exact_only: As ``ComposePolicy.exact``; the fields below as those of the same name there.

    Raises:
        MalformedHandle: A field has the wrong type, length or range. Way out: fail; make composites with ``of``.
    """

    kv_child_ids: tuple[str, ...]
    kv_child_namespaces: tuple[str, ...]
    kv_child_tokens: tuple[int, ...]
    kv_child_exact: tuple[bool, ...] = ()
    kv_child_labels: tuple[str, ...] = field(default=(), compare=False)
    kv_exact_only: bool = False
    kv_rung: Rung = "auto"
    kv_k: int = 16
    kv_r: float = 0.15
    kv_max_deviation: float | None = None

    def __post_init__(self) -> None:
        # A serialiser turns tuples into lists.
        for name in _CHILD_FIELDS:
            value = getattr(self, name)
            if not isinstance(value, (list, tuple)):
                raise MalformedHandle(f"{name} must be a list, got {type(value).__name__}")
            object.__setattr__(self, name, tuple(value))
        num_children = len(self.kv_child_ids)
        if not num_children:
            raise MalformedHandle("a composite needs at least one child, got none")
        if len(self.kv_child_namespaces) == 1:
            object.__setattr__(self, "kv_child_namespaces", self.kv_child_namespaces * num_children)
        for name, default in (("kv_child_exact", True), ("kv_child_labels", "")):
            if not getattr(self, name):
                object.__setattr__(self, name, (default,) * num_children)
        for name in _CHILD_FIELDS:
            if len(getattr(self, name)) != num_children:
                raise MalformedHandle(
                    f"{name} must have an entry for each child, got {len(getattr(self, name))} for {num_children}"
                )
        children = self._handles()
        if len(set(self.kv_child_namespaces)) == 1:
            object.__setattr__(self, "kv_child_namespaces", self.kv_child_namespaces[:1])
        object.__setattr__(self, "kv_child_labels", tuple(_cut(child.kv_label) for child in children))
        try:
            policy = self.policy
        except ConfigError as error:
            raise MalformedHandle(f"the policy of a composite is wrong: {error}") from error
        object.__setattr__(self, "kv_r", policy.r)
        object.__setattr__(self, "kv_max_deviation", policy.max_deviation)

    @classmethod
    def of(
        cls,
        children: Iterable[KVHandle | Mapping[str, Any]] | Mapping[str, KVHandle | Mapping[str, Any]],
        *,
        order: Sequence[str] = (),
        exact: bool = False,
        rung: Rung = "auto",
        k: int = 16,
        r: float = 0.15,
        max_deviation: float | None = None,
    ) -> KVComposite:
        """The composite of ``children``, the same for every order in which they come.

        Args:
            children: Handles, which stand by label, then by id, each once; or handles by name, which stand by name (it takes
                the place of the label), each as often as it is named. Names compare as text: ``"10"`` stands before ``"2"``.
            order: Names, labels or ids of those that stand first, in this order; what is not there is passed over.
            exact: As the options that follow: see ``ComposePolicy``.

        Raises:
            ConfigError: An option or a name is wrong. Way out: fail.
            MalformedHandle: There are no children, or one is no handle. Way out: fail.
        """
        policy = ComposePolicy(exact=exact, rung=rung, k=k, r=r, max_deviation=max_deviation)
        return cls.joined(in_order(children, order), policy)

    @classmethod
    def joined(cls, children: Sequence[KVHandle], policy: ComposePolicy) -> KVComposite:
        """The composite of ``children`` in the order in which they stand.

        Raises:
            MalformedHandle: There are no children. Way out: fail.
        """
        return cls(
            kv_child_ids=tuple(child.kv_id for child in children),
            kv_child_namespaces=tuple(child.kv_namespace for child in children),
            kv_child_tokens=tuple(child.kv_tokens for child in children),
            kv_child_exact=tuple(child.kv_exact for child in children),
            kv_child_labels=tuple(child.kv_label for child in children),
            kv_exact_only=policy.exact,
            kv_rung=policy.rung,
            kv_k=policy.k,
            kv_r=policy.r,
            kv_max_deviation=policy.max_deviation,
        )

    @classmethod
    def coerce(cls, value: Any) -> KVComposite:
        """Return ``value`` as a composite: a composite unchanged, or a mapping of exactly its shape; as ``KVHandle.coerce``.

        Raises:
            MalformedHandle: ``value`` is neither. Way out: fail.
        """
        if isinstance(value, cls):
            return value
        if not isinstance(value, Mapping):
            raise MalformedHandle(f"expected a KVComposite or a dict of its fields, got {type(value).__name__}")
        missing = [name for name in COMPOSITE_REQUIRED if name not in value]
        unknown = sorted(ascii(name)[:40] for name in value if name not in COMPOSITE_FIELDS)
        if missing or unknown:
            raise MalformedHandle(
                f"a composite has the fields {', '.join(COMPOSITE_FIELDS)}; missing: {missing or 'none'}, "
                f"unknown: {unknown[:4] or 'none'}"
            )
        return cls(**{str(name): item for name, item in value.items()})

    def to_dict(self) -> dict[str, Any]:
        """The fields as a JSON-ready dict; ``coerce`` reads it back."""
        return asdict(self)

    @property
    def kv_children(self) -> tuple[KVHandle, ...]:
        """The handles to be joined, in order, without previews."""
        return self._handles()

    @property
    def policy(self) -> ComposePolicy:
        """How they may be joined."""
        return ComposePolicy(
            exact=self.kv_exact_only,
            rung=self.kv_rung,
            k=self.kv_k,
            r=self.kv_r,
            max_deviation=self.kv_max_deviation,
        )

    @property
    def kv_composite_id(self) -> str:
        """64 hex digits over the children's ids and the policy. Derived, and not stored: it cannot be forged."""
        policy = json.dumps(self.policy.effective(), sort_keys=True)
        return digest("composite", policy, *self.kv_child_ids)

    @property
    def kv_label(self) -> str:
        """The children's labels for people, at most 64 characters."""
        named = " + ".join(child.kv_label or child.kv_id[:12] for child in self._handles())
        return _shortened(named, MAX_LABEL_CHARS)

    @property
    def kv_preview(self) -> str:
        """How many segments of how many tokens, at most 80 characters."""
        counts = " + ".join(f"{num_tokens:,}" for num_tokens in self.kv_child_tokens)
        return _shortened(f"{len(self.kv_child_ids)} segments of {counts} tokens", MAX_PREVIEW_CHARS)

    def _handles(self) -> tuple[KVHandle, ...]:
        num_children = len(self.kv_child_ids)
        namespaces = (
            self.kv_child_namespaces if len(self.kv_child_namespaces) > 1 else self.kv_child_namespaces * num_children
        )
        stored = zip(
            self.kv_child_ids, namespaces, self.kv_child_tokens, self.kv_child_exact, self.kv_child_labels, strict=True
        )
        return tuple(KVHandle(*child) for child in stored)


_CHILD_FIELDS = tuple(item.name for item in fields(KVComposite) if item.name.startswith("kv_child_"))
COMPOSITE_FIELDS = tuple(item.name for item in fields(KVComposite))


def coerce_segment(value: Any) -> KVHandle | KVComposite:
    """Return ``value`` as what a node can read: a handle, a composite, or what a serialiser made of either.

    Raises:
        MalformedHandle: ``value`` is none of them. Way out: fail.
    """
    if is_composite_shaped(value):
        return KVComposite.coerce(value)
    return KVHandle.coerce(value)


def is_composite_shaped(value: Any) -> bool:
    """Is it a composite, or a mapping that claims to be one? Whether it is, ``KVComposite.coerce`` says."""
    return isinstance(value, KVComposite) or (isinstance(value, Mapping) and "kv_child_ids" in value)


def joint_digest(namespace: str, composite_id: str) -> str:
    """Names a compose inside of block hashes: what was composed in two ways has two names."""
    return digest("joint", namespace, composite_id)


def in_order(
    children: Iterable[KVHandle | Mapping[str, Any]] | Mapping[str, KVHandle | Mapping[str, Any]],
    order: Sequence[str] = (),
) -> tuple[KVHandle, ...]:
    """The handles of ``KVComposite.of``, in their order; named ones carry their name as label.

    Raises:
        ConfigError: A name or ``order`` is wrong. Way out: fail.
        MalformedHandle: One of them is no handle. Way out: fail.
    """
    if isinstance(children, (str, bytes, KVHandle, KVComposite)) or not isinstance(children, Iterable):
        raise MalformedHandle(f"expected handles to join, in a list or a dict by name, got {type(children).__name__}")
    if not isinstance(children, Mapping):
        return arranged((), map(KVHandle.coerce, children), order)
    if "kv_id" in children or is_composite_shaped(children):
        raise MalformedHandle("expected handles to join, in a list or a dict by name, got the dict of one handle")
    return arranged(((check_label(name), KVHandle.coerce(child)) for name, child in children.items()), (), order)


def arranged(
    named: Iterable[tuple[str, KVHandle]], bare: Iterable[KVHandle], order: Sequence[str] = ()
) -> tuple[KVHandle, ...]:
    """Handles by name, each as often as it is named, and handles without a name, each once, in the order of ``of``.

    Raises:
        ConfigError: ``order`` is wrong. Way out: fail.
    """
    handles = [replace(child, kv_label=name) for name, child in named]
    # Of equal handles the one with the first label stays, whichever came first.
    for child in sorted(bare, key=lambda child: (child.kv_label, child.kv_preview)):
        if child not in handles:
            handles.append(child)
    places = {name: place for place, name in reversed(list(enumerate(check_order(order))))}

    def place(child: KVHandle) -> tuple[int, str, str]:
        known = [places[name] for name in (child.kv_label, child.kv_id) if name in places]
        return min(known, default=len(places)), child.kv_label, child.kv_id

    return tuple(sorted(handles, key=place))


def check_order(order: Sequence[str]) -> tuple[str, ...]:
    """``order`` itself as a tuple.

    Raises:
        ConfigError: It is no list of texts. Way out: fail.
    """
    if not isinstance(order, (list, tuple)) or not all(isinstance(name, str) and name for name in order):
        raise ConfigError(f"order must be a list of names, labels or ids, got {ascii(order)[:80]}")
    return tuple(order)


def _cut(label: str) -> str:
    """The front of ``label`` that fits as JSON, where a quote takes two bytes and a control character six."""
    while len(json.dumps(label, ensure_ascii=False).encode()) > MAX_CHILD_LABEL_BYTES:
        label = label[:-1]
    return label


def _shortened(text: str, num_chars: int) -> str:
    return text if len(text) <= num_chars else f"{text[: num_chars - 1]}…"


def _is_number(value: Any) -> bool:
    """A finite number; NaN compares as nothing, and ``math.isfinite`` cannot take every int."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and -_LARGEST < value < _LARGEST


def _shown(value: Any) -> str:
    # An int of thousands of digits cannot even be printed.
    return (
        f"{type(value).__name__} {ascii(value)[:40]}"
        if type(value) is not int or value.bit_length() < 65
        else "a huge int"
    )
