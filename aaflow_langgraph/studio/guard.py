"""Who may ask the inspector: this machine, and no page of somebody else's in its browser.

Knows HTTP headers; knows nothing of what is served. A page on the web can make a browser ask 127.0.0.1, directly or through a
name of its own that it points there (DNS rebinding); a server around us may allow every origin. So it is looked at here.
"""

from __future__ import annotations

import ipaddress
import re

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Cache-Control": "no-store",
}

_HOST = re.compile(r"(?P<name>\[[0-9a-fA-F:.]+\]|[^:\[\]]+)(?::\d{1,5})?")


class Guard:
    """ASGI middleware: refuses what does not come from this machine and from our own page; adds ``HEADERS``."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer 403, or pass the request on."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":  # a websocket: there are none here
            await send({"type": "websocket.close", "code": 1008})
            return

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers[name] = value
            await send(message)

        problem = refusal(scope)
        app = self._app if problem is None else JSONResponse({"error": problem}, status_code=403)
        await app(scope, receive, send_guarded)


def refusal(scope: Scope) -> str | None:
    """Why a request is not answered; None when it is."""
    client = (scope.get("client") or ("", 0))[0]
    if not is_loopback(client):
        return "the inspector answers this machine only"
    headers = Headers(scope=scope)
    hosts = headers.getlist("host")
    if len(hosts) != 1 or not is_loopback(host_name(hosts[0])):
        return "the inspector is asked for as localhost, 127.0.0.1 or [::1] only; other names may be somebody else's"
    origins = headers.getlist("origin")
    if any(origin.partition("://")[2].lower() != hosts[0].lower() for origin in origins):
        return "the inspector answers its own page only"
    site = headers.get("sec-fetch-site", "none")
    is_navigation = headers.get("sec-fetch-mode") == "navigate" and headers.get("sec-fetch-dest") == "document"
    if site not in ("same-origin", "none") and not (is_navigation and "/api/" not in scope["path"]):
        return "the inspector answers its own page only"
    return None


def host_name(host: str) -> str:
    """A Host header without its port, brackets taken off; empty when it is none."""
    match = _HOST.fullmatch(host)
    return match["name"].strip("[]") if match else ""


def is_loopback(name: str) -> bool:
    """Is this ``localhost`` or an address of this machine alone?"""
    if name.lower() == "localhost":
        return True
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback
