"""The JSON endpoints. Knows query parameters and status codes; what is in the documents is ``View``'s matter.

Every body runs in a thread: the event loop of the server around us is never held up.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from aaflow_langgraph.errors import AAFlowError, ConfigError, IndexUnavailable, RecipeMissing
from aaflow_langgraph.studio.threads import Threads
from aaflow_langgraph.studio.view import UnknownHandle, View

MOST_ROWS = 500
"""Of a page."""

MOST_NODES = 1_000
"""Of a drawing."""

_DIGEST = re.compile(r"[0-9a-f]{64}")
_MOST_CHARS = 1_024  # of a query parameter

Body = Callable[[Mapping[str, str]], dict[str, Any]]


def routes(view: View, threads: Threads) -> list[Route]:
    """What is below ``api/``."""

    def handles(asked: Mapping[str, str]) -> dict[str, Any]:
        return view.handles(**_page(asked), thread=_text(asked, "thread"), text=_text(asked, "q"))

    def graph(asked: Mapping[str, str]) -> dict[str, Any]:
        focus = _digest(asked, "focus") if asked.get("focus") else ""
        limit = _count(asked, "limit", 120, MOST_NODES, least=1)
        return view.graph(limit=limit, focus=focus, thread=_text(asked, "thread"))

    def requests(asked: Mapping[str, str]) -> dict[str, Any]:
        missed = _text(asked, "missed") == "1"
        return view.requests(**_page(asked), thread=_text(asked, "thread"), missed=missed)

    def pool(asked: Mapping[str, str]) -> dict[str, Any]:
        return view.pool(kv_id=_digest(asked, "kv_id") if asked.get("kv_id") else "")

    bodies: dict[str, Body] = {
        "overview": lambda asked: {**view.overview(), "has_checkpoints": threads.is_known},
        "handles": handles,
        "graph": graph,
        "handle": lambda asked: view.handle(_digest(asked, "kv_id")),
        "diff": lambda asked: view.diff(_digest(asked, "a"), _digest(asked, "b")),
        "profile": lambda asked: view.profile(thread=_text(asked, "thread")),
        "requests": requests,
        "miss": lambda asked: view.why_missed(_count(asked, "number", 0, 1 << 53)),
        "movements": lambda asked: view.movements(**_page(asked)),
        "pool": pool,
        "rejected": lambda asked: view.rejected(),
        "threads": lambda asked: threads.listed(**_page(asked)),
        "thread": lambda asked: threads.one(_text(asked, "id"), **_page(asked)),
    }
    return [Route(f"/api/{name}", _endpoint(body), methods=["GET"]) for name, body in bodies.items()]


def _endpoint(body: Body) -> Callable[[Request], Any]:
    async def answer(request: Request) -> Response:
        return await asyncio.to_thread(_answered, body, request.query_params)

    return answer


def _answered(body: Body, asked: Mapping[str, str]) -> Response:
    try:
        return _json(body(asked))
    except (UnknownHandle, RecipeMissing) as error:
        return _json({"error": str(error)}, 404)
    except ConfigError as error:
        return _json({"error": str(error)}, 400)
    except IndexUnavailable as error:
        return _json({"error": str(error)}, 503)
    except AAFlowError as error:
        return _json({"error": str(error)}, 500)


def _json(document: dict[str, Any], status: int = 200) -> Response:
    # In ASCII: names from outside may hold what UTF-8 cannot say.
    return Response(json.dumps(document, allow_nan=False), status, media_type="application/json")


def _page(asked: Mapping[str, str]) -> dict[str, int]:
    return {
        "offset": _count(asked, "offset", 0, 1 << 53),
        "limit": _count(asked, "limit", 50, MOST_ROWS, least=1),
    }


def _count(asked: Mapping[str, str], name: str, default: int, most: int, *, least: int = 0) -> int:
    text = asked.get(name, str(default))
    if not re.fullmatch(r"[0-9]{1,16}", text) or not least <= int(text) <= most:
        raise ConfigError(f"{name} must be a number from {least} to {most}")
    return int(text)


def _digest(asked: Mapping[str, str], name: str) -> str:
    text = asked.get(name, "")
    if not _DIGEST.fullmatch(text):
        raise ConfigError(f"{name} must be the id of a handle: 64 lower-case hex digits")
    return text


def _text(asked: Mapping[str, str], name: str) -> str:
    text = asked.get(name, "")
    if len(text) > _MOST_CHARS:
        raise ConfigError(f"{name} has {len(text)} characters; at most {_MOST_CHARS}")
    return text
