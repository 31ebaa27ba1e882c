"""A server that dies, forgets, stands still or is full under running graphs: the graph finishes, use resumes by itself."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import NamedTuple

import pytest

from aaflow_langgraph import KVBroker
from tests import tiny
from tests.brokers import (  # noqa: F401
    BrokerFailed,
    BrokerWorker,
    Cold,
    Host,
    cold,
    host,
    num_pool_bytes,
    places,
    run_chain,
    server,
)
from tests.processes import wait_until
from tests.servers import RealServer, server_pids

IDS = tiny.words(700, seed=1)
NUM_NEW = 5


class Fault(NamedTuple):
    """What happens to the server, how it ends, and what is said about it at most."""

    happen: Callable[[RealServer], object]
    end: Callable[[RealServer], object]
    num_outages: tuple[int, ...]
    num_warnings: tuple[int, ...]
    lasts_s: float = 0.0


def command(*words: str) -> Callable[[RealServer], object]:
    def run(server: RealServer) -> None:
        with server.client() as client:
            client.execute_command(*words)

    return run


def send(number: signal.Signals) -> Callable[[RealServer], object]:
    return lambda server: os.kill(server.pid, number)


def replace_by_an_empty_one(server: RealServer) -> None:
    server.kill()
    server.start()


def nothing(server: RealServer) -> None:
    pass


FAULTS = {
    "killed": Fault(RealServer.kill, RealServer.start, (1,), (1,)),
    "paused": Fault(send(signal.SIGSTOP), send(signal.SIGCONT), (1,), (1,), lasts_s=3.0),
    "paused for 10 s": Fault(send(signal.SIGSTOP), send(signal.SIGCONT), (1,), (1,), lasts_s=10.0),
    "flushed": Fault(command("FLUSHALL"), nothing, (0,), (0,)),
    "replaced by an empty one": Fault(replace_by_an_empty_one, nothing, (0, 1), (0, 1)),
    "out of memory": Fault(
        command("CONFIG", "SET", "maxmemory", "1"), command("CONFIG", "SET", "maxmemory", "0"), (1,), (1,)
    ),
    "without scripts": Fault(command("SCRIPT", "FLUSH"), nothing, (0,), (0,)),
    "hanging up": Fault(command("CLIENT", "KILL", "TYPE", "normal"), nothing, (0, 1), (0, 1)),
}
EACH = [pytest.param(name, marks=pytest.mark.slow if "10 s" in name else ()) for name in FAULTS]


def has_said(worker: BrokerWorker, fault: Fault) -> bool:
    """Was the outage counted and warned of as often as it may be?"""
    said = worker("warnings")
    assert len(said) in fault.num_warnings, said
    assert worker("stats")["num_index_outages"] in fault.num_outages
    return True


def knows(worker: BrokerWorker, handle: dict[str, object]) -> bool:
    try:
        return bool(worker("token_ids", handle))
    except BrokerFailed as error:
        if "RecipeMissing" not in str(error):
            raise
        return False


@pytest.mark.parametrize("name", EACH)
def test_a_running_graph_finishes_with_the_right_answer_and_use_resumes_by_itself(
    host: Host, server: RealServer, open_broker: Callable[..., KVBroker], name: str
) -> None:
    fault = FAULTS[name]
    worker, other = host.worker(), host.worker()
    worker("open", server.url)
    other("open", server.url)
    worker.start("chain", "Which city?", pause=True)
    worker.wait_for_pause()
    fault.happen(server)
    worker.go_on()
    right = run_chain(open_broker(), "Which city?")
    assert worker.answer() == right
    time.sleep(fault.lasts_s)
    assert worker("chain", "Which city?") == right
    fault.end(server)
    has_said(worker, fault)

    def num_prefilled(asked: BrokerWorker) -> int:
        before = asked("stats")["num_prefilled_tokens"]
        assert asked("chain", "Which city?") == right
        return int(asked("stats")["num_prefilled_tokens"]) - before

    handle = worker("materialize", IDS)
    wait_until(lambda: num_prefilled(other) < 100 and num_prefilled(worker) < 100)
    wait_until(lambda: knows(other, handle))
    worker("materialize", IDS)  # the first time it may have found nobody to publish to
    assert other("transfer", handle)["num_in_place"] == len(IDS)
    assert worker("check") == other("check") == []
    assert worker("stats")["num_leases"] == 0
    assert worker("stats")["num_index_outages"] in fault.num_outages


@pytest.mark.parametrize("name", [each for each in EACH if "10 s" not in str(each.values)])
def test_a_generation_that_reads_another_process_goes_on_without_the_server(
    host: Host, server: RealServer, cold: Cold, name: str
) -> None:
    fault = FAULTS[name]
    owner, reader = host.worker(), host.worker()
    owner("open", server.url)
    reader("open", server.url)
    handle = owner("materialize", IDS)
    reader.start("generate", handle, NUM_NEW, pause_at=2)
    reader.wait_for_pause()
    fault.happen(server)
    reader.go_on()
    assert reader.answer() == cold(IDS, NUM_NEW)
    assert owner("generate", handle, NUM_NEW) == cold(IDS, NUM_NEW)
    fault.end(server)
    for worker in (owner, reader):
        assert worker("generate", handle, NUM_NEW) == cold(IDS, NUM_NEW)
    wait_until(lambda: owner("stats")["num_extents"] > 0)
    wait_until(lambda: reader("transfer", handle)["num_missing"] == 0)
    assert owner("check") == reader("check") == []


def test_a_killed_embedded_server_is_started_again_and_told_everything(
    host: Host, open_broker: Callable[..., KVBroker]
) -> None:
    workers = [host.worker() for _ in range(2)]
    for worker in workers:
        worker("open", f"embedded://{host.folder}/index")
    handle = workers[0]("materialize", IDS)
    workers[0].start("chain", "Which city?", pause=True)
    workers[0].wait_for_pause()
    [pid] = server_pids(host.folder)
    os.kill(pid, signal.SIGKILL)
    workers[0].go_on()
    assert workers[0].answer() == run_chain(open_broker(), "Which city?")
    wait_until(lambda: knows(workers[1], handle))
    wait_until(lambda: workers[1]("transfer", handle)["num_in_place"] == len(IDS))
    assert workers[1]("chain", "Which city?") == run_chain(open_broker(), "Which city?")
    assert [worker("check") for worker in workers] == [[], []]
    for worker in workers:
        worker("close")
    wait_until(lambda: server_pids(host.folder) == [])


def test_in_a_full_pool_beside_a_full_server_release_and_evict_work(host: Host, server: RealServer, cold: Cold) -> None:
    """C7."""
    size = num_pool_bytes(len(IDS))
    worker, other = host.worker(LEASE_S=600.0), host.worker()
    worker("open", server.url, pool_bytes=size)
    other("open", server.url)
    handle = worker("materialize", IDS)
    assert worker("lease", handle) == 1
    command("CONFIG", "SET", "maxmemory", "1")(server)
    more = tiny.words(700, seed=2)
    unsaved = worker("materialize", more)
    assert worker("generate", unsaved, NUM_NEW) == cold(more, NUM_NEW)
    assert worker("stats")["overflow_bytes"] == 0
    assert worker("evict", handle) == 0
    assert worker("release")
    assert worker("evict", handle) == size
    assert (worker("stats")["pool_used_bytes"], worker("stats")["num_extents"]) == (0, 0)
    assert worker("generate", handle, NUM_NEW) == cold(IDS, NUM_NEW)
    assert worker("check") == []
    command("CONFIG", "SET", "maxmemory", "0")(server)
    worker("materialize", IDS)
    assert other("transfer", handle)["num_in_place"] == len(IDS)
    assert other("generate", handle, NUM_NEW) == cold(IDS, NUM_NEW)


def stop_server_within(worker: BrokerWorker, server: RealServer, method: str, name: str, *args: object) -> object:
    """Run a command during which the server stands still from one of the index's calls on, and takes it afterwards."""
    worker("pause_in", "inner index", method)
    worker.start(name, *args)
    worker.wait_for_pause()
    os.kill(server.pid, signal.SIGSTOP)
    worker.go_on()
    answer = worker.answer()
    os.kill(server.pid, signal.SIGCONT)
    return answer


def beat_until(worker: BrokerWorker, condition: Callable[[], bool]) -> None:
    def done() -> bool:
        worker("beat")
        return condition()

    wait_until(done)


def test_an_eviction_whose_reply_was_lost_costs_the_pool_no_byte(host: Host, server: RealServer) -> None:
    worker, other = host.worker(TICK_S=600.0, OWNER_LEASE_S=600.0), host.worker()
    worker("open", server.url)
    other("open", server.url)
    handle = worker("materialize", IDS)
    assert stop_server_within(worker, server, "remove", "evict", handle) == 0
    beat_until(worker, lambda: worker("num_announcements") == 1)
    assert worker("check") == []
    assert other("transfer", handle)["num_in_place"] == len(IDS)
    other("close")
    assert worker("evict", handle) == num_pool_bytes(len(IDS))
    assert worker("stats")["pool_used_bytes"] == 0
    assert worker("check") == []


def test_a_publication_whose_reply_was_lost_is_no_reading_of_freed_bytes(
    host: Host, server: RealServer, cold: Cold
) -> None:
    worker, other = host.worker(TICK_S=600.0, OWNER_LEASE_S=600.0), host.worker()
    worker("open", server.url)
    other("open", server.url)
    handle = stop_server_within(worker, server, "put", "materialize", IDS)
    assert worker("stats")["pool_used_bytes"] == 0
    assert other("materialize", IDS) == handle
    assert other("generate", handle, NUM_NEW) == cold(IDS, NUM_NEW)
    beat_until(worker, lambda: worker("num_announcements") == 1)
    assert worker("generate", handle, NUM_NEW) == cold(IDS, NUM_NEW)
    assert worker("check") == other("check") == []


def test_an_announcement_that_was_cut_short_is_made_again(host: Host, server: RealServer) -> None:
    worker, other = host.worker(TICK_S=600.0, OWNER_LEASE_S=600.0), host.worker()
    worker("open", server.url)
    other("open", server.url)
    handles = [worker("materialize", tiny.words(600, seed=seed)) for seed in (1, 2, 3)]
    command("FLUSHALL")(server)
    stop_server_within(worker, server, "put", "beat")
    beat_until(worker, lambda: worker("num_announcements") >= 1)
    worker("share_recipes_again")
    for handle in handles:
        assert other("transfer", handle)["num_in_place"] == 600
    assert worker("check") == other("check") == []
