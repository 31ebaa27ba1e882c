"""What a fork costs: seconds, and bytes of the pool.

Question. Sixteen agents go on from one context. What does the sixteenth handle cost, and what do all of them hold?

``fork_us`` is the median time of ``broker.fork``; ``bytes_per_fork`` the pool's growth by forking. ``held_ratio`` = bytes in
use after sixteen forks each prefilled ``new`` tokens of their own and decoded ``decoded``, over the bytes of the one
context: 1.0 would be free. All bytes are read from the pool, none are computed from shapes.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from typing import Any

import torch
from rich.console import Console

from aaflow_langgraph.broker import KVBroker
from aaflow_langgraph.engine.sampling import Sampling
from aaflow_langgraph.engine.transformers import TransformersEngine

FORKS = 16


def run(engine: TransformersEngine, context: int, new: int = 16, decoded: int = 16, seed: int = 0) -> dict[str, Any]:
    """Measure one context. The result is a JSON-ready document."""
    context = min(context, engine.window - new - decoded - 8)  # the prompt "x" and what may frame it
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, engine.vocab_size, (context,), generator=generator).tolist()
    with KVBroker.open(
        engine, pool_bytes=engine.layout.num_bytes(2 * context + 64 * FORKS * (new + decoded))
    ) as broker:
        handle = broker.materialize(ids)
        base = broker.stats().pool_used_bytes
        times = []
        forks = []
        for number in range(max(FORKS, 200)):
            started = time.perf_counter()
            fork = broker.fork(handle, label=f"fork {number}")
            times.append(time.perf_counter() - started)
            forks.append(fork)
        forked = broker.stats().pool_used_bytes - base
        for fork in forks[:FORKS]:
            own = torch.randint(0, engine.vocab_size, (new,), generator=generator).tolist()
            grown = broker.append(fork, own)
            broker.generate("x", parent=grown, raw=True, sampling=Sampling(max_tokens=decoded))
        held = broker.stats().pool_used_bytes
        clean = broker.check() == []
    return {
        "schema": 1,
        "name": "bench fork",
        "context": context,
        "forks": FORKS,
        "new": new,
        "decoded": decoded,
        "fork_us": round(statistics.median(times) * 1e6, 2),
        "bytes_per_fork": forked / len(forks),
        "context_bytes": base,
        "held_bytes": held,
        "held_ratio": round(held / base, 4),
        "check_clean": clean,
    }


def report(document: dict[str, Any]) -> None:
    """One sentence for people on stderr, one JSON line on stdout."""
    Console(stderr=True).print(
        f"a fork takes {document['fork_us']} us and {document['bytes_per_fork']:.0f} bytes; {document['forks']} forks of "
        f"{document['context']:,} tokens, {document['new']} new and {document['decoded']} decoded tokens each, hold "
        f"{document['held_ratio']:.3f}x of one context"
    )
    sys.stdout.write(json.dumps(document) + "\n")
