"""One pool, several processes: read in place, one copy, and whatever happens to its owner."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from aaflow_langgraph.errors import KVMissing
from aaflow_langgraph.pool import _memory
from aaflow_langgraph.pool.arena import Allocation
from aaflow_langgraph.pool.peers import Attached, Peers
from aaflow_langgraph.pool.shared import SharedPool
from aaflow_langgraph.pool.sweep import sweep
from tests.processes import Worker, num_descriptors, num_mappings, shared_bytes, wait_until

MIB = 1 << 20


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return tmp_path / "run"


@pytest.fixture
def start(run_dir: Path) -> Iterator[Callable[[], Worker]]:
    workers: list[Worker] = []

    def one() -> Worker:
        workers.append(Worker(run_dir))
        return workers[-1]

    yield one
    for worker in workers:
        worker.end()


@pytest.fixture
def peers(run_dir: Path) -> Iterator[Peers]:
    peers = Peers(run_dir)
    yield peers
    peers.close()


@pytest.fixture(params=["memfd", "file"])
def owner(request: pytest.FixtureRequest, start: Callable[[], Worker]) -> Worker:
    worker = start()
    if request.param == "file":
        worker("refuse_memfd")
    return worker


def read(attached: Attached, allocation: Allocation) -> set[int]:
    view = attached.tensor(allocation, torch.uint8, (allocation.num_bytes,))
    return set(view.unique().tolist())


def test_bytes_written_after_a_reader_attached_are_read_in_place_once_published(owner: Worker, peers: Peers) -> None:
    attached = peers.attach(owner("open", MIB))
    allocation = Allocation(*owner("write", 3 * 4096, 7))
    assert not attached.is_live(allocation)
    owner("publish", allocation_numbers(allocation))
    assert attached.is_live(allocation)
    assert read(attached, allocation) == {7}


def test_a_reader_sees_that_its_bytes_were_given_to_somebody_else(owner: Worker, peers: Peers) -> None:
    attached = peers.attach(owner("open", 4096))
    old = Allocation(*owner("write", 4096, 1))
    owner("publish", allocation_numbers(old))
    view = attached.tensor(old, torch.uint8, (4096,))
    assert attached.is_live(old)
    owner("free", allocation_numbers(old))
    assert not attached.is_live(old)
    new = Allocation(*owner("write", 4096, 2))
    assert new.offset == old.offset
    assert bool((view == 2).all())  # in place: that is why it must ask
    assert not attached.is_live(old)
    owner("publish", allocation_numbers(new))
    assert attached.is_live(new)
    assert not attached.is_live(old)
    assert owner("check") == []


def test_three_processes_hold_one_copy(owner: Worker, start: Callable[[], Worker]) -> None:
    size = 32 * MIB
    readers = [start(), start()]
    before = sum(shared_bytes(worker.pid) for worker in (owner, *readers))
    name = owner("open", size)
    allocation = owner("write", size, 3)
    owner("publish", allocation)
    assert [reader("sum", name, allocation) for reader in readers] == [3 * size, 3 * size]
    held = sum(shared_bytes(worker.pid) for worker in (owner, *readers)) - before
    assert size <= held <= size * 1.02


def test_a_killed_owners_bytes_stay_readable_and_nobody_new_can_attach(
    owner: Worker, peers: Peers, run_dir: Path
) -> None:
    name = owner("open", MIB)
    allocation = Allocation(*owner("write", MIB, 5))
    owner("publish", allocation_numbers(allocation))
    attached = peers.attach(name)
    assert attached.is_alive()
    owner.kill()
    wait_until(lambda: not attached.is_alive())
    assert attached.is_live(allocation)
    assert read(attached, allocation) == {5}
    assert peers.attach(name) is attached
    with pytest.raises(KVMissing, match=name):
        Peers(run_dir).attach(name)
    assert [name in removed for removed in sweep(run_dir)] == [True]
    with pytest.raises(KVMissing, match=name):
        Peers(run_dir).attach(name)
    assert read(attached, allocation) == {5}


@pytest.mark.parametrize("kind", ["memfd", "file"])
def test_five_killed_owners_leave_nothing(kind: str, start: Callable[[], Worker], run_dir: Path) -> None:
    start().end()  # whatever the first process costs for good
    descriptors, mappings = num_descriptors(), num_mappings()
    fallback_files = list(_memory.fallback_dir().glob("*"))
    for cycle in range(5):
        owner = start()
        if kind == "file":
            owner("refuse_memfd")
        owner("sweep")
        name = owner("open", 4 * MIB)
        assert [name in file.name for file in run_dir.iterdir()] == [True]  # the one before is gone
        allocation = owner("write", MIB, cycle)
        owner("publish", allocation)
        peers = Peers(run_dir)
        attached = peers.attach(name)
        assert read(attached, Allocation(*allocation)) == {cycle}
        owner.end()
        wait_until(lambda attached=attached: not attached.is_alive())  # type: ignore[misc]
        peers.close()
        del attached
    assert len(sweep(run_dir)) == 1
    assert list(run_dir.iterdir()) == []
    assert list(_memory.fallback_dir().glob("*")) == fallback_files
    # The last who had the memory was this process: what it does not map any more is free.
    assert num_mappings() == mappings
    assert num_descriptors() == descriptors


def test_a_stopped_owner_costs_the_deadline_and_no_more(start: Callable[[], Worker], run_dir: Path) -> None:
    owner = start()
    name = owner("open", MIB)
    early, late = Peers(run_dir), Peers(run_dir, deadline_s=0.2)
    attached = early.attach(name)
    owner.stop()
    with pytest.raises(KVMissing, match="in time"):
        late.attach(name)
    assert attached.is_alive()
    assert sweep(run_dir) == []
    owner.resume()
    assert late.attach(name).is_alive()
    early.close()
    late.close()


def test_writing_through_a_readers_mapping_ends_the_reader_and_nothing_else(
    owner: Worker, start: Callable[[], Worker], peers: Peers
) -> None:
    name = owner("open", MIB)
    allocation = owner("write", 4096, 6)
    owner("publish", allocation)
    attached = peers.attach(name)
    assert start().exit_code_after("scribble", name, allocation) == -signal.SIGSEGV
    assert read(attached, Allocation(*allocation)) == {6}
    assert owner("check") == []


def test_a_forked_child_neither_serves_nor_removes_nor_keeps_its_parents_pool(
    owner: Worker, peers: Peers, run_dir: Path
) -> None:
    attached = peers.attach(owner("open", MIB))
    allocation = Allocation(*owner("write", 4096, 8))
    owner("publish", allocation_numbers(allocation))
    child, words = owner("fork")
    try:
        assert words[:2] == ["None", "0"]
        assert words[2].startswith("ConfigError: the pool belongs to process")
        assert words[3] == "0"  # no mapping: the memory does not wait for the child
        assert owner("check") == []
        assert attached.is_live(allocation)
        with_parent = Peers(run_dir)
        assert with_parent.attach(attached.owner).is_alive()
        with_parent.close()
        owner.kill()
        wait_until(lambda: not attached.is_alive())  # although the child lives
        with pytest.raises(KVMissing):
            Peers(run_dir).attach(attached.owner)
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_closed_pool_leaves_no_file_no_thread_and_no_descriptor(run_dir: Path, peers: Peers) -> None:
    descriptors, threads, mappings = num_descriptors(), threading.active_count(), num_mappings()
    pool = SharedPool(MIB, run_dir=run_dir)
    attached = peers.attach(pool.owner)
    assert num_descriptors() > descriptors
    pool.close()
    assert not attached.is_alive()
    assert list(run_dir.iterdir()) == []
    assert threading.active_count() == threads
    peers.close()
    del attached, pool
    assert num_mappings() == mappings
    assert num_descriptors() == descriptors


def test_a_pool_that_is_dropped_closes_itself(run_dir: Path) -> None:
    pool = SharedPool(MIB, run_dir=run_dir)
    assert len(list(run_dir.iterdir())) == 1
    del pool
    assert list(run_dir.iterdir()) == []


def test_a_program_that_ends_without_close_leaves_no_socket(run_dir: Path) -> None:
    code = (
        "import pathlib, sys; from aaflow_langgraph.pool.shared import SharedPool; "
        "pool = SharedPool(4096, run_dir=pathlib.Path(sys.argv[1])); print(len(list(pathlib.Path(sys.argv[1]).iterdir())))"
    )
    ended = subprocess.run([sys.executable, "-c", code, str(run_dir)], capture_output=True, text=True, check=True)
    assert ended.stdout == "1\n"
    assert ended.stderr == ""
    assert list(run_dir.iterdir()) == []


def allocation_numbers(allocation: Allocation) -> tuple[int, int, int]:
    return allocation.offset, allocation.num_bytes, allocation.generation
