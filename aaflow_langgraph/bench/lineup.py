"""The sides of ``bench agents`` over one context: opened together, each with what its first prefill took, closed together.

Knows which side needs what; knows nothing of rounds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

from aaflow_langgraph.bench.continuous import Continuous
from aaflow_langgraph.bench.fan_out import Handles
from aaflow_langgraph.bench.pairs import NO_PREFILL, Prefill
from aaflow_langgraph.bench.peers import VLLM, LlamaCpp
from aaflow_langgraph.bench.peers.side import PeerSide
from aaflow_langgraph.bench.sides import Side, Streaming, Task
from aaflow_langgraph.bench.stock import Text, shared_cache
from aaflow_langgraph.engine.transformers import TransformersEngine

HANDLES = "handles-batched"
TRUTH = "text-serial"
_PEERS: dict[str, Callable[[Path, Task, int], PeerSide]] = {"vllm": VLLM, "llama.cpp": LlamaCpp}
PEERS = tuple(_PEERS)
NAMES = (
    TRUTH,
    "text-batched",
    "deepcopy-serial",
    "deepcopy-batched",
    "hf-continuous",
    "handles-serial",
    HANDLES,
    *PEERS,
)

_RUN_TOKENS = {TRUTH: 4096, "text-batched": 8192, "deepcopy-serial": 16384}
"""Sides that wait in line, or fill the machine by themselves, run as many agents at a time as have this much context
together: at least one, in a batch at least two."""


class Lineup:
    """``others`` are the sides that ``batched`` is compared with, ``missing`` those that cannot run here and why."""

    def __init__(
        self, engine: TransformersEngine, task: Task, most_agents: int, names: Sequence[str], *, whole: bool
    ) -> None:
        self._opened = ExitStack()
        self.others: list[Side] = []
        self.streams: list[Streaming] = []
        self.missing: dict[str, str] = {}
        self.prefills: dict[str, Prefill] = {}
        self.stock_prefill: Prefill | None = None
        with self._opened:
            self.batched = self._handles(engine, task, most_agents, batched=True)
            self.streams.append(self.batched)
            self._add_stock(engine, task, names, most_agents, whole=whole)
            if "hf-continuous" in names:
                self._add(Continuous(engine, task, most_agents))
            if "handles-serial" in names:
                self.others.append(self._handles(engine, task, most_agents, batched=False))
            self._add_peers(engine, task, names, most_agents)
            self._opened = self._opened.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._opened.close()

    def _add(self, side: Side) -> None:
        self._opened.callback(side.close)
        self.others.append(side)

    def _handles(self, engine: TransformersEngine, task: Task, most_agents: int, *, batched: bool) -> Handles:
        side = Handles(engine, task, most_agents, batched=batched)
        self._opened.callback(side.close)
        self.prefills[side.name] = Prefill(side.prefill_cpu_s, side.prefill_s)
        return side

    def _add_stock(
        self, engine: TransformersEngine, task: Task, names: Sequence[str], most_agents: int, *, whole: bool
    ) -> None:
        def most(name: str, least: int) -> int:
            at_once = _RUN_TOKENS.get(name)
            return most_agents if at_once is None or whole else max(least, at_once // len(task.context_ids))

        for name in (TRUTH, "text-batched"):
            if name in names:
                batched = name != TRUTH
                self._add(Text(engine, task, batched=batched, most=most(name, 1 + batched)))
                self.prefills[name] = NO_PREFILL
        copies = [name for name in ("deepcopy-serial", "deepcopy-batched") if name in names]
        if copies:
            shared = shared_cache(engine, task)
            prefill = self.stock_prefill = Prefill(shared.cpu_s, shared.wall_s)
        for name in copies:
            batched = name == "deepcopy-batched"
            self._add(Text(engine, task, batched=batched, most=most(name, 1), shared=shared.cache))
            self.prefills[name] = prefill

    def _add_peers(self, engine: TransformersEngine, task: Task, names: Sequence[str], most_agents: int) -> None:
        wanted = [name for name in PEERS if name in names]
        folder, dtype = engine.folder, engine.namespace.dtype
        if folder is None or dtype != "bfloat16":
            why = (
                f"peers run bfloat16, the others {dtype}" if folder else "peers load a model's folder, and it has none"
            )
            self.missing.update(dict.fromkeys(wanted, why))
            return
        for name in wanted:
            peer = _PEERS[name](folder, task, most_agents)
            self._add(peer)
            self.streams.append(peer)
