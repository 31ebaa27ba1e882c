"""Which namespaces a server has, and a look at one of them without being one of its users. No model and no owner is needed.

Keys carry half of a namespace's digest (``_server.key_names``), so that half is all that a server can tell.
"""

from __future__ import annotations

import re
from urllib.parse import quote

from redis.exceptions import NoPermissionError, RedisError

from aaflow_langgraph._directory import expanded
from aaflow_langgraph.errors import ConfigError, IndexUnavailable
from aaflow_langgraph.index._server import explained
from aaflow_langgraph.index.opening import open_index
from aaflow_langgraph.index.redis import RedisIndex

_KEY = re.compile(rb"aaflow:\{([0-9a-f]{32})\}:[a-z_]+")
_PAGE_KEYS = 1000


def namespaces(url: str) -> list[str]:
    """The first 32 digits of every namespace that has keys on the server; on a cluster, on the node that the URL names.

    Reads the names of all keys of the server's database, a thousand at a time.

    Raises:
        ConfigError, IndexUnavailable: As ``open_index``; also where the user may not list keys.
    """
    index = look_into(url, "0" * 32)
    try:
        keys = index.server.client.scan_iter("aaflow:{*", count=_PAGE_KEYS)
        found = {match[1].decode() for match in map(_KEY.fullmatch, keys) if match}
    except NoPermissionError as error:
        raise ConfigError(
            "the index's user may not list keys, and looking from outside begins with that; grant it for this: ACL SETUSER "
            "<name> +scan"
        ) from error
    except RedisError as error:
        raise explained(error) from error
    finally:
        index.close()
    return sorted(found)


def look_into(url: str, namespace: str) -> RedisIndex:
    """The index of a namespace of which only the first 32 digits are known. Nothing is started for it, and an embedded server
    stops when its own users are gone.

    Raises:
        ConfigError, IndexUnavailable: As ``open_index``; also for a memory index, which nobody else can see.
    """
    scheme, _, rest = url.partition("://")
    if scheme == "embedded" and rest:
        socket = expanded(rest).absolute() / "server.sock"
        if not socket.exists():
            raise IndexUnavailable(
                f"no process uses the embedded index in {rest} now, so there is nothing in it; what is on disk can be looked "
                "at without an index: --disk DIR alone"
            )
        url = f"unix://{quote(str(socket))}"
    index = open_index(url, namespace.ljust(64, "0"))
    if not isinstance(index, RedisIndex):
        raise ConfigError("an index in memory is seen by its own process only; use KVBroker.stats() and check() there")
    return index
