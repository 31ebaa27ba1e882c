"""The inspector: one page over a broker, or over what lies on a server or a disk, at ``/kv`` of any ASGI server.

Needs the extra ``studio`` (starlette, uvicorn).
"""

from aaflow_langgraph.studio.app import inspector_app as inspector_app

__all__ = ["inspector_app"]
