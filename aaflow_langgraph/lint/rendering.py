"""The prompts of one start of an app: every request, in order, as token ids. JSON in, JSON out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from aaflow_langgraph.broker import KVBroker
from aaflow_langgraph.explain.divergence import Prompt
from aaflow_langgraph.explain.elsewhere import prompt_of
from aaflow_langgraph.model import Span, Turn


@dataclass(frozen=True, slots=True)
class Request:
    """One request.

    Attributes:
        namespace: Digest of the namespace of the broker that got it.
        source: The node whose handle it went on from, or could have.
        node: Who asked.
        prompt: What the model was shown.
    """

    namespace: str
    source: str
    node: str
    prompt: Prompt

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON."""
        turns = [[turn.role, turn.content.start, turn.content.stop, turn.open] for turn in self.prompt.turns]
        return {
            "namespace": self.namespace,
            "source": self.source,
            "node": self.node,
            "token_ids": self.prompt.token_ids,
            "turns": turns,
        }

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> Request:
        """The request that ``to_dict`` wrote."""
        turns = tuple(Turn(role, Span(start, stop), is_open) for role, start, stop, is_open in document["turns"])
        prompt = Prompt(tuple(document["token_ids"]), turns)
        return cls(document["namespace"], document["source"], document["node"], prompt)


def requests_of(brokers: Sequence[KVBroker]) -> tuple[Request, ...]:
    """What was asked of brokers, oldest first."""
    found = []
    for broker in brokers:
        makers: dict[str, str] = {}
        for entry in broker.journal.entries():
            makers.setdefault(entry.kv_id, entry.node)
            prompt = prompt_of(broker, entry)
            if prompt is not None:
                source = makers.get(entry.parent or entry.nearest or "", "")
                found.append((entry.at_s, Request(broker.namespace.digest, source, entry.node or entry.label, prompt)))
    return tuple(request for _, request in sorted(found, key=lambda one: one[0]))
