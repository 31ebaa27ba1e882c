"""What happens to an index on Redis and to its users when the server, the network or the content misbehaves. Case 14, C7, C8."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import secrets
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import redis
from redis.crc import key_slot

from aaflow_langgraph.errors import Fenced, IndexFull, IndexUnavailable, IntegrityError, LeaseExpired
from aaflow_langgraph.hashing import block_hashes
from aaflow_langgraph.index._lua import scripts
from aaflow_langgraph.index._server import key_names
from aaflow_langgraph.index.base import Index, Place
from aaflow_langgraph.index.guarded import GuardedIndex
from aaflow_langgraph.index.opening import open_index
from aaflow_langgraph.index.redis import RedisIndex
from aaflow_langgraph.model import Receipt, Recipe, Span, Turn
from aaflow_langgraph.pool.arena import Allocation
from aaflow_langgraph.testing.clock import ManualClock
from aaflow_langgraph.testing.index_cases import LEASE_S, NAMESPACE, OTHER, OWNER, B, query, record, sequence, spans
from tests.servers import KINDS, RealServer, our_keys, redis_server, running, until  # noqa: F401


@pytest.fixture(params=KINDS)
def server(request: pytest.FixtureRequest) -> Iterator[RealServer]:
    """A server that the test may mistreat."""
    with running(request.param) as one:
        yield one


def opened(server: RealServer, *, share_recipes: bool = True) -> RedisIndex:
    index = open_index(server.url, NAMESPACE, share_recipes=share_recipes)
    assert isinstance(index, RedisIndex)
    return index


def published(index: Index, ids: tuple[int, ...], epoch: int) -> int:
    kept, receipt = index.put(record(index, ids), epoch, LEASE_S)
    index.release(receipt)
    return kept.extent_id


# ---------------------------------------------------------------------- the server forgets or goes


def test_scripts_that_the_server_forgot_are_loaded_again(server: RealServer) -> None:
    """redis-py#2914: SCRIPT FLUSH in the middle of a run; no change is half applied."""
    index = opened(server)
    epoch = index.join(OWNER, LEASE_S)
    with server.client() as client:
        number = published(index, sequence("A"), epoch)
        client.script_flush()
        match = index.match(query(sequence("A")), B, LEASE_S)
        assert spans(match) == [(number, 0, B)]
        client.script_flush()
        assert index.release(match.receipt)
        assert index.check() == []
    index.close()


def test_a_killed_connection_is_replaced(server: RealServer) -> None:
    """CLIENT KILL between two calls is not seen by the caller."""
    index = opened(server)
    epoch = index.join(OWNER, LEASE_S)
    with server.client() as client:
        assert client.client_kill_filter(_type="normal", skipme=True) >= 1
    assert index.heartbeat(OWNER, epoch, LEASE_S)
    index.close()


def test_after_kill_9_and_restart_everything_is_cleanly_missing(server: RealServer) -> None:
    """C4: nothing is half there; owners are fenced, leases gone, and new ids and epochs are larger than any before."""
    index = opened(server)
    epoch = index.join(OWNER, LEASE_S)
    number = published(index, sequence("A"), epoch)
    receipt = index.match(query(sequence("A")), B, LEASE_S).receipt
    server.kill()
    with pytest.raises(IndexUnavailable):
        index.heartbeat(OWNER, epoch, LEASE_S)
    server.start()
    assert not index.heartbeat(OWNER, epoch, LEASE_S)
    with pytest.raises(Fenced):
        index.put(record(index, sequence("A")), epoch, LEASE_S)
    with pytest.raises(LeaseExpired):
        index.renew(receipt, LEASE_S)
    assert index.records() == []
    assert index.join(OWNER, LEASE_S) > epoch
    assert index.next_extent_id() > number
    index.close()


def test_a_flushed_server_gives_no_epoch_and_no_id_twice(server: RealServer) -> None:
    """There is no counter that could start again."""
    index = opened(server)
    epochs, ids = [], []
    with server.client() as client:
        for _ in range(20):
            epochs.append(index.join(OWNER, LEASE_S))
            ids.append(published(index, sequence("A"), epochs[-1]))
            client.flushall()
    assert epochs == sorted(set(epochs))
    assert ids == sorted(set(ids))
    index.close()


# ---------------------------------------------------------------------- outages behind the guard


@contextmanager
def guarded(
    server: RealServer, clock: Callable[[], float] = time.monotonic
) -> Iterator[tuple[GuardedIndex, list[str]]]:
    warnings: list[str] = []
    index = GuardedIndex(opened(server), clock=clock, on_warning=warnings.append)
    yield index, warnings
    index.close()


def answers_as_if_empty(index: GuardedIndex, epoch: int, receipt: Receipt) -> None:
    """Everything an outage must be answered with."""
    ids = sequence("A")
    made = record(index, ids)
    place = Place(OWNER, Allocation(0, 64, 1))
    assert index.match(query(ids), B, LEASE_S).parts == ()
    assert index.covering(query(ids)) == index.records() == index.candidates(OWNER) == []
    assert index.renew(receipt, LEASE_S) == receipt
    assert not index.release(receipt)
    assert not index.heartbeat(OWNER, epoch, LEASE_S)
    assert index.remove(1, OWNER) is None
    assert not index.lose(1, place)
    assert not index.move(1, None, place, epoch)
    assert not index.set_on_disk(1, True)
    assert index.claim("f" * 64, OWNER, LEASE_S)
    assert not index.unclaim("f" * 64, OWNER)
    assert index.sweep() == (0, 0, 0)
    assert (index.num_leases(), index.leave(OTHER), index.owners()) == (0, 0, {})
    assert index.recipe("c" * 64) is None
    index.put_recipe(Recipe("c" * 64, NAMESPACE, None, 0, (1,), 0, (), "materialize"), LEASE_S)
    for call in (
        lambda: index.put(made, epoch, LEASE_S),
        lambda: index.join(OTHER, LEASE_S),
        lambda: index.check(),
    ):
        with pytest.raises(IndexUnavailable):
            call()


def test_an_outage_is_one_warning_and_use_resumes_by_itself(server: RealServer) -> None:
    """Killed and started again: counted once, everything answered, nothing to be done to get it back."""
    clock = ManualClock()
    with guarded(server, clock) as (index, warnings):
        epoch = index.join(OWNER, LEASE_S)
        published(index, sequence("A"), epoch)
        receipt = index.match(query(sequence("A")), B, LEASE_S).receipt
        server.kill()
        answers_as_if_empty(index, epoch, receipt)
        clock.advance(2)
        answers_as_if_empty(index, epoch, receipt)
        assert (index.num_outages, len(warnings), index.is_out) == (1, 1, True)
        failed = index.num_failed_calls
        assert failed > 30
        server.start()
        assert not index.heartbeat(OWNER, epoch, LEASE_S)  # asked too early
        assert index.is_out
        clock.advance(2)
        assert not index.heartbeat(OWNER, epoch, LEASE_S)  # answered: unknown to the new server
        assert not index.is_out
        epoch = index.join(OWNER, LEASE_S)
        number = published(index, sequence("A"), epoch)
        assert spans(index.match(query(sequence("A")), B, LEASE_S)) == [(number, 0, B)]
        server.kill()
        assert index.match(query(sequence("A")), B, LEASE_S).parts == ()
        assert (index.num_outages, len(warnings)) == (2, 2)
        server.start()


def test_a_paused_server_is_waited_for_by_one_call_only(server: RealServer) -> None:
    """SIGSTOP: the first call runs into its timeout, the others are answered at once until the pause is over."""
    clock = ManualClock()
    with guarded(server, clock) as (index, warnings):
        epoch = index.join(OWNER, LEASE_S)
        number = published(index, sequence("A"), epoch)
        receipt = index.match(query(sequence("A")), B, LEASE_S).receipt
        os.kill(server.pid, signal.SIGSTOP)
        try:
            assert index.match(query(sequence("A")), B, LEASE_S).parts == ()
            started = time.thread_time()
            for _ in range(20):
                answers_as_if_empty(index, epoch, receipt)
            assert time.thread_time() - started < 10  # and nothing was waited for: the manual clock stands still
            assert (index.num_outages, len(warnings)) == (1, 1)
        finally:
            os.kill(server.pid, signal.SIGCONT)
        clock.advance(2)
        assert index.heartbeat(OWNER, epoch, LEASE_S)
        match = index.match(query(sequence("A")), B, LEASE_S)
        assert spans(match) == [(number, 0, B)]
        assert index.check() == []  # what the paused server did with the calls it had read is whole


def test_a_server_replaced_by_an_empty_one_says_so_without_an_outage(server: RealServer) -> None:
    with guarded(server) as (index, warnings):
        epoch = index.join(OWNER, LEASE_S)
        published(index, sequence("A"), epoch)
        receipt = index.match(query(sequence("A")), B, LEASE_S).receipt
        with server.client() as client:
            client.flushall()
        assert not index.heartbeat(OWNER, epoch, LEASE_S)
        with pytest.raises(LeaseExpired):
            index.renew(receipt, LEASE_S)
        assert (index.num_outages, warnings) == (0, [])


def test_a_full_server_reads_releases_and_evicts_and_takes_nothing_new(server: RealServer) -> None:
    """C7: only calls that write anew fail, one warning, and no pause for the others."""
    with guarded(server) as (index, warnings):
        epoch = index.join(OWNER, LEASE_S)
        number = published(index, sequence("A"), epoch)
        kept, receipt = index.put(record(index, sequence("B")), epoch, LEASE_S)
        with server.client() as client:
            client.config_set("maxmemory", 1)
            for _ in range(3):
                with pytest.raises(IndexFull):
                    index.put(record(index, sequence("C")), epoch, LEASE_S)
            assert index.match(query(sequence("A")), B, LEASE_S).parts == ()
            assert index.claim("f" * 64, OWNER, LEASE_S)
            assert len(index.records()) == 2
            assert index.heartbeat(OWNER, epoch, LEASE_S)
            assert index.renew(receipt, LEASE_S).extent_ids == (kept.extent_id,)
            assert index.release(receipt)
            assert index.remove(number, OWNER) is not None
            assert index.sweep() == (0, 0, 0)
            assert index.set_on_disk(kept.extent_id, True)
            assert index.lose(kept.extent_id, kept.place)  # type: ignore[arg-type]
            assert index.set_on_disk(kept.extent_id, False)
            assert (index.num_outages, len(warnings), index.is_out) == (1, 1, False)
            assert index.leave(OWNER) == 0
            client.config_set("maxmemory", 0)
        assert our_keys(server) == []
        epoch = index.join(OWNER, LEASE_S)
        published(index, sequence("C"), epoch)


def test_a_read_only_server_is_an_outage(server: RealServer) -> None:
    """A replica after a failover."""
    with guarded(server) as (index, warnings):
        index.join(OWNER, LEASE_S)
        with server.client() as client:
            client.execute_command("REPLICAOF", "127.0.0.1", "1")
            assert index.match(query(sequence("A")), B, LEASE_S).parts == ()
            with pytest.raises(IndexUnavailable):
                index.join(OTHER, LEASE_S)
            client.execute_command("REPLICAOF", "NO", "ONE")
        assert len(warnings) == 1


# ---------------------------------------------------------------------- the network


class SlowProxy:
    """A Unix socket in front of another, each reply ``delay_s`` late."""

    def __init__(self, target: Path, delay_s: float) -> None:
        self.path = target.with_name("slow")
        self._target, self._delay_s = target, delay_s
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(self.path))
        self._listener.listen()
        self._sockets = [self._listener]
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        for one in self._sockets:
            one.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            server = socket.socket(socket.AF_UNIX)
            server.connect(str(self._target))
            self._sockets += [client, server]
            threading.Thread(target=self._pump, args=(client, server, 0.0), daemon=True).start()
            threading.Thread(target=self._pump, args=(server, client, self._delay_s), daemon=True).start()

    @staticmethod
    def _pump(source: socket.socket, sink: socket.socket, delay_s: float) -> None:
        try:
            while piece := source.recv(1 << 16):
                threading.Event().wait(delay_s)
                sink.sendall(piece)
        except OSError:
            pass


def test_a_network_of_100_ms_is_slow_and_nothing_else(redis_server: RealServer) -> None:
    proxy = SlowProxy(redis_server.socket, 0.1)
    try:
        index = open_index(f"unix://{proxy.path}", secrets.token_hex(32))
        epoch = index.join(OWNER, LEASE_S)
        number = published(index, sequence("A"), epoch)
        match = index.match(query(sequence("A")), B, LEASE_S)
        assert spans(match) == [(number, 0, B)]
        assert index.release(match.receipt)
        assert index.leave(OWNER) == 1
        index.close()
    finally:
        proxy.close()
        proxy.path.unlink()


# ---------------------------------------------------------------------- cluster


def test_all_keys_of_a_namespace_lie_in_one_slot() -> None:
    names = tuple({name for script in scripts().values() for name in script.keys})
    for namespace in (secrets.token_hex(32) for _ in range(20)):
        slots = {key_slot(key.encode()) for key in key_names(namespace, names)}
        assert len(slots) == 1
        assert all(key.startswith(f"aaflow:{{{namespace[:32]}}}:") for key in key_names(namespace, names))


@pytest.mark.parametrize("kind", KINDS)
def test_a_cluster_of_two_nodes_serves_every_namespace(kind: str) -> None:
    """Whichever node the URL names: the client follows its slot, before and after the slot moves."""
    ports = [_free_port(), _free_port()]
    options = [("--port", str(port), "--cluster-enabled", "yes", "--cluster-port", str(_free_port())) for port in ports]
    with running(kind, *options[0]) as one, running(kind, *options[1]) as two, one.client() as a, two.client() as b:
        a.execute_command("CLUSTER", "ADDSLOTSRANGE", 0, 8191)
        b.execute_command("CLUSTER", "ADDSLOTSRANGE", 8192, 16383)
        bus = options[1][-1]
        a.execute_command("CLUSTER", "MEET", "127.0.0.1", ports[1], bus)
        until(lambda: all(b"cluster_state:ok" in _raw(node, "CLUSTER", "INFO") for node in (a, b)), "the cluster forms")
        until(lambda: all(b"cluster_known_nodes:2" in _raw(node, "CLUSTER", "INFO") for node in (a, b)), "nodes meet")
        slots = set()
        for namespace in (hashlib.sha256(bytes([number])).hexdigest() for number in range(8)):
            index = open_index(f"redis://127.0.0.1:{ports[0]}", namespace)
            epoch = index.join(OWNER, LEASE_S)
            ids = sequence("A")
            number = published(index, ids, epoch)
            assert spans(index.match(query(ids), B, LEASE_S)) == [(number, 0, B)]
            assert index.check() == []
            slots.add(key_slot(key_names(namespace, ("state",))[0].encode()) // 8192)
            index.close()
        assert slots == {0, 1}


def _raw(client: redis.Redis, *command: str) -> bytes:
    reply = client.execute_command(*command)
    return reply if isinstance(reply, bytes) else "\r\n".join(f"{k}:{v}" for k, v in reply.items()).encode()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


# ---------------------------------------------------------------------- content that is not ours


def tamper(server: RealServer, name: str, field: str, value: bytes | str) -> None:
    with server.client() as client:
        client.hset(key_names(NAMESPACE, (name,))[0], field, value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("state", "x"),
        ("state", "0 256 " + OWNER + " 99999999999999999999 64 1 - 0 1 1 1"),
        ("state", "300 200 " + OWNER + " 0 64 1 - 0 1 1 1"),
        ("state", "0 512 " + OWNER + " 0 64 1 - 0 1 1 1"),
        ("state", "0 256 ../../etc/passwd 0 64 1 - 0 1 1 1"),
        ("state", "0 256 " + OWNER + " -64 64 1 - 0 1 1 1"),
        ("records", "x"),
        ("records", "0 256 0 " + "0" * 32 + " " + "e" * 64),
        ("records", "0 256 0 " + "0" * 32 + " " + "e" * 64 + " " + "f" * 64),
        ("records", "0 256 512 " + "0" * 32 + " " + "e" * 64 + " " + "f" * 64),
        ("records", "0 256 0 " + "0" * 32 + " " + "e" * 64 + " " + "f" * 64 + " " + "d" * 64),
        ("records", "0 256 0 " + "0" * 32 + " " + "e" * 64 + " " + "f" * 64 + " " + "d" * 64 + " @256"),
        ("records", "0 256 0 " + "0" * 32 + " " + "e" * 64 + " " + "f" * 64 + " " + "d" * 64 + " @0"),
        ("records", "0 256 0 " + "0" * 32 + " " + "e" * 64 + " " + "f" * 64 + " " + "@100"),
        ("records", "0 256 0 " + "0" * 32 + " " + "e" * 64 + " " + "f" * 64 + " " + "d" * 64 + " @100,50"),
        (
            "records",
            "0 256 0 " + "0" * 32 + " " + "e" * 64 + " " + "f" * 64 + " " + "d" * 64 + " " + "c" * 64 + " @100,50",
        ),
        ("records", "0 256 0 " + "0" * 32 + " " + "e" * 64 + " " + "f" * 64 + " " + "d" * 64 + " @-1"),
        ("tokens", b"\0" * 12),
        ("tokens", b"\0" * 1024),
    ],
)
def test_an_entry_that_is_not_what_it_says_is_a_miss_and_a_finding(server: RealServer, name: str, value: bytes) -> None:
    """S2, S3: whatever stands there, no KV comes of it, no path, no crash; the next writer replaces it."""
    writer, reader = opened(server), opened(server)
    epoch = writer.join(OWNER, LEASE_S)
    ids = sequence("A")
    number = published(writer, ids, epoch)
    tamper(server, name, f"{number:016x}", value)
    warnings: list[str] = []
    index = GuardedIndex(reader, on_warning=warnings.append)
    assert index.match(query(ids), B, LEASE_S).parts == ()
    assert not any(found.place and not found.place.owner.isalnum() for found in index.records())
    index.candidates(OWNER)
    index.covering(query(ids))
    if name != "tokens":
        assert index.check() != []
    assert index.num_leases() == 0
    try:
        kept, receipt = index.put(record(index, ids), epoch, LEASE_S)
    except IndexUnavailable:
        assert len(warnings) == 1
    else:
        index.release(receipt)
        if kept.extent_id != number:
            assert spans(index.match(query(ids), B, LEASE_S)) == [(kept.extent_id, 0, B)]
    writer.close()
    index.close()


def test_a_key_of_another_type_is_a_typed_error(server: RealServer) -> None:
    index = opened(server)
    epoch = index.join(OWNER, LEASE_S)
    with server.client() as client:
        client.set(key_names(NAMESPACE, ("names",))[0], "mine now")
    with pytest.raises(IntegrityError):
        index.match(query(sequence("A")), B, LEASE_S)
    with pytest.raises(IntegrityError):
        index.put(record(index, sequence("A")), epoch, LEASE_S)
    warnings: list[str] = []
    careful = GuardedIndex(index, on_warning=warnings.append)
    assert careful.match(query(sequence("A")), B, LEASE_S).parts == ()
    assert careful.match(query(sequence("A")), B, LEASE_S).parts == ()
    with pytest.raises(IndexUnavailable):
        careful.put(record(index, sequence("A")), epoch, LEASE_S)
    assert (careful.num_outages, len(warnings)) == (0, 1)
    index.close()


def test_a_liar_is_left_out_and_what_else_covers_is_read(server: RealServer) -> None:
    """S11: a forged entry under the query's own hashes neither serves wrong KV nor hides the right one."""
    index = opened(server)
    epoch = index.join(OWNER, LEASE_S)
    ids, other = sequence("AB"), sequence("XB")
    lying = replace(record(index, other), hashes=block_hashes(NAMESPACE, ids))
    index.release(index.put(lying, epoch, LEASE_S)[1])
    assert index.match(query(ids), 2 * B, LEASE_S).stop == 0
    honest = published(index, sequence("A"), epoch)
    match = index.match(query(ids), 2 * B, LEASE_S)
    assert spans(match) == [(honest, 0, B)]
    assert index.num_malformed == 2
    assert index.num_leases() == 1
    index.close()


def test_a_recipe_that_is_malformed_is_none(server: RealServer) -> None:
    index = opened(server)
    turns = (Turn("user", Span(0, 2), False),)
    good = Recipe("c" * 64, NAMESPACE, None, 0, (1, 2, 3), 1, turns, "generate")
    index.put_recipe(good, LEASE_S)
    assert index.recipe("c" * 64) == good
    for text in ("", "[]", "{}", "[" * 5000, '["x",null,0,[1],0,[],"append"]', f'["{NAMESPACE}",null,0,[-1],0,[],"append"]',
                 f'["{NAMESPACE}",null,5,[1],0,[],"append"]', f'["{NAMESPACE}",null,0,[1],2,[],"append"]',
                 f'["{NAMESPACE}",null,0,[1],0,[],"exec"]', f'["{NAMESPACE}",null,0,[true],0,[],"append"]',
                 f'["{NAMESPACE}",null,0,[1],0,[["user",0,9,false]],"append"]'):  # fmt: skip
        tamper(server, "recipes", "c" * 64, f"1 60 {text}")
        assert index.recipe("c" * 64) is None
    index.close()


# ---------------------------------------------------------------------- what the server knows


@pytest.mark.parametrize("share_recipes", [True, False])
def test_no_text_and_where_told_so_no_token_id_reaches_the_server(server: RealServer, share_recipes: bool) -> None:
    """S14: scan everything it holds for a canary."""
    canary = (0xC0FFEE01, 0xC0FFEE02, 0xC0FFEE03)
    ids = canary * 100
    index = opened(server, share_recipes=share_recipes)
    epoch = index.join(OWNER, LEASE_S)
    kept, _ = index.put(record(index, ids), epoch, LEASE_S)
    recipe = Recipe("c" * 64, NAMESPACE, None, 0, ids, 0, (Turn("user", Span(0, 3), True),), "materialize")
    index.put_recipe(recipe, LEASE_S)
    match = index.match(query(ids), len(ids), LEASE_S)
    assert [(number, stop) for number, _, stop in spans(match)] == [(kept.extent_id, len(ids))]
    with server.client() as client:
        dump = b""
        for key in client.scan_iter():
            dump += key + b"\n"
            for part in client.hgetall(key).items() if client.type(key) == b"hash" else client.zscan_iter(key):
                dump += b" ".join(piece if isinstance(piece, bytes) else str(piece).encode() for piece in part) + b"\n"
    packed, written = canary[0].to_bytes(4, "little"), str(canary[0]).encode()
    assert (packed in dump) == share_recipes
    assert (written in dump) == share_recipes
    assert index.recipe("c" * 64) == (recipe if share_recipes else None)
    assert match.parts[0][0].token_ids == (ids if share_recipes else ())
    other = opened(server, share_recipes=share_recipes)
    assert other.records() == index.records()
    index.close()
    other.close()


# ---------------------------------------------------------------------- many at once


def test_threads_and_forks_share_one_index_and_leave_no_key(server: RealServer) -> None:
    """C8: eight threads here and four processes, one opened before it was forked; then nothing is left."""
    index = opened(server)
    context = multiprocessing.get_context("forkserver")
    processes = [context.Process(target=_hammer, args=(server.url, number, 60)) for number in range(4)]
    for process in processes:
        process.start()
    failures: list[BaseException] = []

    def work(number: int) -> None:
        try:
            _work(index, number, 25)
        except BaseException as error:  # reported by the main thread
            failures.append(error)

    threads = [threading.Thread(target=work, args=(10 + number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for process in processes:
        process.join()
    assert failures == []
    assert [process.exitcode for process in processes] == [0] * 4
    assert index.check() == []
    assert (index.records(), index.num_leases(), index.owners()) == ([], 0, {})
    assert our_keys(server) == []
    index.close()


def test_a_forked_child_uses_connections_of_its_own(server: RealServer) -> None:
    index = opened(server)
    epoch = index.join(OWNER, LEASE_S)
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            status = 0 if all(index.heartbeat(OWNER, epoch, LEASE_S) for _ in range(50)) else 2
        finally:
            os._exit(status)
    assert all(index.heartbeat(OWNER, epoch, LEASE_S) for _ in range(50))
    assert os.waitpid(pid, 0)[1] == 0
    index.close()


def test_the_killed_leave_nothing_after_their_time(server: RealServer) -> None:
    """C1, C8: ten workers killed at any moment; sweeps by the server's clock bring every count back to zero."""
    context = multiprocessing.get_context("forkserver")
    index = opened(server)
    for number in range(10):
        process = context.Process(target=_hammer, args=(server.url, number, 10_000, 0.3))
        process.start()
        until(lambda: bool(index.owners()), "it has joined")
        until(lambda: bool(index.records()) or bool(index.num_leases()), "it works")
        process.kill()
        process.join()
        assert index.check() == []
        until(lambda: not (index.sweep().num_owners + len(index.owners()) + index.num_leases()), "its time is up")
    assert index.check() == []
    # A claim may be the youngest thing that the last one left.
    until(lambda: not (index.sweep().num_owners + len(our_keys(server))), "nothing is left")
    index.close()


def _hammer(url: str, number: int, turns: int, lease_s: float = LEASE_S) -> None:
    index = open_index(url, NAMESPACE)
    _work(index, number, turns, lease_s)
    index.close()


def _work(index: Index, number: int, turns: int, lease_s: float = LEASE_S) -> None:
    owner = f"{number:032x}"
    for turn in range(turns):
        epoch = index.join(owner, lease_s)
        ids = sequence("ABC"[(number + turn) % 3] + "ABC"[turn % 3])
        made = record(index, ids, owner=owner)
        kept, receipt = index.put(made, epoch, lease_s)
        match = index.match(query(ids), len(ids), lease_s)
        assert match.stop in (0, B, 2 * B)  # whoever published it may have left meanwhile
        index.claim(kept.end_id, owner, lease_s)
        index.release(match.receipt)
        index.release(receipt)
        index.unclaim(kept.end_id, owner)
        index.remove(kept.extent_id, owner)
        index.leave(owner)
