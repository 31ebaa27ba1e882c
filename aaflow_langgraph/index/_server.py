"""One Redis server as the index sees it: scripts by name, our keys, typed errors. Knows no extents.

All keys of a namespace carry one hash tag, so they lie in one slot, on one node of a cluster, and one client serves them;
when the slot moves, the server says so and the client follows.

Nothing is retried: a reply that got lost does not tell whether the script ran. Dead connections are noticed when they are
taken from the pool, scripts that the server forgot are loaded again.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import redis
from redis.commands.core import Script
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import MovedError, OutOfMemoryError, RedisError, ResponseError

from aaflow_langgraph.errors import AAFlowError, IndexFull, IndexUnavailable, IntegrityError
from aaflow_langgraph.index._lua import scripts

# A key of another type, a value that is no number, an error inside a script.
_STUMBLED = ("WRONGTYPE", "not a valid float", "attempt to ")
_MOVED = re.compile(r"MOVED \d+ (?P<host>\S+):(?P<port>\d{1,5})$")
_DIGEST = re.compile(r"[0-9a-f]{64}")


class Server:
    """Runs the index's scripts.

    Args:
        client: Ours alone; replies are bytes.
        namespace: Digest whose keys are meant.
        clock: Seconds instead of the server's, for tests with a clock that stands still; production passes none (C10).
        revive: Called when no connection can be made, for a server that is ours to start.
        follow: A client for the node (host, port) that the namespace's slot has moved to.
    """

    def __init__(
        self,
        client: redis.Redis,
        namespace: str,
        *,
        clock: Callable[[], float] | None = None,
        revive: Callable[[], object] | None = None,
        follow: Callable[[str, int], redis.Redis] | None = None,
    ) -> None:
        self.client = client
        self._clock = clock
        self._revive = revive
        self._follow = follow
        self._scripts = {
            name: (client.register_script(script.text), key_names(namespace, script.keys))
            for name, script in scripts().items()
        }

    def run(self, name: str, *arguments: str | bytes) -> Any:
        """Run one script with the time and ``arguments``.

        Raises:
            IndexFull: The server is out of memory and the script writes. Way out: go on without.
            IndexUnavailable: No reply. Way out: go on without, try again later.
            IntegrityError: The script stumbled over what others wrote under our keys.
        """
        script, keys = self._scripts[name]
        now = "" if self._clock is None else repr(float(self._clock()))
        try:
            return script(keys, (now, *arguments), self.client)
        except RedisConnectionError as error:
            if self._revive is not None:
                self._revive()
            raise explained(error) from error
        except RedisError as error:
            target = _moved_to(error)
            if target is None or self._follow is None:
                raise explained(error) from error
            return self._elsewhere(self._follow(*target), script, keys, (now, *arguments))

    def close(self) -> None:
        """Close every connection. Idempotent."""
        self.client.close()
        self.client.connection_pool.disconnect()

    def _elsewhere(self, client: redis.Redis, script: Script, keys: tuple[str, ...], arguments: tuple[Any, ...]) -> Any:
        self.client = client  # others may still read from the old one, whose connections close with it
        try:
            return script(keys, arguments, client)
        except RedisError as error:
            raise explained(error) from error


def _moved_to(error: RedisError) -> tuple[str, int] | None:
    """Where a cluster says that our slot lies now. Not every supported client knows the reply as an exception of its own."""
    if isinstance(error, MovedError):
        return str(error.host), int(error.port)
    match = _MOVED.match(str(error))
    return (match["host"], int(match["port"])) if match else None


def key_names(namespace: str, names: tuple[str, ...]) -> tuple[str, ...]:
    """Our keys in Redis: half of the digest is as unguessable as all of it, and shorter on the wire (S9)."""
    if not _DIGEST.fullmatch(namespace):
        raise IntegrityError("a namespace is a digest of 64 hex digits")
    return tuple(f"aaflow:{{{namespace[:32]}}}:{name}" for name in names)


def explained(error: RedisError) -> AAFlowError:
    """What an error of the client means for the index. No message of ours quotes credentials; the server's do not either."""
    text = str(error)
    if isinstance(error, OutOfMemoryError):
        return IndexFull(f"the index's server is out of memory: {text}; raise maxmemory or stop what else fills it")
    if isinstance(error, ResponseError) and any(sign in text for sign in _STUMBLED) and "ACL" not in text:
        return IntegrityError(f"others wrote under the index's keys: {text}")
    return IndexUnavailable(f"the index's server does not serve: {type(error).__name__}: {text}")
