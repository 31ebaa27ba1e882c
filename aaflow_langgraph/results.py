"""What the operators return: named, frozen, ready for logs and metadata."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal

from aaflow_langgraph.errors import IntegrityError
from aaflow_langgraph.handle import KVHandle

Reuse = Literal["handle", "blocks", "common-prefix", "none"]


@dataclass(frozen=True, slots=True)
class Usage:
    """Where the tokens of one call went.

    Attributes:
        num_context: Tokens of context before the first new one: reused + prefilled.
        num_reused: Tokens whose KV was read.
        num_prefilled: Tokens run through the model before the first new one.
        num_decoded: New tokens generated.
        ttft_s: Seconds from the call to the first new token (of a prefill: to its end).
        total_s: Seconds from the call to its end.
        reuse: How the reused part was found: the parent ``"handle"``, equal ``"blocks"`` of other requests, a
            ``"common-prefix"`` (the chat template rewrote earlier turns), or ``"none"``.
        queued_s: Seconds in the line before it began, because so many others ran; part of ``ttft_s``.
        longest_itl_s: Longest inter-token latency: from asking for a token behind the first to having it. What the forwards
            of others cost is in it, what the caller does between two tokens is not.
        num_shared: Forwards behind the first token that computed for other requests as well.
    """

    num_context: int
    num_reused: int
    num_prefilled: int
    num_decoded: int
    ttft_s: float
    total_s: float
    reuse: Reuse
    queued_s: float = 0.0
    longest_itl_s: float = 0.0
    num_shared: int = 0


@dataclass(frozen=True, slots=True)
class Prefilled:
    """A handle and what it cost."""

    handle: KVHandle
    usage: Usage


@dataclass(frozen=True, slots=True)
class Audit:
    """The next-token distribution behind a composite against that behind the same tokens computed densely.

    Attributes:
        kl: Kullback-Leibler divergence of the composite's from the dense one, in nats.
        top1: Is the most likely token the same?
        kl_control_other: The same divergence with another example's KV of the same shape in the copied tokens' place.
        kl_control_zeroed: With zeroes in their place.
        kl_control_random: With noise of the same spread in their place. Where the controls are as small as ``kl``, the copied
            KV carries nothing that the next token depends on, and ``kl`` says nothing.
    """

    kl: float
    top1: bool
    kl_control_other: float
    kl_control_zeroed: float
    kl_control_random: float


@dataclass(frozen=True, slots=True)
class ComposeReport:
    """How a composite was materialised.

    Deviation is the relative distance of a token's values at the check layer (layer 1) from what they would be had the
    token been computed in its new context: a proxy that is cheap to measure, not a bound on the output. It is taken over
    tokens that were left as they were moved.

    Attributes:
        rung: What was done: ``"prefix"``, ``"suffix"``, ``"legolink"``, ``"blend"`` or ``"dense"``.
        requested: The rung that was asked for.
        k: For legolink: tokens recomputed at the front of each segment but the first.
        r: For blend: share of the moved tokens that was recomputed.
        exact: Did no approximate rung take part, here and in the first segment?
        gate: Why it was made exact although an approximate one was allowed; else empty.
        num_segments: Segments joined.
        num_tokens: Tokens of the composite.
        num_left_out: Tokens of the segments that do not stand in it again: beginnings that several of them share.
        num_shared: Of these in the first segment: read where they lie.
        num_reused: Of the others, tokens whose KV was moved and kept.
        num_recomputed: Of the others, tokens that were run through the model.
        num_checked: Tokens that the deviation was measured over.
        deviation_max: Largest deviation among them.
        deviation_mean: Mean deviation.
        deviation_share: Share of them above ``threshold``.
        threshold: ``max_deviation`` of the request, or 0.5.
        num_bytes: Bytes of KV that were written.
        seconds: How long it took, without the audit and without measuring this machine the first time.
        predicted_s: Predicted seconds of every rung that was possible, by name.
        audit: See ``Audit``; None unless it was asked for.
    """

    rung: str
    requested: str
    k: int
    r: float
    exact: bool
    num_segments: int
    num_tokens: int
    num_shared: int
    num_reused: int
    num_recomputed: int
    num_bytes: int
    seconds: float
    num_left_out: int = 0
    gate: str = ""
    num_checked: int = 0
    deviation_max: float = 0.0
    deviation_mean: float = 0.0
    deviation_share: float = 0.0
    threshold: float = 0.5
    predicted_s: dict[str, float] = field(default_factory=dict)
    audit: Audit | None = None

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON."""
        return asdict(self)

    def to_json(self) -> str:
        """As text, for the recipe."""
        return json.dumps(self.to_dict(), separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> ComposeReport:
        """The report of a recipe.

        Raises:
            IntegrityError: It is none. Way out: fail.
        """
        try:
            stored = json.loads(text)
            known = {item.name: stored[item.name] for item in fields(cls) if item.name in stored}
            if known.get("audit") is not None:
                known["audit"] = Audit(**known["audit"])
            return cls(**known)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise IntegrityError(f"no report of a compose: {error!r:.100}") from error


@dataclass(frozen=True, slots=True)
class Composed:
    """A handle of segments that were joined, and how that went."""

    handle: KVHandle
    report: ComposeReport


@dataclass(frozen=True, slots=True)
class TokenDelta:
    """One new token and the text that it completes; the texts of all deltas add up to the generation's.

    ``text`` is empty while a character is incomplete or a stop string may be beginning. ``token_id`` is None for text that
    was held back and turned out to belong to the answer.
    """

    token_id: int | None
    text: str
    logprob: float | None = None


@dataclass(frozen=True, slots=True)
class Generation:
    """A finished generation: ``handle`` names the whole conversation, the generated turn included.

    ``finish_reason`` is ``"stop"`` (end of turn or stop string) or ``"length"`` (``max_tokens``). ``logprobs`` are natural
    log-probabilities, one per decoded token, when they were asked for.
    """

    handle: KVHandle
    text: str
    token_ids: tuple[int, ...]
    finish_reason: Literal["stop", "length"]
    usage: Usage
    logprobs: tuple[float, ...] | None = None


@dataclass(frozen=True, slots=True)
class Transfer:
    """Where the tokens of a transferred handle are now: together ``num_tokens``.

    Attributes:
        num_tokens: Tokens whose KV the handle's recipe says were computed.
        num_local: In this broker's pool before.
        num_in_place: In the pool of another process, mapped.
        num_copied: Copied from what a process left that is gone.
        num_fetched: Read from disk.
        num_missing: Nowhere in reach: recomputed at the next read.
        seconds: How long it took.
    """

    num_tokens: int
    num_local: int
    num_in_place: int
    num_copied: int
    num_fetched: int
    num_missing: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Stats:
    """Counters since the broker was opened, and what is held now. Bytes are measured from the pool."""

    pool_capacity_bytes: int
    pool_used_bytes: int
    pool_peak_bytes: int
    num_extents: int
    num_leases: int
    num_recipes: int
    num_reused_tokens: int
    num_prefilled_tokens: int
    num_decoded_tokens: int
    num_recomputed_tokens: int
    num_evictions: int
    num_lost_receipts: int
    num_kv_load_failures: int
    overflow_bytes: int
    peak_overflow_bytes: int
    device_capacity_bytes: int
    device_used_bytes: int
    num_device_copies: int
    disk_capacity_bytes: int
    disk_used_bytes: int
    num_spills: int
    num_spill_failures: int
    num_compactions: int
    num_fetches: int
    num_adoptions: int
    num_index_outages: int
    num_running_requests: int
    num_waiting_requests: int
    longest_stall_s: float
    num_batched_steps: int
    num_batched_forwards: int
    num_repeated_steps: int
