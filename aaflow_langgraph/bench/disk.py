"""The disk tier against the plainest code that moves the same bytes.

Question. What does it cost that a spilled extent is whole or absent, and that a fetched one is proven?

Legs, interleaved file by file in one process, files of equal size in the same directory; ``kv`` bytes only are counted:

* ``spill_s``       ``DiskPool.write``: header, KV, token ids; fsync, rename, fsync of the folder;
* ``write_s``       the KV alone into a new file, fsync of the file and of its folder: the same durability;
* ``unsynced_s``    the same without any fsync: what the page cache takes, lost with the power;
* ``fetch_s``       ``DiskPool.read`` into memory that was touched before: header checked, KV copied and hashed;
* ``mapped_s``      the plain file mapped and copied into the same memory, nothing checked;
* ``fetch_cold_s``, ``mapped_cold_s``  both again after the page cache forgot the files.

Physics. A spill is bound by the disk: its ratio falls only where files are so small that the rename counts. A fetch from the
page cache is bound by memory: copying runs at the bandwidth of main memory, and hashing has to read every byte once more.
``*_ratio`` = plain / ours, 1.0 is as fast as plain; medians over rounds of the sums over files, spread = (max - min) /
median. ``fetch_cpu_ratio`` is the same in CPU seconds, which other processes disturb less.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from rich.console import Console
from rich.table import Table

from aaflow_langgraph._cache_dir import cache_dir
from aaflow_langgraph.errors import ConfigError
from aaflow_langgraph.hashing import block_hashes, digest, prefix_id
from aaflow_langgraph.model import KVLayout
from aaflow_langgraph.pool.disk import DiskPool, StoredExtent
from aaflow_langgraph.tensors import tensor_bytes

LAYOUT = KVLayout(num_layers=24, num_kv_heads=2, head_dim=64, dtype="bfloat16", itemsize=2)
EXTENT_BYTES = (1 << 20, 16 << 20, 128 << 20)
ROUNDS = 7
_NAMESPACE = digest("namespace", "bench disk")


@dataclass(frozen=True, slots=True)
class Row:
    """One extent size; seconds are medians over rounds, each the sum over ``num_files``."""

    extent_bytes: int
    num_files: int
    spill_s: float
    write_s: float
    unsynced_s: float
    fetch_s: float
    mapped_s: float
    fetch_cold_s: float
    mapped_cold_s: float
    spill_ratio: float
    spill_unsynced_ratio: float
    fetch_ratio: float
    fetch_cpu_ratio: float
    fetch_cold_ratio: float
    spill_spread: float
    write_spread: float
    fetch_spread: float
    mapped_spread: float


def run(num_bytes: int, directory: str | None, rounds: int = ROUNDS) -> list[Row]:
    """Move ``num_bytes`` per leg and round, in extents of several sizes, below ``directory`` (default: the cache directory)."""
    sizes = [size for size in EXTENT_BYTES if size <= num_bytes]
    if not sizes:
        raise ConfigError(f"--bytes {num_bytes} is less than one extent of {EXTENT_BYTES[0]}")
    parent = Path(directory) if directory else cache_dir()
    try:
        parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=parent, prefix="bench-disk-") as place:
            return [_measure(Path(place), size, num_bytes // size, rounds) for size in sizes]
    except OSError as error:
        raise ConfigError(f"cannot measure in {parent}: {error.strerror}; pass --directory") from error


def report(rows: list[Row], rounds: int = ROUNDS) -> None:
    """A table for people on stderr, one JSON line for machines as the last line of stdout."""
    table = Table(title="disk tier against plain code, GB/s of KV")
    columns = (
        "extent",
        "files",
        "spill",
        "write + fsync",
        "ratio",
        "no fsync",
        "fetch",
        "mapped",
        "ratio",
        "CPU ratio",
    )
    for name in (*columns, "cold fetch", "cold mapped", "ratio", "spread"):
        table.add_column(name, justify="right")
    for row in rows:
        moved = row.extent_bytes * row.num_files
        spreads = (row.spill_spread, row.write_spread, row.fetch_spread, row.mapped_spread)
        table.add_row(
            f"{row.extent_bytes / (1 << 20):.0f} MiB",
            str(row.num_files),
            _rate(moved, row.spill_s),
            _rate(moved, row.write_s),
            f"{row.spill_ratio:.2f}x",
            _rate(moved, row.unsynced_s),
            _rate(moved, row.fetch_s),
            _rate(moved, row.mapped_s),
            f"{row.fetch_ratio:.2f}x",
            f"{row.fetch_cpu_ratio:.2f}x",
            _rate(moved, row.fetch_cold_s),
            _rate(moved, row.mapped_cold_s),
            f"{row.fetch_cold_ratio:.2f}x",
            " ".join(f"{spread:.0%}" for spread in spreads),
        )
    Console(stderr=True).print(table)
    document = {
        "schema": 1,
        "name": "bench disk",
        "rows": [asdict(row) for row in rows],
        "rounds": rounds,
        "baseline": "write: a new file, fsync of it and of its folder; read: mapped, copied into touched memory",
    }
    sys.stdout.write(json.dumps(document) + "\n")


def _measure(place: Path, extent_bytes: int, num_files: int, rounds: int) -> Row:
    num_tokens = extent_bytes // LAYOUT.token_bytes // 2 * 2
    kv = torch.randint(-(1 << 15), 1 << 15, LAYOUT.shape(num_tokens), dtype=torch.int16).view(torch.bfloat16)
    # As many destinations as files: one that stays in the CPU's cache would measure that cache.
    into = [torch.ones(LAYOUT.shape(num_tokens), dtype=torch.bfloat16) for _ in range(num_files)]
    source, checksum = tensor_bytes(kv), xxhash.xxh3_128_hexdigest(tensor_bytes(kv))
    plain = place / f"plain-{extent_bytes}"
    plain.mkdir()
    times: dict[str, list[float]] = defaultdict(list)
    cpu: dict[str, list[float]] = defaultdict(list)
    capacity = 2 * num_files * (LAYOUT.num_bytes(num_tokens) + (1 << 20))
    with contextlib.closing(DiskPool(place / f"pool-{extent_bytes}", _NAMESPACE, LAYOUT, capacity)) as pool:
        for number in range(rounds + 1):  # the first one warms up
            extents = [_extent(number * num_files + file, num_tokens, checksum) for file in range(num_files)]
            spent: dict[str, float] = defaultdict(float)
            spent_cpu: dict[str, float] = defaultdict(float)

            def timed(leg: str, body: Callable[[], object], spent: Any = spent, spent_cpu: Any = spent_cpu) -> None:
                started, started_cpu = time.perf_counter(), time.process_time()
                body()
                spent[leg] += time.perf_counter() - started
                spent_cpu[leg] += time.process_time() - started_cpu

            for file, extent in enumerate(extents):
                legs: list[tuple[str, Callable[[], object]]] = [
                    ("spill", partial(pool.write, extent, kv)),
                    ("write", partial(_write, plain, f"{file}", source, synced=True)),
                    ("unsynced", partial(_write, plain, f"unsynced-{file}", source, synced=False)),
                ]
                for leg, body in legs if number % 2 else reversed(legs):
                    timed(leg, body)
            os.sync()  # what was not synced would be written during the reads
            for leg in ("", "_cold"):
                for file, extent in enumerate(extents):
                    if leg:
                        _forget(plain / f"{file}")
                        _forget(
                            place / f"pool-{extent_bytes}" / _NAMESPACE / extent.name[:2] / f"{extent.name}.safetensors"
                        )
                    reads: list[tuple[str, Callable[[], object]]] = [
                        (f"fetch{leg}", partial(pool.read, extent, into[file])),
                        (f"mapped{leg}", partial(_read_mapped, plain / f"{file}", into[file])),
                    ]
                    for name, body in reads if number % 2 else reversed(reads):
                        timed(name, body)
            for extent in extents:
                pool.remove(extent.name)
            for path in plain.iterdir():
                path.unlink()
            if number:
                for name in spent:
                    times[name].append(spent[name])
                    cpu[name].append(spent_cpu[name])
    return _row(LAYOUT.num_bytes(num_tokens), num_files, times, cpu)


def _extent(number: int, num_tokens: int, checksum: str) -> StoredExtent:
    ids = tuple(range(number, number + num_tokens))
    hashes = block_hashes(_NAMESPACE, ids)
    return StoredExtent(0, ids, prefix_id(_NAMESPACE, ids, num_tokens, hashes), hashes, 0, checksum)


def _write(folder: Path, name: str, source: memoryview, *, synced: bool) -> None:
    with _opened(folder / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL) as fd:
        done = 0
        while done < source.nbytes:
            done += os.write(fd, source[done:])
        if synced:
            os.fsync(fd)
    if synced:
        with _opened(folder, os.O_RDONLY) as fd:
            os.fsync(fd)


def _read_mapped(path: Path, into: torch.Tensor) -> None:
    target: Any = np.frombuffer(tensor_bytes(into), dtype=np.uint8)
    with _opened(path, os.O_RDONLY) as fd:
        mapping = mmap.mmap(fd, 0, access=mmap.ACCESS_READ)
        np.copyto(target, np.frombuffer(mapping, dtype=np.uint8))
        mapping.close()


def _forget(path: Path) -> None:
    with _opened(path, os.O_RDONLY) as fd:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)


@contextlib.contextmanager
def _opened(path: Path, flags: int) -> Iterator[int]:
    fd = os.open(path, flags, 0o600)
    try:
        yield fd
    finally:
        os.close(fd)


def _row(extent_bytes: int, num_files: int, times: dict[str, list[float]], cpu: dict[str, list[float]]) -> Row:
    median = {leg: statistics.median(values) for leg, values in times.items()}
    spread = {leg: round((max(values) - min(values)) / median[leg], 3) for leg, values in times.items()}
    cpu_ratio = statistics.median(cpu["mapped"]) / statistics.median(cpu["fetch"])
    return Row(
        extent_bytes=extent_bytes,
        num_files=num_files,
        **{f"{leg}_s": round(median[leg], 5) for leg in median},
        spill_ratio=round(median["write"] / median["spill"], 3),
        spill_unsynced_ratio=round(median["unsynced"] / median["spill"], 3),
        fetch_ratio=round(median["mapped"] / median["fetch"], 3),
        fetch_cpu_ratio=round(cpu_ratio, 3),
        fetch_cold_ratio=round(median["mapped_cold"] / median["fetch_cold"], 3),
        spill_spread=spread["spill"],
        write_spread=spread["write"],
        fetch_spread=spread["fetch"],
        mapped_spread=spread["mapped"],
    )


def _rate(num_bytes: int, seconds: float) -> str:
    return f"{num_bytes / seconds / 1e9:.2f}"
