"""Both ends of a pool's socket, each against a peer that misbehaves."""

from __future__ import annotations

import array
import contextlib
import fcntl
import mmap
import os
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from tempfile import mkdtemp

import pytest
import torch

from aaflow_langgraph.errors import KVMissing
from aaflow_langgraph.pool._door import MAX_READERS, MESSAGE_BYTES, Offer
from aaflow_langgraph.pool._layout import Layout
from aaflow_langgraph.pool._rundir import PoolName, RunDir, reached
from aaflow_langgraph.pool.peers import Peers
from aaflow_langgraph.pool.shared import SharedPool
from tests.processes import Worker, num_descriptors, num_mappings, wait_until

OWNER = "0123456789abcdef" * 2
NOBODY = 65534
LAYOUT = Layout(OWNER, 8192)
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    path = tmp_path / "run"
    path.mkdir(mode=0o700)
    return path


@pytest.fixture
def pool(run_dir: Path) -> Iterator[SharedPool]:
    pool = SharedPool(8192, run_dir=run_dir)
    yield pool
    pool.close()


def call(run_dir: Path) -> socket.socket:
    """A bare client of the only pool there is."""
    client = socket.socket(socket.AF_UNIX)
    (file,) = os.listdir(run_dir)
    with RunDir(run_dir).opened() as folder:
        client.connect(reached(folder, file))
    return client


def attaches(run_dir: Path, owner: str) -> bool:
    peers = Peers(run_dir, deadline_s=5)
    try:
        return peers.attach(owner).is_alive()
    finally:
        peers.close()


# The owner's end.


@pytest.mark.parametrize("said", [b"x", b"GET / HTTP/1.1\r\n\r\n", os.urandom(100_000)], ids=["byte", "http", "noise"])
def test_who_talks_is_cut_off_and_nobody_else(run_dir: Path, pool: SharedPool, said: bytes) -> None:
    with call(run_dir) as client:
        client.settimeout(30)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            client.sendall(said)
        with contextlib.suppress(ConnectionResetError):
            while client.recv(4096):
                pass
    assert attaches(run_dir, pool.owner)


def test_who_listens_to_nothing_or_only_half_keeps_nobody_waiting(run_dir: Path, pool: SharedPool) -> None:
    with call(run_dir), call(run_dir) as half:
        half.recv(MESSAGE_BYTES // 2)
        assert attaches(run_dir, pool.owner)
        allocation = pool.reserve(4096)
        assert allocation is not None
        pool.publish(allocation)
        pool.free(allocation)


def test_who_sends_descriptors_gets_none_of_the_owners_room(run_dir: Path, pool: SharedPool) -> None:
    before = num_descriptors()
    with call(run_dir) as client:
        socket.send_fds(client, [b"here"], [0, 1, 2])
        client.settimeout(30)
        with contextlib.suppress(ConnectionResetError):
            while client.recv(4096):
                pass
    wait_until(lambda: num_descriptors() == before)


def test_more_readers_than_a_pool_takes_are_turned_away_until_some_leave(run_dir: Path, pool: SharedPool) -> None:
    before = num_descriptors()
    clients = [call(run_dir) for _ in range(MAX_READERS)]
    for client in clients:
        client.recv(MESSAGE_BYTES)
    with pytest.raises(KVMissing, match="hung up"):
        Peers(run_dir, deadline_s=30).attach(pool.owner)
    for client in clients:
        client.close()
    wait_until(lambda: num_descriptors() == before)
    assert attaches(run_dir, pool.owner)


def test_an_owner_without_free_descriptors_serves_again_when_it_has_some(tmp_path: Path) -> None:
    worker = Worker(tmp_path / "run")
    try:
        owner = worker("open", 8192)
        worker("limit", "RLIMIT_NOFILE", 64)
        worker("use_up_descriptors")
        with pytest.raises(KVMissing, match="in time"):
            Peers(tmp_path / "run", deadline_s=0.2).attach(owner)
        worker("give_descriptors_back")
        assert attaches(tmp_path / "run", owner)
    finally:
        worker.end()


@as_root
def test_a_reader_of_another_user_gets_no_descriptor() -> None:
    """Although somebody opened the directory and the socket to everybody."""
    run_dir = Path(mkdtemp(prefix="aaflow-", dir="/tmp"))
    pool = SharedPool(8192, run_dir=run_dir)
    try:
        (file,) = run_dir.iterdir()
        run_dir.chmod(0o711)
        file.chmod(0o777)
        assert as_nobody(lambda: _received(run_dir, file.name)) == 1
        assert as_nobody(lambda: _received(run_dir, file.name), user=0) == 0
        run_dir.chmod(0o700)
        assert attaches(run_dir, pool.owner)
    finally:
        pool.close()
        run_dir.rmdir()


def _received(run_dir: Path, file: str) -> int:
    os.chdir(run_dir)
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(30)
        client.connect(file)
        message, fds, _, _ = socket.recv_fds(client, MESSAGE_BYTES, 4)
    return 0 if len(message) == MESSAGE_BYTES and len(fds) == 1 else 1 if not message and not fds else 2


def as_nobody(action: Callable[[], int], user: int = NOBODY) -> int:
    """Runs in a child of another user; its exit status is what ``action`` returns, 99 when it raises."""
    pid = os.fork()
    if pid == 0:
        status = 99
        with contextlib.suppress(BaseException):
            os.setgroups([])
            os.setresgid(user, user, user)
            os.setresuid(user, user, user)
            status = action()
        os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.parametrize("kind", ["memfd", "file"])
def test_what_a_reader_gets_can_be_read_and_nothing_else(
    run_dir: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind == "file":
        monkeypatch.setattr(os, "memfd_create", refuse)
    pool = SharedPool(8192, run_dir=run_dir)
    allocation = pool.reserve(8192)
    assert allocation is not None
    view = pool.tensor(allocation, torch.uint8, (8192,))
    view.fill_(4)
    with call(run_dir) as client:
        _, (fd,), _, _ = socket.recv_fds(client, MESSAGE_BYTES, 1)
    size = os.fstat(fd).st_size
    attempts: list[Callable[[], object]] = [
        lambda: mmap.mmap(fd, size),
        lambda: mmap.mmap(fd, size, prot=mmap.PROT_WRITE),
        lambda: os.ftruncate(fd, 0),
        lambda: os.ftruncate(fd, size - 4096),
        lambda: os.ftruncate(fd, size + 4096),
        lambda: os.pwrite(fd, b"x", size - 1),
        lambda: os.posix_fallocate(fd, size, 4096),
    ]
    if kind == "memfd":
        attempts.append(lambda: fcntl.fcntl(fd, 1033, 8))  # no further seal either
    for attempt in attempts:
        with pytest.raises(OSError):  # noqa: PT011  # EPERM or EACCES or EINVAL or EBADF, as the kernel likes
            attempt()
    os.close(fd)
    assert set(view.tolist()) == {4}
    pool.close()


# The reader's end.


def refuse(*_: object) -> int:
    raise OSError(1, "not here")


def sealed(size: int = LAYOUT.total_bytes, front: bytes | None = None, seals: int = 0x17) -> int:
    fd = os.memfd_create("fake", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size)
    os.pwrite(fd, LAYOUT.front() if front is None else front, 0)
    fcntl.fcntl(fd, 1033, seals)
    return fd


def named_file(folder: Path, flags: int = os.O_RDONLY, *, unlink: bool = True, mode: int = 0o600) -> int:
    path = folder / "memory"
    path.write_bytes(LAYOUT.front().ljust(LAYOUT.total_bytes, b"\0"))
    path.chmod(mode)
    fd = os.open(path, flags | os.O_CLOEXEC)
    if unlink:
        path.unlink()
    return fd


GOOD = Offer(LAYOUT, "memfd").pack()
FILE = Offer(LAYOUT, "file").pack()
Answer = tuple[bytes, list[int]]
ANSWERS: dict[str, tuple[str, Callable[[Path], Answer]]] = {
    "silence and a hang-up": ("hung up", lambda _: (b"", [])),
    "half a message": ("hung up", lambda _: (GOOD[:20], [sealed()])),
    "no descriptor": ("0 descriptors", lambda _: (GOOD, [])),
    "two descriptors": ("2 descriptors", lambda _: (GOOD, [sealed(), sealed()])),
    "another format": ("format", lambda _: (b"HTTP/1.1 200 OK\r\n".ljust(MESSAGE_BYTES), [sealed()])),
    "a later version": ("version 2", lambda _: (GOOD[:8] + b"\2" + GOOD[9:], [sealed()])),
    "an unknown kind": ("kind 9", lambda _: (GOOD[:12] + b"\x09" + GOOD[13:], [sealed()])),
    "another owner": ("answers there", lambda _: (Offer(replace(LAYOUT, owner="f" * 32), "memfd").pack(), [sealed()])),
    "no capacity": ("capacity of 0", lambda _: (GOOD[:-8] + bytes(8), [sealed()])),
    "an odd capacity": ("impossible", lambda _: (GOOD[:-8] + b"\1" + bytes(7), [sealed()])),
    "a huge capacity": ("impossible", lambda _: (GOOD[:-8] + b"\0\xf0" + b"\xff" * 6, [sealed()])),
    "less than announced": ("bytes where", lambda _: (GOOD, [sealed(LAYOUT.total_bytes - 4096)])),
    "more than announced": ("bytes where", lambda _: (GOOD, [sealed(LAYOUT.total_bytes + 4096)])),
    "no seals": ("changed or cut", lambda _: (GOOD, [sealed(seals=0)])),
    "one seal short": ("changed or cut", lambda _: (GOOD, [sealed(seals=0x15)])),
    "another header": ("something else", lambda _: (GOOD, [sealed(front=b"AAFLOWKW")])),
    "another owner's header": (
        "something else",
        lambda _: (GOOD, [sealed(front=replace(LAYOUT, owner="f" * 32).front())]),
    ),
    "a pipe": ("bytes where", lambda _: (GOOD, [os.pipe2(os.O_CLOEXEC)[0]])),
    "a file for a memfd": ("changed or cut", lambda folder: (GOOD, [named_file(folder)])),
    "a file with a name": ("changed or cut", lambda folder: (FILE, [named_file(folder, unlink=False)])),
    "a writable file": ("changed or cut", lambda folder: (FILE, [named_file(folder, os.O_RDWR)])),
    "everybody's file": ("changed or cut", lambda folder: (FILE, [named_file(folder, mode=0o644)])),
}


@contextlib.contextmanager
def impostor(run_dir: Path, answer: Callable[[socket.socket], None]) -> Iterator[None]:
    """Listens under an owner's name and does ``answer`` with the first connection."""
    file = PoolName.of_this_process(OWNER).file("sock")
    with socket.socket(socket.AF_UNIX) as listener:
        with RunDir(run_dir).opened() as folder:
            listener.bind(reached(folder, file))
        listener.listen()

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                answer(connection)

        thread = threading.Thread(target=serve)
        thread.start()
        yield
        thread.join()
    (run_dir / file).unlink()


@pytest.mark.parametrize("case", ANSWERS)
def test_an_answer_that_cannot_be_is_a_miss_that_says_what_is_wrong(case: str, run_dir: Path, tmp_path: Path) -> None:
    what, make = ANSWERS[case]
    before = num_descriptors()
    message, fds = make(tmp_path)

    def answer(connection: socket.socket) -> None:
        if message:
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
            connection.sendmsg([message], rights)

    with impostor(run_dir, answer), pytest.raises(KVMissing, match=what):
        Peers(run_dir, deadline_s=30).attach(OWNER)
    for fd in fds:
        os.close(fd)
    if case == "a pipe":
        before += 1  # its other end, which nobody here has a number for
    assert num_descriptors() == before
    assert num_mappings() == 0


def test_an_honest_answer_in_single_bytes_is_understood(run_dir: Path) -> None:
    """So the cases above are refused for what is wrong with them."""
    ended = threading.Event()

    def answer(connection: socket.socket) -> None:
        fd = sealed()
        socket.send_fds(connection, [GOOD[:1]], [fd])
        os.close(fd)
        for at in range(1, MESSAGE_BYTES):
            connection.sendall(GOOD[at : at + 1])
        ended.wait(30)

    with impostor(run_dir, answer):
        peers = Peers(run_dir, deadline_s=30)
        assert peers.attach(OWNER).capacity_bytes == 8192
        ended.set()
        peers.close()


def test_a_named_file_is_taken_when_everything_about_it_is_right(run_dir: Path, tmp_path: Path) -> None:
    def answer(connection: socket.socket) -> None:
        fd = named_file(tmp_path)
        socket.send_fds(connection, [FILE], [fd])
        os.close(fd)

    with impostor(run_dir, answer):
        peers = Peers(run_dir, deadline_s=30)
        assert peers.attach(OWNER).owner == OWNER
        peers.close()


def test_an_owner_that_drips_is_given_up_at_the_deadline(run_dir: Path) -> None:
    given_up = threading.Event()

    def answer(connection: socket.socket) -> None:
        connection.sendall(GOOD[:10])
        given_up.wait(30)

    with impostor(run_dir, answer):
        with pytest.raises(KVMissing, match="in time"):
            Peers(run_dir, deadline_s=0.1).attach(OWNER)
        given_up.set()


@as_root
def test_an_owner_of_another_user_is_not_believed(run_dir: Path) -> None:
    """Whoever put the socket into our directory."""
    elsewhere = Path(mkdtemp(prefix="aaflow-", dir="/tmp"))
    elsewhere.chmod(0o777)
    ready, listening = os.pipe()
    done, finish = os.pipe()

    def serve() -> int:
        with socket.socket(socket.AF_UNIX) as listener:
            os.chdir(elsewhere)
            listener.bind("sock")
            listener.listen()
            os.write(listening, b"x")
            os.read(done, 1)
        return 0

    pid = os.fork()
    if pid == 0:
        with contextlib.suppress(BaseException):
            os.setgroups([])
            os.setresgid(NOBODY, NOBODY, NOBODY)
            os.setresuid(NOBODY, NOBODY, NOBODY)
            serve()
        os._exit(0)
    os.read(ready, 1)
    try:
        (elsewhere / "sock").rename(run_dir / PoolName.of_this_process(OWNER).file("sock"))
        with pytest.raises(KVMissing, match=f"uid {NOBODY}"):
            Peers(run_dir).attach(OWNER)
    finally:
        os.write(finish, b"x")
        os.waitpid(pid, 0)
        for fd in (ready, listening, done, finish):
            os.close(fd)
        elsewhere.rmdir()


def test_eight_threads_that_attach_at_once_share_one_mapping(run_dir: Path, pool: SharedPool) -> None:
    peers, found = Peers(run_dir, deadline_s=30), []
    before = num_mappings()
    threads = [threading.Thread(target=lambda: found.append(peers.attach(pool.owner))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert len(set(map(id, found))) == 1
    assert peers.attached() == [found[0]]
    assert num_mappings() == before + 1
    peers.detach(pool.owner)
    peers.detach(pool.owner)
    assert peers.attached() == []
    assert not found[0].is_alive()
    assert attaches(run_dir, pool.owner)
