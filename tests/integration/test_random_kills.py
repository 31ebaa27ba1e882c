"""C8: SIGKILL, again and again, of whoever it hits, whatever it does: no wrong token, and at the end nothing is left."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path

import pytest

from tests import tiny
from tests.brokers import MIB, BrokerWorker, Cold, Host, cold, host, kinds_of_keys, owners, server  # noqa: F401
from tests.processes import num_descriptors, num_mappings, wait_until
from tests.servers import RealServer

CONTEXTS = [tiny.words(count, seed=count) for count in (300, 512, 640)]
BEHIND = [tiny.words(count, seed=count) for count in (5, 270)]
NUM_NEW = 3
POOL_BYTES = MIB
"""Room for two contexts and what is behind them: a third one makes somebody leave."""


def num_records(server: RealServer) -> int:
    """Extents that the index knows."""
    with server.client() as client:
        [key] = client.keys("aaflow:*:records")
        return client.hlen(key)


@pytest.mark.parametrize(
    "num_kills", [10, pytest.param(100, marks=pytest.mark.slow)], ids=lambda count: f"{count} kills"
)
def test_random_kills_leave_right_tokens_and_nothing_else(
    host: Host, server: RealServer, cold: Cold, tmp_path: Path, num_kills: int
) -> None:
    drawn = random.Random(num_kills)
    disk = tmp_path / "kv"
    jobs = [(ids, more) for ids in CONTEXTS for more in BEHIND]
    right = {number: cold([*ids, *more], NUM_NEW) for number, (ids, more) in enumerate(jobs)}

    def opened() -> BrokerWorker:
        worker = host.worker(OWNER_LEASE_S=3.0)
        worker.start("open", server.url, disk=str(disk), pool_bytes=POOL_BYTES, disk_bytes=4 * MIB)
        return worker

    host.worker().kill()  # whatever the first process costs for good
    descriptors_here = num_descriptors()
    watcher, *workers = [opened() for _ in range(4)]
    for worker in (watcher, *workers):
        worker.answer()
    wait_until(lambda: len(owners(server)) == 4)
    watcher("work", *jobs[0], NUM_NEW)
    wait_until(lambda: watcher("attached") == [])
    watcher("collect_no_cycles")
    # Its keeper opens and closes files meanwhile; what stays open is the least that is seen.
    descriptors_there = min(watcher("num_descriptors") for _ in range(50))
    mappings_there = num_mappings(watcher.pid)

    for _ in range(num_kills):
        asked = {worker: drawn.randrange(len(jobs)) for worker in (watcher, *workers)}
        for worker, number in asked.items():
            worker.start("work", *jobs[number], NUM_NEW)
        victim = drawn.choice(workers)
        time.sleep(drawn.uniform(0, 0.2))
        victim.kill()
        workers.remove(victim)
        heir = opened()
        for worker, number in asked.items():
            if worker is not victim:
                assert worker.answer() == right[number], f"wrong tokens for job {number}"
        heir.answer()
        workers.append(heir)

    living = (watcher, *workers)
    wait_until(lambda: len(owners(server)) == 4)
    wait_until(lambda: watcher("stats")["num_leases"] == 0)
    for worker in living:
        wait_until(lambda worker=worker: set(worker("attached")) < owners(server))  # type: ignore[misc]
        assert worker("check") == []
        assert worker("stats")["overflow_bytes"] == 0
    for number, (ids, more) in enumerate(jobs):
        assert watcher("work", ids, more, NUM_NEW) == right[number]

    for worker in workers:
        worker("close")
        worker.kill()
    wait_until(lambda: len(owners(server)) == 1 and watcher("attached") == [])
    assert watcher("check") == []
    assert num_mappings(watcher.pid) == mappings_there
    # A thread that needs a connection while the other one uses it opens a second one, for good.
    wait_until(lambda: watcher("num_descriptors") <= descriptors_there + 1)
    assert len(host.sockets()) == 1
    watcher("close")
    # What is on disk stays known, by one record a file; no owner, lease or claim is left.
    assert kinds_of_keys(server) <= {"records", "state", "tokens", "names", "keys", "children"}
    assert num_records(server) == len(list(disk.rglob("*.safetensors")))
    assert host.sockets() == []
    assert os.listdir(disk / "tmp") == os.listdir(disk / "quarantine") == []
    watcher.kill()
    assert num_descriptors() == descriptors_here
