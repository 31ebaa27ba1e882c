"""A real ``langgraph dev``, driven over HTTP as Studio drives it. Not a test itself."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from langgraph_sdk import get_sync_client

from tests.servers import until

_MISSING = [name for name in ("langgraph_cli", "langgraph_api") if importlib.util.find_spec(name) is None]
needs_langgraph_dev = pytest.mark.skipif(
    bool(_MISSING), reason=f"needs {', '.join(_MISSING)}: pip install 'langgraph-cli[inmem]'"
)

_COMPLAINT = re.compile(r"\[(error|critical) |Traceback|[Bb]locking|aaflow_langgraph(\.\w+)?\]")


# After 30 seconds the server calls it an error; how long a model takes to load is the machine's matter.
_SLOW_START = "exceeded the expected startup time"


class DevServer:
    """``langgraph dev`` on a project."""

    def __init__(self, folder: Path, **settings: str) -> None:
        """``settings`` are environment variables."""
        self.folder = folder
        self._settings = {
            "LANGSMITH_TRACING": "false",
            "LANGGRAPH_CLI_NO_ANALYTICS": "1",
            "LOG_COLOR": "false",
            **settings,
        }
        self.log = folder / "log"
        self._num_forgiven = 0
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        command = [
            str(Path(sys.executable).with_name("langgraph")),
            "dev",
            "--config",
            "langgraph.json",
            "--no-browser",
        ]
        command += ["--no-reload", "--n-jobs-per-worker", "4", "--host", "127.0.0.1", "--port", str(port)]
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                command,
                cwd=self.folder,
                env={**os.environ, **self._settings},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        until(self._answers, f"the server starts; see {self.log}", timeout_s=240)
        self.client = get_sync_client(url=self.url)

    def stop(self) -> None:
        """As Ctrl-C does."""
        assert self._process is not None
        self.client.http.client.close()
        self._process.send_signal(signal.SIGINT)
        self._process.wait(timeout=30)

    def kill(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()

    def counters(self) -> dict[str, int]:
        with urllib.request.urlopen(f"{self.url}/kv") as answer:
            found: dict[str, int] = json.load(answer)
        return found

    def complaints(self) -> list[str]:
        """Errors, and warnings of ours, in the server's log."""
        lines = re.sub(r"\x1b\[[0-9;]*m", "", self.log.read_text(errors="replace")).splitlines()
        found = [line for line in lines if re.search(_COMPLAINT, line) and _SLOW_START not in line]
        return found[self._num_forgiven :]

    def forgive(self) -> list[str]:
        """The complaints so far: a test that provoked them looks at them, and nobody finds them again."""
        found = self.complaints()
        self._num_forgiven += len(found)
        return found

    def _answers(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, self.log.read_text(errors="replace")
        try:
            with urllib.request.urlopen(f"{self.url}/ok"):
                return True
        except (urllib.error.URLError, ConnectionError):
            return False
