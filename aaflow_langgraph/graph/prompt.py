"""What a node reads from the state: prompts with placeholders, and the address of a handle.

Knows the three kinds of LangGraph state (dict, dataclass, pydantic model) and nothing of graphs, brokers or models.
A placeholder is a plain state key: ``{question}``. Attribute and index access, conversions and format specifications are
refused, because a prompt must not reach into objects that a state edit can replace; ``{{`` and ``}}`` are braces.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from string import Formatter
from typing import Any

from aaflow_langgraph.composite import ComposePolicy, KVComposite, coerce_segment, is_composite_shaped
from aaflow_langgraph.engine.cache_adapter import refuse_foreign_cache
from aaflow_langgraph.engine.turns import check_text
from aaflow_langgraph.errors import ConfigError, MalformedHandle
from aaflow_langgraph.handle import MAX_LABEL_CHARS, KVHandle

_STATE_KEY = re.compile(r"[^\W\d][\w-]*")


def state_values(state: Any) -> Mapping[str, Any]:
    """The keys and values of a LangGraph state.

    Raises:
        ConfigError: The state has no keys (a root state, or a ``Send`` of something else). Way out: fail.
    """
    if isinstance(state, Mapping):
        return state
    if is_dataclass(state) and not isinstance(state, type):
        return {field.name: getattr(state, field.name) for field in fields(state)}
    # Duck-typed: pydantic is not among our own dependencies.
    model_fields = getattr(type(state), "model_fields", None)
    if isinstance(model_fields, Mapping):
        return {name: getattr(state, name) for name in model_fields}
    raise ConfigError(
        f"a node reads a state with keys (TypedDict, dataclass or pydantic model), got {type(state).__name__}; give the "
        "graph such a state, or Send a dict"
    )


@dataclass(frozen=True, slots=True)
class Prompt:
    """Text with placeholders, parsed once. ``parts`` are literal text, each with the state key that follows it or None."""

    what: str
    parts: tuple[tuple[str, str | None], ...]

    @classmethod
    def parse(cls, text: str, *, what: str) -> Prompt:
        """Parse ``text``; ``what`` names it in messages.

        Raises:
            ConfigError: A placeholder is not a plain state key, or braces do not match. Way out: fail.
        """
        if not isinstance(text, str):
            raise ConfigError(f"{what} must be text, got {type(text).__name__}")
        check_text(text, what)
        try:
            parsed = list(Formatter().parse(text))
        except ValueError as error:
            raise ConfigError(f"{what}: {error}; write {{{{ and }}}} for braces that are meant") from error
        for _, name, specification, conversion in parsed:
            if name is not None and (specification or conversion or not _STATE_KEY.fullmatch(name)):
                shown = name + (f"!{conversion}" if conversion else "") + (f":{specification}" if specification else "")
                raise ConfigError(
                    f"{what}: the placeholder {{{shown}}} is not a plain state key; write {{key}} and compute what you "
                    "need in a node before, or write {{ and }} for braces that are meant"
                )
        return cls(what, tuple((literal, name) for literal, name, _, _ in parsed))

    @property
    def keys(self) -> tuple[str, ...]:
        """State keys in order of appearance, each once."""
        return tuple(dict.fromkeys(name for _, name in self.parts if name is not None))

    def render(self, values: Mapping[str, Any]) -> str:
        """The text with every placeholder replaced by ``str`` of its value; bytes are read as UTF-8.

        Raises:
            ConfigError: A key is missing or None, or holds a handle or bytes that are no text. Way out: fail.
        """
        missing = [key for key in self.keys if values.get(key) is None]
        if missing:
            raise ConfigError(
                f"{self.what} needs the state keys {', '.join(missing)}; the state has {_present(values)}. Give them in "
                "the input or let a node write them before"
            )
        texts = {key: self._text(key, values[key]) for key in self.keys}
        return "".join(literal + (texts[name] if name is not None else "") for literal, name in self.parts)

    def _text(self, key: str, value: Any) -> str:
        if _holds_handle(value):
            raise ConfigError(
                f"{self.what}: the state key {key!r} holds a KV handle, not text; name it in reads={key!r}"
            )
        if not isinstance(value, (str, bytes)):
            return str(value)
        if not value.strip():
            # One value may be blank; whether the whole prompt may be is the broker's to say.
            return value if isinstance(value, str) else value.decode("ascii")
        return check_text(value, f"the state key {key!r}")


@dataclass(frozen=True, slots=True)
class Address:
    """Where a handle lies in the state: ``"key"``, or ``"key.branch"`` in a ``KVBranches``.

    The branch may hold placeholders: ``"drafts.{topic}"``. Only the first dot separates.
    """

    key: str
    branch: Prompt | None

    @classmethod
    def parse(cls, text: str) -> Address:
        """Parse the ``reads`` of a node.

        Raises:
            ConfigError: It is no address. Way out: fail.
        """
        if not isinstance(text, str):
            raise ConfigError(f"reads must be text, got {type(text).__name__}")
        check_text(text, "reads")
        key, dot, branch = text.partition(".")
        if not key:
            raise ConfigError(f"reads={text!r} names no state key; write 'key' or 'key.branch'")
        return cls(key, Prompt.parse(branch, what=f"the branch of reads={text!r}") if dot else None)

    def handle(self, values: Mapping[str, Any]) -> KVHandle | KVComposite:
        """The handle or the composite that lies here; a plain dict of its shape is turned back into one.

        Raises:
            ConfigError: Nothing lies here, a branch has to be named, or a transformers cache lies here. Way out: fail.
            MalformedHandle: What lies here is no handle. Way out: fail.
        """
        value, where = self._found(values)
        if _holds_branches(value):
            raise ConfigError(f"reads={where!r} holds branches: {_present(value)}; name one: reads='{where}.<branch>'")
        return _coerced(value, where)

    def segments(self, values: Mapping[str, Any]) -> KVHandle | KVComposite:
        """As ``handle``; branches without a name are all of them, by name.

        Raises:
            ConfigError: Nothing lies here, or a transformers cache lies here. Way out: fail.
            MalformedHandle: What lies here is no handle. Way out: fail.
        """
        value, where = self._found(values)
        if isinstance(value, Mapping) and not value:
            raise ConfigError(
                f"reads={where!r} holds no branch; a node with writes={where!r} has to run before this one"
            )
        if not _holds_branches(value):
            return _coerced(value, where)
        children = []
        for name, item in sorted(value.items(), key=lambda item: str(item[0])):
            branch = _coerced(item, f"{where}.{name}")
            parts = branch.kv_children if isinstance(branch, KVComposite) else (branch,)
            children += [replace(part, kv_label=str(name)[:MAX_LABEL_CHARS]) for part in parts]
        return KVComposite.joined(children, ComposePolicy())

    def _found(self, values: Mapping[str, Any]) -> tuple[Any, str]:
        """What lies here, and its place in the state."""
        value, where = values.get(self.key), self.key
        if self.branch is not None and isinstance(value, Mapping):
            name = self.branch.render(values)
            if name not in value:
                raise ConfigError(
                    f"reads={where!r} has no branch {name!r}, only {_present(value)}; a node with writes={where!r} and "
                    f"branch={name!r} has to run before this one"
                )
            value, where = value[name], f"{where}.{name}"
        if value is None:
            raise ConfigError(
                f"reads={where!r}, but the state holds no handle there (a value that is none is kept out of the state, see "
                f"graph.rejected.rejected_writes()); a node with writes={self.key!r} has to run before "
                f"this one (prefill_node(broker, text, writes={self.key!r}), say). The state has {_present(values)}"
            )
        return value, where


def _coerced(value: Any, where: str) -> KVHandle | KVComposite:
    refuse_foreign_cache(value)
    try:
        return coerce_segment(value)
    except MalformedHandle as error:
        raise MalformedHandle(f"the state key {where!r} holds no handle: {error}") from error


def _holds_branches(value: Any) -> bool:
    return isinstance(value, Mapping) and not _is_segment(value) and _holds_handle(value)


def _holds_handle(value: Any) -> bool:
    if isinstance(value, Mapping):
        return _is_segment(value) or any(map(_holds_handle, value.values()))
    return isinstance(value, (KVHandle, KVComposite))


def _is_segment(value: Mapping[Any, Any]) -> bool:
    return "kv_id" in value or is_composite_shaped(value)


def _present(values: Mapping[str, Any]) -> str:
    return ", ".join(sorted(str(key) for key, value in values.items() if value is not None)) or "no keys"
