"""``inspector_app``: the page and its endpoints as one ASGI app, for the LangGraph dev server and for itself.

Knows routes and files; what is shown is ``View``'s and ``Threads``' matter, who may ask is ``Guard``'s.
"""

from __future__ import annotations

import os
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import BaseRoute, Mount, Route

from aaflow_langgraph.errors import ConfigError
from aaflow_langgraph.studio.api import routes
from aaflow_langgraph.studio.guard import Guard
from aaflow_langgraph.studio.threads import Threads
from aaflow_langgraph.studio.view import View

if TYPE_CHECKING:
    from aaflow_langgraph.broker import KVBroker
    from aaflow_langgraph.checkpoint.saver import KVCheckpointSaver

_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".mjs": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}


def inspector_app(
    broker: KVBroker,
    checkpointer: KVCheckpointSaver | str | os.PathLike[str] | None = None,
    *,
    metadata_only: bool = False,
    prefix: str = "/kv",
) -> Starlette:
    """The inspector of a broker of this process: a page and the JSON that it shows, below ``prefix``.

    In ``langgraph.json``: ``"http": {"app": "./studio.py:app"}``, where ``studio.py`` says ``app = inspector_app(broker)``.

    It answers this machine only, and no other page in its browser. Everything is read, nothing is changed.

    Args:
        broker: Whose handles, requests and pool are shown.
        checkpointer: The saver, or what was passed to ``KVCheckpointSaver.local`` (a directory, which may come later): shows
            the checkpoints of each thread.
        metadata_only: Send no token ids, no text and no previews; labels, names, numbers and ids only.
        prefix: Where it is: a path that begins with ``/`` and does not end with one; empty for the root.

    Raises:
        ConfigError: An option is wrong. Way out: fail.
    """
    from aaflow_langgraph.studio.inprocess import (
        InProcess,
    )  # late: it loads torch, which a look from outside does without

    view = View(InProcess(broker), metadata_only=_flag(metadata_only))
    return make_app(view, Threads(_directory(checkpointer)), prefix=prefix)


def make_app(view: View, threads: Threads, *, prefix: str) -> Starlette:
    """The app over any source."""
    if not isinstance(prefix, str) or (prefix and (not prefix.startswith("/") or prefix.endswith("/"))):
        raise ConfigError(f"prefix must be empty or begin with / and not end with one, got {prefix!r:.100}")
    inner: list[BaseRoute] = [*routes(view, threads), *_static()]
    guarded = Guard(Starlette(routes=inner))
    top: list[BaseRoute] = [Mount(prefix, app=guarded)]
    if prefix:  # the page names its files relative to a directory

        async def redirect(request: Request) -> Response:
            return RedirectResponse(f"{request.scope.get('root_path', '')}{prefix}/")

        top.insert(0, Route(prefix, redirect, methods=["GET"]))
    return Starlette(routes=top)


def _static() -> list[Route]:
    """The files of the page, each under its own name: read once, so that no request opens a file."""
    root = resources.files("aaflow_langgraph.studio") / "static"
    found = [_file("/", "index.html", (root / "index.html").read_bytes())]
    for folder, name in ((root, ""), (root / "vendor", "vendor/")):
        for file in sorted(folder.iterdir(), key=lambda file: file.name):
            if Path(file.name).suffix in _TYPES:
                found.append(_file(f"/{name}{file.name}", file.name, file.read_bytes()))
    return found


def _file(path: str, name: str, body: bytes) -> Route:
    async def answer(_: Request) -> Response:
        return Response(body, headers={"Content-Type": _TYPES[Path(name).suffix]})

    return Route(path, answer, methods=["GET"])


def _directory(checkpointer: Any) -> Path | None:
    if checkpointer is None:
        return None
    from aaflow_langgraph.checkpoint.saver import KVCheckpointSaver

    if isinstance(checkpointer, KVCheckpointSaver):
        return checkpointer.directory
    if not isinstance(checkpointer, (str, os.PathLike)) or not os.fspath(checkpointer):
        raise ConfigError(
            f"checkpointer must be a KVCheckpointSaver or the path of one, got {type(checkpointer).__name__}"
        )
    return Path(checkpointer)


def _flag(value: object) -> bool:
    if not isinstance(value, bool):
        raise ConfigError(f"metadata_only must be True or False, got {value!r:.100}")
    return value
