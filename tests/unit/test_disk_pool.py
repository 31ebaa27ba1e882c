"""The disk tier over real files: what is written is read back, and what is not whole is never served."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import shutil
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import safetensors
import torch
import xxhash

from aaflow_langgraph.errors import (
    CapacityError,
    ConfigError,
    Evicted,
    IntegrityError,
    KVMissing,
    PoolExhausted,
)
from aaflow_langgraph.evict.base import Candidate
from aaflow_langgraph.hashing import block_hashes, digest, prefix_id, token_bytes
from aaflow_langgraph.model import BLOCK_TOKENS, Finding, KVLayout, Recipe, Span, Turn
from aaflow_langgraph.pool import _checked_read, _placed
from aaflow_langgraph.pool.disk import DiskPool, StoredExtent
from aaflow_langgraph.tensors import tensor_bytes

NAMESPACE = digest("namespace", "test")
LAYOUT = KVLayout(num_layers=2, num_kv_heads=2, head_dim=8, dtype="float32", itemsize=4)


def kv_of(extent: StoredExtent, layout: KVLayout = LAYOUT) -> torch.Tensor:
    """Bytes that are a function of the tokens: a wrong read is seen."""
    generator = torch.Generator().manual_seed(hash_of(extent))
    dtype = getattr(torch, layout.dtype)
    return torch.randn(layout.shape(extent.num_rows), generator=generator).to(dtype)


def hash_of(extent: StoredExtent) -> int:
    return int(digest("seed", token_bytes(extent.token_ids), str(extent.start))[:12], 16)


def extent_of(
    seed: int, start: int = 0, stop: int = 300, layout: KVLayout = LAYOUT, canonical: int = 0
) -> StoredExtent:
    ids = tuple(random.Random(seed).choices(range(50_000), k=stop))
    hashes = block_hashes(NAMESPACE, ids)
    bare = StoredExtent(
        start=start,
        token_ids=ids[start:],
        end_id=prefix_id(NAMESPACE, ids, stop, hashes),
        hashes=hashes[start // BLOCK_TOKENS : stop // BLOCK_TOKENS],
        canonical_stop=canonical,
        checksum="0" * 32,
    )
    return replace(bare, checksum=xxhash.xxh3_128_hexdigest(tensor_bytes(kv_of(bare, layout))))


def empty(extent: StoredExtent, layout: KVLayout = LAYOUT) -> torch.Tensor:
    return torch.full(layout.shape(extent.num_rows), -1.0, dtype=getattr(torch, layout.dtype))


def file_of(directory: Path, extent: StoredExtent, namespace: str = NAMESPACE) -> Path:
    return directory / namespace / extent.name[:2] / f"{extent.name}.safetensors"


def ticking() -> Callable[[], int]:
    """A clock that moves by one second at each reading."""
    return itertools.count(1_700_000_000_000_000_000, 1_000_000_000).__next__


def size_of(extent: StoredExtent) -> int:
    return 4096 + LAYOUT.num_bytes(extent.num_rows) + 4 * len(extent.token_ids)


def found_by(pool: DiskPool) -> tuple[set[StoredExtent], list[Finding]]:
    findings: list[Finding] = []
    return set(pool.scan(findings)), findings


def assert_serves(pool: DiskPool, extent: StoredExtent) -> None:
    into = empty(extent)
    assert pool.read(extent, into) == extent
    assert torch.equal(into, kv_of(extent))


@pytest.fixture
def open_pool(tmp_path: Path) -> Iterator[Callable[..., DiskPool]]:
    opened: list[DiskPool] = []

    def open_one(capacity_bytes: int = 64 << 20, **options: object) -> DiskPool:
        directory = options.pop("directory", tmp_path / "kv")
        pool = DiskPool(directory, NAMESPACE, LAYOUT, capacity_bytes, **options)  # type: ignore[arg-type]
        opened.append(pool)
        return pool

    yield open_one
    for pool in opened:
        pool.close()


# what is written is read back


@pytest.mark.parametrize(("start", "stop"), [(0, 1), (0, 2), (0, 256), (200, 700), (511, 513), (256, 512)])
def test_what_is_written_is_read_back_by_another_pool(
    open_pool: Callable[..., DiskPool], start: int, stop: int
) -> None:
    extent = extent_of(1, start, stop)
    writer = open_pool()
    assert writer.write(extent, kv_of(extent))
    writer.close()
    reader = open_pool()
    assert_serves(reader, extent)
    assert_serves(reader, reader.read(extent.name, empty(extent)))
    assert found_by(reader) == ({extent}, [])
    assert reader.check(payloads=True) == []


@pytest.mark.parametrize(("dtype", "itemsize"), [("float32", 4), ("bfloat16", 2), ("float16", 2)])
def test_a_file_is_what_any_safetensors_reader_opens(tmp_path: Path, dtype: str, itemsize: int) -> None:
    layout = KVLayout(3, 2, 4, dtype, itemsize)
    extent = extent_of(2, 255, 600, layout)
    pool = DiskPool(tmp_path / "kv", NAMESPACE, layout, 1 << 20)
    pool.write(extent, kv_of(extent, layout))
    pool.close()
    path = file_of(tmp_path / "kv", extent)
    with safetensors.safe_open(path, "pt") as file:
        assert torch.equal(file.get_tensor("kv"), kv_of(extent, layout))
        assert tuple(file.get_tensor("token_ids").tolist()) == extent.token_ids
        assert file.metadata()["end_id"] == extent.end_id
    raw = path.read_bytes()
    kv_offset = 8 + int.from_bytes(raw[:8], "little")
    assert kv_offset % 4096 == 0
    assert raw[kv_offset:].startswith(bytes(tensor_bytes(kv_of(extent, layout))))
    header = raw[8:kv_offset].rstrip(b" ")
    assert header == json.dumps(json.loads(header), separators=(",", ":")).encode()


def test_a_header_longer_than_a_page_is_read_back(tmp_path: Path) -> None:
    layout = KVLayout(1, 1, 1, "float16", 2)
    extent = extent_of(3, 0, 100 * BLOCK_TOKENS, layout)
    with contextlib.closing(DiskPool(tmp_path / "kv", NAMESPACE, layout, 1 << 20)) as pool:
        pool.write(extent, kv_of(extent, layout))
        into = empty(extent, layout)
        assert pool.read(extent, into) == extent
        assert torch.equal(into, kv_of(extent, layout))


def test_more_than_one_piece_of_bytes_is_read_back(tmp_path: Path) -> None:
    layout = KVLayout(8, 2, 64, "float32", 4)
    extent = extent_of(4, 0, 2100, layout)
    assert layout.num_bytes(extent.num_rows) > 2 * _checked_read.PIECE_BYTES
    with contextlib.closing(DiskPool(tmp_path / "kv", NAMESPACE, layout, 64 << 20)) as pool:
        pool.write(extent, kv_of(extent, layout))
        into = empty(extent, layout)
        pool.read(extent, into)
        assert torch.equal(into, kv_of(extent, layout))


def test_a_destination_that_is_not_contiguous_is_filled_and_one_of_the_wrong_shape_refused(
    open_pool: Callable[..., DiskPool],
) -> None:
    pool, extent = open_pool(), extent_of(5)
    pool.write(extent, kv_of(extent))
    wide = torch.zeros(*LAYOUT.shape(extent.num_rows + 4))
    pool.read(extent, wide[..., 2 : extent.num_rows + 2, :])
    assert torch.equal(wide[..., 2 : extent.num_rows + 2, :], kv_of(extent))
    assert not wide[..., :2, :].any()
    for wrong in (wide, empty(extent).half(), empty(extent)[..., :-1, :]):
        with pytest.raises(ValueError, match="into of 300 tokens"):
            pool.read(extent, wrong)
        with pytest.raises(ValueError, match="kv of 300 tokens"):
            pool.write(extent, wrong)
    assert_serves(pool, extent)  # a caller's mistake is no damage


def test_equal_extents_are_stored_once_and_the_first_one_stays(open_pool: Callable[..., DiskPool]) -> None:
    """I8. Two writers of the same tokens may have other bits; the file that is there is right by itself."""
    pool, other, extent = open_pool(), open_pool(), extent_of(6)
    assert pool.write(extent, kv_of(extent))
    used = pool.used_bytes
    assert used == size_of(extent)
    mine = kv_of(extent) + 1
    twin = replace(extent, checksum=xxhash.xxh3_128_hexdigest(tensor_bytes(mine)))
    assert not other.write(twin, mine)
    assert other.used_bytes == used
    into = empty(extent)
    assert other.read(twin, into).checksum == extent.checksum
    assert torch.equal(into, kv_of(extent))


def test_extents_that_differ_only_in_how_they_were_computed_have_files_of_their_own(
    open_pool: Callable[..., DiskPool],
) -> None:
    pool, plain, canonical = open_pool(), extent_of(7, 0, 256), extent_of(7, 0, 256, canonical=256)
    assert pool.write(plain, kv_of(plain))
    assert pool.write(canonical, kv_of(canonical))
    assert found_by(pool) == ({plain, canonical}, [])


def test_namespaces_in_one_directory_do_not_see_each_other(tmp_path: Path) -> None:
    """I6, S9."""
    extent, other = extent_of(8), digest("namespace", "other")
    with (
        contextlib.closing(DiskPool(tmp_path / "kv", NAMESPACE, LAYOUT, 1 << 20)) as mine,
        contextlib.closing(DiskPool(tmp_path / "kv", other, LAYOUT, 1 << 20)) as theirs,
    ):
        mine.write(extent, kv_of(extent))
        assert (theirs.used_bytes, list(theirs.scan()), theirs.check()) == (0, [], [])
        with pytest.raises(Evicted):
            theirs.read(extent, empty(extent))
        # A file that was carried over by hand is told by its header.
        carried = file_of(tmp_path / "kv", extent, other)
        carried.parent.mkdir()
        carried.write_bytes(file_of(tmp_path / "kv", extent).read_bytes())
        with pytest.raises(IntegrityError, match="belongs to namespace"):
            theirs.read(extent, empty(extent))
        assert_serves(mine, extent)


def test_a_missing_extent_is_a_miss(open_pool: Callable[..., DiskPool]) -> None:
    pool, extent = open_pool(), extent_of(9)
    with pytest.raises(Evicted, match="not there") as caught:
        pool.read(extent, empty(extent))
    assert caught.value.recovery == "recompute"
    assert not pool.remove(extent.name)
    pool.touch(extent.name)
    assert pool.read_recipe(extent.end_id) is None
    assert pool.used_bytes == 0


def test_who_reads_is_not_harmed_by_a_removal(open_pool: Callable[..., DiskPool], tmp_path: Path) -> None:
    pool, extent = open_pool(), extent_of(10)
    pool.write(extent, kv_of(extent))
    with pool._shelf.reading(f"{extent.name}.safetensors") as opened:
        assert pool.remove(extent.name)
        assert os.pread(opened.fd, 1 << 20, 4096).startswith(bytes(tensor_bytes(kv_of(extent))))
    with pytest.raises(Evicted):
        pool.read(extent, empty(extent))
    assert pool.used_bytes == 0


@pytest.mark.parametrize(
    "name",
    ["", "../x", "a" * 63, "A" * 64, "a" * 64 + "\n", "/" + "a" * 63, "a" * 31 + "/" + "b" * 32, b"a" * 64, None],
)
def test_a_name_that_is_no_digest_never_reaches_a_path(open_pool: Callable[..., DiskPool], name: object) -> None:
    """S2."""
    pool = open_pool()
    for call in (pool.remove, pool.touch, pool.read_recipe, lambda bad: pool.read(bad, torch.empty(0))):
        with pytest.raises(ConfigError, match="64 lower-case hex digits"):
            call(name)  # type: ignore[operator]


@pytest.mark.parametrize(
    "wrong",
    [
        {"start": -1},
        {"start": True},
        {"token_ids": ()},
        {"token_ids": (-1,) * 300},
        {"token_ids": (1 << 32,) * 300},
        {"token_ids": (1.5,) * 300},
        {"end_id": "../" + "a" * 61},
        {"hashes": ()},
        {"hashes": ("a" * 63,)},
        {"canonical_stop": 301},
        {"checksum": "0" * 31},
        {"checksum": None},
    ],
    ids=repr,
)
def test_an_extent_that_cannot_be_is_refused_before_anything_is_written(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        replace(extent_of(11), **wrong)  # type: ignore[arg-type]


def test_files_and_folders_are_for_their_owner_only(open_pool: Callable[..., DiskPool], tmp_path: Path) -> None:
    pool, extent = open_pool(), extent_of(12)
    pool.write(extent, kv_of(extent))
    pool.write_recipe(recipe_of(extent))
    paths = [tmp_path / "kv", *(tmp_path / "kv").rglob("*")]
    assert len(paths) >= 8
    for path in paths:
        mode = stat.S_IMODE(path.stat().st_mode)
        assert mode == (0o700 if path.is_dir() else 0o600), path


# what is damaged is never served


def flip(path: Path, position: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[position] ^= 1 << (position % 8)
    path.write_bytes(raw)


def positions() -> list[int]:
    """Every 37th byte of the header, and places in padding, KV and token ids."""
    size = size_of(extent_of(20))
    return [*range(0, 1400, 37), 4095, 4096, 5000, size - 1201, size - 1200, size - 1]


@pytest.mark.parametrize("position", positions())
def test_one_flipped_bit_is_found_quarantined_and_written_anew(
    open_pool: Callable[..., DiskPool], tmp_path: Path, position: int
) -> None:
    """S4. safetensors alone would load it."""
    pool, extent = open_pool(), extent_of(20)
    pool.write(extent, kv_of(extent))
    flip(file_of(tmp_path / "kv", extent), position)
    assert {finding.invariant for finding in pool.check(payloads=True)} == {"I4"}
    with pytest.raises(IntegrityError, match="quarantine/") as caught:
        pool.read(extent, empty(extent))
    assert caught.value.recovery == "fail"
    with pytest.raises(Evicted):
        pool.read(extent, empty(extent))
    (kept,) = (tmp_path / "kv" / "quarantine").iterdir()
    assert extent.name in kept.name
    assert [finding.what.split("/")[0] for finding in pool.check()] == ["quarantine"]
    assert pool.write(extent, kv_of(extent))
    assert_serves(pool, extent)


@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 2000, 4095, 4096, 4097, 20_000, -1])
def test_a_truncated_file_is_found_and_quarantined(
    open_pool: Callable[..., DiskPool], tmp_path: Path, size: int
) -> None:
    pool, extent = open_pool(), extent_of(21)
    pool.write(extent, kv_of(extent))
    path = file_of(tmp_path / "kv", extent)
    os.truncate(path, size if size >= 0 else path.stat().st_size + size)
    extents, findings = found_by(pool)
    assert not extents
    assert [finding.invariant for finding in findings] == ["I4"]
    with pytest.raises(IntegrityError, match="quarantine/"):
        pool.read(extent, empty(extent))
    assert not path.exists()


def test_a_file_that_grew_is_found(open_pool: Callable[..., DiskPool], tmp_path: Path) -> None:
    pool, extent = open_pool(), extent_of(22)
    pool.write(extent, kv_of(extent))
    with file_of(tmp_path / "kv", extent).open("ab") as file:
        file.write(b"\0")
    with pytest.raises(IntegrityError, match="bytes"):
        pool.read(extent, empty(extent))


def test_two_swapped_files_are_both_found(open_pool: Callable[..., DiskPool], tmp_path: Path) -> None:
    pool, first, second = open_pool(), extent_of(23), extent_of(24)
    for extent in (first, second):
        pool.write(extent, kv_of(extent))
    a, b = file_of(tmp_path / "kv", first), file_of(tmp_path / "kv", second)
    content = a.read_bytes()
    a.write_bytes(b.read_bytes())
    b.write_bytes(content)
    assert len(pool.check()) == 2
    for extent in (first, second):
        with pytest.raises(IntegrityError, match="swapped"):
            pool.read(extent, empty(extent))


def rewrite(path: Path, change: Callable[[dict[str, dict[str, object]]], None]) -> None:
    """Another header of the same length in front of the same bytes."""
    raw = path.read_bytes()
    stop = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:stop])
    change(header)
    text = json.dumps(header, separators=(",", ":")).encode()
    path.write_bytes(raw[:8] + text.ljust(stop - 8) + raw[stop:])


@pytest.mark.parametrize(
    ("tensor", "field", "value"),
    [
        ("kv", "dtype", "F16"),
        ("kv", "shape", [2, 2, 2, 300, 16]),
        ("kv", "shape", [2, 2, 2, -300, 8]),
        ("kv", "shape", "wide"),
        ("kv", "data_offsets", [0, 1 << 63]),
        ("kv", "data_offsets", [8, 76808]),
        ("token_ids", "shape", [299]),
        ("token_ids", "shape", [1 << 62]),
        ("token_ids", "shape", [10**900]),
        ("token_ids", "shape", []),
        ("token_ids", "shape", [True]),
        ("token_ids", "shape", [0]),
        ("token_ids", "dtype", "I32"),
        ("__metadata__", "start", "1"),
        ("__metadata__", "start", "-1"),
        ("__metadata__", "start", 0),
        ("__metadata__", "canonical_stop", "256"),
        ("__metadata__", "hashes", ""),
        ("__metadata__", "hashes", 5),
        ("__metadata__", "checksum", "f" * 32),
        ("__metadata__", "end_id", "0" * 64),
        ("__metadata__", "seal", "0" * 64),
        ("__metadata__", "format", "pt"),
        ("__metadata__", "version", "0"),
        ("__metadata__", "version", "9" * 40),
    ],
)
def test_a_header_that_lies_is_found_without_reading_the_kv(
    open_pool: Callable[..., DiskPool], tmp_path: Path, tensor: str, field: str, value: object
) -> None:
    """S3, S4."""
    pool, extent = open_pool(), extent_of(25)
    pool.write(extent, kv_of(extent))
    rewrite(file_of(tmp_path / "kv", extent), lambda header: header[tensor].update({field: value}))
    extents, findings = found_by(pool)
    assert not extents
    assert [finding.invariant for finding in findings] == ["I4"]
    with pytest.raises(IntegrityError):
        pool.read(extent, empty(extent))


@pytest.mark.parametrize(
    "content",
    [
        (1 << 63).to_bytes(8, "little") + b"{" * 5000,
        (1 << 20).to_bytes(8, "little") + b" " * (1 << 21),
        (4088).to_bytes(8, "little") + b"[" * 4088,
        (8184).to_bytes(8, "little") + b"[" * 8184,
        (4088).to_bytes(8, "little") + b"null".ljust(4088),
        (4088).to_bytes(8, "little") + b'{"__metadata__":[],"kv":{},"token_ids":{"shape":[1]}}'.ljust(4088),
        (4088).to_bytes(8, "little") + b"\xff" * 4088,
        (4088).to_bytes(8, "little") + b"1" * 4088 + b"\0" * 9000,
        b"no safetensors at all" * 500,
        (8184).to_bytes(8, "little")
        + b'{"__metadata__":{"format":"aaflow-langgraph extent","version":"1"},"kv":{},"token_ids":{"shape":[1'
        + (b"0" * 4298 + b"]}}").ljust(8184 - 98),
    ],
    ids=range(10),
)
def test_foreign_content_under_one_of_our_names_is_found(
    open_pool: Callable[..., DiskPool], tmp_path: Path, content: bytes
) -> None:
    pool, extent = open_pool(), extent_of(26)
    path = file_of(tmp_path / "kv", extent)
    path.parent.mkdir()
    path.write_bytes(content)
    assert [finding.invariant for finding in pool.check()] == ["I4"]
    with pytest.raises(IntegrityError):
        pool.read(extent, empty(extent))


def test_a_header_of_any_size_is_not_parsed(open_pool: Callable[..., DiskPool], tmp_path: Path) -> None:
    pool, extent = open_pool(), extent_of(31)
    pool.write(extent, kv_of(extent))
    path = file_of(tmp_path / "kv", extent)
    raw = path.read_bytes()
    path.write_bytes(((2 << 20) - 8).to_bytes(8, "little") + raw[8:4096].ljust((2 << 20) - 8) + raw[4096:])
    with pytest.raises(IntegrityError, match="with a header of 2097152"):
        pool.read(extent, empty(extent))


@pytest.mark.parametrize("kind", ["link to a whole file", "dangling link", "directory", "pipe", "folder is a link"])
def test_what_is_no_file_is_never_followed(open_pool: Callable[..., DiskPool], tmp_path: Path, kind: str) -> None:
    pool, extent = open_pool(), extent_of(27)
    pool.write(extent, kv_of(extent))
    path, away = file_of(tmp_path / "kv", extent), tmp_path / "away"
    if kind == "folder is a link":
        path.parent.rename(away)
        path.parent.symlink_to(away)
    else:
        path.rename(away)
        if kind == "directory":
            path.mkdir()
            (path / "theirs").write_text("kept")
        elif kind == "pipe":
            os.mkfifo(path)
        else:
            path.symlink_to(away if kind == "link to a whole file" else tmp_path / "nowhere")
    extents, findings = found_by(pool)
    assert not extents
    assert len(findings) == 1
    with pytest.raises(IntegrityError, match="no file"):
        pool.read(extent, empty(extent))
    assert away.exists()
    if kind == "folder is a link":
        with pytest.raises(CapacityError):
            pool.write(extent, kv_of(extent))
        assert path.exists()
        return
    assert not path.exists()
    if kind == "directory":
        (moved,) = (tmp_path / "kv" / "quarantine").iterdir()
        assert (moved / "theirs").read_text() == "kept"
    assert pool.write(extent, kv_of(extent))
    assert_serves(pool, extent)


def test_a_file_of_other_tokens_under_the_same_name_is_not_served(open_pool: Callable[..., DiskPool]) -> None:
    """After a hash hit the token ids are compared: a collision, or a forged header, is no hit."""
    pool, extent = open_pool(), extent_of(28)
    pool.write(extent, kv_of(extent))
    with pytest.raises(IntegrityError, match="other tokens"):
        pool.read(replace(extent, token_ids=(7, *extent.token_ids[1:])), empty(extent))


def test_a_file_of_a_newer_version_is_a_miss_and_stays_where_it_is(
    open_pool: Callable[..., DiskPool], tmp_path: Path
) -> None:
    pool, extent = open_pool(), extent_of(29)
    pool.write(extent, kv_of(extent))
    path = file_of(tmp_path / "kv", extent)
    rewrite(path, lambda header: header["__metadata__"].update(version="2"))
    with pytest.raises(KVMissing, match="upgrade"):
        pool.read(extent, empty(extent))
    assert path.exists()
    extents, findings = found_by(pool)
    assert not extents
    assert "format 2" in findings[0].what


def test_a_wrong_checksum_given_by_the_writer_is_never_served(open_pool: Callable[..., DiskPool]) -> None:
    pool, extent = open_pool(), replace(extent_of(30), checksum="0" * 32)
    pool.write(extent, kv_of(extent))
    with pytest.raises(IntegrityError, match="checksum"):
        pool.read(extent, empty(extent))


def test_quarantine_keeps_the_last_damaged_files_only(open_pool: Callable[..., DiskPool], tmp_path: Path) -> None:
    pool, extents = open_pool(clock=ticking()), [extent_of(seed, 0, 4) for seed in range(100, 111)]
    for extent in extents:
        pool.write(extent, kv_of(extent))
        flip(file_of(tmp_path / "kv", extent), 5000)
        with contextlib.suppress(IntegrityError):
            pool.read(extent, empty(extent))
    kept = sorted(path.name for path in (tmp_path / "kv" / "quarantine").iterdir())
    assert [name.split("-")[2].split(".")[0] for name in kept] == [extent.name for extent in extents[-8:]]


# capacity


def test_the_least_recently_read_files_make_room_and_are_told(open_pool: Callable[..., DiskPool]) -> None:
    """I10."""
    told: list[str] = []
    extents = [extent_of(seed) for seed in range(40, 45)]
    size = size_of(extents[0])
    pool = open_pool(3 * size, clock=ticking(), on_evict=told.append)
    for extent in extents[:3]:
        pool.write(extent, kv_of(extent))
    assert_serves(pool, extents[0])
    assert pool.write(extents[3], kv_of(extents[3]))
    assert told == [extents[1].name]
    assert pool.used_bytes == 3 * size
    pool.touch(extents[2].name)
    assert not pool.write(extents[0], kv_of(extents[0]))  # asking for it is a use
    assert pool.write(extents[4], kv_of(extents[4]))
    assert told == [extents[1].name, extents[3].name]
    assert pool.num_evictions == 2
    assert found_by(pool)[0] == {extents[0], extents[2], extents[4]}
    assert pool.check(payloads=True) == []


def test_what_another_process_read_meanwhile_is_not_taken_for_old(open_pool: Callable[..., DiskPool]) -> None:
    clock = ticking()
    extents = [extent_of(seed) for seed in range(50, 53)]
    pool, other = (open_pool(2 * size_of(extents[0]), clock=clock) for _ in range(2))
    for extent in extents[:2]:
        pool.write(extent, kv_of(extent))
    pool._shelf.listing._folders.clear()
    assert pool.used_bytes == 2 * size_of(extents[0])
    for folder in pool._shelf.listing._folders.values():
        folder.listed_ns = time.time_ns() + (1 << 60)  # as if it had been listed long after its last change
    assert_serves(other, extents[0])
    pool.write(extents[2], kv_of(extents[2]))
    assert found_by(pool)[0] == {extents[0], extents[2]}


def test_use_counts_the_files_of_every_process(open_pool: Callable[..., DiskPool]) -> None:
    pool, other = open_pool(), open_pool()
    extents = [extent_of(seed) for seed in range(60, 64)]
    for count, extent in enumerate(extents, 1):
        (pool if count % 2 else other).write(extent, kv_of(extent))
        assert pool.used_bytes == other.used_bytes == count * size_of(extent)
    other.remove(extents[0].name)
    assert pool.used_bytes == 3 * size_of(extents[0])


def test_an_extent_larger_than_the_pool_is_refused_and_nothing_is_removed(open_pool: Callable[..., DiskPool]) -> None:
    small, large = extent_of(65, 0, 10), extent_of(66, 0, 3000)
    pool = open_pool(100_000)
    pool.write(small, kv_of(small))
    with pytest.raises(PoolExhausted, match="larger disk_bytes"):
        pool.write(large, kv_of(large))
    assert_serves(pool, small)
    assert pool.num_evictions == 0


def test_a_policy_decides_what_goes(open_pool: Callable[..., DiskPool]) -> None:
    extents = [extent_of(seed) for seed in range(70, 73)]
    pool = open_pool(
        2 * size_of(extents[0]), clock=ticking(), policy=lambda found, need: [max(found, key=lambda c: c.last_used)]
    )
    for extent in extents:
        pool.write(extent, kv_of(extent))
    assert found_by(pool)[0] == {extents[0], extents[2]}


def test_a_policy_that_raises_fails_no_write(open_pool: Callable[..., DiskPool]) -> None:
    extents = [extent_of(seed) for seed in range(3)]

    def raises(found: object, need_bytes: int) -> list[Candidate]:
        raise KeyError("the user's own")

    pool = open_pool(2 * size_of(extents[0]), clock=ticking(), policy=raises)
    for extent in extents:
        assert pool.write(extent, kv_of(extent))
    assert found_by(pool)[0] == set(extents[1:])


def test_threads_that_write_at_once_stay_within_the_capacity(open_pool: Callable[..., DiskPool]) -> None:
    extents = [extent_of(seed) for seed in range(80, 100)]
    capacity = 6 * size_of(extents[0])
    pool = open_pool(capacity)
    seen: list[int] = []

    def work(mine: list[StoredExtent]) -> None:
        for extent in mine:
            with contextlib.suppress(PoolExhausted):  # the others are writing all of it
                pool.write(extent, kv_of(extent))
            seen.append(pool.used_bytes)

    threads = [threading.Thread(target=work, args=(extents[number::4],)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(seen) == 20
    assert max(seen) <= capacity
    assert pool.check(payloads=True) == []


# recipes


def recipe_of(extent: StoredExtent, **changes: object) -> Recipe:
    recipe = Recipe(
        kv_id=extent.end_id,
        namespace=NAMESPACE,
        parent=None,
        start=extent.start,
        token_ids=extent.token_ids,
        num_pending=2,
        turns=(Turn("user", Span(3, 90), False), Turn("ass\u00efstant", Span(95, extent.stop), True)),
        operator="generate",
    )
    return replace(recipe, **changes)  # type: ignore[arg-type]


def test_a_recipe_outlives_its_writer(open_pool: Callable[..., DiskPool]) -> None:
    extent = extent_of(200)
    recipe = recipe_of(extent)
    writer = open_pool()
    writer.write_recipe(recipe)
    writer.write_recipe(replace(recipe, operator="append"))
    writer.close()
    reader = open_pool()
    assert reader.read_recipe(recipe.kv_id) == recipe  # the first one stays
    child = replace(recipe, kv_id=digest("child"), parent=recipe.kv_id, start=300, num_pending=0, turns=())
    reader.write_recipe(child)
    assert reader.read_recipe(child.kv_id) == child
    assert reader.check() == []
    assert list(reader.scan()) == []


@pytest.mark.parametrize(
    "wrong",
    [
        {"namespace": digest("another")},
        {"namespace": "x"},
        {"kv_id": "../../etc/passwd"},
        {"parent": "no digest"},
        {"token_ids": (1, -2)},
        {"token_ids": [1, 2]},
        {"token_ids": (True,)},
        {"num_pending": 301},
        {"num_pending": -1},
        {"start": -1},
        {"operator": "exec"},
        {"turns": (Turn("user", Span(0, 1), 1),)},  # type: ignore[arg-type]
        {"turns": (Turn(None, Span(0, 1), True),)},  # type: ignore[arg-type]
    ],
    ids=repr,
)
def test_a_recipe_that_cannot_be_is_refused(open_pool: Callable[..., DiskPool], wrong: dict[str, object]) -> None:
    pool = open_pool()
    with pytest.raises(ConfigError):
        pool.write_recipe(recipe_of(extent_of(201), **wrong))
    assert pool.used_bytes == 0


def test_a_damaged_recipe_is_a_miss_and_can_be_written_again(
    open_pool: Callable[..., DiskPool], tmp_path: Path
) -> None:
    pool, recipe = open_pool(), recipe_of(extent_of(202))
    path = tmp_path / "kv" / NAMESPACE / recipe.kv_id[:2] / f"{recipe.kv_id}.json"
    pool.write_recipe(recipe)
    whole = path.read_bytes()
    damaged = [
        whole[:-1],
        whole[: len(whole) // 2],
        b"",
        b"[]",
        b"{}",
        b"[" * 100_000,
        whole.replace(b"false", b"true "),
    ]
    damaged += [whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :] for at in range(0, len(whole), 101)]
    other = recipe_of(extent_of(203))
    pool.write_recipe(other)
    damaged.append((path.parents[1] / other.kv_id[:2] / f"{other.kv_id}.json").read_bytes())
    for content in damaged:
        path.write_bytes(content)
        assert pool.check() != []
        assert pool.read_recipe(recipe.kv_id) is None
        assert not path.exists()
        pool.write_recipe(recipe)
        assert pool.read_recipe(recipe.kv_id) == recipe


def test_recipes_keep_to_their_share_and_survive_the_extents(open_pool: Callable[..., DiskPool]) -> None:
    extents = [extent_of(seed) for seed in range(210, 230)]
    pool = open_pool(8 * size_of(extents[0]), clock=ticking())
    for extent in extents:
        pool.write_recipe(recipe_of(extent))
        pool.write(extent, kv_of(extent))
    kept = [extent for extent in extents if pool.read_recipe(extent.end_id) is not None]
    assert kept == extents[-len(kept) :]
    assert len(kept) > len(found_by(pool)[0]) > 0
    assert pool.used_bytes <= pool.capacity_bytes
    assert pool.check() == []
    with pytest.raises(PoolExhausted):
        pool.write_recipe(recipe_of(extent_of(231, 0, 60_000)))


# the directory


@pytest.mark.parametrize("capacity", [0, -1, 4095, 1.5, "1g", None, True])
def test_a_capacity_that_makes_no_sense_is_refused_by_name(tmp_path: Path, capacity: object) -> None:
    with pytest.raises(ConfigError, match="disk_bytes"):
        DiskPool(tmp_path, NAMESPACE, LAYOUT, capacity)  # type: ignore[arg-type]


def test_arguments_that_cannot_be_right_are_refused_and_make_nothing(tmp_path: Path) -> None:
    for namespace in ("", "..", "A" * 64, None):
        with pytest.raises(ConfigError, match="namespace"):
            DiskPool(tmp_path / "kv", namespace, LAYOUT, 1 << 20)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="float8"):
        DiskPool(tmp_path / "kv", NAMESPACE, replace(LAYOUT, dtype="float8"), 1 << 20)
    for directory in ("", "a\0b", 7, None):
        with pytest.raises(ConfigError, match="path"):
            DiskPool(directory, NAMESPACE, LAYOUT, 1 << 20)  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_holds_other_things_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match=r"notes\.txt.*empty or a new directory"):
        DiskPool(tmp_path, NAMESPACE, LAYOUT, 1 << 20)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
    (tmp_path / "notes.txt").unlink()
    (tmp_path / "tmp").mkdir()
    (tmp_path / "tmp" / "theirs").write_text("mine")
    with pytest.raises(ConfigError, match="tmp/theirs"):
        DiskPool(tmp_path, NAMESPACE, LAYOUT, 1 << 20)
    assert (tmp_path / "tmp" / "theirs").read_text() == "mine"


def test_a_file_where_the_directory_should_be_is_refused(tmp_path: Path) -> None:
    (tmp_path / "kv").write_text("")
    with pytest.raises(ConfigError, match="cannot hold a disk pool"):
        DiskPool(tmp_path / "kv", NAMESPACE, LAYOUT, 1 << 20)
    with pytest.raises(ConfigError, match="cannot hold a disk pool"):
        DiskPool(tmp_path / "kv" / "below", NAMESPACE, LAYOUT, 1 << 20)


@pytest.mark.parametrize(
    ("marker", "message"),
    [
        ('{"format": "aaflow-langgraph disk pool", "version": 2}', "newer version"),
        ('{"format": "aaflow-langgraph disk pool", "version": true}', "damaged"),
        ('{"format": "aaflow-langgraph disk pool"}', "damaged"),
        ('{"format": "other", "version": 1}', "damaged"),
        ("", "damaged"),
        ("[" * 4096, "damaged"),
    ],
)
def test_a_marker_that_this_version_cannot_trust_is_refused(tmp_path: Path, marker: str, message: str) -> None:
    (tmp_path / "aaflow-disk-pool.json").write_text(marker)
    (tmp_path / "aaflow-disk-pool.json").chmod(0o600)
    with pytest.raises(ConfigError, match=message):
        DiskPool(tmp_path, NAMESPACE, LAYOUT, 1 << 20)
    assert [path.name for path in tmp_path.iterdir()] == ["aaflow-disk-pool.json"]


def test_a_directory_that_others_can_reach_is_closed_while_empty_and_refused_afterwards(tmp_path: Path) -> None:
    directory = tmp_path / "kv"
    directory.mkdir(mode=0o755)
    DiskPool(directory, NAMESPACE, LAYOUT, 1 << 20).close()
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    directory.chmod(0o750)
    with pytest.raises(ConfigError, match="mode 0750"):
        DiskPool(directory, NAMESPACE, LAYOUT, 1 << 20)


def test_a_home_directory_is_found_and_an_unknown_one_refused(
    open_pool: Callable[..., DiskPool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    open_pool(directory="~/below/kv")
    assert [path.name for path in tmp_path.iterdir()] == ["below"]
    with pytest.raises(ConfigError, match="whole path"):
        DiskPool("~nobody-of-this-name/kv", NAMESPACE, LAYOUT, 1 << 20)


@pytest.mark.parametrize("what", [".", NAMESPACE, "tmp"])
def test_a_directory_that_is_removed_while_it_is_in_use_is_made_again(
    open_pool: Callable[..., DiskPool],
    tmp_path: Path,
    what: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.chdir(tmp_path)
    pool = open_pool(directory="kv")
    monkeypatch.chdir("/")
    before, after = extent_of(1), extent_of(2)
    pool.write(before, kv_of(before))
    num_fds = len(os.listdir("/proc/self/fd"))
    for _ in range(2):
        shutil.rmtree(tmp_path / "kv" / what)
        if what != "tmp":
            assert pool.used_bytes == 0
            with pytest.raises(Evicted):
                pool.read(before, empty(before))
        assert pool.write(after, kv_of(after)) or what == "tmp"
        assert_serves(pool, after)
        assert pool.check(payloads=True) == []
        assert stat.S_IMODE((tmp_path / "kv").stat().st_mode) == 0o700
        if what == "tmp":
            pool.remove(after.name)
    assert len(os.listdir("/proc/self/fd")) == num_fds
    assert len([record for record in caplog.records if "removed while it was in use" in record.message]) == 2


def test_a_removed_directory_that_cannot_be_made_again_is_a_lack_of_room_until_it_can(
    open_pool: Callable[..., DiskPool], tmp_path: Path
) -> None:
    pool, extent = open_pool(), extent_of(1)
    shutil.rmtree(tmp_path / "kv")
    (tmp_path / "kv").write_text("somebody's")
    num_fds = len(os.listdir("/proc/self/fd"))
    with pytest.raises(CapacityError, match="removed while it was in use"):
        pool.write(extent, kv_of(extent))
    assert len(os.listdir("/proc/self/fd")) == num_fds
    assert (tmp_path / "kv").read_text() == "somebody's"
    (tmp_path / "kv").unlink()
    assert pool.write(extent, kv_of(extent))
    assert_serves(pool, extent)


def test_threads_that_find_the_directory_removed_make_it_again_once(
    open_pool: Callable[..., DiskPool], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pool = open_pool()
    extents = [extent_of(seed) for seed in range(8)]
    shutil.rmtree(tmp_path / "kv")
    with ThreadPoolExecutor(8) as workers:
        assert all(workers.map(lambda extent: pool.write(extent, kv_of(extent)), extents))
    assert found_by(pool) == (set(extents), [])
    assert len(caplog.records) == 1


def test_a_folder_that_goes_while_it_is_listed_is_not_there(
    open_pool: Callable[..., DiskPool], monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = open_pool()
    names = _placed.names
    monkeypatch.setattr(_placed, "names", lambda directory: [*names(directory), "ab"])
    assert pool.used_bytes == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
def test_a_directory_of_somebody_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "kv").mkdir(mode=0o700)
    os.chown(tmp_path / "kv", 12345, 12345)
    with pytest.raises(ConfigError, match="uid 12345"):
        DiskPool(tmp_path / "kv", NAMESPACE, LAYOUT, 1 << 20)


def test_foreign_files_are_reported_and_never_touched(open_pool: Callable[..., DiskPool], tmp_path: Path) -> None:
    pool, extent = open_pool(), extent_of(240)
    pool.write(extent, kv_of(extent))
    directory = tmp_path / "kv"
    foreign = [
        directory / NAMESPACE / extent.name[:2] / "notes.txt",
        directory / NAMESPACE / "zz",
        directory / "tmp" / "theirs",
        directory / NAMESPACE / extent.name[:2] / f"{extent.name}.safetensors.bak",
        directory / NAMESPACE / ("00" if extent.name[:2] != "00" else "01") / f"{extent.name}.safetensors",
    ]
    for path in foreign:
        path.parent.mkdir(exist_ok=True)
        path.write_text("mine")
    extents, findings = found_by(pool)
    assert extents == {extent}
    assert sorted(finding.what.split(" ")[0] for finding in findings) == sorted(
        str(path.relative_to(directory)) for path in foreign
    )
    assert {finding.invariant for finding in pool.check()} == {"I11"}
    assert pool.sweep() == []
    assert [path.read_text() for path in foreign] == ["mine"] * 5


def test_a_closed_pool_says_so_and_gives_its_descriptors_back(open_pool: Callable[..., DiskPool]) -> None:
    before = len(os.listdir("/proc/self/fd"))
    pool, extent = open_pool(), extent_of(241)
    pool.write(extent, kv_of(extent))
    assert_serves(pool, extent)
    list(pool.scan())
    pool.close()
    pool.close()
    assert len(os.listdir("/proc/self/fd")) == before
    assert (pool.capacity_bytes, pool.used_bytes) == (0, 0)
    calls = (
        pool.sweep,
        pool.check,
        lambda: pool.read(extent, empty(extent)),
        lambda: pool.write(extent, kv_of(extent)),
    )
    for call in calls:
        with pytest.raises(ValueError, match="closed"):
            call()  # type: ignore[operator]


def test_refused_directories_keep_no_descriptor(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    before = len(os.listdir("/proc/self/fd"))
    for directory in (tmp_path, tmp_path / "notes.txt"):
        with pytest.raises(ConfigError):
            DiskPool(directory, NAMESPACE, LAYOUT, 1 << 20)
    assert len(os.listdir("/proc/self/fd")) == before


# full and read-only file systems


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of one MiB."""
    place = tmp_path / "small"
    place.mkdir()
    if os.geteuid() != 0 or mount("-t", "tmpfs", "-o", "size=1m,mode=0700", "tmpfs", str(place)):
        pytest.skip("a small file system needs the right to mount")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def mount(*arguments: str) -> int:
    return subprocess.run(["mount", *arguments], stderr=subprocess.DEVNULL, check=False).returncode


def test_a_full_disk_is_a_typed_error_that_leaves_nothing(small_disk: Path) -> None:
    with contextlib.closing(DiskPool(small_disk, NAMESPACE, LAYOUT, 1 << 30)) as pool:
        extents = [extent_of(seed, 0, 1200) for seed in range(250, 255)]
        for extent in extents[:3]:
            pool.write(extent, kv_of(extent))
        with pytest.raises(CapacityError, match=r"free on its file system.*No space left") as caught:
            pool.write(extents[3], kv_of(extents[3]))
        assert caught.value.recovery == "retry"
        assert list((small_disk / "tmp").iterdir()) == []
        whole, findings = found_by(pool)
        assert (len(whole), findings) == (3, [])
        for extent in whole:
            assert_serves(pool, extent)
        pool.remove(extents[0].name)
        assert pool.write(extents[4], kv_of(extents[4]))


def test_a_disk_that_is_known_to_be_too_full_is_not_written_at_all(
    open_pool: Callable[..., DiskPool], monkeypatch: pytest.MonkeyPatch
) -> None:
    pool, extent = open_pool(), extent_of(261)
    monkeypatch.setattr(pool._shelf, "_free_bytes", lambda: size_of(extent) - 1)
    with pytest.raises(CapacityError, match=f"{size_of(extent)} bytes asked, {size_of(extent) - 1} free"):
        pool.write(extent, kv_of(extent))
    monkeypatch.setattr(pool._shelf, "_free_bytes", lambda: size_of(extent))
    assert pool.write(extent, kv_of(extent))


def test_a_disk_that_fills_up_in_the_middle_of_a_write_leaves_nothing(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others write too, so the look at the free bytes before is no promise."""
    with contextlib.closing(DiskPool(small_disk, NAMESPACE, LAYOUT, 1 << 30)) as pool:
        monkeypatch.setattr(pool._shelf, "_free_bytes", lambda: 1 << 40)
        extent = extent_of(256, 0, 5000)
        with pytest.raises(CapacityError, match="No space left"):
            pool.write(extent, kv_of(extent))
        assert list((small_disk / "tmp").iterdir()) == []
        assert found_by(pool) == (set(), [])
        small = extent_of(257)
        pool.write(small, kv_of(small))
        assert_serves(pool, small)


def test_a_directory_that_becomes_read_only_is_read_on_and_refused_when_opened(small_disk: Path) -> None:
    extent, other = extent_of(258), extent_of(259)
    with contextlib.closing(DiskPool(small_disk, NAMESPACE, LAYOUT, 1 << 30)) as pool:
        for stored in (extent, other):
            pool.write(stored, kv_of(stored))
        flip(file_of(small_disk, other), 5000)
        assert mount("-o", "remount,ro", str(small_disk)) == 0
        assert_serves(pool, extent)
        new = extent_of(260)
        for refused in (lambda: pool.write(new, kv_of(new)), lambda: pool.remove(extent.name)):
            with pytest.raises(CapacityError, match="Read-only"):
                refused()
        with pytest.raises(IntegrityError, match=r"not moved to quarantine"):
            pool.read(other, empty(other))
        with pytest.raises(ConfigError, match="Read-only"):
            DiskPool(small_disk, NAMESPACE, LAYOUT, 1 << 30)


# crashes and other processes


def test_only_unfinished_files_of_dead_writers_are_swept(
    open_pool: Callable[..., DiskPool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool, tmp = open_pool(), tmp_path / "kv" / "tmp"
    other = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        start, boot = _placed.start_time(other.pid), _placed.boot_id()
        living, dead = f"{boot}-{other.pid}-{start}-{'1' * 16}.tmp", f"{boot}-{other.pid}-{start + 1}-{'2' * 16}.tmp"  # type: ignore[operator]
        earlier = f"{'0' * 16}-1-1-{'3' * 16}.tmp"
        elsewhere = f"{'0' * 16}-1-1-{'4' * 16}.tmp"
        for name in (living, dead, earlier, elsewhere, "notes.txt"):
            (tmp / name).write_bytes(b"half")
        fd = os.open(tmp / elsewhere, os.O_RDONLY)
        try:
            _placed.fcntl.flock(fd, _placed.fcntl.LOCK_EX)  # a writer in another pid namespace holds its file
            assert {f.what.split(" ")[0] for f in pool.check()} == {f"tmp/{dead}", f"tmp/{earlier}", "tmp/notes.txt"}
            assert pool.sweep() == sorted([dead, earlier])
        finally:
            os.close(fd)
        assert pool.sweep() == [elsewhere]
    finally:
        other.communicate(b"\n")
    assert pool.sweep() == [living]
    assert [path.name for path in tmp.iterdir()] == ["notes.txt"]


WRITERS = """
import os, sys
from tests.unit.test_disk_pool import *

def work(directory, first, last, capacity, rounds):
    pool = DiskPool(directory, NAMESPACE, LAYOUT, int(capacity))
    extents = [extent_of(seed, 0, 4000) for seed in range(int(first), int(last))]
    wrong = 0
    for _ in range(int(rounds)):
        for extent in extents:
            pool.write(extent, kv_of(extent))
            into = empty(extent)
            try:
                pool.read(extent, into)
                wrong += not torch.equal(into, kv_of(extent))
            except Evicted:
                pass
            if len(extents) <= 3:
                pool.remove(extent.name)
    return wrong

for line in sys.stdin:
    if line == "wait\\n":
        print(os.waitstatus_to_exitcode(os.wait()[1]), flush=True)
        continue
    pid = os.fork()
    if not pid:
        os._exit(work(*line.split()))
    print(pid, flush=True)
"""


class Writers:
    """Processes that write into one directory, forked from one that has imported everything."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._parent = subprocess.Popen(
            [sys.executable, "-c", WRITERS],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[2],
        )

    def start(self, seeds: range, capacity: int, rounds: int) -> int:
        """Start one; its process id."""
        return self._ask(f"{self._directory} {seeds.start} {seeds.stop} {capacity} {rounds}")

    def wait(self) -> int:
        """Wait until one ended; how many wrong reads it saw, or the signal that killed it, negative."""
        return self._ask("wait")

    def close(self) -> None:
        self._parent.communicate()
        assert self._parent.returncode == 0

    def _ask(self, line: str) -> int:
        assert self._parent.stdin is not None
        assert self._parent.stdout is not None
        self._parent.stdin.write(f"{line}\n")
        self._parent.stdin.flush()
        return int(self._parent.stdout.readline())


@pytest.fixture
def writers(tmp_path: Path) -> Iterator[Writers]:
    writers = Writers(tmp_path / "kv")
    yield writers
    writers.close()


def test_a_writer_killed_at_any_moment_leaves_whole_files_and_leftovers_that_are_swept(
    open_pool: Callable[..., DiskPool], tmp_path: Path, writers: Writers
) -> None:
    """C3, C8: SIGKILL, several times, at a random moment of writing."""
    pool, chance, num_left = open_pool(), random.Random(5), 0
    for _ in range(10):
        victim = writers.start(range(300, 303), 1 << 30, 1_000_000)
        for _ in range(chance.randrange(1, 200)):
            wait_for(lambda: list((tmp_path / "kv" / "tmp").iterdir()))
        os.kill(victim, signal.SIGKILL)
        assert writers.wait() == -signal.SIGKILL
        left = {path.name for path in (tmp_path / "kv" / "tmp").iterdir()}
        num_left += len(left)
        whole, findings = found_by(pool)
        assert findings == []
        assert {finding.what.split(" ")[0] for finding in pool.check(payloads=True)} == {f"tmp/{name}" for name in left}
        assert set(pool.sweep()) == left
        assert pool.check(payloads=True) == []
        for extent in whole:
            assert_serves(pool, extent)
            pool.remove(extent.name)
        assert [path for path in (tmp_path / "kv" / NAMESPACE).rglob("*") if path.is_file()] == []
    assert num_left > 0  # at least one was hit in the middle
    assert list((tmp_path / "kv" / "tmp").iterdir()) == []


def wait_for(condition: Callable[[], object], deadline_s: float = 30.0) -> None:
    end = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end
        time.sleep(0)


def test_processes_that_write_read_and_evict_in_one_directory_see_whole_extents_only(
    open_pool: Callable[..., DiskPool], writers: Writers
) -> None:
    capacity = 4 * (4096 + LAYOUT.num_bytes(4000) + 16_000)
    pool = open_pool(capacity)
    pids = [writers.start(range(310, 316), capacity, 5) for _ in range(2)]
    while any(_placed.start_time(pid) is not None for pid in pids):
        for extent in pool.scan():
            into = empty(extent)
            with contextlib.suppress(Evicted):
                pool.read(extent, into)
                assert torch.equal(into, kv_of(extent))
    assert [writers.wait() for _ in pids] == [0, 0]
    assert pool.sweep() == []
    findings = pool.check(payloads=True)
    assert {finding.invariant for finding in findings} <= {"I10"}  # two at once may pass it by what they were writing
    last = extent_of(320, 0, 4000)
    pool.write(last, kv_of(last))
    assert pool.check(payloads=True) == []


def test_all_who_open_a_new_directory_at_once_get_it(tmp_path: Path) -> None:
    """Nobody takes another one's half-made pool for foreign files."""
    for number in range(5):
        directory, gate = tmp_path / str(number), threading.Barrier(6)

        def open_it(directory: Path = directory, gate: threading.Barrier = gate) -> None:
            gate.wait()
            DiskPool(directory, NAMESPACE, LAYOUT, 1 << 20).close()

        with ThreadPoolExecutor(6) as threads:
            opened = [threads.submit(open_it) for _ in range(6)]
        assert [future.result() for future in opened] == [None] * 6
        assert sorted(path.name for path in directory.iterdir()) == sorted(
            ["aaflow-disk-pool.json", "quarantine", "tmp", NAMESPACE]
        )
