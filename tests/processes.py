"""Processes that do as they are told, for tests of what several of them share. Not a test itself.

They are forked from a server that has imported what they need, so that one costs milliseconds, and die with the test.
"""

from __future__ import annotations

import errno
import multiprocessing
import os
import resource
import signal
import time
from collections.abc import Callable
from dataclasses import astuple
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from aaflow_langgraph.pool.arena import Allocation
from aaflow_langgraph.pool.peers import Peers
from aaflow_langgraph.pool.shared import SharedPool
from aaflow_langgraph.pool.sweep import sweep

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["tests.processes"])


class Worker:
    """One process. ``worker("name", ...)`` runs ``Commands.name(...)`` there; what it raises comes back as ``Failed``."""

    def __init__(self, run_dir: Path) -> None:
        self._pipe, theirs = _context.Pipe()
        self._process = _context.Process(target=_obey, args=(theirs, run_dir), daemon=True)
        self._process.start()
        theirs.close()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def __call__(self, command: str, *args: object) -> Any:
        self._pipe.send((command, args))
        failed, answer = self._pipe.recv()
        if failed:
            raise Failed(answer)
        return answer

    def kill(self) -> None:
        """SIGKILL, and wait for the end."""
        self._process.kill()
        self._process.join()

    def exit_code_after(self, command: str, *args: object) -> int:
        """For commands that do not return."""
        self._pipe.send((command, args))
        self._process.join()
        assert self._process.exitcode is not None
        return self._process.exitcode

    def stop(self) -> None:
        """SIGSTOP, in force on return."""
        os.kill(self.pid, signal.SIGSTOP)
        wait_until(lambda: Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T")

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def end(self) -> None:
        """Kill it if it runs, and close what it was reached by. Idempotent."""
        if self._pipe.closed:
            return
        self.kill()
        self._pipe.close()
        self._process.close()


class Failed(Exception):
    """``TypeName: message`` of what a command raised."""


class Commands:
    """What a worker can do. Allocations travel as three numbers."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.pool: SharedPool | None = None
        self.peers = Peers(run_dir)
        self.kept: list[object] = []

    def refuse_memfd(self) -> None:
        def refuse(*_: object) -> int:
            raise OSError(errno.EPERM, "not here")

        os.memfd_create = refuse

    def limit(self, what: str, value: int) -> None:
        number = getattr(resource, what)
        resource.setrlimit(number, (value, resource.getrlimit(number)[1]))

    def open(self, capacity_bytes: int) -> str:
        self.pool = SharedPool(capacity_bytes, run_dir=self.run_dir)
        return self.pool.owner

    def open_another(self, capacity_bytes: int) -> None:
        self.kept.append(SharedPool(capacity_bytes, run_dir=self.run_dir))

    def write(self, num_bytes: int, value: int) -> tuple[int, int, int]:
        assert self.pool is not None
        allocation = self.pool.reserve(num_bytes)
        assert allocation is not None
        self.pool.tensor(allocation, torch.uint8, (num_bytes,)).fill_(value)
        return astuple(allocation)

    def publish(self, allocation: tuple[int, int, int]) -> None:
        assert self.pool is not None
        self.pool.publish(Allocation(*allocation))

    def free(self, allocation: tuple[int, int, int]) -> None:
        assert self.pool is not None
        self.pool.free(Allocation(*allocation))

    def check(self) -> list[str]:
        assert self.pool is not None
        return self.pool.check()

    def close(self) -> None:
        assert self.pool is not None
        self.pool.close()

    def sum(self, owner: str, allocation: tuple[int, int, int]) -> int:
        view = self.peers.attach(owner).tensor(Allocation(*allocation), torch.uint8, (allocation[1],))
        return int(view.sum(dtype=torch.int64))

    def scribble(self, owner: str, allocation: tuple[int, int, int]) -> None:
        self.peers.attach(owner).tensor(Allocation(*allocation), torch.uint8, (1,)).fill_(0)

    def sweep(self) -> list[str]:
        return sweep(self.run_dir)

    def use_up_descriptors(self) -> None:
        try:
            while True:
                self.kept.append(os.dup(0))
        except OSError:
            pass

    def give_descriptors_back(self) -> None:
        while self.kept:
            os.close(self.kept.pop())  # type: ignore[call-overload]

    def num_descriptors(self) -> int:
        return num_descriptors()

    def fork(self) -> tuple[int, list[str]]:
        """A child that says what it sees of its parent's pool and then stays; its pid and its words."""
        assert self.pool is not None
        live = self.pool.reserve(1)
        assert live is not None
        reading, writing = os.pipe()
        pid = os.fork()
        if pid:
            os.close(writing)
            with os.fdopen(reading) as answer:
                words = answer.read().split("\n")
            return pid, words
        words = [str(self.pool.reserve(1)), str(self.pool.capacity_bytes)]
        try:
            self.pool.tensor(live, torch.uint8, (1,))
        except ValueError as error:
            words.append(f"{type(error).__name__}: {error}")
        self.pool.publish(live)
        self.pool.free(live)
        self.pool.close()
        words.append(str(num_mappings()))
        os.write(writing, "\n".join(words).encode())
        os.close(writing)
        signal.pause()
        os._exit(0)


def _obey(pipe: Connection, run_dir: Path) -> None:
    commands = Commands(run_dir)
    while True:
        try:
            name, args = pipe.recv()
        except EOFError:
            return
        try:
            answer = False, getattr(commands, name)(*args)
        except Exception as error:
            answer = True, f"{type(error).__name__}: {error}"
        pipe.send(answer)


def wait_until(condition: Callable[[], bool]) -> None:
    """Returns as soon as it holds; a minute without it is a failure."""
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "waited for a minute in vain"
        time.sleep(0.002)


def num_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def num_mappings(pid: int | str = "self") -> int:
    """How many mappings of pools a process has."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return sum("memfd:aaflow-pool" in line or "/aaflow-langgraph-" in line for line in lines)


def shared_bytes(pid: int) -> int:
    """A process's proportional part of all shared memory it maps: summed over all processes, what they hold together."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss_Shmem:"))
