"""Long chains are merged in the background: bytes move, handles and what they reuse do not. Cold = warm throughout (I14)."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch
from langgraph.checkpoint.memory import InMemorySaver

from aaflow_langgraph import KVBroker, KVCheckpointSaver, KVHandle, TransformersEngine
from aaflow_langgraph.checkpoint.ledger import Durability
from aaflow_langgraph.compaction import NUM_LEFT, Compactor
from aaflow_langgraph.index.memory import MemoryIndex
from aaflow_langgraph.keeper import Keeper
from aaflow_langgraph.model import BLOCK_TOKENS
from aaflow_langgraph.pool.disk import DiskPool
from aaflow_langgraph.pool.host import HostPool
from aaflow_langgraph.store import LONGEST_CHAIN, ExtentStore
from tests import tiny
from tests.oracle import stock_of
from tests.processes import wait_until
from tests.savers import is_empty, put

POOL_BYTES = 8 << 20
TURNS = 40


class ByHand(KVBroker):
    """A broker whose background runs when a test says so."""

    def tick(self) -> None:
        self._keeper.tick()

    @property
    def store(self) -> ExtentStore:
        return self._store


Opened = Callable[..., ByHand]


@pytest.fixture
def opened(engines: Callable[..., TransformersEngine], monkeypatch: pytest.MonkeyPatch) -> Iterator[Opened]:
    """Brokers that are closed and found in order at the end."""
    monkeypatch.setattr(Keeper, "start", lambda self: None)
    made: list[ByHand] = []

    def open_one(disk: Path | None = None, pool_bytes: int = POOL_BYTES) -> ByHand:
        engine = engines()
        below = None if disk is None else DiskPool(disk, engine.namespace.digest, engine.layout, 64 << 20)
        broker = ByHand(engine, MemoryIndex(), HostPool(pool_bytes), disk=below)
        made.append(broker)
        return broker

    yield open_one
    for broker in made:
        assert broker.check() == []
        assert broker.is_closed or broker.stats().num_leases == 0
        broker.close()


def grown(broker: KVBroker, num_turns: int = TURNS, front: int = 300) -> list[KVHandle]:
    """A chain of appends, and the handle at the end of each. Most end inside a block, some on the border of one."""
    handles = [broker.materialize(tiny.words(front, 1))]
    for number in range(num_turns - 1):
        size = (7, 25, BLOCK_TOKENS - handles[-1].kv_tokens % BLOCK_TOKENS, 1, 40)[number % 5]
        handles.append(broker.append(handles[-1], tiny.words(size, 100 + number)))
    return handles


def num_parts(broker: ByHand, handle: KVHandle) -> int:
    """How many extents a reader of ``handle`` meets."""
    recipe = broker.recipe(handle)
    sequence = broker._recipes.sequence(recipe.kv_id)
    match = broker.store.match(sequence, handle.kv_tokens, borders=broker._recipes.borders(recipe))
    broker.store.release(match.receipt)
    return len(match.parts)


def reused(broker: ByHand, handles: Sequence[KVHandle]) -> list[int]:
    """How many tokens of each handle a request behind it finds."""
    found = []
    for handle in handles:
        recipe = broker.recipe(handle)
        sequence = broker._recipes.sequence(recipe.kv_id)
        found.append(broker.store.covered(sequence, handle.kv_tokens, broker._recipes.borders(recipe)))
    return found


def assert_like_stock(broker: KVBroker, handles: Sequence[KVHandle]) -> None:
    """A fork behind each handle goes on as a plain forward does."""
    for number, handle in enumerate(handles):
        more = tiny.words(3, 900 + number)
        expected = stock_of(broker.engine).logits([*broker.token_ids(handle), *more])
        assert torch.allclose(broker.first_logits(handle, more), expected, atol=1e-4)


def compact(broker: ByHand, handle: KVHandle) -> None:
    """Read it, as a request does, and let the background work."""
    num_parts(broker, handle)
    broker.tick()


def test_every_handle_of_a_merged_chain_is_reused_as_before_and_forks_equal_cold(opened: Opened) -> None:
    broker = opened()
    handles = grown(broker)
    before, used_bytes = reused(broker, handles), broker.stats().pool_used_bytes
    assert before == [handle.kv_tokens for handle in handles]
    assert num_parts(broker, handles[-1]) == TURNS
    compact(broker, handles[-1])
    stats = broker.stats()
    assert stats.num_compactions == 1
    assert num_parts(broker, handles[-1]) == NUM_LEFT
    assert reused(broker, handles) == before
    # One copy: only the rounding of each extent to whole rows and alignment is saved.
    assert 0.9 * used_bytes < stats.pool_used_bytes <= used_bytes
    assert (stats.num_leases, stats.num_evictions, stats.num_extents) == (0, 0, NUM_LEFT)
    assert broker.check() == []
    assert_like_stock(broker, handles[::6])
    assert all(broker.append(handle, [9, 9]).kv_tokens == handle.kv_tokens + 2 for handle in handles[::7])


def test_a_chain_that_grows_on_is_merged_again(opened: Opened) -> None:
    """What was merged is merged once more with what came behind it, its borders and all."""
    broker = opened()
    handles = [broker.materialize(tiny.words(90, 1))]
    for number in range(60):
        handles.append(broker.append(handles[-1], tiny.words(11, number)))
        broker.tick()
        assert num_parts(broker, handles[-1]) <= LONGEST_CHAIN + 1
    assert 5 <= broker.stats().num_compactions <= 15
    assert reused(broker, handles) == [handle.kv_tokens for handle in handles]
    assert_like_stock(broker, handles[::15])


def test_branches_off_a_merged_chain_stay_and_pin_it(opened: Opened) -> None:
    """I2, I3: what was built on a part is built on what it was merged into."""
    broker = opened()
    handles = grown(broker)
    branches = [broker.append(handle, tiny.words(9, 500 + n)) for n, handle in enumerate(handles[::10])]
    compact(broker, handles[-1])
    everything = [*handles, *branches]
    assert reused(broker, everything) == [handle.kv_tokens for handle in everything]
    assert_like_stock(broker, branches)
    broker.evict(handles[-1])  # what nobody builds on
    assert reused(broker, branches) == [branch.kv_tokens for branch in branches]
    assert all(broker.evict(branch) > 0 for branch in branches)
    broker.evict(handles[-1])
    assert broker.stats().pool_used_bytes == 0


def test_evicting_the_end_of_a_merged_chain_frees_all_of_it_and_a_handle_inside_frees_nothing(opened: Opened) -> None:
    broker = opened()
    handles = grown(broker)
    compact(broker, handles[-1])
    used_bytes = broker.stats().pool_used_bytes
    assert broker.evict(handles[20]) == 0
    assert broker.stats().pool_used_bytes == used_bytes
    assert broker.evict(handles[-1]) == used_bytes
    assert broker.stats().pool_used_bytes == 0
    assert broker.stats().num_extents == 0
    moved = {movement.end_id: movement.num_bytes for movement in broker.movements() if movement.move == "evict"}
    assert moved.keys() == {handle.kv_id for handle in handles}
    assert 0.9 * used_bytes < sum(moved.values()) < 1.1 * used_bytes
    assert_like_stock(broker, [handles[20]])


def test_readers_that_hold_a_lease_go_on_and_the_parts_go_with_the_last_of_them(opened: Opened) -> None:
    broker = opened()
    handles = grown(broker)
    recipe = broker.recipe(handles[-1])
    sequence = broker._recipes.sequence(recipe.kv_id)
    match = broker.store.match(sequence, handles[-1].kv_tokens, borders=broker._recipes.borders(recipe))
    records = [record for record, _, _ in match.parts]
    read = [broker.store.piece(*part).kv.clone() for part in match.parts]
    used_bytes = broker.stats().pool_used_bytes
    broker.tick()
    assert broker.stats().num_compactions == 1
    assert broker.stats().pool_used_bytes > 1.5 * used_bytes  # both are there
    assert num_parts(broker, handles[-1]) == NUM_LEFT  # who comes now reads the merged one
    grandchild = broker.append(handles[-1], [5, 6, 7])
    broker.tick()
    broker.store.verify(match.receipt, records)
    assert all(torch.equal(broker.store.piece(*part).kv, kv) for part, kv in zip(match.parts, read, strict=True))
    assert broker.check() == []
    broker.store.release(match.receipt)
    broker.tick()
    assert broker.stats().pool_used_bytes < 1.1 * used_bytes
    assert reused(broker, [*handles, grandchild])[-1] == grandchild.kv_tokens


def test_what_is_computed_behind_a_part_while_it_is_merged_is_a_child_of_the_merged_one(opened: Opened) -> None:
    """A request that began before the merge publishes after it: it pins what its past was merged into."""
    broker = opened()
    handles = grown(broker)
    num_parts(broker, handles[-1])
    original, begun, go_on = broker.engine.start, threading.Event(), threading.Event()

    def slow(*args: object, **options: object) -> object:
        begun.set()
        assert go_on.wait(30)
        return original(*args, **options)

    broker.engine.start = slow  # type: ignore[method-assign, assignment]
    try:
        worker = threading.Thread(target=broker.append, args=(handles[-1], [5, 6, 7]))
        worker.start()
        assert begun.wait(30)
        broker.tick()
        go_on.set()
        worker.join()
    finally:
        broker.engine.start = original  # type: ignore[method-assign]
    child = broker.append(handles[-1], [5, 6, 7])
    broker.tick()
    assert broker.stats().num_compactions == 1
    assert broker.evict(handles[-1]) == 0
    assert reused(broker, [child]) == [child.kv_tokens]
    freed = broker.evict(child)
    assert freed > 0
    assert broker.stats().pool_used_bytes == 0


def test_a_pool_without_room_merges_shorter_runs_and_evicts_nobody(opened: Opened) -> None:
    broker = opened()
    handles = grown(broker)
    pool, layout = broker.store.pool, broker.store.layout
    filler = pool.reserve(pool.capacity_bytes - pool.used_bytes - layout.num_bytes(400))
    assert filler is not None
    compact(broker, handles[-1])
    after = num_parts(broker, handles[-1])
    assert NUM_LEFT < after < TURNS
    assert broker.stats().num_evictions == 0
    pool.free(filler)
    for _ in range(3):
        compact(broker, handles[-1])
    assert num_parts(broker, handles[-1]) <= LONGEST_CHAIN
    assert reused(broker, handles) == [handle.kv_tokens for handle in handles]


def test_no_room_at_all_leaves_everything_as_it_is(opened: Opened) -> None:
    broker = opened()
    handles = grown(broker)
    pool = broker.store.pool
    filler = []
    while (taken := pool.reserve(64)) is not None:
        filler.append(taken)
    compact(broker, handles[-1])
    assert (broker.stats().num_compactions, num_parts(broker, handles[-1])) == (0, TURNS)
    for taken in filler:
        pool.free(taken)


def test_canonical_blocks_keep_their_extent_and_their_bits(opened: Opened) -> None:
    """A deterministic run reads canonical KV only: bit-equal before and after what lies behind it was merged."""
    broker = opened()
    handles = grown(broker, front=600)
    more = tiny.words(3, 77)
    ids = [*tiny.words(600, 1), *more]
    before = broker.append(handles[0], more, deterministic=True)
    front = {record.extent_id for record in broker.extents() if record.canonical_stop}
    compact(broker, handles[-1])
    assert broker.stats().num_compactions == 1
    assert front <= {record.extent_id for record in broker.extents()}
    assert all(not record.canonical_stop for record in broker.extents() if record.borders)
    reused_tokens = broker.stats().num_reused_tokens
    assert broker.materialize(ids, deterministic=True) == before
    assert broker.stats().num_reused_tokens - reused_tokens >= 512


def test_what_is_evicted_while_it_is_copied_is_not_published(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for the background: it finds out, and gives its bytes back."""
    broker = opened()
    handles = grown(broker, front=200)
    store = broker.store
    finish = store.finish

    def evicting(*args: object, **options: object) -> object:
        made = finish(*args, **options)  # type: ignore[arg-type]
        assert broker.evict(handles[-1]) > 0
        return made

    monkeypatch.setattr(store, "finish", evicting)
    compact(broker, handles[-1])
    monkeypatch.undo()
    assert broker.stats().num_compactions == 0
    assert broker.stats().pool_used_bytes == 0
    assert broker.check() == []


def test_on_disk_it_stays_as_it_was_computed_and_is_read_after_a_restart(opened: Opened, tmp_path: Path) -> None:
    """No file is written twice, none of another form: each goes with the last recipe that needs it."""
    broker = opened(tmp_path)
    handles = grown(broker)
    num_parts(broker, handles[-1])
    broker.tick()
    broker.tick()
    stats = broker.stats()
    assert (stats.num_compactions, stats.num_spills) == (1, TURNS)
    assert all(broker.persist(handle) for handle in handles)
    assert broker.stats().num_spills == TURNS
    assert sum(1 for record in broker.extents() if record.place) == NUM_LEFT
    assert reused(broker, handles) == [handle.kv_tokens for handle in handles]
    assert_like_stock(broker, handles[::13])
    assert (broker.stats().num_fetches, broker.stats().num_recomputed_tokens) == (0, 0)
    broker.close()

    again = opened(tmp_path)
    assert_like_stock(again, handles[12::-6])
    assert num_parts(again, handles[-1]) == TURNS
    assert (again.stats().num_fetches, again.stats().num_recomputed_tokens) == (TURNS, 0)
    compact(again, handles[-1])
    assert (again.stats().num_compactions, num_parts(again, handles[-1])) == (1, NUM_LEFT)
    assert reused(again, handles) == [handle.kv_tokens for handle in handles]


def test_a_merged_extent_that_leaves_the_pool_is_on_disk_in_its_parts(opened: Opened, tmp_path: Path) -> None:
    """Also those parts that nobody had written before they were merged."""
    broker = opened(tmp_path)
    handles = grown(broker)
    num_parts(broker, handles[-1])
    broker.store.writes_behind = False
    broker.tick()
    assert (broker.stats().num_compactions, broker.stats().num_spills) == (1, 0)
    assert broker.evict(handles[-1]) > 0
    stats = broker.stats()
    assert (stats.pool_used_bytes, stats.num_spills, stats.num_extents) == (0, TURNS, TURNS)
    assert num_parts(broker, handles[-1]) == TURNS
    assert (broker.stats().num_fetches, broker.stats().num_recomputed_tokens) == (TURNS, 0)
    assert_like_stock(broker, handles[::13])
    assert broker.evict(handles[-1], tier="disk") > 0
    assert (broker.stats().num_extents, broker.stats().disk_used_bytes > 0) == (0, True)  # recipes are left


def test_only_what_is_wanted_of_a_merged_extent_goes_to_disk(opened: Opened, tmp_path: Path) -> None:
    """I13: what was deleted of a chain is not written with the rest of it."""
    broker = opened()
    handles = grown(broker)
    compact(broker, handles[-1])
    wanted = {name for handle in handles[:20] for name in broker.names_of(broker.recipe(handle))}
    disk = DiskPool(tmp_path, broker.namespace.digest, broker.engine.layout, 64 << 20)
    broker.attach_disk(disk, write="evict", wants=lambda names: not wanted.isdisjoint(names))
    assert broker.persist(handles[19])
    assert not broker.persist(handles[-1])
    assert max(found.stop for found in disk.scan()) == handles[19].kv_tokens
    assert broker.forget_names(broker.names_of(broker.recipe(handles[19])), lambda names: False) > 0
    assert max(found.stop for found in disk.scan()) == handles[18].kv_tokens
    assert reused(broker, [handles[-1]]) == [handles[-1].kv_tokens]
    wanted.update(name for handle in handles for name in broker.names_of(broker.recipe(handle)))
    broker.detach_disk()  # what is wanted by now is written, as at close
    assert sorted(found.stop for found in disk.scan()) == [handle.kv_tokens for handle in handles]
    disk.close()


@pytest.mark.parametrize("durability", ["sync", "async", "evict"])
def test_a_deleted_thread_leaves_nothing_of_its_own_and_a_kept_one_all_of_it(
    durability: Durability, opened: Opened, tmp_path: Path
) -> None:
    """I13: one chain, the second thread stands in the middle of what was merged."""
    broker = opened()
    saver = KVCheckpointSaver(InMemorySaver(), broker, directory=tmp_path, durability=durability)
    handles = grown(broker)
    short, whole = handles[19], handles[-1]
    put(saver, {"docs": whole}, name="whole")
    put(saver, {"docs": short}, name="short")
    compact(broker, whole)
    broker.tick()
    assert broker.stats().num_compactions == 1
    later = broker.append(whole, [3, 3, 3])
    put(saver, {"docs": later}, name="whole")
    broker.tick()
    if durability != "evict":
        assert broker.stats().num_spills == TURNS + 1
    saver.delete_thread("whole")
    broker.evict(later)
    broker.evict(short)
    assert broker.stats().pool_used_bytes == 0
    assert_like_stock(broker, [short])
    assert (broker.stats().num_fetches, broker.stats().num_recomputed_tokens) == (20, 0)
    saver.delete_thread("short")
    assert is_empty(saver)
    saver.close()


def test_a_thread_is_there_only_where_a_chain_grew_long(engines: Callable[..., TransformersEngine]) -> None:
    def keepers() -> list[threading.Thread]:
        return [thread for thread in threading.enumerate() if thread.name == "aaflow-keeper"]

    others = set(keepers())
    with KVBroker(engines(), MemoryIndex(), HostPool(POOL_BYTES)) as broker:
        handles = grown(broker, LONGEST_CHAIN)
        broker.first_logits(handles[-1], [7])
        assert set(keepers()) == others
        broker.append(broker.append(handles[-1], [8, 8]), [9, 9])
        assert len(set(keepers()) - others) == 1
        wait_until(lambda: broker.stats().num_compactions == 1)
        assert broker.check() == []
    assert set(keepers()) == others


def test_chains_that_wait_are_bounded_and_what_is_gone_is_passed_over(opened: Opened) -> None:
    broker = opened()
    handles = grown(broker, LONGEST_CHAIN + 2)
    num_parts(broker, handles[-1])
    assert broker.evict(handles[-1]) > 0
    broker.tick()
    assert broker.stats().num_compactions == 0
    compactor = Compactor(broker.store)
    sequence = broker._recipes.sequence(handles[0].kv_id)
    compactor.note(sequence, (), broker.store.match(sequence, 0))
    compactor.tick()
    assert broker.stats().num_compactions == 0
