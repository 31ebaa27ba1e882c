"""A broker of this process, as the inspector sees it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from aaflow_langgraph.broker import KVBroker
from aaflow_langgraph.errors import ConfigError, IndexUnavailable
from aaflow_langgraph.graph.rejected import RejectedWrite, rejected_writes
from aaflow_langgraph.model import Recipe
from aaflow_langgraph.studio.facts import Facts
from aaflow_langgraph.studio.tally import MOST_CHARS


class InProcess:
    """A ``Source``. When the broker is closed, what it remembers is still shown."""

    def __init__(self, broker: KVBroker) -> None:
        if not isinstance(broker, KVBroker):
            raise ConfigError(f"broker must be a KVBroker, got {type(broker).__name__}")
        self._broker = broker

    def facts(self) -> Facts:
        """What is there now; of a closed broker, or while its index does not answer, no extents."""
        broker = self._broker
        try:
            extents = broker.extents()
        except (ConfigError, IndexUnavailable):
            extents = ()
        return Facts(
            recipes={recipe.kv_id: recipe for recipe in broker.recipes()},
            extents=extents,
            entries=broker.journal.entries(),
            movements=broker.movements(),
            owner=broker.owner,
            token_bytes=broker.engine.layout.token_bytes,
        )

    def overview(self) -> dict[str, Any]:
        """Counters, sizes, and whether it is open."""
        broker = self._broker
        entries, movements = broker.journal.entries(), broker.movements()
        told: dict[str, Any] = {
            "kind": "broker",
            "state": "closed" if broker.is_closed else "open",
            "model": broker.namespace.model,
            "dtype": broker.namespace.dtype,
            "device": str(broker.engine.device),
            "namespace": broker.namespace.digest,
            "kv": broker.kv,
            "token_bytes": broker.engine.layout.token_bytes,
            "num_handles": len(broker.recipes()),
            "num_requests": entries[-1].number if entries else 0,
            "num_movements": movements[-1].number if movements else 0,
            "num_rejected": sum(one.count for one in rejected_writes()),
            "threads": sorted({entry.thread for entry in entries if 0 < len(entry.thread) <= MOST_CHARS}),
            "stats": None,
            "pool": None,
        }
        if not broker.is_closed:
            stats = broker.stats()
            told["stats"] = asdict(stats)
            told["pool"] = {
                "capacity_bytes": stats.pool_capacity_bytes,
                "used_bytes": stats.pool_used_bytes,
                "peak_bytes": stats.pool_peak_bytes,
                "disk_capacity_bytes": stats.disk_capacity_bytes,
                "disk_used_bytes": stats.disk_used_bytes,
            }
        return told

    def names_of(self, recipe: Recipe) -> Sequence[str]:
        """As the broker names them."""
        return self._broker.names_of(recipe)

    def decode(self, token_ids: Sequence[int]) -> str | None:
        """By the broker's tokenizer; special tokens left out."""
        return self._broker.engine.frame.decode(token_ids)

    def spell(self, token_ids: Sequence[int]) -> str | None:
        """By the broker's tokenizer; special tokens as it writes them."""
        return self._broker.engine.frame.spell(token_ids)

    def rejected(self) -> Sequence[RejectedWrite]:
        """Those of the process: channels know no broker."""
        return rejected_writes()

    def why_missed(self, number: int, *, with_text: bool) -> dict[str, Any] | None:
        """As ``explain_request`` says; of a closed broker nothing can be said."""
        from aaflow_langgraph.explain import CAUSES, explain_request  # late: it is asked for seldom

        report = explain_request(self._broker, number, text=with_text)
        if report is None:
            return None
        told = report.to_dict() | {"cause_words": CAUSES[report.cause]}
        if told["difference"] is not None and not with_text:
            kept = ("position", "role", "known_kv_id", "known_node")
            told["difference"] = {name: told["difference"][name] for name in kept}
        return told
