"""``explain_miss``: for every request of a broker, how many tokens it reused of those it could, and why not more.

Reads the broker's journal and recipes, and those of other brokers of this process; changes nothing, computes nothing. Of
other namespaces it says only how many tokens they share and what they are: their text is never shown.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from aaflow_langgraph.broker import KVBroker
from aaflow_langgraph.errors import ConfigError
from aaflow_langgraph.explain.divergence import Divergence, Prompt, covers_earlier_turns, divergence
from aaflow_langgraph.explain.elsewhere import (
    Elsewhere,
    cause_of,
    elsewhere,
    other_brokers,
    prompt_of,
    turns_of,
    why_elsewhere,
)
from aaflow_langgraph.explain.eviction import evicted_for
from aaflow_langgraph.explain.mend import mend_of, why_differs
from aaflow_langgraph.explain.report import Cause, Difference, MissReport
from aaflow_langgraph.journal import Entry
from aaflow_langgraph.model import BLOCK_TOKENS

FEWEST_TOKENS = 16
"""What costs fewer tokens than this is called no miss: templates begin alike, and tokens at the seams are always run again."""

FEWEST_BEHIND = 64
"""In the last turn of a prompt something new is expected: a date there is a miss only with this many tokens behind it."""


def explain_miss(
    broker: KVBroker, *, thread: str | None = None, node: str | None = None, last: int = 100, text: bool = True
) -> tuple[MissReport, ...]:
    """A report for each of the last requests, oldest first; hits included, with the cause ``"none"``.

    Args:
        broker: Its journal is read. Other brokers of this process are asked whether they know the same tokens under another
            model, dtype or tenant.
        thread: Only requests of this LangGraph thread.
        node: Only requests of this node.
        last: At most so many requests, the newest.
        text: Show the text around a difference. Off, reports hold numbers, ids, names and sentences that quote nothing.

    Raises:
        ConfigError: ``broker`` is none or is closed, an option is wrong, or the journal has no request of that thread or
            node: says which there are. Way out: fail.
    """
    if type(last) is not int or last < 1:
        raise ConfigError(f"last must be a positive int, got {last!r:.100}")
    entries = _entries(broker, text)
    for name, wanted in (("thread", thread), ("node", node)):
        there = sorted({str(getattr(entry, name)) for entry in entries})
        if wanted is not None and wanted not in there:
            shown = ", ".join(repr(one) for one in there[:8]) or "no request at all"
            raise ConfigError(f"the journal has no request of {name} {wanted!r:.100}; it has {shown}")
    chosen = [entry for entry in entries if thread in (None, entry.thread) and node in (None, entry.node)][-last:]
    explainer = Explainer(broker, other_brokers(broker), text)
    return tuple(explainer.report(entry) for entry in chosen)


def explain_request(broker: KVBroker, number: int, *, text: bool = True) -> MissReport | None:
    """The report of one request by its number in the journal; None when it is not there (any more).

    Raises:
        ConfigError: ``broker`` is none or is closed. Way out: fail.
    """
    entries = _entries(broker, text)
    entry = next((entry for entry in entries if entry.number == number), None)
    return None if entry is None else Explainer(broker, other_brokers(broker), text).report(entry)


def _entries(broker: KVBroker, text: bool) -> tuple[Entry, ...]:
    if not isinstance(broker, KVBroker):
        raise ConfigError(f"a miss is explained of a KVBroker, got {type(broker).__name__}")
    if not isinstance(text, bool):
        raise ConfigError(f"text must be True or False, got {text!r:.100}")
    entries = broker.journal.entries()
    broker.find_recipe(entries[-1].kv_id if entries else broker.namespace.digest)  # a closed broker says so
    return entries


@dataclass(frozen=True, slots=True)
class _Known:
    """A handle that a prompt is compared with."""

    kv_id: str
    node: str
    prompt: Prompt


class Explainer:
    """Explains requests that are in a broker's journal when it is made.

    Args:
        broker: An open one.
        others: Brokers that serve other namespaces, to be asked as well.
        text: Show text?
    """

    def __init__(self, broker: KVBroker, others: Sequence[KVBroker], text: bool) -> None:
        self._broker = broker
        self._text = text
        self._others = others
        self._maker: dict[str, str] = {}
        self._before: dict[int, Entry] = {}
        latest: dict[tuple[str, str], Entry] = {}
        for entry in broker.journal.entries():
            self._maker.setdefault(entry.kv_id, entry.node)
            earlier = latest.get((entry.thread, entry.node))
            if earlier is not None:
                self._before[entry.number] = earlier
            latest[entry.thread, entry.node] = entry

    def report(self, entry: Entry) -> MissReport:
        """Why one request reused no more."""
        asked = prompt_of(self._broker, entry)
        cause: Cause = "none"
        num_lost, why, difference = 0, "everything that could be reused was; what was prefilled is new", None
        if asked is not None:
            found = self._divergence(entry, asked)
            if found is not None:
                known, where = found
                difference = self._difference(known, where)
                if where.cause != "none":
                    cause, num_lost = where.cause, _num_behind(entry, known, where)
                    why = why_differs(cause, where.what, where.role, where.position, num_lost)
            other = elsewhere(self._broker, self._others, asked, entry.at_s)
            if other is not None and self._is_worse(other, entry, num_lost):
                own = self._broker.namespace
                cause, num_lost = cause_of(other.namespace, own), other.num_shared - entry.num_reused
                why, difference = why_elsewhere(other, own), None
            num_gone = max(entry.num_reusable - entry.num_reused, entry.num_recomputed)
            if num_gone > num_lost:
                gone = self._gone(entry, asked, num_gone)
                if gone is not None:
                    cause, why = gone
                    num_lost, difference = num_gone, None
                elif cause == "none":
                    why = self._in_blocks(entry, num_gone)
        return MissReport(
            number=entry.number,
            at_s=entry.at_s,
            operator=entry.operator,
            thread=entry.thread,
            source=self._maker.get(entry.parent or entry.nearest or "", ""),
            node=entry.node,
            label=entry.label,
            kv_id=entry.kv_id,
            num_context=entry.num_context,
            num_reused=entry.num_reused,
            num_reusable=entry.num_reusable,
            num_recomputed=entry.num_recomputed,
            num_lost=num_lost,
            cause=cause,
            why=why,
            mend=mend_of(cause),
            difference=difference,
        )

    def _divergence(self, entry: Entry, asked: Prompt) -> tuple[_Known, Divergence] | None:
        """The surest one among the handles that this prompt could have gone on from."""
        found: list[tuple[_Known, Divergence]] = []
        covered = covers_earlier_turns(asked, entry.num_nearest, self._decoded)
        for known in self._candidates(entry):
            where = divergence(asked, known.prompt, self._decoded, same_asker=known.node == entry.node)
            if where is None:
                continue
            # Where all earlier turns could be reused, what another conversation said in them does not matter.
            if (covered and where.position < entry.num_nearest) or _is_expected(
                where, _num_behind(entry, known, where)
            ):
                where = replace(where, cause="none")
            found.append((known, where))
        blamed = [one for one in found if one[1].cause != "none"]
        return next(iter(blamed or found), None)

    def _candidates(self, entry: Entry) -> list[_Known]:
        earlier = self._before.get(entry.number)
        ids = [entry.nearest, earlier.kv_id if earlier else None, entry.parent]
        known = []
        for kv_id in dict.fromkeys(one for one in ids if one is not None and one != entry.kv_id):
            recipe = self._broker.find_recipe(kv_id)
            if recipe is not None:
                ids_of = self._broker.tokens_of(kv_id)
                prompt = Prompt(ids_of, turns_of(recipe.turns, len(ids_of)))
                known.append(_Known(kv_id, self._maker.get(kv_id, ""), prompt))
        return known

    def _difference(self, known: _Known, where: Divergence) -> Difference:
        shown = (where.before, where.asked, where.known) if self._text else ("", "", "")
        return Difference(
            position=where.position,
            role=where.role,
            asked_id=where.asked_id,
            known_id=where.known_id,
            known_kv_id=known.kv_id,
            known_node=known.node,
            before=shown[0],
            asked=shown[1],
            known=shown[2],
        )

    def _is_worse(self, other: Elsewhere, entry: Entry, num_lost: int) -> bool:
        """Do other namespaces explain more than what was found here? A little more is their template's beginning."""
        more = other.num_shared - max(entry.num_reusable, entry.num_reused)
        return more >= FEWEST_TOKENS and other.num_shared - entry.num_reused > num_lost

    def _gone(self, entry: Entry, asked: Prompt, num_gone: int) -> tuple[Cause, str] | None:
        """Why KV that had been computed was not read."""
        if not self._broker.kv:
            return "off", f"{num_gone:,} tokens had been computed before; this broker passes text (kv=False)"
        was_evicted, nodes = evicted_for(self._broker, entry, asked)
        if was_evicted or entry.num_recomputed:
            by = f", in favour of {', '.join(nodes)}" if nodes else ""
            return "evicted", f"{num_gone:,} tokens had been computed before and were evicted{by}"
        if not entry.num_reused and num_gone >= FEWEST_TOKENS:
            return "off", f"{num_gone:,} tokens had been computed before; this request looked nothing up (kv=False)"
        return None

    def _in_blocks(self, entry: Entry, num_gone: int) -> str:
        """Why tokens that are there were not looked for."""
        parent = None if entry.parent is None else self._broker.find_recipe(entry.parent)
        if parent is not None and entry.num_reused >= parent.stop - parent.num_pending:
            return (
                f"it went on from handle {parent.kv_id[:10]}, all of which was reused; another known prompt shares "
                f"{_tokens(num_gone)} more behind it, and what is not the handle's own is reused in whole blocks of "
                f"{BLOCK_TOKENS} tokens only"
            )
        return (
            f"{_tokens(num_gone)} that had been computed before were not looked for: a prompt that goes on from no handle, or "
            f"is deterministic, finds whole blocks of {BLOCK_TOKENS} tokens"
        )

    def _decoded(self, ids: Sequence[int]) -> str:
        return str(self._broker.engine.tokenizer.decode(list(ids)))


def _tokens(num: int) -> str:
    return f"{num:,} {'token' if num == 1 else 'tokens'}"


def _num_behind(entry: Entry, known: _Known, where: Divergence) -> int:
    """Tokens behind a difference that both sides have: an estimate of what it cost."""
    return min(entry.num_context, len(known.prompt.token_ids)) - where.position


def _is_expected(where: Divergence, num_behind: int) -> bool:
    """Is it what a last turn is for, or so little that it is nobody's fault?"""
    if where.cause in ("think", "retokenised"):
        return False  # these never are what anybody meant
    return num_behind < (FEWEST_BEHIND if where.is_last_turn and where.cause == "volatile" else FEWEST_TOKENS)
