"""Whose files are whose: the private directory, the names, and the sweep of what dead owners left."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from aaflow_langgraph.errors import ConfigError, KVMissing
from aaflow_langgraph.pool import _memory
from aaflow_langgraph.pool._rundir import PoolName, RunDir, boot_id, reached, start_time
from aaflow_langgraph.pool.peers import Peers
from aaflow_langgraph.pool.shared import SharedPool
from aaflow_langgraph.pool.sweep import sweep

OWNER = "0123456789abcdef" * 2
NOBODY = 65534


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    path = tmp_path / "run"
    path.mkdir(mode=0o700)
    return path


@pytest.fixture(autouse=True)
def private_fallback(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(_memory, "_FALLBACK_PARENT", tmp_path)


def leave_socket(path: Path) -> None:
    """A socket file on which nobody listens, as a killed process leaves it."""
    with socket.socket(socket.AF_UNIX) as dead, address(path) as short:
        dead.bind(short)


@contextlib.contextmanager
def address(path: Path) -> Iterator[str]:
    """A short way to a socket: pytest's directories lie deep."""
    with RunDir(path.parent).opened() as folder:
        yield reached(folder, path.name)


def dead_name() -> PoolName:
    """Of a process that is no more: its pid is taken, by a process that started at another time."""
    return replace(PoolName.of_this_process(OWNER), start=1)


def test_a_name_says_what_it_was_made_of() -> None:
    name = PoolName.of_this_process(OWNER)
    assert (name.boot, name.pid, name.owner) == (boot_id(), os.getpid(), OWNER)
    for suffix in ("sock", "new", "mem"):
        assert PoolName.parse(name.file(suffix)) == name
        assert len(name.file(suffix)) + len("/proc/self/fd/1234567/") < 108
    assert name.is_running()


@pytest.mark.parametrize(
    "file",
    [
        "",
        "pool",
        "other.sock",
        "pool-x-1-1-" + OWNER + ".sock",
        f"pool-{'a' * 16}-1-1-{OWNER}.sock~",
        f"xpool-{'a' * 16}-1-1-{OWNER}.sock",
        f"pool-{'a' * 16}-1-1-{OWNER.upper()}.sock",
        f"pool-{'a' * 16}-0-1-{OWNER}.sock",
        f"pool-{'a' * 16}-1-1-{OWNER}.sock\n",
        f"pool-{'a' * 16}-1-1-{OWNER}",
    ],
)
def test_other_names_are_nobodys(file: str) -> None:
    assert PoolName.parse(file) is None


def test_a_pid_that_was_used_again_is_another_process() -> None:
    assert not dead_name().is_running()
    assert not replace(PoolName.of_this_process(OWNER), boot="0" * 16).is_running()


def test_a_process_has_a_start_time_whatever_it_calls_itself_and_a_zombie_has_none() -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        started = start_time(process.pid)
        assert started is not None
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert Path(f"/proc/{process.pid}/stat").exists()
        assert start_time(process.pid) is None
    own = Path("/proc/self/comm")
    before = own.read_text()
    try:
        own.write_text("a) Z 1 1 1")
        assert start_time("self") == start_time(os.getpid()) is not None
    finally:
        own.write_text(before.strip())


def test_the_directory_is_made_private(tmp_path: Path) -> None:
    previous = os.umask(0)
    try:
        with RunDir.of(tmp_path / "made").opened() as folder:
            assert stat.S_IMODE(os.fstat(folder).st_mode) == 0o700
    finally:
        os.umask(previous)


def test_where_it_is_follows_the_standard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/7")
    assert RunDir.of(None).path == Path("/run/user/7/aaflow-langgraph")
    for ignored in ("", "relative/path"):
        monkeypatch.setenv("XDG_RUNTIME_DIR", ignored)
        assert RunDir.of(None).path == Path(f"/tmp/aaflow-langgraph-{os.geteuid()}")
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    assert RunDir.of(None).path == Path(f"/tmp/aaflow-langgraph-{os.geteuid()}")


def test_a_process_that_goes_elsewhere_still_removes_its_socket(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    pool = SharedPool(4096, run_dir=Path("here"))
    assert len(list((tmp_path / "here").iterdir())) == 1
    monkeypatch.chdir("/")
    pool.close()
    assert list((tmp_path / "here").iterdir()) == []


@pytest.mark.parametrize("mode", [0o755, 0o710, 0o701, 0o770, 0o777])
def test_a_directory_with_rights_for_others_is_refused_by_writer_reader_and_sweep(run_dir: Path, mode: int) -> None:
    run_dir.chmod(mode)
    for call in (
        lambda: SharedPool(4096, run_dir=run_dir),
        lambda: Peers(run_dir).attach(OWNER),
        lambda: sweep(run_dir),
    ):
        with pytest.raises(ConfigError, match=f"mode {mode:04o}"):
            call()
    assert list(run_dir.iterdir()) == []


def test_a_link_to_a_directory_is_refused(run_dir: Path, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(run_dir)
    with pytest.raises(ConfigError, match="a link is none"):
        SharedPool(4096, run_dir=link)
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="a link is none"):
        SharedPool(4096, run_dir=tmp_path / "dangling")


def test_what_is_no_directory_or_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ConfigError, match="no directory"):
        SharedPool(4096, run_dir=tmp_path / "file")
    assert (tmp_path / "file").read_text() == "mine"
    with pytest.raises(ConfigError, match="XDG_RUNTIME_DIR"):
        SharedPool(4096, run_dir=tmp_path / "no" / "parent")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
def test_a_directory_of_somebody_else_is_refused(run_dir: Path) -> None:
    os.chown(run_dir, NOBODY, NOBODY)
    with pytest.raises(ConfigError, match=f"uid {NOBODY}"):
        SharedPool(4096, run_dir=run_dir)


def test_a_directory_far_down_works_although_a_sockets_path_is_short(tmp_path: Path) -> None:
    deep = tmp_path
    for _ in range(10):
        deep = deep / ("d" * 60)
        deep.mkdir(mode=0o700)
    pool, peers = SharedPool(4096, run_dir=deep), Peers(deep)
    assert peers.attach(pool.owner).is_alive()
    peers.close()
    pool.close()
    assert list(deep.iterdir()) == []


def test_the_sweep_removes_what_dead_owners_left(run_dir: Path, tmp_path: Path) -> None:
    rebooted = replace(PoolName.of_this_process("f" * 32), boot="0" * 16)
    left = sorted([dead_name().file("sock"), dead_name().file("new"), rebooted.file("sock")])
    for file in left:
        leave_socket(run_dir / file)
    fallback = _memory.fallback_dir()
    fallback.mkdir(mode=0o700)
    (fallback / dead_name().file("mem")).write_bytes(b"pages")
    assert sweep(run_dir) == [*left, dead_name().file("mem")]
    assert list(run_dir.iterdir()) == list(fallback.iterdir()) == []
    assert sweep(run_dir) == []


def test_the_sweep_leaves_the_living_alone(run_dir: Path) -> None:
    pool = SharedPool(4096, run_dir=run_dir)
    being_made = PoolName.of_this_process(OWNER)
    leave_socket(run_dir / being_made.file("new"))  # bound, and does not listen yet
    before = sorted(run_dir.iterdir())
    assert sweep(run_dir) == []
    assert sorted(run_dir.iterdir()) == before
    pool.close()


def test_who_listens_is_alive_even_if_no_such_process_can_be_seen(run_dir: Path) -> None:
    """Its pid may be of another namespace."""
    with socket.socket(socket.AF_UNIX) as listener, address(run_dir / dead_name().file("sock")) as short:
        listener.bind(short)
        listener.listen(1)
        assert sweep(run_dir) == []
        for _ in range(4):  # every sweep knocks; the queue of one is full after two
            assert sweep(run_dir) == []
    assert sweep(run_dir) == [dead_name().file("sock")]


def test_the_sweep_touches_no_foreign_file(run_dir: Path) -> None:
    name = dead_name()
    (run_dir / "notes.txt").write_text("mine")
    leave_socket(run_dir / "other.sock")
    (run_dir / name.file("sock")).write_text("a file where a socket should be")
    (run_dir / name.file("new")).mkdir()
    (run_dir / replace(name, owner="a" * 32).file("sock")).symlink_to(run_dir / "notes.txt")
    leave_socket(run_dir / replace(name, owner="b" * 32).file("mem"))
    before = sorted(run_dir.iterdir())
    assert sweep(run_dir) == []
    assert sorted(run_dir.iterdir()) == before
    assert (run_dir / "notes.txt").read_text() == "mine"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_the_sweep_touches_no_file_of_another_user(run_dir: Path) -> None:
    leave_socket(run_dir / dead_name().file("sock"))
    os.chown(run_dir / dead_name().file("sock"), NOBODY, NOBODY)
    assert sweep(run_dir) == []


@pytest.mark.parametrize(
    "owner", ["", "../../etc/passwd", "g" * 32, OWNER[:-1], OWNER + "0", OWNER.upper(), None, 7, "x" * 9999]
)
def test_an_owners_name_that_cannot_be_is_a_miss(run_dir: Path, owner: object) -> None:
    with pytest.raises(KVMissing, match="no pool's name"):
        Peers(run_dir).attach(owner)  # type: ignore[arg-type]


def test_an_owner_that_was_never_here_is_a_miss_that_names_it(run_dir: Path) -> None:
    leave_socket(run_dir / replace(dead_name(), owner="a" * 32).file("sock"))
    with pytest.raises(KVMissing, match=OWNER):
        Peers(run_dir).attach(OWNER)
    with pytest.raises(KVMissing, match="its owner is gone"):
        Peers(run_dir).attach("a" * 32)
