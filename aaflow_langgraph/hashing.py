"""Chained block hashes over canonical bytes. Knows token ids and digests; knows no tensors and no storage.

    block_hash(0) = H("block", namespace, "",            ids of block 0)
    block_hash(i) = H("block", namespace, block_hash(i-1), ids of block i)
    kv_id         = H("kv",    namespace, hash of the last full block or "", ids of the partial tail)

A *joint* is a position from which on KV was composed, not computed in the context of what stands before it. The block or
tail in which a joint lies has a tag of its own and names the joint, and with the chain all that follows does: what was
composed never answers to the name of what was computed.

Every field is tagged and length-prefixed, so no two field lists share bytes. BLAKE2b, 256 bits, full width (S11).
A hash commits to all tokens before it; after a hash hit the stored token ids are still compared (nano-vllm does the same).
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from aaflow_langgraph.model import BLOCK_TOKENS, BlockHash


@dataclass(frozen=True, slots=True)
class Joint:
    """Tokens at ``start`` and behind were composed, in the way that ``digest`` names."""

    start: int
    digest: str


def digest(tag: str, *fields: bytes | str) -> str:
    """64 hex digits over ``tag`` and ``fields``, each length-prefixed."""
    parts: list[bytes] = []
    for item in (tag, *fields):
        raw = item.encode() if isinstance(item, str) else item
        parts += (len(raw).to_bytes(8, "little"), raw)
    return hashlib.blake2b(b"".join(parts), digest_size=32).hexdigest()


def token_bytes(token_ids: Iterable[int]) -> bytes:
    """Token ids as little-endian unsigned 32-bit integers."""
    packed = array("I", token_ids)
    if packed.itemsize != 4:  # pragma: no cover - every supported platform has 4-byte unsigned ints
        raise RuntimeError("unsigned int is not 4 bytes on this platform")
    return packed.tobytes()


def block_hashes(
    namespace: str, token_ids: Sequence[int], known: Sequence[BlockHash] = (), joints: Sequence[Joint] = ()
) -> tuple[BlockHash, ...]:
    """Hashes of every full block of ``token_ids``, continuing from ``known`` hashes of its first blocks."""
    hashes = list(known)
    for start in range(len(hashes) * BLOCK_TOKENS, len(token_ids) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
        parent = hashes[-1] if hashes else ""
        stop = start + BLOCK_TOKENS
        hashes.append(BlockHash(_name("block", namespace, parent, token_ids, start, stop, joints)))
    return tuple(hashes)


def prefix_id(
    namespace: str,
    token_ids: Sequence[int],
    stop: int,
    hashes: Sequence[BlockHash],
    joints: Sequence[Joint] = (),
) -> str:
    """``kv_id`` of ``token_ids[:stop]``, given the block hashes of ``token_ids``."""
    num_blocks = stop // BLOCK_TOKENS
    last = hashes[num_blocks - 1] if num_blocks else ""
    return _name("kv", namespace, last, token_ids, num_blocks * BLOCK_TOKENS, stop, joints)


def _name(
    tag: str, namespace: str, parent: str, token_ids: Sequence[int], start: int, stop: int, joints: Sequence[Joint]
) -> str:
    """Name of ``token_ids[start:stop]`` behind ``parent``."""
    packed = token_bytes(token_ids[start:stop])
    inside = [f"{joint.start}:{joint.digest}" for joint in joints if start <= joint.start < stop]
    if inside:
        return digest(f"composed-{tag}", namespace, parent, packed, *inside)
    return digest(tag, namespace, parent, packed)


def extent_name(end_id: str, start: int, canonical_stop: int) -> str:
    """Name of the file of an extent. It names tokens and how they were computed, not bits: two writers of one name may have
    other bits, and either file is right by itself.
    """
    return digest("file", end_id, str(start), str(canonical_stop))
