"""Pools of a host as somebody sees them who only looks: whose they are, how full, and whether a range is still what it was.

Nothing is kept open and nobody is held up: a pool is mapped, its door is left at once. No torch, so that looking is quick.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from aaflow_langgraph.errors import Evicted, KVMissing
from aaflow_langgraph.pool._layout import GRANULE_BYTES, Layout, Slots
from aaflow_langgraph.pool._rundir import PoolName, RunDir
from aaflow_langgraph.pool._visit import visit
from aaflow_langgraph.pool.arena import Allocation

Condition = Literal["alive", "silent", "dead", "absent"]
"""``alive``: it answers. ``silent``: somebody listens and does not answer (stopped, overrun). ``dead``: its socket is there and
nobody listens. ``absent``: no socket here; it was closed, or lives on another host or with another run directory.
"""


@dataclass(frozen=True, slots=True)
class SeenPool:
    """What was seen of one owner; sizes are 0 where it did not answer.

    Attributes:
        pid: Its process, as this pid namespace or the socket's name has it; None when there is no socket.
        process: What the process calls itself; empty when it does not run.
        used_bytes: Published ranges; what is being written is not in it.
    """

    owner: str
    condition: Condition
    pid: int | None = None
    process: str = ""
    capacity_bytes: int = 0
    used_bytes: int = 0
    _memory: tuple[memoryview, Layout] | None = field(default=None, repr=False, compare=False)

    def holds(self, allocation: Allocation) -> bool:
        """Is exactly this range published under this generation now? False for a pool that did not answer."""
        return self._memory is not None and Slots(*self._memory).holds(allocation)

    def read(self, allocation: Allocation, num_bytes: int) -> memoryview | None:
        """The first bytes of a range, in place; None where they cannot be. Ask ``holds`` after reading them."""
        if self._memory is None or not 0 < num_bytes <= allocation.num_bytes or not self.holds(allocation):
            return None
        view, layout = self._memory
        start = layout.header_bytes + allocation.offset
        return view[start : start + num_bytes]


def look(owners: Iterable[str], run_dir: Path | None = None, *, deadline_s: float = 1.0) -> dict[str, SeenPool]:
    """What can be seen of these owners from this host; each takes at most ``deadline_s``.

    Raises:
        ConfigError: The run directory is not ours alone. Way out: fail.
    """
    directory = RunDir.of(run_dir)
    return {owner: _seen(directory, owner, deadline_s) for owner in owners}


def _seen(directory: RunDir, owner: str, deadline_s: float) -> SeenPool:
    try:
        found = visit(directory, owner, deadline_s)
    except Evicted:
        name = _name(directory, owner)  # a socket that refuses is a dead owner's, none at all says less
        return SeenPool(owner, "dead" if name else "absent", name.pid if name else None)
    except KVMissing:
        name = _name(directory, owner)
        return SeenPool(owner, "silent", name.pid, _process(name)) if name else SeenPool(owner, "absent")
    found.connection.close()
    name = _name(directory, owner)
    view = memoryview(found.mapping)
    used_bytes = _used_bytes(Slots(view, found.layout))
    memory = (view, found.layout)
    pid, process = (name.pid, _process(name)) if name else (None, "")
    return SeenPool(owner, "alive", pid, process, found.layout.capacity_bytes, used_bytes, memory)


def _name(directory: RunDir, owner: str) -> PoolName | None:
    with directory.opened() as folder:
        for file in os.listdir(folder):
            name = PoolName.parse(file)
            if name is not None and name.owner == owner and file == name.file("sock"):
                return name
    return None


def _process(name: PoolName) -> str:
    with contextlib.suppress(OSError):
        if name.is_running():
            return Path(f"/proc/{name.pid}/comm").read_text(encoding="utf-8", errors="replace").strip()
    return ""


def _used_bytes(slots: Slots) -> int:
    """A range shows its generation at its first and its last granule, and no two ranges share one."""
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for granule, generation in slots.taken().items():
        first.setdefault(generation, granule)
        last[generation] = granule
    return sum(last[generation] - start + 1 for generation, start in first.items()) * GRANULE_BYTES
