"""Frozen values that every layer shares. No torch, no I/O."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NewType

from aaflow_langgraph.errors import ConfigError

BLOCK_TOKENS = 256
"""Tokens in a block: unit of hashing, lookup and canonical prefill (kv at absolute multiples of this)."""

LAYOUT_VERSION = 1
"""Part of every namespace: changes when the meaning of stored bytes changes."""

BlockHash = NewType("BlockHash", str)
Tier = Literal["device", "host", "disk"]
Operator = Literal["materialize", "append", "generate", "compose"]


@dataclass(frozen=True, slots=True)
class Span:
    """Half-open token positions ``[start, stop)``."""

    start: int
    stop: int

    def __post_init__(self) -> None:
        if not 0 <= self.start <= self.stop:
            raise ConfigError(f"a span needs 0 <= start <= stop, got [{self.start}, {self.stop})")

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Shape of the KV of one model: ``[L, 2, H, T, D]`` = layers, key/value, KV heads, tokens, head dim."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    itemsize: int

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in all layers, keys and values."""
        return self.num_layers * 2 * self.num_kv_heads * self.head_dim * self.itemsize

    def shape(self, num_tokens: int) -> tuple[int, int, int, int, int]:
        """``(L, 2, H, T, D)`` for ``num_tokens`` tokens."""
        return (self.num_layers, 2, self.num_kv_heads, num_tokens, self.head_dim)

    def num_bytes(self, num_tokens: int) -> int:
        """Bytes of ``num_tokens`` tokens."""
        return self.token_bytes * num_tokens


@dataclass(frozen=True, slots=True)
class Namespace:
    """What must be equal for KV to be shared (I6). ``digest`` is the name used everywhere.

    ``facts`` are recorded beside it: they decide whether the bit-exact promise holds, not whether KV may be used.
    """

    digest: str
    model: str
    dtype: str
    tenant: str = ""
    facts: tuple[tuple[str, str], ...] = field(default=(), compare=False)


@dataclass(frozen=True, slots=True)
class Turn:
    """One chat turn inside a recipe.

    Attributes:
        role: ``"system"``, ``"user"``, ``"assistant"`` or what the model's template knows; ``""`` is raw text outside any frame.
        content: Token positions of the content, absolute, without the template's frame.
        open: The turn has not been closed by the template's end-of-turn ids yet: the next prompt may continue it.
    """

    role: str
    content: Span
    open: bool


@dataclass(frozen=True, slots=True)
class Copied:
    """KV of a child's positions ``[start, stop)`` that was moved to ``at`` in what it was composed to."""

    kv_id: str
    start: int
    stop: int
    at: int


@dataclass(frozen=True, slots=True)
class Composition:
    """How the tokens that a recipe adds were joined.

    Attributes:
        composite_id: Identity of the request: the children in order, and the policy.
        children: Ids of all children, in order; the first is the recipe's parent, or the whole of it is copied.
        labels: Their labels.
        copied: Where the added tokens' KV comes from; what lies between are tokens of the chat frame, computed.
        rung: What was done with them: ``"legolink"``, ``"blend"``, or an exact rung.
        k: See ``ComposePolicy``; as it was done.
        r: Likewise.
        report: ``ComposeReport`` as JSON, of the first time.
    """

    composite_id: str
    children: tuple[str, ...]
    labels: tuple[str, ...]
    copied: tuple[Copied, ...]
    rung: str
    k: int
    r: float
    report: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class Recipe:
    """Enough to rebuild the KV of a handle: the parent's recipe and the token ids added to it.

    A recipe stores only what it adds, so a chain of n turns grows by O(new tokens).

    Attributes:
        kv_id: The handle this rebuilds.
        namespace: Digest of the namespace.
        parent: ``kv_id`` of the handle it extends, or None when it starts at position 0.
        start: Position of the first added token (0 without a parent).
        token_ids: The added token ids.
        num_pending: How many of the last ids had no KV yet when the handle was made (the last sampled token and the
            template's end-of-turn ids): they are prefilled with the next append.
        turns: Every chat turn up to here, the parent's included.
        operator: Which operator made it.
        composition: How the added tokens were joined, when a compose made it.
    """

    kv_id: str
    namespace: str
    parent: str | None
    start: int
    token_ids: tuple[int, ...]
    num_pending: int
    turns: tuple[Turn, ...]
    operator: Operator
    composition: Composition | None = None

    @property
    def stop(self) -> int:
        """Number of tokens named by the handle."""
        return self.start + len(self.token_ids)

    @property
    def has_chat(self) -> bool:
        """Does it know chat turns, not only raw text?"""
        return any(turn.role for turn in self.turns)


@dataclass(frozen=True, slots=True)
class Receipt:
    """The only way to give a lease back. Losing it leaks until ``deadline_s`` and is reported; it frees nothing else (I9).

    Attributes:
        lease_id: Unguessable name of the lease.
        extent_ids: The extents it pins.
        deadline_s: Clock reading after which it grants nothing (I7).
    """

    lease_id: str
    extent_ids: tuple[int, ...]
    deadline_s: float


@dataclass(frozen=True, slots=True)
class Finding:
    """One violated invariant, as ``check()`` reports it."""

    invariant: str
    what: str
