"""What it costs to reach KV that another process of this host holds.

Question. A reader has just learned from the index where an extent lies. How long until it has a tensor over it, and what do
the pages cost when they are read?

Physics. Nothing is copied: the reader asks the owner's socket for a descriptor and maps it, so the size does not matter. The
first touch of each page then is a minor fault (a page table entry, no I/O), once in the life of a mapping; it is reported
apart, because whoever holds a mapping does not pay it again.

``attach_ms`` is a first attach in a fresh ``Peers`` (directory, socket, descriptor, checks, map, tensor), against an owner in
another process that is idle. ``map_ms`` is, in the same rounds, the bare ``mmap`` of as many bytes of this process's own:
the part that nobody can avoid. ``known_us`` is the same call when the pool is mapped already.
"""

from __future__ import annotations

import json
import mmap
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import astuple
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from aaflow_langgraph.errors import ConfigError
from aaflow_langgraph.pool.arena import Allocation
from aaflow_langgraph.pool.peers import Peers
from aaflow_langgraph.pool.shared import SharedPool

_PAGE_BYTES = mmap.PAGESIZE
_WARM_UP = 5


def run(num_mib: int, rounds: int) -> dict[str, Any]:
    """Measure ``rounds`` attaches to a pool of ``num_mib`` MiB, all of it one extent. The result is a JSON-ready document.

    Raises:
        ConfigError: The machine has no such pool to give. Way out: fail.
    """
    num_bytes = num_mib << 20
    with tempfile.TemporaryDirectory(prefix="aaflow-") as folder:
        # The owner ends when its stdin does: also when this process is killed.
        command = [sys.executable, "-c", f"from {__name__} import own; own({folder!r}, {num_bytes})"]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdin is not None
            assert process.stdout is not None
            try:
                told = json.loads(process.stdout.readline() or '{"error": "the other process died"}')
                if "error" in told:
                    raise ConfigError(told["error"])
                return _measure(Path(folder), told["owner"], Allocation(*told["range"]), rounds)
            finally:
                process.stdin.close()


def own(run_dir: str, num_bytes: int) -> None:
    """The other process: a full pool, its name and its one range on stdout, until stdin ends."""
    try:
        pool = SharedPool(num_bytes, run_dir=Path(run_dir))
    except ConfigError as error:
        sys.stdout.write(json.dumps({"error": str(error)}) + "\n")
        return
    whole = pool.reserve(num_bytes)
    assert whole is not None
    pool.tensor(whole, torch.uint8, (num_bytes,)).fill_(1)
    pool.publish(whole)
    sys.stdout.write(json.dumps({"owner": pool.owner, "range": astuple(whole)}) + "\n")
    sys.stdout.flush()
    sys.stdin.read()
    pool.close()


def report(document: dict[str, Any]) -> None:
    """Two sentences for people on stderr, one JSON line on stdout."""
    attach, faults = document["attach_ms"], document["first_touch"]
    Console(stderr=True).print(
        f"a first attach to {document['pool_mib']} MiB of another process takes {attach['p50']:.3f} ms (p95 "
        f"{attach['p95']:.3f}), the bare map {document['map_ms']['p50']:.3f}; a known pool {document['known_us']:.1f} us\n"
        f"first touch of its {faults['pages']:,} pages: {faults['faults']:,} page faults, {faults['ms']:.1f} ms; the second "
        f"{faults['second_ms']:.1f} ms"
    )
    sys.stdout.write(json.dumps(document) + "\n")


def _measure(run_dir: Path, owner: str, whole: Allocation, rounds: int) -> dict[str, Any]:
    attach, bare, known = [], [], []
    own_fd = os.memfd_create("aaflow-bench", os.MFD_CLOEXEC)
    os.truncate(own_fd, whole.num_bytes)
    for number in range(rounds + _WARM_UP):
        peers = Peers(run_dir, deadline_s=10.0)
        started = time.perf_counter()
        view = peers.attach(owner).tensor(whole, torch.uint8, (whole.num_bytes,))
        attached = time.perf_counter()
        peers.attach(owner).tensor(whole, torch.uint8, (whole.num_bytes,))
        again = time.perf_counter()
        mapping = mmap.mmap(own_fd, whole.num_bytes)
        mapped = time.perf_counter()
        mapping.close()
        if number >= _WARM_UP:
            attach.append((attached - started) * 1e3)
            known.append((again - attached) * 1e6)
            bare.append((mapped - again) * 1e3)
        if number < rounds + _WARM_UP - 1:
            del view
            peers.close()
    os.close(own_fd)
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    first = _touch(view)
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults
    second = _touch(view)
    is_right = peers.attach(owner).is_live(whole) and bool((view == 1).all())
    peers.close()
    return {
        "schema": 1,
        "name": "bench attach",
        "pool_mib": whole.num_bytes >> 20,
        "rounds": rounds,
        "attach_ms": _percentiles(attach),
        "map_ms": _percentiles(bare),
        "known_us": round(statistics.median(known), 2),
        "first_touch": {
            "pages": whole.num_bytes // _PAGE_BYTES,
            "faults": faults,
            "ms": round(first * 1e3, 3),
            "second_ms": round(second * 1e3, 3),
        },
        "bytes_right": is_right,
    }


def _touch(view: torch.Tensor) -> float:
    """Seconds to read one byte of each page."""
    started = time.perf_counter()
    view[::_PAGE_BYTES].sum()
    return time.perf_counter() - started


def _percentiles(values: Sequence[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {"p50": round(statistics.median(ordered), 4), "p95": round(ordered[int(0.95 * (len(ordered) - 1))], 4)}
