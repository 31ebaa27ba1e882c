"""A peer behind stdin and stdout: one JSON line asks, one JSON line answers. Runs in the peers' environment.

``python serve.py NAME OPTIONS`` imports the module NAME beside this file, opens its peer with the JSON object OPTIONS and
answers until stdin ends. Imports nothing of this project, listens on no port. Whatever else the peer prints goes to stderr.

Each answer has ``cpu_s``: CPU seconds of this process, its threads and its children while the request ran. Times inside a
request count from the moment at which it has been read and decoded.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any, TextIO


def main() -> None:
    """Open the peer, say in the first line how long that took, answer requests."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    name, options = sys.argv[1], json.loads(sys.argv[2])
    started = time.perf_counter()
    peer = importlib.import_module(name).Peer(**options)
    _say(answers, {"load_s": time.perf_counter() - started})
    for line in sys.stdin:
        request = json.loads(line)
        do = getattr(peer, request.pop("do"))
        cpu = cpu_s()
        answer = do(**request)
        _say(answers, {**answer, "cpu_s": cpu_s() - cpu})
    # Engines take seconds to take themselves apart, and nothing of them is to be kept.
    os._exit(0)


def cpu_s() -> float:
    """CPU seconds of this process and all that descend from it, threads that ended included as far as the kernel keeps them."""
    return time.process_time() + sum(_used_s(pid) for pid in _descendants(os.getpid()))


def _descendants(pid: int) -> list[int]:
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            found += [int(child), *_descendants(int(child))]
    return found


def _used_s(pid: int) -> float:
    """Nanosecond counts of the threads: the ticks of ``stat`` are too coarse for a request of a tenth of a second."""
    return sum(int((task / "schedstat").read_text().split()[0]) for task in Path(f"/proc/{pid}/task").iterdir()) / 1e9


def _say(answers: TextIO, answer: dict[str, Any]) -> None:
    answers.write(json.dumps(answer) + "\n")
    answers.flush()


if __name__ == "__main__":
    main()
