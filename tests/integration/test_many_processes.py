"""Several processes, one index, one copy of what they share; what survives the end of all of them."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests import tiny
from tests.brokers import (  # noqa: F401
    MIB,
    BrokerFailed,
    Cold,
    Host,
    cold,
    host,
    num_pool_bytes,
    server,
    wait_until_saved,
)
from tests.processes import shared_bytes, wait_until
from tests.servers import RealServer, server_pids

LONG = tiny.words(3000)
SHORT = tiny.words(700, seed=1)
NUM_NEW = 4


@pytest.mark.parametrize("at_once", [False, True], ids=["in turn", "at once"])
def test_four_workers_prefill_a_shared_context_once_and_hold_one_copy(
    host: Host, server: RealServer, cold: Cold, at_once: bool
) -> None:
    workers = [host.worker() for _ in range(4)]
    for worker in workers:
        worker("open", server.url, pool_bytes=4 * MIB)
    before = sum(shared_bytes(worker.pid) for worker in workers)
    if at_once:
        for worker in workers:
            worker.start("materialize", LONG)
        handles = [worker.answer() for worker in workers]
    else:
        handles = [worker("materialize", LONG) for worker in workers]
    assert all(handle == handles[0] for handle in handles)
    stats = [worker("stats") for worker in workers]
    assert sum(found["num_prefilled_tokens"] for found in stats) == len(LONG)
    assert sum(found["num_reused_tokens"] for found in stats) == 3 * len(LONG)
    assert sum(found["pool_used_bytes"] for found in stats) == num_pool_bytes(len(LONG))
    moved = [worker("transfer", handles[0]) for worker in workers]
    assert sorted((found["num_local"], found["num_in_place"]) for found in moved) == 3 * [(0, 3000)] + [(3000, 0)]
    # Pools are touched when they are made; readers map what is there.
    held = sum(shared_bytes(worker.pid) for worker in workers) - before
    assert abs(held) < num_pool_bytes(len(LONG)) / 10
    assert {worker("generate", handles[0], 2) for worker in workers} == {cold(LONG, 2)}
    assert [worker("check") for worker in workers] == 4 * [[]]
    assert [worker("warnings") for worker in workers] == 4 * [[]]


def test_different_questions_behind_one_context_share_its_blocks(host: Host, server: RealServer, cold: Cold) -> None:
    workers = [host.worker() for _ in range(3)]
    sequences = [tiny.words(1024) + tiny.words(100 + number, seed=number + 5) for number in range(3)]
    for worker, ids in zip(workers, sequences, strict=True):
        worker("open", server.url)
        worker.start("materialize", ids)
    handles = [worker.answer() for worker in workers]
    assert sum(worker("stats")["num_prefilled_tokens"] for worker in workers) == 1024 + 100 + 101 + 102
    for worker, handle, ids in zip(workers, handles, sequences, strict=True):
        assert worker("generate", handle, NUM_NEW) == cold(ids)
        assert worker("check") == []


def test_a_composite_is_composed_once_and_again_where_its_maker_and_its_kv_are_gone(
    host: Host, server: RealServer
) -> None:
    first, second = host.worker(), host.worker()
    first("open", server.url)
    second("open", server.url)
    docs = [first("materialize", tiny.words(300, seed=seed)) for seed in range(3)]
    composed = first("compose", docs)
    expected = first("generate", composed, NUM_NEW)
    before = second("stats")["num_prefilled_tokens"]
    assert second("compose", docs) == composed
    assert second("generate", composed, NUM_NEW) == expected
    assert second("stats")["num_prefilled_tokens"] - before <= 16  # the prompt
    assert second("check") == []
    first.kill()
    wait_until(lambda: second("attached") == [])  # what the dead process left was copied
    second("evict", composed)
    for handle in docs:
        second("evict", handle)
    assert second("transfer", composed)["num_missing"] == composed["kv_tokens"]
    assert second("generate", composed, NUM_NEW) == expected
    assert second("check") == []


def test_a_handle_made_here_is_read_there_and_its_children_here_again(
    host: Host, server: RealServer, cold: Cold
) -> None:
    first, second = host.worker(), host.worker()
    first("open", server.url)
    second("open", server.url)
    base = first("materialize", SHORT)
    child = second("append", base, [7, 8, 9])
    assert second("stats")["num_prefilled_tokens"] == 3
    assert first("token_ids", child) == (*SHORT, 7, 8, 9)
    assert first("generate", child, NUM_NEW) == cold([*SHORT, 7, 8, 9])
    assert first("stats")["num_recomputed_tokens"] == 0
    assert first("transfer", child)["num_in_place"] == 3
    assert second("transfer", child)["num_in_place"] == len(SHORT)


def test_a_chain_that_one_process_merged_is_read_in_place_at_every_end_and_outlives_it(
    host: Host, server: RealServer, cold: Cold
) -> None:
    first, second = host.worker(), host.worker()
    first("open", server.url)
    second("open", server.url)
    ids = [tiny.words(200)] + [tiny.words(20 + number, seed=number + 1) for number in range(11)]
    handles = [first("materialize", ids[0])]
    for more in ids[1:]:
        handles.append(first("append", handles[-1], more))
    wait_until(lambda: first("stats")["num_compactions"] >= 1)
    for handle in handles:
        assert second("transfer", handle)["num_in_place"] == handle["kv_tokens"]
    inside = handles[4]
    sequence = [token for part in ids[:5] for token in part]
    assert second("generate", inside, NUM_NEW) == cold(sequence)
    assert second("stats")["num_recomputed_tokens"] == 0
    assert first("check") == second("check") == []
    first.kill()
    wait_until(lambda: second("attached") == [])  # what the dead process left was copied
    for handle in (inside, handles[-1]):
        assert second("transfer", handle)["num_local"] == handle["kv_tokens"]
    assert second("generate", handles[-1], NUM_NEW) == cold([token for part in ids for token in part])
    assert second("check") == []


def test_two_tenants_share_nothing_but_the_server(host: Host, server: RealServer) -> None:
    """S9, S10: a handle of another tenant is refused as one that never was."""
    ours, theirs = host.worker(), host.worker()
    ours("open", server.url, tenant="red")
    theirs("open", server.url, tenant="blue")
    handle = ours("materialize", SHORT)
    assert theirs("materialize", SHORT)["kv_id"] != handle["kv_id"]
    assert theirs("stats")["num_prefilled_tokens"] == len(SHORT)
    with pytest.raises(BrokerFailed, match="IncompatibleHandle") as denied:
        theirs("token_ids", handle)
    with pytest.raises(BrokerFailed, match="IncompatibleHandle") as missing:
        theirs("token_ids", {**handle, "kv_id": "0" * 64})
    assert message(denied, handle["kv_id"]) == message(missing, "0" * 64)
    # With the namespace forged, what exists elsewhere and what exists nowhere look the same.
    forged = {**handle, "kv_namespace": theirs("namespace")}
    with pytest.raises(BrokerFailed, match="RecipeMissing") as denied:
        theirs("token_ids", forged)
    with pytest.raises(BrokerFailed, match="RecipeMissing") as missing:
        theirs("token_ids", {**forged, "kv_id": "0" * 64})
    assert message(denied, handle["kv_id"]) == message(missing, "0" * 64)
    assert theirs("attached") == []


def message(caught: pytest.ExceptionInfo[BrokerFailed], kv_id: str) -> str:
    """An error's words without the id that was asked for."""
    return str(caught.value).replace(kv_id[:12], "...")


# --- the end of all of them ---


@pytest.mark.parametrize("index", ["server", "embedded", "memory"])
def test_after_all_are_killed_what_was_written_is_not_prefilled_again(
    host: Host, server: RealServer, tmp_path: Path, cold: Cold, index: str
) -> None:
    url = {"server": server.url, "embedded": f"embedded://{host.folder}/index", "memory": "memory://"}[index]
    folder = str(tmp_path / "kv")
    before = [host.worker() for _ in range(3)]
    for worker in before:
        worker("open", url, disk=folder)
    handle = before[0]("materialize", LONG)
    child = before[1]("append", before[1]("materialize", LONG), tiny.words(20, seed=9))
    for worker in before:
        wait_until_saved(worker)
    for pid in server_pids(host.folder):
        os.kill(pid, signal.SIGKILL)  # the embedded server, where there is one
    for worker in before:
        worker.kill()
    after = [host.worker() for _ in range(2)]
    for worker in after:
        worker("open", url, disk=folder)
    assert [worker("token_ids", handle) == tuple(LONG) for worker in after] == [True, True]
    assert [worker("materialize", LONG) for worker in after] == [handle, handle]
    assert sum(worker("stats")["num_prefilled_tokens"] for worker in after) == 0
    ids = [*LONG, *tiny.words(20, seed=9)]
    assert after[1]("generate", child, 2) == cold(ids, 2)
    assert after[0]("generate", handle, 2) == cold(LONG, 2)
    for worker in after:
        found = worker("stats")
        assert found["num_prefilled_tokens"] == len("so")
        assert found["num_recomputed_tokens"] == found["num_kv_load_failures"] == 0
        assert worker("check") == []
    # Two extents: each is read once by whoever finds it first, or once by everybody who shares nothing.
    assert after[1]("stats")["num_fetches"] + after[0]("stats")["num_fetches"] == (3 if index == "memory" else 2)


def test_a_handle_of_a_dead_process_is_rebuilt_from_the_recipe_on_the_server(
    host: Host, server: RealServer, cold: Cold
) -> None:
    gone, heir = host.worker(), host.worker()
    gone("open", server.url)
    base = gone("materialize", SHORT)
    child = gone("append", base, [7, 8, 9])
    gone.kill()
    heir("open", server.url)
    assert heir("generate", base, NUM_NEW) == cold(SHORT)
    assert heir("stats")["num_recomputed_tokens"] == len(SHORT)
    assert heir("generate", child, NUM_NEW) == cold([*SHORT, 7, 8, 9])
    assert heir("stats")["num_recomputed_tokens"] == len(SHORT) + 3


@pytest.mark.parametrize("index", ["memory", "server that may know no tokens", "server that was emptied"])
def test_a_handle_whose_recipe_is_nowhere_says_how_to_avoid_that(host: Host, server: RealServer, index: str) -> None:
    url = "memory://" if index == "memory" else server.url
    options = {"share_recipes": False} if "no tokens" in index else {}
    gone, heir = host.worker(), host.worker()
    gone("open", url, **options)
    handle = gone("materialize", SHORT)
    gone.kill()
    if "emptied" in index:
        with server.client() as client:
            client.flushall()
    heir("open", url, **options)
    with pytest.raises(BrokerFailed, match=r"RecipeMissing: no recipe is known") as caught:
        heir("generate", handle, NUM_NEW)
    for way in ("Run the node that wrote it again", "index='redis://...'", "disk=..."):
        assert way in str(caught.value)
    assert heir("materialize", SHORT) == handle
    assert len(heir("generate", handle, NUM_NEW)) == NUM_NEW


def test_with_recipes_kept_private_the_server_never_sees_a_token_and_blocks_are_shared_all_the_same(
    host: Host, server: RealServer, cold: Cold
) -> None:
    """S14."""
    first, second = host.worker(), host.worker()
    first("open", server.url, share_recipes=False)
    second("open", server.url, share_recipes=False)
    handle = first("materialize", SHORT)
    assert second("materialize", SHORT) == handle
    assert second("stats")["num_prefilled_tokens"] == 0
    assert second("generate", handle, NUM_NEW) == cold(SHORT)
    assert first("check") == second("check") == []


def test_a_worker_that_closes_leaves_the_others_everything_they_read(
    host: Host, server: RealServer, cold: Cold
) -> None:
    workers = [host.worker() for _ in range(3)]
    for worker in workers:
        worker("open", server.url)
    handle = workers[0]("materialize", SHORT)
    workers[1]("materialize", SHORT)
    workers[0]("close")
    wait_until(lambda: workers[1]("stats")["num_adoptions"] == 1)
    assert workers[2]("transfer", handle)["num_in_place"] == len(SHORT)
    assert [worker("generate", handle, NUM_NEW) for worker in workers[1:]] == 2 * [cold(SHORT)]
    assert sum(worker("stats")["num_recomputed_tokens"] for worker in workers[1:]) == 0
    assert [worker("check") for worker in workers[1:]] == [[], []]
