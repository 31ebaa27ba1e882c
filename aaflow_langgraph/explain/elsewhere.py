"""Does another broker of this process know the same prompt, under another model, dtype or tenant?

Counts tokens; never hands out what the other side holds.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass

from aaflow_langgraph.broker import KVBroker
from aaflow_langgraph.engine.turns import common_prefix
from aaflow_langgraph.errors import ConfigError, RecipeMissing
from aaflow_langgraph.explain.divergence import Prompt
from aaflow_langgraph.explain.report import Cause
from aaflow_langgraph.journal import Entry
from aaflow_langgraph.model import Namespace, Turn

_MOST_ENTRIES = 200
"""So many requests of another broker are looked at."""

_PROBE = "The quick brown fox, 1234567890 times; déjà vu?\n\n{}"


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """A prefix of a prompt that is known in another namespace."""

    namespace: Namespace
    num_shared: int


def other_brokers(broker: KVBroker) -> tuple[KVBroker, ...]:
    """The brokers of this process that serve another namespace."""
    return tuple(other for other in open_brokers() if other.namespace.digest != broker.namespace.digest)


def open_brokers() -> tuple[KVBroker, ...]:
    """Every broker of this process that somebody still holds."""
    # By type, not isinstance: that asks the objects of strangers for their class, and some answer with warnings.
    found = [thing for thing in gc.get_objects() if issubclass(type(thing), KVBroker)]
    return tuple(found)


def prompt_of(broker: KVBroker, entry: Entry) -> Prompt | None:
    """The prompt of a request; None when its recipe is known no more, or the broker is closed."""
    try:
        recipe = broker.find_recipe(entry.kv_id)
        if recipe is None:
            return None
        ids = broker.tokens_of(entry.kv_id)
    except (ConfigError, RecipeMissing):
        return None
    return Prompt(ids[: entry.num_context], turns_of(recipe.turns, entry.num_context))


def turns_of(turns: Sequence[Turn], num_tokens: int) -> tuple[Turn, ...]:
    """Turns that begin within the first tokens; none when only the answer's is known, which tells nothing of the prompt."""
    inside = tuple(turn for turn in turns if turn.content.start < num_tokens)
    return inside if any(turn.role not in ("", "assistant") for turn in inside) else ()


def elsewhere(broker: KVBroker, others: Sequence[KVBroker], asked: Prompt, before_s: float) -> Elsewhere | None:
    """The longest prefix of ``asked`` that another namespace had computed before; None when none had any."""
    best: Elsewhere | None = None
    for other in others:
        entries = [entry for entry in other.journal.entries() if entry.at_s < before_s][-_MOST_ENTRIES:]
        same = _same_tokenizer(broker, other)
        for prompt in (prompt_of(other, entry) for entry in entries):
            if prompt is None:
                continue
            if same:
                num_shared = common_prefix(asked.token_ids, prompt.token_ids)
            else:
                num_shared = _common_contents(broker, asked, other, prompt)
            if num_shared > (best.num_shared if best else 0):
                best = Elsewhere(other.namespace, num_shared)
    return best


def cause_of(other: Namespace, own: Namespace) -> Cause:
    """Which of the two keeps the namespaces apart."""
    alike = (other.model, other.dtype) == (own.model, own.dtype)
    return "tenant" if alike and other.tenant != own.tenant else "namespace"


def why_elsewhere(found: Elsewhere, own: Namespace) -> str:
    """In one sentence. Tenants are not named: a report may be read by another one."""
    other = found.namespace
    if cause_of(other, own) == "tenant":
        return f"{found.num_shared:,} leading tokens are known to a broker of another tenant, which shares nothing"
    if other.model == own.model and other.dtype == own.dtype:
        return (
            f"{found.num_shared:,} leading tokens are known to a broker with other weights or settings of {own.model}"
        )
    return (
        f"{found.num_shared:,} leading tokens are known to a broker of {other.model} in {other.dtype}; this one serves "
        f"{own.model} in {own.dtype}"
    )


def _same_tokenizer(one: KVBroker, other: KVBroker) -> bool:
    a, b = one.engine.tokenizer, other.engine.tokenizer
    return a is b or (
        a.chat_template == b.chat_template
        and a.encode(_PROBE, add_special_tokens=False) == b.encode(_PROBE, add_special_tokens=False)
    )


def _common_contents(broker: KVBroker, asked: Prompt, other: KVBroker, known: Prompt) -> int:
    """Tokens of ``asked`` up to the end of the last leading turn that says the same in both."""
    num_shared = 0
    for a, k in zip(asked.turns, known.turns, strict=False):
        ours = broker.engine.frame.decode(asked.token_ids[a.content.start : a.content.stop])
        theirs = other.engine.frame.decode(known.token_ids[k.content.start : k.content.stop])
        if a.role != k.role or ours.strip() != theirs.strip():
            break
        num_shared = min(a.content.stop, len(asked.token_ids))
    return num_shared
