"""The checkpointer in bad surroundings: damaged tensors, full disks, foreign files, other savers, missing models, cancellation."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sqlite3
import stat
import subprocess
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.base import empty_checkpoint
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.checkpoint.serde.encrypted import EncryptedSerializer
from langgraph.checkpoint.sqlite import SqliteSaver

from aaflow_langgraph import KVBroker, KVCheckpointSaver, KVHandle
from aaflow_langgraph.checkpoint.locks import ThreadLock
from aaflow_langgraph.checkpoint.sidecar import FORMAT_VERSION, Sidecar
from aaflow_langgraph.errors import ConfigError, PersistenceError
from aaflow_langgraph.pool.disk import DiskPool
from tests.oracle import stock_of
from tests.savers import DOCS, SHORT, Bystander, asking, is_empty, put, query, thread


@pytest.fixture
def broker(open_broker: Callable[..., KVBroker]) -> KVBroker:
    return open_broker()


@pytest.fixture
def saver(broker: KVBroker) -> Iterator[KVCheckpointSaver]:
    with KVCheckpointSaver(InMemorySaver(), broker, durability="sync") as opened:
        yield opened


# ---------------------------------------------------------------- damaged and missing tensors


def _flip(path: Path) -> None:
    body = bytearray(path.read_bytes())
    body[len(body) // 2] ^= 4
    path.write_bytes(body)


def _truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 100)


@pytest.mark.parametrize("damage", ["delete", "flip", "truncate", "swap"])
def test_a_run_goes_on_from_recipes_when_tensors_are_lost_or_damaged(
    damage: str, open_broker: Callable[..., KVBroker], tmp_path: Path
) -> None:
    first = open_broker()
    with KVCheckpointSaver.local(tmp_path, first) as saver:
        graph = asking(first).compile(checkpointer=saver)
        graph.invoke({"question": "What?"}, thread())
        expected = first.generate("And?", parent=graph.get_state(thread()).values["plan"], sampling=SHORT).token_ids
    first.close()
    files = sorted((tmp_path / "checkpoints.sqlite.kv" / "extents").rglob("*.safetensors"))
    assert len(files) >= 2
    if damage == "swap":
        contents = [file.read_bytes() for file in files]
        for file, content in zip(files, [*contents[1:], contents[0]], strict=True):
            file.write_bytes(content)
    else:
        for file in files:
            {"delete": Path.unlink, "flip": _flip, "truncate": _truncate}[damage](file)
    later = open_broker()
    with KVCheckpointSaver.local(tmp_path, later) as saver:
        plan = asking(later).compile(checkpointer=saver).get_state(thread()).values["plan"]
        again = later.generate("And?", parent=plan, sampling=SHORT)
        assert again.token_ids == expected
        assert (
            again.token_ids
            == stock_of(later.engine).greedy(
                (*later.token_ids(plan), *later.token_ids(again.handle)[plan.kv_tokens : again.usage.num_context]), 6
            )[: len(again.token_ids)]
        )
        assert later.stats().num_recomputed_tokens > 0
        if damage == "flip":
            assert any((tmp_path / "checkpoints.sqlite.kv" / "extents" / "quarantine").iterdir())
            assert any("quarantine" in found.what for found in later.check())
            for left in (tmp_path / "checkpoints.sqlite.kv" / "extents" / "quarantine").iterdir():
                left.unlink()


def test_tensors_that_cannot_be_written_never_fail_the_run_and_are_tried_again(
    broker: KVBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with KVCheckpointSaver.local(tmp_path, broker, durability="sync") as saver:
        graph = asking(broker).compile(checkpointer=saver)
        (disk,) = saver._ledger._disks.values()
        with monkeypatch.context() as patch:

            def full(*args: Any, **options: Any) -> bool:
                raise OSError(28, "No space left on device")

            patch.setattr(disk, "write", full)
            graph.invoke({"question": "What?"}, thread())
        stats = saver.stats()
        assert stats.num_tensor_failures > 0
        assert stats.manifest.num_not_durable == stats.manifest.num_recipes == 2
        assert stats.tensor_bytes == 0
        graph.invoke({"question": "What?"}, thread())
        stats = saver.stats()
        assert stats.manifest.num_not_durable == 0
        assert stats.tensor_bytes > 0
    assert "could not be written" in caplog.text


# ---------------------------------------------------------------- bad surroundings


def test_a_directory_that_cannot_be_written_is_refused(broker: KVBroker, tmp_path: Path) -> None:
    blocked = tmp_path / "blocked"
    blocked.write_text("a file")
    with pytest.raises(ConfigError, match="cannot be made"):
        KVCheckpointSaver(InMemorySaver(), broker, directory=blocked)
    with pytest.raises(ConfigError, match="cannot hold checkpoints"), KVCheckpointSaver.local(blocked, broker):
        pass
    if os.geteuid():
        (tmp_path / "closed").mkdir(mode=0o500)
        with pytest.raises(ConfigError, match="cannot be written"):
            KVCheckpointSaver(InMemorySaver(), broker, directory=tmp_path / "closed")
    assert not broker.has_disk


def test_a_directory_that_others_can_reach_is_closed_while_empty_and_refused_afterwards(
    broker: KVBroker, tmp_path: Path
) -> None:
    def opened_locally(folder: Path) -> None:
        with KVCheckpointSaver.local(folder, broker):
            pass

    def opened_beside(folder: Path) -> None:
        KVCheckpointSaver(InMemorySaver(), broker, directory=folder).close()

    for open_it in (opened_locally, opened_beside):
        folder = tmp_path / open_it.__name__
        folder.mkdir(mode=0o755)
        open_it(folder)
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        folder.chmod(0o750)
        with pytest.raises(ConfigError, match="mode 0750.*chmod it to 700"):
            open_it(folder)
        assert stat.S_IMODE(folder.stat().st_mode) == 0o750
    assert not broker.has_disk


def test_a_home_directory_is_found(broker: KVBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    with KVCheckpointSaver.local("~/local", broker) as saver:
        assert saver.directory == tmp_path / "local" / "checkpoints.sqlite.kv"
    with KVCheckpointSaver(InMemorySaver(), broker, directory="~/beside") as saver:
        assert saver.directory == tmp_path / "beside"
    assert {path.name for path in tmp_path.iterdir()} == {"local", "beside"}


@pytest.mark.parametrize("where", ["", 5, b"x"])
def test_a_directory_that_is_no_path_is_refused(where: Any, broker: KVBroker) -> None:
    with pytest.raises(ConfigError, match="directory must be a path"):
        KVCheckpointSaver(InMemorySaver(), broker, directory=where)


def test_a_manifest_of_a_newer_version_is_refused_and_left_as_it_is(broker: KVBroker, tmp_path: Path) -> None:
    KVCheckpointSaver(InMemorySaver(), broker, directory=tmp_path).close()
    with closing(sqlite3.connect(tmp_path / "manifest.sqlite")) as database:
        database.execute(f"PRAGMA user_version = {FORMAT_VERSION + 1}")
    with pytest.raises(ConfigError, match="newer version"):
        KVCheckpointSaver(InMemorySaver(), broker, directory=tmp_path)
    with closing(sqlite3.connect(tmp_path / "manifest.sqlite")) as database:
        assert database.execute("PRAGMA user_version").fetchone() == (FORMAT_VERSION + 1,)


@pytest.mark.parametrize("content", ["another database", "no database", "a link", "a folder"])
def test_a_foreign_manifest_is_refused_and_left_as_it_is(content: str, broker: KVBroker, tmp_path: Path) -> None:
    path = tmp_path / "manifest.sqlite"
    if content == "another database":
        with closing(sqlite3.connect(path)) as database:
            database.execute("CREATE TABLE theirs (x)")
            database.commit()
    elif content == "no database":
        path.write_bytes(b"not a database at all" * 100)
    elif content == "a link":
        path.symlink_to(tmp_path / "elsewhere")
    else:
        path.mkdir()
    before = path.read_bytes() if path.is_file() else None
    with pytest.raises(ConfigError, match="name a"):
        KVCheckpointSaver(InMemorySaver(), broker, directory=tmp_path)
    assert (path.read_bytes() if path.is_file() else None) == before
    assert not (tmp_path / "elsewhere").exists()
    assert not broker.has_disk


def test_a_recipe_that_cannot_be_written_fails_the_run_before_the_checkpoint_is_stored(
    broker: KVBroker, tmp_path: Path
) -> None:
    memory = InMemorySaver()
    with KVCheckpointSaver(memory, broker, directory=tmp_path) as saver:
        other = sqlite3.connect(tmp_path / "manifest.sqlite")
        with closing(other):
            pages = other.execute("PRAGMA page_count").fetchone()[0]
            saver._ledger.sidecar._db.execute(f"PRAGMA max_page_count = {pages}")
        docs = broker.materialize([9] * 3000)
        with pytest.raises(PersistenceError, match="cannot be written: database or disk is full"):
            put(saver, {"docs": docs})
        assert list(memory.list(None)) == []
        with pytest.raises(PersistenceError):
            saver.put_writes(thread(checkpoint_ns="", checkpoint_id="x"), [("docs", docs)], "task")
        assert not memory.writes
        put(saver, {"text": "no handle"})
        saver._ledger.sidecar._db.execute("PRAGMA max_page_count = 100000")
        put(saver, {"docs": docs})
        assert len(list(memory.list(None))) == 2


def test_two_savers_on_one_directory_share_recipes_and_tensors(
    open_broker: Callable[..., KVBroker], tmp_path: Path
) -> None:
    """As two processes would: brokers that share nothing else."""
    one, other = open_broker(), open_broker()
    with (
        KVCheckpointSaver.local(tmp_path, one, durability="sync") as mine,
        KVCheckpointSaver.local(tmp_path, other, durability="sync") as theirs,
    ):
        docs = one.prefill(DOCS).handle
        put(mine, {"docs": docs}, name="mine")
        before = mine.stats().tensor_bytes
        found = theirs.get_tuple(thread("mine"))
        assert found is not None
        read = KVHandle.coerce(found.checkpoint["channel_values"]["docs"])
        assert other.token_ids(read) == one.token_ids(docs)
        put(theirs, {"docs": read}, name="theirs")
        mine.delete_thread("mine")
        assert mine.stats().manifest.num_recipes == 1
        assert mine.stats().tensor_bytes == before
        theirs.delete_thread("theirs")
        theirs.sweep()
        assert is_empty(mine)


def test_two_savers_race_on_one_directory(open_broker: Callable[..., KVBroker], tmp_path: Path) -> None:
    brokers = [open_broker(), open_broker()]
    with (
        KVCheckpointSaver.local(tmp_path, brokers[0], durability="sync") as one,
        KVCheckpointSaver.local(tmp_path, brokers[1], durability="sync") as other,
        ThreadPoolExecutor(8) as workers,
    ):

        def live(number: int) -> None:
            saver, broker = (one, brokers[0]) if number % 2 else (other, brokers[1])
            for turn in range(6):
                shared = broker.materialize([9, 8, 7, 6])
                at = put(saver, {"docs": shared, "own": broker.append(shared, [20 + turn])}, name=f"t{number % 3}")
                saver.put_writes(at, [("docs", shared)], "task")
                saver.delete_thread(f"t{number % 3}")

        for done in [workers.submit(live, number) for number in range(8)]:
            done.result()
        one.sweep()
        other.sweep()
        assert is_empty(one)


def test_handles_of_a_model_that_is_not_loaded_are_kept_as_they_are(
    open_broker: Callable[..., KVBroker], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    llama, qwen = open_broker(), open_broker("qwen2")
    foreign = qwen.prefill(DOCS).handle
    with KVCheckpointSaver.local(tmp_path, llama) as saver:
        put(saver, {"docs": foreign})
        put(saver, {"docs": foreign}, name="2")
        assert saver.stats().manifest.num_foreign == 1
    assert caplog.text.count("belong to no broker of this saver") == 1
    with KVCheckpointSaver.local(tmp_path, [llama, qwen], durability="sync") as saver:
        put(saver, {"docs": foreign}, name="3")
        assert saver.stats().manifest.num_foreign == 0
        assert saver.stats().tensor_bytes > 0
    with KVCheckpointSaver.local(tmp_path, llama) as saver:
        put(saver, {"docs": foreign}, name="4")
        for name in "1234":
            saver.delete_thread(name)
        assert saver.stats().manifest.num_recipes == 0
    with KVCheckpointSaver.local(tmp_path, [qwen, llama]) as saver:
        assert is_empty(saver), "the tensors went when their model was there again"


def test_a_handle_that_nothing_can_rebuild_is_stored_and_said(
    saver: KVCheckpointSaver, broker: KVBroker, caplog: pytest.LogCaptureFixture
) -> None:
    real = broker.materialize([9, 2, 3])
    forged = KVHandle("ab" * 32, real.kv_namespace, 3)
    altered = KVHandle(real.kv_id, real.kv_namespace, 99)
    put(saver, {"docs": forged, "more": altered})
    assert caplog.text.count("nothing can rebuild") == 2
    assert saver.get_tuple(thread()) is not None
    saver.delete_thread("1")
    assert is_empty(saver)


def test_a_broker_that_was_closed_first_cannot_promise_new_recipes(
    open_broker: Callable[..., KVBroker], tmp_path: Path
) -> None:
    broker = open_broker()
    with KVCheckpointSaver.local(tmp_path, broker) as saver:
        known = broker.prefill(DOCS).handle
        new = broker.append(known, [20, 21])
        at = put(saver, {"docs": known})
        broker.close()
        put(saver, {"docs": known}, parent=at)
        with pytest.raises(PersistenceError, match="Close the broker after the saver"):
            put(saver, {"docs": new}, parent=at)
        assert len(list(saver.list(thread()))) == 2
    later = open_broker()
    with KVCheckpointSaver.local(tmp_path, later) as saver:
        assert later.transfer(known).num_fetched == known.kv_tokens
        saver.delete_thread("1")
        assert is_empty(saver)


def test_a_broker_with_a_disk_of_its_own_keeps_tensors_there(engines: Callable[..., Any], tmp_path: Path) -> None:
    with KVBroker.open(engines(), pool_bytes=8 << 20, disk=tmp_path / "disk") as broker:
        with KVCheckpointSaver.local(tmp_path / "own", broker, durability="sync") as saver:
            docs = broker.prefill(DOCS).handle
            put(saver, {"docs": docs})
            assert saver.stats().manifest.num_not_durable == 0
            assert saver.stats().tensor_bytes == 0
            assert broker.stats().num_spills == 1
        assert broker.has_disk


def test_an_encrypting_saver_stores_recipes_through_its_cipher_and_no_tensors(
    open_broker: Callable[..., KVBroker], tmp_path: Path
) -> None:
    class Xor:
        def encrypt(self, plaintext: bytes) -> tuple[str, bytes]:
            return "xor", bytes(byte ^ 0x55 for byte in plaintext)

        def decrypt(self, ciphername: str, ciphertext: bytes) -> bytes:
            return bytes(byte ^ 0x55 for byte in ciphertext)

    def encrypted() -> InMemorySaver:
        return InMemorySaver(serde=EncryptedSerializer(Xor()))

    broker = open_broker()
    for durability in ("evict", "sync", "async"):
        with pytest.raises(ConfigError, match="pass durability='recipe'"):
            KVCheckpointSaver(encrypted(), broker, durability=durability, directory=tmp_path)  # type: ignore[arg-type]
    docs = broker.materialize([123, 124, 125])
    with KVCheckpointSaver(encrypted(), broker, durability="recipe", directory=tmp_path) as saver:
        put(saver, {"docs": docs})
        kind, body = query(saver, "SELECT type, body FROM recipes")
        assert kind.endswith("+xor")
        assert b"token_ids" not in body
        assert saver.stats().manifest.num_names == 0, "a hash tells who guesses a text that it is there"
    later = open_broker()
    with KVCheckpointSaver(encrypted(), later, durability="recipe", directory=tmp_path):
        assert later.token_ids(docs) == (123, 124, 125)


def test_what_is_no_saver_no_broker_or_no_policy_is_refused(broker: KVBroker, saver: KVCheckpointSaver) -> None:
    for inner, given, options, message in (
        (None, broker, {}, "inner must be"),
        (saver, broker, {}, "inner must be"),
        (InMemorySaver(), [], {}, "broker must be"),
        (InMemorySaver(), ["x"], {}, "broker must be"),
        (InMemorySaver(), [broker, broker], {}, "serve the same model"),
        (InMemorySaver(), broker, {"durability": "always"}, "durability must be one of recipe, evict, sync, async"),
        (Bystander(InMemorySaver()), broker, {}, "pass directory="),
    ):
        with pytest.raises(ConfigError, match=message):
            KVCheckpointSaver(inner, given, **options)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="strategy must be"):
        saver.prune(["1"], strategy="all")


def test_a_closed_saver_says_so(broker: KVBroker) -> None:
    saver = KVCheckpointSaver(InMemorySaver(), broker)
    place = saver._ledger.sidecar.path.parent
    saver.close()
    saver.close()
    with pytest.raises(ConfigError, match="is closed"):
        put(saver, {})
    assert not place.exists()
    assert not broker.has_disk


# ---------------------------------------------------------------- the inner saver's own ways


def test_a_clone_for_an_allow_list_shares_everything_else(saver: KVCheckpointSaver, broker: KVBroker) -> None:
    strict = KVCheckpointSaver.with_allowlist(saver, [("x", "Y")])
    assert strict is saver  # this serialiser allows all
    saver.inner.serde._allowed_msgpack_modules = None  # type: ignore[attr-defined]
    clone = saver.with_allowlist([("x", "Y")])
    assert clone is not saver
    assert clone.inner is not saver.inner
    assert clone.serde is clone.inner.serde is not saver.serde
    put(clone, {"docs": broker.materialize([9, 2, 3])})
    assert saver.stats().manifest.num_recipes == clone.stats().manifest.num_recipes == 1
    assert isinstance(
        saver.get_next_version(None, None), str
    )  # the inner saver's versions, not the base class' integers
    assert saver.config_specs == saver.inner.config_specs


async def test_async_methods_leave_the_loop_free_while_they_wait_for_a_thread(
    saver: KVCheckpointSaver, broker: KVBroker
) -> None:
    docs = broker.materialize([9, 2, 3])
    held = saver._operations._locks.acquire(["1"])
    checkpoint = empty_checkpoint()
    checkpoint["channel_values"] = {"docs": docs}
    waiting = [asyncio.create_task(saver.aput(thread(checkpoint_ns=""), checkpoint, {}, {})) for _ in range(50)]
    others = await asyncio.gather(
        *(saver.aput(thread(str(number), checkpoint_ns=""), checkpoint, {}, {}) for number in range(100, 108))
    )
    assert len(others) == 8
    assert not any(task.done() for task in waiting)
    held.release()
    await asyncio.gather(*waiting)
    saver.delete_thread("1")
    assert saver.stats().manifest.num_references == 8


async def test_a_write_that_began_is_finished_when_its_caller_is_cancelled(broker: KVBroker, tmp_path: Path) -> None:
    """Else the thread's lock would be given back while the row is on its way, and a deletion could come first."""
    began, go_on = threading.Event(), threading.Event()

    class Slow(InMemorySaver):
        def put(self, *args: Any) -> RunnableConfig:
            began.set()
            assert go_on.wait(30)
            return super().put(*args)

        async def aput(self, *args: Any) -> RunnableConfig:
            return await asyncio.to_thread(self.put, *args)

    with KVCheckpointSaver(Slow(), broker, directory=tmp_path) as saver:
        checkpoint = empty_checkpoint()
        checkpoint["channel_values"] = {"docs": broker.materialize([9, 2, 3])}
        writing = asyncio.create_task(saver.aput(thread(checkpoint_ns=""), checkpoint, {}, {}))
        await asyncio.to_thread(began.wait)
        writing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await writing
        deleting = asyncio.create_task(saver.adelete_thread("1"))
        await asyncio.sleep(0)
        assert not deleting.done()
        go_on.set()
        await deleting
        assert saver.get_tuple(thread()) is None
        assert is_empty(saver)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=2m,mode=0700", "tmpfs", str(folder)]
    mounted = subprocess.run(command, capture_output=True, check=False)
    if mounted.returncode:
        pytest.skip(f"cannot mount a tmpfs: {mounted.stderr.decode().strip()}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_on_a_full_disk_tensors_are_given_up_before_recipes_and_recipes_before_checkpoints(
    small_disk: Path, broker: KVBroker
) -> None:
    memory = InMemorySaver()
    with KVCheckpointSaver(memory, broker, durability="sync", directory=small_disk) as saver:

        def store(number: int) -> None:
            put(saver, {"docs": broker.materialize([9, number % 200 + 10, number // 200 + 10] * 130)}, name=str(number))

        for number in range(12):  # 300 kB of tensors each
            store(number)
        stats = saver.stats()
        assert stats.manifest.num_recipes == 12
        assert stats.num_tensor_failures > 0
        assert 0 < stats.tensor_bytes < 2 << 20
        _fill(small_disk)
        number = 12
        with contextlib.suppress(PersistenceError):
            while number < 2000:
                store(number)
                _fill(small_disk)
                number += 1
        assert number < 2000
        assert saver.stats().tensor_bytes == 0, "tensors made room for recipes to the last"
        with pytest.raises(PersistenceError, match="free some room"):
            store(number)
        assert memory.get_tuple(thread(str(number), checkpoint_ns="")) is None
        assert saver.get_tuple(thread("0")) is not None
        (small_disk / "filler").unlink()
        store(number)
        for name in range(number + 1):
            saver.delete_thread(str(name))
        assert is_empty(saver)


def _fill(folder: Path) -> None:
    """Leave no room."""
    with (folder / "filler").open("ab", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(b"x" * 4096)


async def test_async_methods_touch_no_file_on_the_loops_thread(
    broker: KVBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case 15: what blocks runs elsewhere, for a sync and for an async saver inside."""
    loop_thread = threading.get_ident()
    touched: list[str] = []

    def watch(owner: type, name: str) -> None:
        real = getattr(owner, name)

        def watched(*args: Any, **options: Any) -> Any:
            touched.append(name)
            assert threading.get_ident() != loop_thread, name
            return real(*args, **options)

        monkeypatch.setattr(owner, name, watched)

    connection = sqlite3.connect(tmp_path / "c.sqlite", check_same_thread=False)
    with closing(connection), KVCheckpointSaver(SqliteSaver(connection), broker, durability="sync") as saver:
        graph = asking(broker).compile(checkpointer=saver)
        with monkeypatch.context():
            watch(Sidecar, "_rows")
            watch(Sidecar, "_writing")
            watch(ThreadLock, "take")
            watch(DiskPool, "write")
            watch(DiskPool, "remove")
            watch(SqliteSaver, "cursor")
            await graph.ainvoke({"question": "What?"}, thread())
            await graph.aget_state(thread())
            assert len([found async for found in saver.alist(thread())]) == 4
            await saver.acopy_thread("1", "2")
            await saver.aprune(["1"])
            await saver.adelete_for_runs(["none"])
            await saver.aget_delta_channel_history(config=thread("2", checkpoint_ns=""), channels=["x"])
            for name in "12":
                await saver.adelete_thread(name)
            await saver.asweep(grace_s=0)
            monkeypatch.undo()
        assert {"_rows", "_writing", "take", "write", "remove", "cursor"} <= set(touched)
        assert is_empty(saver)
