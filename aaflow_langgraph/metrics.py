"""Numbers in Prometheus' text format, version 0.0.4. Knows the format and the names; serves nothing.

``prometheus`` gives what one broker counted; ``aaflow inspect --prometheus`` what can be seen from outside
(``inspection.view.document``). A counter ends in ``_total`` and starts at 0 when its broker is opened.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from aaflow_langgraph.results import Stats

Labels = Mapping[str, str]

_STATS: dict[str, tuple[str, Literal["gauge", "counter"], str]] = {
    "pool_capacity_bytes": ("pool_capacity_bytes", "gauge", "Capacity of the pool."),
    "pool_used_bytes": ("pool_used_bytes", "gauge", "Bytes of the pool that are taken."),
    "pool_peak_bytes": ("pool_peak_bytes", "gauge", "The most that was taken since the broker was opened."),
    "num_extents": ("extents", "gauge", "Extents that the index knows, those of other processes included."),
    "num_leases": ("leases", "gauge", "Leases in the index, those of other processes included."),
    "num_recipes": ("recipes", "gauge", "Recipes that this broker holds."),
    "num_reused_tokens": ("reused_tokens_total", "counter", "Tokens whose KV was read instead of computed."),
    "num_prefilled_tokens": ("prefilled_tokens_total", "counter", "Tokens that were run through the model."),
    "num_decoded_tokens": ("decoded_tokens_total", "counter", "Tokens that were generated."),
    "num_recomputed_tokens": ("recomputed_tokens_total", "counter", "Tokens computed again: their KV was gone."),
    "num_evictions": ("evictions_total", "counter", "Extents that left the pool."),
    "num_lost_receipts": ("lost_receipts_total", "counter", "Leases that ran out and were not given back."),
    "num_kv_load_failures": ("kv_load_failures_total", "counter", "Reads of KV that failed and were recomputed."),
    "overflow_bytes": ("overflow_bytes", "gauge", "Bytes that requests hold outside of the pool: it is full."),
    "peak_overflow_bytes": ("overflow_peak_bytes", "gauge", "The most of them since the broker was opened."),
    "device_capacity_bytes": ("device_capacity_bytes", "gauge", "What copies of KV on an accelerator may take."),
    "device_used_bytes": ("device_used_bytes", "gauge", "What they take."),
    "num_device_copies": ("device_copies_total", "counter", "Extents copied from main memory to an accelerator."),
    "disk_capacity_bytes": ("disk_capacity_bytes", "gauge", "What files of this namespace may take."),
    "disk_used_bytes": ("disk_used_bytes", "gauge", "What files of this namespace take."),
    "num_spills": ("spills_total", "counter", "Extents written to disk."),
    "num_spill_failures": ("spill_failures_total", "counter", "Extents that the disk did not take."),
    "num_compactions": ("compactions_total", "counter", "Extents that a long chain was merged to."),
    "num_fetches": ("fetches_total", "counter", "Extents read from disk."),
    "num_adoptions": ("adoptions_total", "counter", "Extents taken over from a process that is gone."),
    "num_index_outages": ("index_outages_total", "counter", "How often the index went away."),
    "num_running_requests": ("running_requests", "gauge", "Requests that run."),
    "num_waiting_requests": ("waiting_requests", "gauge", "Requests in the line for one of the places to run."),
    "longest_stall_s": (
        "longest_stall_seconds",
        "gauge",
        "Longest that a stream's next token waited for its forward to begin since the engine was loaded.",
    ),
    "num_batched_steps": ("batched_steps_total", "counter", "Steps of requests that could share a forward."),
    "num_batched_forwards": ("batched_forwards_total", "counter", "Forwards that these steps took."),
    "num_repeated_steps": (
        "repeated_steps_total",
        "counter",
        "Shared forwards that failed and were run again request by request.",
    ),
}


@dataclass(slots=True)
class _Family:
    """One metric with all its samples."""

    name: str
    kind: str
    help: str
    samples: list[tuple[Labels, float]] = field(default_factory=list)

    def lines(self) -> Iterable[str]:
        """Its part of the text."""
        yield f"# HELP aaflow_{self.name} {_escaped(self.help)}"
        yield f"# TYPE aaflow_{self.name} {self.kind}"
        for labels, value in self.samples:
            inside = ",".join(f'{name}="{_quoted(text)}"' for name, text in labels.items())
            yield f"aaflow_{self.name}{{{inside}}} {value!r}"


def prometheus(stats: Stats, namespace: str) -> str:
    """What one broker counted, labelled with its namespace.

    Examples:
        >>> print(prometheus(broker.stats(), broker.namespace.digest))  # doctest: +SKIP
    """
    families = [
        _Family(name, kind, text, [({"namespace": namespace}, getattr(stats, attribute))])
        for attribute, (name, kind, text) in _STATS.items()
    ]
    return _text(families)


def prometheus_from_outside(document: Mapping[str, Any]) -> str:
    """What ``aaflow inspect`` sees, for every namespace. All are gauges: nobody counts outside of a broker."""
    owners = _Family("owners", "gauge", "Owners of pools, by what can be seen of them.")
    lease = _Family("owner_lease_left_seconds", "gauge", "How long an owner's lease in the index still lasts.")
    capacity = _Family("owner_pool_capacity_bytes", "gauge", "Capacity of an owner's pool.")
    used = _Family("owner_pool_published_bytes", "gauge", "Bytes of an owner's pool that others can read.")
    extents = _Family("index_extents", "gauge", "Extents that the index knows, by where their bytes are.")
    tokens = _Family("index_extent_tokens", "gauge", "Their tokens.")
    num_bytes = _Family("index_extent_bytes", "gauge", "Their bytes.")
    uses = _Family("index_extent_uses", "gauge", "Leases that the extents of now were given so far.")
    counts = {
        name: _Family(f"index_{name.removeprefix('num_')}", "gauge", text)
        for name, text in {
            "num_leases": "Leases in the index.",
            "num_claims": "Computations that somebody has claimed.",
            "num_recipes": "Recipes that the index shares.",
        }.items()
    }
    files = {
        "num_extents": _Family("disk_files", "gauge", "Files of extents."),
        "num_recipes": _Family("disk_recipes", "gauge", "Files of recipes."),
        "num_bytes": _Family("disk_used_bytes", "gauge", "What files of this namespace take."),
    }
    for one in document["namespaces"]:
        label = {"namespace": one["namespace"]}
        for condition in ("alive", "silent", "dead", "absent"):
            number = sum(owner["condition"] == condition for owner in one["owners"])
            owners.samples.append(({**label, "condition": condition}, number))
        for owner in one["owners"]:
            named = {**label, "owner": owner["owner"]}
            if owner["lease_left_s"] is not None:
                lease.samples.append((named, owner["lease_left_s"]))
            if owner["condition"] == "alive":
                capacity.samples.append((named, owner["capacity_bytes"]))
                used.samples.append((named, owner["used_bytes"]))
        for tier, summed in one["extents"].items():
            for family, key in ((extents, "num_extents"), (tokens, "num_tokens"), (num_bytes, "num_bytes")):
                family.samples.append(({**label, "tier": tier}, summed[key]))
        uses.samples.append((label, one["num_uses"]))
        for key, family in counts.items():
            family.samples.append((label, one[key]))
        for key, family in files.items() if one["files"] is not None else ():
            family.samples.append((label, one["files"][key]))
    every = [owners, lease, capacity, used, extents, tokens, num_bytes, uses, *counts.values(), *files.values()]
    return _text(family for family in every if family.samples)


def _text(families: Iterable[_Family]) -> str:
    return "".join(f"{line}\n" for family in families for line in family.lines())


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n")


def _quoted(text: str) -> str:
    return _escaped(text).replace('"', '\\"')
