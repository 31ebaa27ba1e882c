"""Processes that die or stand still at the worst moment: it costs time, never a wrong token, and nothing stays behind."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests import tiny
from tests.brokers import (  # noqa: F401
    BrokerWorker,
    Cold,
    Host,
    cold,
    host,
    kinds_of_keys,
    num_pool_bytes,
    owners,
    places,
    server,
    wait_until_saved,
)
from tests.processes import wait_until
from tests.servers import RealServer

IDS = tiny.words(700, seed=1)
OTHERS = tiny.words(700, seed=2)
NUM_BYTES = num_pool_bytes(700)
NUM_NEW = 5


def end(worker: BrokerWorker, how: str) -> None:
    if how == "killed":
        worker.kill()
    else:
        worker("close")


# --- the owner of what others read ---


@pytest.mark.parametrize("how", ["killed", "closed"])
@pytest.mark.parametrize("reader_is", ["generating", "idle"])
def test_what_is_attached_outlives_its_owner_and_is_read_by_others_again(
    host: Host, server: RealServer, cold: Cold, how: str, reader_is: str
) -> None:
    owner, reader, third = host.worker(), host.worker(), host.worker()
    first = owner("open", server.url)
    heir, last = reader("open", server.url), third("open", server.url)
    handle = owner("materialize", IDS)
    if reader_is == "generating":
        reader.start("generate", handle, NUM_NEW, pause_at=2)
        reader.wait_for_pause()
    else:
        assert reader("transfer", handle)["num_in_place"] == len(IDS)
    end(owner, how)
    wait_until(lambda: first not in places(server))
    assert places(server) == {heir}
    if reader_is == "generating":
        reader.go_on()
        assert reader.answer() == cold(IDS, NUM_NEW)
    moved = third("transfer", handle)
    assert (moved["num_in_place"], moved["num_missing"]) == (len(IDS), 0)
    assert heir in third("attached")
    assert third("generate", handle, NUM_NEW) == reader("generate", handle, NUM_NEW) == cold(IDS, NUM_NEW)
    assert reader("stats")["num_adoptions"] == 1
    for worker in (reader, third):
        assert worker("stats")["num_recomputed_tokens"] == worker("stats")["num_kv_load_failures"] == 0
        assert worker("check") == []
    wait_until(lambda: owners(server) == {heir, last})
    wait_until(lambda: first not in reader("attached") + third("attached"))


def test_what_an_owner_held_that_died_with_nobody_attached_is_computed_at_once_by_who_asks(
    host: Host, server: RealServer, cold: Cold
) -> None:
    owner, other = host.worker(), host.worker()
    dead = owner("open", server.url)
    living = other("open", server.url)
    handle = owner("materialize", IDS)
    owner.kill()
    assert other("generate", handle, NUM_NEW) == cold(IDS, NUM_NEW)
    assert other("stats")["num_recomputed_tokens"] == len(IDS)
    assert places(server) == {living}
    wait_until(lambda: owners(server) == {living})
    assert dead not in other("attached")
    assert other("check") == []


def test_an_owner_that_nobody_asks_about_is_swept(host: Host, server: RealServer) -> None:
    owner, other = host.worker(), host.worker()
    owner("open", server.url)
    living = other("open", server.url)
    owner("materialize", IDS)
    owner.kill()
    wait_until(lambda: owners(server) == {living})
    assert places(server) == set()
    assert other("check") == []


# --- C1: a holder of leases ---


def test_a_killed_reader_pins_its_extents_until_its_lease_ends_and_they_are_freed_once(
    host: Host, server: RealServer, cold: Cold
) -> None:
    """C1."""
    owner, reader = host.worker(SHARED_LEASE_S=2.0), host.worker(SHARED_LEASE_S=2.0)
    owner("open", server.url)
    reader("open", server.url)
    handle = owner("materialize", IDS)
    reader.start("generate", handle, NUM_NEW, pause_at=2)
    reader.wait_for_pause()
    time.sleep(3.0)  # well beyond the lease: its keeper renews it
    assert owner("evict", handle) == 0
    assert owner("stats")["num_leases"] == 1
    reader.kill()
    wait_until(lambda: owner("stats")["num_leases"] == 0)
    assert owner("stats")["num_lost_receipts"] == 1
    assert owner("evict", handle) == NUM_BYTES
    assert owner("evict", handle) == 0
    assert owner("stats")["pool_used_bytes"] == 0
    assert owner("generate", handle, NUM_NEW) == cold(IDS, NUM_NEW)
    assert owner("check") == []


def test_a_lost_receipt_ends_by_itself(host: Host, server: RealServer) -> None:
    owner, other = host.worker(LEASE_S=1.0), host.worker(LEASE_S=1.0)
    owner("open", server.url)
    other("open", server.url)
    handle = owner("materialize", IDS)
    assert other("lease", handle) == 1
    assert owner("evict", handle) == 0
    wait_until(lambda: owner("stats")["num_leases"] == 0)
    assert not other("release")
    assert owner("evict", handle) == NUM_BYTES


# --- C2: in the middle of a transfer ---


def test_an_owner_that_dies_before_it_is_attached_costs_a_prefill(host: Host, server: RealServer, cold: Cold) -> None:
    """C2."""
    owner, reader = host.worker(), host.worker()
    owner("open", server.url)
    reader("open", server.url)
    handle = owner("materialize", IDS)
    reader("pause_in", "peers", "attach")
    reader.start("generate", handle, NUM_NEW)
    reader.wait_for_pause()
    owner.kill()
    reader.go_on()
    assert reader.answer() == cold(IDS, NUM_NEW)
    assert reader("stats")["num_recomputed_tokens"] == len(IDS)
    assert reader("check") == []


def test_an_owner_that_stands_still_is_passed_by_within_the_deadline_and_used_again_later(
    host: Host, server: RealServer, cold: Cold
) -> None:
    owner, reader, third = host.worker(OWNER_LEASE_S=60.0), host.worker(), host.worker()
    name = owner("open", server.url)
    reader("open", server.url)
    third("open", server.url)
    handle = owner("materialize", IDS)
    owner.stop()
    assert reader("generate", handle, NUM_NEW) == cold(IDS, NUM_NEW)
    assert reader("stats")["num_recomputed_tokens"] == len(IDS)
    owner.resume()
    ids = tiny.words(600, seed=4)
    fresh = owner("materialize", ids)
    assert reader("transfer", fresh)["num_in_place"] == len(ids)
    assert name in reader("attached")
    assert third("generate", handle, NUM_NEW) == owner("generate", handle, NUM_NEW) == cold(IDS, NUM_NEW)
    assert owner("check") == reader("check") == third("check") == []


def test_an_heir_that_dies_while_it_adopts_leaves_the_rest_to_the_next(
    host: Host, server: RealServer, cold: Cold, tmp_path: Path
) -> None:
    """C2: the copy that was not finished is seen by nobody."""
    owner, heir, reader = host.worker(), host.worker(), host.worker(TICK_S=0.3)
    first = owner("open", server.url)
    heir("open", server.url)
    last = reader("open", server.url)
    handle = owner("materialize", IDS)
    assert heir("transfer", handle)["num_in_place"] == len(IDS)
    reader.start("generate", handle, NUM_NEW, pause_at=2)
    reader.wait_for_pause()
    sign = tmp_path / "adopting"
    heir("hang_in", "pool", "publish", str(sign))
    owner.kill()
    wait_until(lambda: sign.exists() or first not in places(server))
    heir.kill()
    reader.go_on()
    assert reader.answer() == cold(IDS, NUM_NEW)
    assert reader("generate", handle, NUM_NEW) == cold(IDS, NUM_NEW)
    wait_until(lambda: owners(server) == {last})
    assert places(server) <= {last}
    assert reader("check") == []


# --- C3: between the first byte and the publication ---


@pytest.mark.parametrize("where", [("pool", "publish"), ("index", "put"), ("index", "next_extent_id")])
def test_what_a_killed_writer_did_not_publish_is_seen_by_nobody(
    host: Host, server: RealServer, cold: Cold, tmp_path: Path, where: tuple[str, str]
) -> None:
    """C3."""
    writer, other = host.worker(), host.worker()
    writer("open", server.url)
    living = other("open", server.url)
    sign = tmp_path / "writing"
    writer("hang_in", *where, str(sign))
    writer.start("materialize", IDS)
    wait_until(sign.exists)
    assert other("stats")["num_extents"] == 0
    writer.kill()
    handle = other("materialize", IDS)
    assert other("stats")["num_prefilled_tokens"] == len(IDS)
    assert other("generate", handle, NUM_NEW) == cold(IDS, NUM_NEW)
    wait_until(lambda: owners(server) == {living})
    assert places(server) == {living}
    assert other("check") == []


def test_who_waits_for_a_prefix_that_its_computer_never_publishes_computes_it(
    host: Host, server: RealServer, cold: Cold, tmp_path: Path
) -> None:
    writer, others = host.worker(), [host.worker() for _ in range(2)]
    writer("open", server.url)
    for other in others:
        other("open", server.url)
    sign = tmp_path / "writing"
    writer("hang_in", "pool", "publish", str(sign))
    writer.start("materialize", IDS)
    wait_until(sign.exists)
    for other in others:
        other.start("materialize", IDS)
    writer.kill()
    handles = [other.answer() for other in others]
    assert sum(other("stats")["num_prefilled_tokens"] for other in others) == len(IDS)
    assert {other("generate", handles[0], NUM_NEW) for other in others} == {cold(IDS, NUM_NEW)}
    assert [other("check") for other in others] == [[], []]


# --- C5: an owner back from the dead ---


def test_an_owner_that_stood_still_beyond_its_lease_is_fenced_and_serves_again(
    host: Host, server: RealServer, cold: Cold
) -> None:
    """C5."""
    owner, other = host.worker(), host.worker()
    name = owner("open", server.url)
    living = other("open", server.url)
    handle = owner("materialize", IDS)
    owner.stop()
    wait_until(lambda: owners(server) == {living})
    assert places(server) == set()
    owner.resume()
    wait_until(lambda: name in places(server) and owner("num_announcements") == 1)
    assert other("transfer", handle)["num_in_place"] == len(IDS)
    assert other("generate", handle, NUM_NEW) == owner("generate", handle, NUM_NEW) == cold(IDS, NUM_NEW)
    assert owner("stats")["num_prefilled_tokens"] == len(IDS) + len("so")
    assert owner("check") == other("check") == []


def test_what_others_computed_while_an_owner_stood_still_is_kept_once(
    host: Host, server: RealServer, cold: Cold
) -> None:
    """C5, I8."""
    owner, other = host.worker(), host.worker()
    name = owner("open", server.url)
    living = other("open", server.url)
    handle = owner("materialize", IDS)
    kept = owner("materialize", OTHERS)
    owner.stop()
    wait_until(lambda: owners(server) == {living})
    assert other("materialize", IDS) == handle
    owner.resume()
    wait_until(lambda: owners(server) == {name, living} and owner("num_announcements") == 1)
    assert owner("stats")["pool_used_bytes"] == other("stats")["pool_used_bytes"] == NUM_BYTES
    assert owner("transfer", handle)["num_in_place"] == len(IDS)
    assert owner("transfer", kept)["num_local"] == len(OTHERS)
    assert owner("generate", handle, NUM_NEW) == cold(IDS, NUM_NEW)
    assert other("generate", kept, NUM_NEW) == cold(OTHERS, NUM_NEW)
    assert owner("check") == other("check") == []


def test_an_owner_fenced_in_the_middle_of_its_own_generation_finishes_it(
    host: Host, server: RealServer, cold: Cold
) -> None:
    """C5."""
    owner, other = host.worker(), host.worker()
    owner("open", server.url)
    living = other("open", server.url)
    handle = owner("materialize", IDS)
    owner.start("generate", handle, NUM_NEW, pause_at=2)
    owner.wait_for_pause()
    owner.stop()
    wait_until(lambda: owners(server) == {living})
    owner.resume()
    owner.go_on()
    assert owner.answer() == cold(IDS, NUM_NEW)
    assert other("generate", handle, NUM_NEW) == cold(IDS, NUM_NEW)
    assert owner("check") == other("check") == []


# --- C10: clocks ---


@pytest.mark.parametrize("jump_s", [86400.0, -86400.0])
def test_a_process_whose_clock_jumps_keeps_and_breaks_no_lease(
    host: Host, server: RealServer, cold: Cold, tmp_path: Path, jump_s: float
) -> None:
    """C10: only the server's clock counts."""
    owner, jumping = host.worker(), host.worker()
    owner("open", server.url, disk=str(tmp_path / "kv"))
    name = jumping("open", server.url, disk=str(tmp_path / "kv"))
    handle = owner("materialize", IDS)
    jumping("set_clock", jump_s)
    own = jumping("materialize", OTHERS)
    owner.start("generate", handle, NUM_NEW, pause_at=2)
    owner.wait_for_pause()
    found = jumping("stats")  # sweeps
    assert (found["num_leases"], found["num_lost_receipts"], found["num_extents"]) == (1, 0, 2)
    jumping.start("generate", own, NUM_NEW, pause_at=2)
    jumping.wait_for_pause()
    owner.go_on()
    assert owner.answer() == cold(IDS, NUM_NEW)
    assert owner("stats")["num_leases"] == 1
    jumping.go_on()
    assert jumping.answer() == cold(OTHERS, NUM_NEW)
    assert owner("transfer", own)["num_in_place"] == len(OTHERS)
    wait_until_saved(jumping)
    wait_until_saved(owner)
    assert name in owners(server)
    for worker in (owner, jumping):
        assert worker("stats")["num_kv_load_failures"] == worker("num_announcements") == 0
        assert worker("check") == []


# --- a reader that stands still ---


@pytest.mark.parametrize(
    "constants",
    [
        {},
        pytest.param(
            {"SHARED_LEASE_S": 8.0, "OWNER_LEASE_S": 15.0, "TICK_S": 0.5, "CLAIM_S": 10.0}, marks=pytest.mark.slow
        ),
    ],
    ids=["short leases", "ten seconds"],
)
def test_a_reader_paused_beyond_its_lease_shows_no_token_from_bytes_of_others(
    host: Host, server: RealServer, cold: Cold, constants: dict[str, float]
) -> None:
    owner, reader = host.worker(**constants), host.worker(**constants)
    owner("open", server.url, pool_bytes=2 * NUM_BYTES)
    reader("open", server.url)
    handle = owner("materialize", IDS)
    reader.start("generate", handle, NUM_NEW, pause_at=2)
    reader.wait_for_pause()
    reader.stop()
    if constants:
        time.sleep(10)
    wait_until(lambda: owner("stats")["num_leases"] == 0)
    assert owner("evict", handle) == NUM_BYTES
    for seed in (2, 3):  # every byte of the pool now holds something else
        owner("materialize", tiny.words(700, seed=seed))
    assert owner("stats")["pool_used_bytes"] == 2 * NUM_BYTES
    reader.resume()
    reader.go_on()
    assert reader.answer() == cold(IDS, NUM_NEW)
    assert reader("stats")["num_kv_load_failures"] >= 1
    assert reader("generate", handle, NUM_NEW) == cold(IDS, NUM_NEW)
    assert owner("check") == reader("check") == []


# --- the end ---


def test_what_those_who_closed_left_for_heirs_ends_with_their_leases(host: Host, server: RealServer) -> None:
    workers = [host.worker() for _ in range(3)]
    for number, worker in enumerate(workers):
        worker("open", server.url)
        handle = worker("materialize", IDS)
        worker("append", handle, [7, 8, number + 9])
        worker("generate", handle, NUM_NEW)
    for worker in workers:
        worker("close")
    last = host.worker()
    last("open", server.url)
    wait_until(lambda: len(owners(server)) == 1)
    last("close")
    assert kinds_of_keys(server) == set()
    assert host.sockets() == []
