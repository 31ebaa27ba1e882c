"""``MissReport``: where the tokens of one request went, and why some that could have been reused were not.

Knows numbers, names and sentences; looks at nothing itself. ``why`` and ``mend`` never quote a prompt: only ``Difference``
holds text, and its text can be left out.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

Cause = Literal[
    "none",
    "volatile",
    "tools",
    "think",
    "retokenised",
    "system",
    "history",
    "namespace",
    "tenant",
    "evicted",
    "off",
]

CAUSES: dict[Cause, str] = {
    "none": "nothing was missed",
    "volatile": "timestamp or id early in the prompt",
    "tools": "tool list order",
    "think": "think block dropped by the template",
    "retokenised": "text re-tokenised at a boundary",
    "system": "system prompt changed",
    "history": "earlier turn edited or left out",
    "namespace": "other model or dtype",
    "tenant": "other tenant",
    "evicted": "evicted",
    "off": "KV switched off",
}
"""Every cause in words."""


@dataclass(frozen=True, slots=True)
class Difference:
    """Where a prompt leaves the tokens of a handle that was known.

    Attributes:
        position: Index of the first differing token; all before it are equal.
        role: Chat role of the turn it is in; empty when the prompt's turns are not known.
        asked_id: The prompt's token there, or None when the prompt ends there.
        known_id: The known handle's.
        known_kv_id: The handle that was compared; empty when it belongs to another namespace.
        known_node: The node that made it, when the journal knows it.
        before: Text in front of the difference, the same on both sides. Texts are empty when they are switched off.
        asked: How the prompt goes on.
        known: How the known handle goes on.
    """

    position: int
    role: str
    asked_id: int | None
    known_id: int | None
    known_kv_id: str
    known_node: str
    before: str = ""
    asked: str = ""
    known: str = ""


@dataclass(frozen=True, slots=True)
class MissReport:
    """One request of a broker.

    Attributes:
        number: Its number in the broker's journal.
        at_s: When it was made, in seconds since 1970.
        operator: What it asked for: ``"materialize"``, ``"append"``, ``"generate"`` or ``"compose"``.
        thread: The LangGraph thread that asked; empty outside of one.
        source: The node whose handle it could go on from: together with ``node`` the edge. Empty when nobody made one.
        node: The node that asked.
        label: Label of the handle it made.
        kv_id: Id of the handle it made.
        num_context: Tokens of its prompt.
        num_reused: Of these, served from KV.
        num_reusable: The longest prefix that was computed before by anybody in this process: what could have been served.
        num_recomputed: Computed a second time because their KV was gone.
        num_lost: Tokens that were prefilled and would not have been without the cause; an estimate where text differs.
        cause: Why. ``"none"`` when all that could be reused was, and the rest is new text.
        why: The cause in one sentence.
        mend: What to change, in one sentence; empty without a cause.
        difference: Where the prompt leaves what was known; None when it does not.
    """

    number: int
    at_s: float
    operator: str
    thread: str
    source: str
    node: str
    label: str
    kv_id: str
    num_context: int
    num_reused: int
    num_reusable: int
    num_recomputed: int
    num_lost: int
    cause: Cause
    why: str
    mend: str
    difference: Difference | None

    @property
    def num_prefilled(self) -> int:
        """Tokens that were run through the model before the first new one."""
        return self.num_context - self.num_reused

    @property
    def is_miss(self) -> bool:
        """Was something computed that need not have been?"""
        return self.cause != "none"

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON."""
        return asdict(self) | {"num_prefilled": self.num_prefilled}
