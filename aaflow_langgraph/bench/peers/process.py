"""One server process in the peers' environment: started, asked line by line, ended for good.

Knows where ``make peers`` puts that environment and how a line is asked; knows no model and no engine. Whatever goes wrong
is a ``NotRun`` with the end of what the process wrote to stderr.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from aaflow_langgraph.bench.sides import NotRun

FOLDER = Path(__file__).parents[3] / "build" / "peers"
"""Of a checkout: what ``make peers`` makes."""

_SERVE = Path(__file__).parent / "servers" / "serve.py"
_END_S = 20.0
_TAIL_BYTES = 2000


class PeerProcess:
    """A server of ``servers/``, up when the constructor returns. Not for several threads at once.

    Args:
        server: Name of its module in ``servers/``.
        options: What its ``Peer`` is opened with.
        environment: Variables to set besides those of this process.
        deadline_s: Longest wait for the first line, and for each answer.

    Raises:
        NotRun: No environment, or the server did not come up.
    """

    def __init__(
        self, server: str, options: Mapping[str, Any], environment: Mapping[str, str], deadline_s: float = 900.0
    ) -> None:
        python = FOLDER / "venv" / "bin" / "python"
        if not (FOLDER / ".installed").exists():
            raise NotRun("needs an environment of its own, about 3.5 GB: run `make peers` in a checkout of the project")
        self._server = server
        self._deadline_s = deadline_s
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        # No file name: nothing is left behind, however this process ends.
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - open as long as the process
        self._process = subprocess.Popen(
            [str(python), str(_SERVE), server, json.dumps(dict(options))],
            # Threads that spin made vLLM six times slower on a machine where anything else ran.
            env={"OMP_WAIT_POLICY": "PASSIVE", **os.environ, **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            text=True,
            # A group of its own: what it forks ends with it.
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, name=f"peer-{server}", daemon=True)
        self._reader.start()
        try:
            self.load_s = float(self._next()["load_s"])
            """What it took to open the model."""
        except NotRun:
            self.close()
            raise

    def ask(self, do: str, **request: Any) -> dict[str, Any]:
        """What the server answers to one request.

        Raises:
            NotRun: It died, did not answer in time, or said something that is not an answer. It is closed then.
        """
        line = json.dumps({"do": do, **request}) + "\n"
        try:
            if self._process.stdin is None or self._process.stdin.closed:
                raise NotRun(f"{self._server} is closed")
            try:
                self._process.stdin.write(line)
                self._process.stdin.flush()
            except BrokenPipeError:
                raise NotRun(self._why("ended")) from None
            return self._next()
        except NotRun:
            self.close()
            raise

    def close(self) -> None:
        """End the process and all that descends from it. Safe to call twice."""
        if self._stderr.closed:
            return
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_S)
        self._kill()
        self._process.wait()
        # What a server forked is not this process's child: its end cannot be waited for, only seen.
        end = time.monotonic() + _END_S
        while _is_running(self._process.pid) and time.monotonic() < end:
            time.sleep(0.01)
        self._reader.join()
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._stderr.close()

    def _read(self) -> None:
        if self._process.stdout is not None:
            for line in self._process.stdout:
                self._lines.put(line)
        self._lines.put("")

    def _next(self) -> dict[str, Any]:
        try:
            line = self._lines.get(timeout=self._deadline_s)
        except queue.Empty:
            why = self._why(f"said nothing for {self._deadline_s:.0f} s")
            self._kill()
            raise NotRun(why) from None
        if not line:
            self._process.wait()
            raise NotRun(self._why(f"ended with status {self._process.returncode}"))
        try:
            answer: dict[str, Any] = json.loads(line)
        except ValueError:
            raise NotRun(self._why(f"gave an answer that is cut or no JSON: {line[:80]!r}")) from None
        return answer

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def _why(self, what: str) -> str:
        self._stderr.seek(0, os.SEEK_END)
        self._stderr.seek(max(0, self._stderr.tell() - _TAIL_BYTES))
        said = [line.strip() for line in self._stderr.read().decode(errors="replace").splitlines() if line.strip()]
        return f"{self._server} {what}" + (f"; its last words: {' / '.join(said[-3:])}" if said else "")


def _is_running(group: int) -> bool:
    """Has this process group a member that has not ended? One that nobody has looked after (a zombie) has."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, of_group = stat.read_text().rpartition(")")[2].split()[:3]
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(of_group) == group and state != "Z":
            return True
    return False
