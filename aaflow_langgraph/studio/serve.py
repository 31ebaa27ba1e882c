"""``aaflow studio``: the inspector on its own, over a shared index, a disk or checkpoints. Bound to this machine only."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from pathlib import Path

from aaflow_langgraph.checkpoint.beside import Beside
from aaflow_langgraph.errors import ConfigError
from aaflow_langgraph.studio.app import make_app
from aaflow_langgraph.studio.guard import is_loopback
from aaflow_langgraph.studio.outside import FromOutside
from aaflow_langgraph.studio.threads import Threads
from aaflow_langgraph.studio.view import View

PORT = 8155


def serve(
    index: str,
    disk: str | None,
    checkpoints: str | None,
    *,
    model: str | None = None,
    host: str = "127.0.0.1",
    port: int = PORT,
    metadata_only: bool = False,
) -> int:
    """Serve until Ctrl-C.

    Raises:
        ConfigError: Nothing to look at, an address of others than this machine, a port that is taken. Way out: fail.
        IndexUnavailable: The server of the index does not answer. Way out: retry.
    """
    import uvicorn

    if not is_loopback(host):
        raise ConfigError(
            f"the inspector has no login and shows what prompts say: it binds to this machine only, not to {host!r}; for "
            "another machine forward the port with ssh -L"
        )
    if not 0 < port < 1 << 16:
        raise ConfigError(f"port must be from 1 to 65535, got {port}")
    with ExitStack() as stack:
        if checkpoints is not None:
            stack.enter_context(Beside(checkpoints))  # says now what is wrong with it
        source = stack.enter_context(FromOutside(index, disk, checkpoints, model))
        source.facts()
        app = make_app(
            View(source, metadata_only=metadata_only),
            Threads(None if checkpoints is None else Path(checkpoints)),
            prefix="",
        )
        server = uvicorn.Server(uvicorn.Config(app, host=host, port=port, log_level="warning", server_header=False))
        shown = f"[{host}]" if ":" in host else host
        sys.stderr.write(f"aaflow studio: http://{shown}:{port}/ until Ctrl-C\n")
        try:
            server.run()
        except SystemExit as error:  # uvicorn's way to say that it could not bind
            raise ConfigError(f"port {port} of {host} cannot be used: something else listens there") from error
        except KeyboardInterrupt:
            pass
    return 0
