"""``KVHandle``: the small immutable value that LangGraph state carries instead of text.

Knows how to name KV and how to come back from JSON. Knows nothing of brokers, pools or tensors: a handle owns nothing
and counts nothing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from aaflow_langgraph.errors import ConfigError, MalformedHandle

DIGEST_PATTERN = re.compile(r"[0-9a-f]{64}")
MAX_LABEL_CHARS = 64
MAX_PREVIEW_CHARS = 80
# No window of any known model comes near; a bound keeps forged counts out of arithmetic.
MAX_TOKENS = 1 << 31

_FIELDS = ("kv_id", "kv_namespace", "kv_tokens", "kv_exact", "kv_label", "kv_preview")


@dataclass(frozen=True, slots=True)
class KVHandle:
    """Names the KV of a token sequence under one namespace. Immutable, hashable, under 1 kB serialised.

    Two handles are equal when they name the same KV: label and preview are for people and do not take part.

    Attributes:
        kv_id: Digest (64 hex digits) of the namespace and every token id. It names tokens, never bits.
        kv_namespace: Digest (64 hex digits) of model, tokenizer, dtype, rotary settings, layout and tenant.
        kv_tokens: Number of tokens named, at least 1.
        kv_exact: False once an approximate compose took part.
        kv_label: Short name for people, at most 64 characters.
        kv_preview: First and last words, at most 80 characters; empty when previews are off.

    Raises:
        MalformedHandle: A field has the wrong type, pattern or length. Way out: fail; pass on a handle that a broker made.
    """

    kv_id: str
    kv_namespace: str
    kv_tokens: int
    kv_exact: bool = True
    kv_label: str = field(default="", compare=False)
    kv_preview: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        for name in ("kv_id", "kv_namespace"):
            value = getattr(self, name)
            if not isinstance(value, str) or not DIGEST_PATTERN.fullmatch(value):
                raise MalformedHandle(f"{name} must be 64 lower-case hex digits, got {_shown(value)}")
        if type(self.kv_tokens) is not int or not 1 <= self.kv_tokens < MAX_TOKENS:
            raise MalformedHandle(f"kv_tokens must be an int in [1, {MAX_TOKENS}), got {_shown(self.kv_tokens)}")
        if type(self.kv_exact) is not bool:
            raise MalformedHandle(f"kv_exact must be true or false, got {_shown(self.kv_exact)}")
        for name, limit in (("kv_label", MAX_LABEL_CHARS), ("kv_preview", MAX_PREVIEW_CHARS)):
            value = getattr(self, name)
            if not isinstance(value, str) or len(value) > limit or not is_unicode(value):
                raise MalformedHandle(f"{name} must be Unicode text of at most {limit} characters, got {_shown(value)}")

    @classmethod
    def coerce(cls, value: Any) -> KVHandle:
        """Return ``value`` as a handle: a handle unchanged, or a mapping of exactly its shape.

        Serialisers in strict mode, Studio's JSON editor, ``Send`` and interrupt payloads turn handles into plain dicts;
        every place that takes a handle calls this.

        Raises:
            MalformedHandle: ``value`` is neither. Way out: fail.
        """
        if isinstance(value, cls):
            return value
        if not isinstance(value, Mapping):
            raise MalformedHandle(f"expected a KVHandle or a dict of its fields, got {_shown(value)}")
        missing = [name for name in ("kv_id", "kv_namespace", "kv_tokens") if name not in value]
        unknown = sorted(str(name) for name in value if name not in _FIELDS)
        if missing or unknown:
            raise MalformedHandle(
                f"a handle has the fields {', '.join(_FIELDS)}; missing: {missing or 'none'}, unknown: {unknown[:4] or 'none'}"
            )
        return cls(**{str(name): item for name, item in value.items()})

    def to_dict(self) -> dict[str, Any]:
        """The fields as a JSON-ready dict; ``coerce`` reads it back."""
        return asdict(self)


def make_preview(text: str) -> str:
    """First and last words of ``text`` in at most 80 characters, control characters and runs of space folded."""
    words = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    if len(words) <= MAX_PREVIEW_CHARS:
        return words
    half = (MAX_PREVIEW_CHARS - 3) // 2
    return f"{words[:half].rstrip()} … {words[-half:].lstrip()}"


def check_label(label: object) -> str:
    """``label`` itself when a handle can carry it.

    Raises:
        ConfigError: It is no text, too long, or cannot be serialised. Way out: fail.
    """
    if not isinstance(label, str) or len(label) > MAX_LABEL_CHARS or not is_unicode(label):
        raise ConfigError(
            f"label must be Unicode text of at most {MAX_LABEL_CHARS} characters, got {ascii(label)[:80]}"
        )
    return label


def is_unicode(text: str) -> bool:
    """Can ``text`` be serialised? A lone surrogate cannot."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _shown(value: Any) -> str:
    """``value`` for an error message: type and at most 40 characters."""
    shown = ascii(value) if isinstance(value, str) and not is_unicode(value) else repr(value)
    return f"{type(value).__name__} {shown if len(shown) <= 40 else shown[:37] + '...'}"
