"""An index from its URL.

    memory://                              this process only
    unix:///run/redis.sock                 a server on this host; ``unix://user:password@/run/redis.sock?db=0`` with a user
    redis://localhost:6379/0               a server on this host by TCP
    rediss://user:password@host:6379/0     a server anywhere, by TLS and with a password; ``?ssl_ca_certs=FILE``
    embedded://PATH                        a private server in a directory, started by the first who opens it

Knows URLs, and what a server must be like. Credentials appear in no message, log line or ``repr``.
"""

from __future__ import annotations

import ipaddress
import logging
import time
from collections.abc import Callable
from functools import partial
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import redis
from redis.backoff import NoBackoff
from redis.connection import BlockingConnectionPool, Connection, SSLConnection, UnixDomainSocketConnection
from redis.exceptions import AuthenticationError, NoPermissionError, RedisError, ResponseError
from redis.retry import Retry

from aaflow_langgraph._directory import expanded
from aaflow_langgraph.errors import ConfigError, IndexUnavailable
from aaflow_langgraph.index._server import Server, explained
from aaflow_langgraph.index.base import Index
from aaflow_langgraph.index.embedded import EmbeddedServer
from aaflow_langgraph.index.memory import MemoryIndex
from aaflow_langgraph.index.redis import RedisIndex

SCHEMES = ("memory://", "redis://", "rediss://", "unix://", "embedded://PATH")
ACL_RULE = "~aaflow:* resetchannels -@all +@hash +@sortedset +evalsha +script|load +time +ping +info +config|get"
"""What an ACL user needs, without its name and password."""

_TIMEOUT_S = 1.0
_MAX_CONNECTIONS = 64
_OLDEST = (7, 0)
_TLS_OPTIONS = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile")
# Settings of a client that is ours alone: what a shared URL says about them is not meant for us.
_IGNORED = ("decode_responses", "encoding", "encoding_errors", "protocol", "socket_timeout", "socket_connect_timeout")

_Connection = type[Connection] | type[UnixDomainSocketConnection]
_logger = logging.getLogger("aaflow_langgraph")
# What stands in the wrong place of a URL may be a piece of a password: it is never quoted.
_ESCAPES = "write '/', '?', '#' and '@' of a user or password as %2F, %3F, %23 and %40"


def open_index(
    url: str, namespace: str, *, share_recipes: bool = True, clock: Callable[[], float] = time.monotonic
) -> Index:
    """Open the index of one namespace.

    Args:
        url: Where; see the module.
        namespace: Digest of what must be equal for KV to be shared; names the keys on the server.
        share_recipes: May the server know token ids?
        clock: Seconds for ``memory://``; every other index goes by its server's clock.

    Raises:
        ConfigError: The URL, the server's settings or the credentials are wrong. Way out: fail, the message says what to change.
        IndexUnavailable: The server cannot be reached. Way out: retry.
    """
    scheme, separator, rest = url.partition("://")
    if scheme == "memory" and not rest:
        return MemoryIndex(clock)
    if scheme == "embedded" and rest:
        embedded = EmbeddedServer(expanded(rest))
        try:
            pool = _pool(UnixDomainSocketConnection, path=str(embedded.socket))
            return _opened(_EmbeddedRedisServer(pool, namespace, embedded), f"embedded://{rest}", share_recipes)
        except BaseException:
            embedded.close()
            raise
    if separator and scheme in ("redis", "rediss", "unix"):
        connection, options, shown = _address(url)
        follow = None if scheme == "unix" else partial(_moved, connection, options)
        server = Server(redis.Redis(connection_pool=_pool(connection, **options)), namespace, follow=follow)
        return _opened(server, shown, share_recipes)
    raise ConfigError(f"an index is one of {', '.join(SCHEMES)}; what was given is none of them")


class _EmbeddedRedisServer(Server):
    """A server that is ours to start again and to leave."""

    def __init__(self, pool: BlockingConnectionPool, namespace: str, embedded: EmbeddedServer) -> None:
        super().__init__(redis.Redis(connection_pool=pool), namespace, revive=embedded.revive)
        self._embedded = embedded

    def close(self) -> None:
        super().close()
        self._embedded.close()


def _opened(server: Server, shown: str, share_recipes: bool) -> RedisIndex:
    try:
        _require_fit(server, shown)
    except BaseException:
        server.close()
        raise
    return RedisIndex(server, share_recipes=share_recipes)


def _require_fit(server: Server, shown: str) -> None:
    """Raise unless the server answers, lets us in, is new enough, and keeps what it is given."""
    try:
        server.client.ping()
        version = _told(server.client, "server").get("redis_version")
        if version is not None and _version(version) < _OLDEST:
            raise ConfigError(f"{shown} is Redis {version}; 7.0 or newer is needed, or Valkey")
        policy = _policy(server.client)
        if policy is None:
            _logger.warning(
                "%s does not say its maxmemory-policy; make sure that it is no allkeys-* policy: those evict what is in use",
                shown,
            )
        elif policy.startswith("allkeys-"):
            raise ConfigError(
                f"{shown} evicts keys that are in use (maxmemory-policy {policy}); set maxmemory-policy to noeviction or to a "
                f"volatile-* policy, or use a server of its own"
            )
        refused = sorted({name.decode() for name in server.run("probe")})
    except AuthenticationError as error:
        raise ConfigError(
            f"{shown} wants other credentials ({error}); put user and password into the URL: scheme://user:password@host"
        ) from error
    except NoPermissionError as error:
        raise _lacks_rights(shown, str(error)) from error
    except RedisError as error:
        failure = explained(error)
        raise type(failure)(f"{shown}: {failure}") from error
    except IndexUnavailable as error:
        if isinstance(error.__cause__, NoPermissionError):
            raise _lacks_rights(shown, str(error.__cause__)) from error
        raise
    if refused:
        raise _lacks_rights(shown, f"it may not run {', '.join(refused)}")


def _lacks_rights(shown: str, why: str) -> ConfigError:
    return ConfigError(
        f"the user of {shown} lacks rights: {why}; grant them: ACL SETUSER <name> on ><password> {ACL_RULE}"
    )


def _told(client: redis.Redis, section: str) -> dict[str, Any]:
    """A section of INFO; empty for a user who may not ask."""
    try:
        return dict(client.info(section))
    except (NoPermissionError, ResponseError):
        return {}


def _policy(client: redis.Redis) -> str | None:
    try:
        found = client.config_get("maxmemory-policy")
        for name, value in dict(found).items():
            if name in ("maxmemory-policy", b"maxmemory-policy"):
                return value.decode() if isinstance(value, bytes) else str(value)
    except (NoPermissionError, ResponseError):
        pass  # forbidden to the user, or renamed by a hosting service
    told = _told(client, "memory").get("maxmemory_policy")
    return None if told is None else str(told)


def _version(text: object) -> tuple[int, ...]:
    return tuple(int(part) for part in str(text).split(".")[:2] if part.isdigit())


def _pool(connection: _Connection, **options: Any) -> BlockingConnectionPool:
    return BlockingConnectionPool(  # type: ignore[no-untyped-call]
        connection_class=connection,
        max_connections=_MAX_CONNECTIONS,
        timeout=_TIMEOUT_S,
        socket_timeout=_TIMEOUT_S,
        socket_connect_timeout=_TIMEOUT_S,
        retry=Retry(NoBackoff(), 0),
        decode_responses=False,
        protocol=2,
        **options,
    )


def _moved(connection: _Connection, options: dict[str, Any], host: str, port: int) -> redis.Redis:
    """A client for another node of a cluster, held to the same rules as the first."""
    _require_safe(host, connection is SSLConnection, bool(options.get("password")))
    return redis.Redis(connection_pool=_pool(connection, **{**options, "host": host, "port": port}))


def _address(url: str) -> tuple[_Connection, dict[str, Any], str]:
    """Connection class, its options, and the URL as it may be shown."""
    try:
        parts = urlsplit(url)
        host, port, query = (
            parts.hostname,
            parts.port,
            parse_qs(parts.query, keep_blank_values=True, strict_parsing=False),
        )
    except ValueError:
        # Neither the URL nor the parser's words: both may quote a password.
        raise ConfigError(f"the index's URL is malformed behind its scheme {url.partition(':')[0]}://") from None
    scheme = parts.scheme
    path = unquote(parts.path)
    user = f"{unquote(parts.username)}:***@" if parts.username else ":***@" if parts.password else ""
    shown = f"{scheme}://{user}{path}" if scheme == "unix" else f"{scheme}://{user}{host}:{port or 6379}"
    allowed = ("db", *_TLS_OPTIONS) if scheme == "rediss" else ("db",)
    unknown = sorted(query.keys() - {*allowed, *_IGNORED})
    if unknown:
        named = "one of its own" if "@" in parts.path + parts.query else repr(unknown[0])
        raise ConfigError(f"a {scheme}:// URL knows the options {', '.join(allowed)}, not {named}; {_ESCAPES}")
    db = query["db"][-1] if "db" in query else path.strip("/") if scheme != "unix" else ""
    if db and not (db.isascii() and db.isdecimal()):
        raise ConfigError(f"in a {scheme}:// URL a database is a number; {_ESCAPES}")
    options: dict[str, Any] = {"db": int(db or 0)}
    if parts.username:
        options["username"] = unquote(parts.username)
    if parts.password:
        options["password"] = unquote(parts.password)
    if scheme == "unix":
        if not path.startswith("/"):
            raise ConfigError("unix:// needs the absolute path of a socket: unix:///run/redis.sock")
        return UnixDomainSocketConnection, {**options, "path": path}, shown
    if not host:
        raise ConfigError(f"{scheme}:// needs a host: {scheme}://localhost:6379")
    _require_safe(host, scheme == "rediss", bool(parts.password))
    options |= {"host": host, "port": port or 6379}
    if scheme == "redis":
        return Connection, options, shown
    options |= {name: query[name][-1] for name in _TLS_OPTIONS if name in query}
    return SSLConnection, {**options, "ssl_check_hostname": True}, shown


def _require_safe(host: str, is_tls: bool, has_password: bool) -> None:
    """Nothing leaves this host in the clear or without a password (S6, S7)."""
    if host == "localhost":
        return
    try:
        if ipaddress.ip_address(host).is_loopback:
            return
    except ValueError:
        pass  # a name
    if not is_tls:
        raise ConfigError(
            f"redis:// to {host} would send token ids over the network in the clear; use a Unix socket (unix:///path), or "
            f"rediss://user:password@{host} with TLS and an ACL user"
        )
    if not has_password:
        raise ConfigError(
            f"rediss://{host} without a password would let everybody in who reaches it; give an ACL user: "
            f"rediss://user:password@{host}"
        )
