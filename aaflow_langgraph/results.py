"""What the operators return: named, frozen, ready for logs and metadata."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

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
    """

    num_context: int
    num_reused: int
    num_prefilled: int
    num_decoded: int
    ttft_s: float
    total_s: float
    reuse: Reuse


@dataclass(frozen=True, slots=True)
class Prefilled:
    """A handle and what it cost."""

    handle: KVHandle
    usage: Usage


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
    disk_capacity_bytes: int
    disk_used_bytes: int
    num_spills: int
    num_spill_failures: int
    num_fetches: int
    num_adoptions: int
    num_index_outages: int
