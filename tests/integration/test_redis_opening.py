"""Opening an index by URL: what is let in, what is refused and with which words. Real servers."""

from __future__ import annotations

import logging
import secrets
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from aaflow_langgraph.errors import ConfigError, IndexUnavailable
from aaflow_langgraph.index.base import Index
from aaflow_langgraph.index.memory import MemoryIndex
from aaflow_langgraph.index.opening import ACL_RULE, open_index
from aaflow_langgraph.index.redis import RedisIndex
from aaflow_langgraph.testing.index_cases import OWNER, B, query, record, sequence
from tests.servers import KINDS, DidNotStart, RealServer, redis_server, running, short_folder  # noqa: F401

NAMESPACE = "e" * 64
SECRET = "hunter2-and-more"


def works(index: Index) -> None:
    """Every kind of command runs."""
    epoch = index.join(OWNER, 60.0)
    ids = sequence("AB")
    kept, receipt = index.put(record(index, ids), epoch, 60.0)
    assert index.heartbeat(OWNER, epoch, 60.0)
    match = index.match(query(ids), 2 * B, 60.0)
    assert match.stop == 2 * B
    index.renew(match.receipt, 60.0)
    assert index.covering(query(ids)) == index.records(OWNER) == [kept]
    assert index.num_leases() == 2
    assert index.release(match.receipt)
    assert index.release(receipt)
    assert index.set_on_disk(kept.extent_id, True)
    assert len(index.candidates(OWNER)) == 1
    assert index.claim("f" * 64, OWNER, 60.0)
    assert index.unclaim("f" * 64, OWNER)
    assert index.recipe("c" * 64) is None
    assert index.check() == []
    index.sweep()
    assert index.leave(OWNER) == 1
    assert index.set_on_disk(kept.extent_id, False)
    assert index.records() == []


@pytest.fixture
def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def test_memory_is_an_index_of_this_process() -> None:
    assert isinstance(open_index("memory://", NAMESPACE), MemoryIndex)


@pytest.mark.parametrize(
    "url", ["", "http://localhost", "memory://x", "embedded://", "redis", "REDISS ://x", "/tmp/socket"]
)
def test_an_unknown_scheme_is_refused_with_those_that_are_known(url: str) -> None:
    with pytest.raises(ConfigError, match=r"memory://, redis://, rediss://, unix://, embedded://PATH"):
        open_index(url, NAMESPACE)


@pytest.mark.parametrize(
    ("url", "words"),
    [
        (f"redis://u:{SECRET}@localhost:port/0", "malformed"),
        (f"redis://u:{SECRET}@[::1/0", "malformed"),
        ("unix://relative", "absolute"),
        ("redis://", "needs a host"),
        ("redis://localhost/abc", "database is a number"),
        ("redis://localhost/0?ssl_cert_reqs=none", "ssl_cert_reqs"),
        ("rediss://localhost/0?ssl_cert_reqs=none", "ssl_cert_reqs"),
        (f"redis://u:{SECRET}@db.example.org:6379", "in the clear"),
        ("redis://10.1.2.3", "in the clear"),
        ("redis://0.0.0.0", "in the clear"),
        ("rediss://db.example.org", "without a password"),
        ("rediss://user@db.example.org", "without a password"),
    ],
)
def test_a_url_that_is_malformed_or_unsafe_is_refused_and_says_why(url: str, words: str) -> None:
    """S6, S7: nothing beyond this host in the clear or without a password; no password in a message."""
    with pytest.raises(ConfigError, match=words) as caught:
        open_index(url, NAMESPACE)
    shown = repr(caught.value) + repr(caught.value.__cause__) + repr(caught.value.__context__)
    assert SECRET not in shown or caught.value.__suppress_context__
    assert SECRET not in str(caught.value)


def test_a_server_that_is_not_there_is_unavailable(free_port: int) -> None:
    for url in (f"redis://127.0.0.1:{free_port}", "unix:///tmp/no/such/socket"):
        with pytest.raises(IndexUnavailable, match="does not serve"):
            open_index(url, NAMESPACE)


@pytest.mark.parametrize(
    "query_part", ["", "?decode_responses=True", "?db=3&decode_responses=yes&protocol=3&encoding=latin-1"]
)
def test_a_url_for_other_clients_does_not_change_ours(redis_server: RealServer, query_part: str) -> None:
    """Case 14: replies are bytes, whatever a shared URL says."""
    index = open_index(redis_server.url + query_part, secrets.token_hex(32))
    works(index)
    index.close()
    index.close()


@pytest.mark.parametrize("kind", KINDS)
def test_a_policy_that_evicts_what_is_in_use_is_refused_with_the_setting_to_change(kind: str) -> None:
    """It would drop referenced handles."""
    with running(kind, "--maxmemory-policy", "allkeys-lru") as server:
        with pytest.raises(ConfigError, match=r"allkeys-lru.*set maxmemory-policy to noeviction"):
            open_index(server.url, NAMESPACE)
        with server.client() as client:
            client.config_set("maxmemory-policy", "volatile-lru")
        open_index(server.url, NAMESPACE).close()


@pytest.mark.parametrize("kind", KINDS)
def test_passwords_open_and_are_never_shown(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    with running(kind, "--requirepass", SECRET) as server:
        path = server.socket
        for url in (f"unix://{path}", f"unix://:wrong-{SECRET}@{path}", f"unix://nobody:{SECRET}@{path}"):
            with pytest.raises(ConfigError, match="credentials") as caught:
                open_index(url, NAMESPACE)
            assert SECRET not in repr(caught.value) + repr(caught.value.__cause__)
        index = open_index(f"unix://:{SECRET}@{path}", NAMESPACE)
        works(index)
        assert SECRET not in repr(index) + repr(vars(index))
        server.kill()
        with pytest.raises(IndexUnavailable) as unavailable:
            index.num_leases()
        assert SECRET not in repr(unavailable.value) + repr(unavailable.value.__cause__)
        index.close()
    assert SECRET not in caplog.text


@pytest.mark.parametrize("kind", KINDS)
def test_an_acl_user_of_our_keys_alone_is_enough(kind: str) -> None:
    """S7: the documented rule, and what it does not let us do."""
    with running(kind) as server:
        with server.client() as client:
            client.execute_command("ACL", "SETUSER", "kv", "on", f">{SECRET}", *ACL_RULE.split())
        index = open_index(f"unix://kv:{SECRET}@{server.socket}", NAMESPACE)
        works(index)
        index.close()
        with server.client(username="kv", password=SECRET) as limited:
            for command in (("GET", "other"), ("HSET", "other", "a", "b"), ("KEYS", "*"), ("FLUSHALL",)):
                with pytest.raises(Exception, match="permission"):
                    limited.execute_command(*command)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "rule",
    [
        "~aaflow:* -@all +ping +info",
        "~aaflow:* -@all +@hash +evalsha +script|load +time +ping",
        "~other:* +@all",
    ],
)
def test_a_user_without_the_rights_is_refused_with_the_rule_that_grants_them(kind: str, rule: str) -> None:
    with running(kind) as server:
        with server.client() as client:
            client.execute_command("ACL", "SETUSER", "kv", "on", f">{SECRET}", *rule.split())
        with pytest.raises(ConfigError, match=r"ACL SETUSER .*\+evalsha") as caught:
            open_index(f"unix://kv:{SECRET}@{server.socket}", NAMESPACE)
        assert SECRET not in str(caught.value)


@pytest.mark.parametrize("kind", KINDS)
def test_a_user_who_may_not_ask_for_settings_is_warned_once(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    rule = ACL_RULE.replace(" +config|get", "").replace(" +info", "")
    with running(kind) as server:
        with server.client() as client:
            client.execute_command("ACL", "SETUSER", "kv", "on", f">{SECRET}", *rule.split())
        index = open_index(f"unix://kv:{SECRET}@{server.socket}", NAMESPACE)
        works(index)
        index.close()
    assert [r.name for r in caplog.records if "maxmemory-policy" in r.message] == ["aaflow_langgraph"]


@pytest.fixture(scope="module")
def certificate() -> Iterator[Path]:
    """A self-made certificate for localhost."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    with short_folder() as folder:
        subject = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
        key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-keyout", str(folder / "key")]
        command = ["openssl", "req", "-x509", "-nodes", "-days", "2", *key, "-out", str(folder / "cert"), *subject]
        subprocess.run(command, check=True, capture_output=True)
        yield folder


@pytest.mark.parametrize("kind", KINDS)
def test_tls_works_and_is_checked(kind: str, certificate: Path, free_port: int) -> None:
    """S7."""
    tls = ["--tls-cert-file", str(certificate / "cert"), "--tls-key-file", str(certificate / "key")]
    tls += ["--tls-ca-cert-file", str(certificate / "cert"), "--tls-auth-clients", "no", "--tls-port", str(free_port)]
    try:
        with running(kind, *tls):
            pass
    except DidNotStart as error:
        assert "tls" in str(error)  # noqa: PT017
        pytest.skip(f"{kind} is built without TLS")
    with running(kind, "--requirepass", SECRET, *tls):
        trusted = f"rediss://:{SECRET}@localhost:{free_port}/0?ssl_ca_certs={certificate / 'cert'}"
        index = open_index(trusted, secrets.token_hex(32))
        assert isinstance(index, RedisIndex)
        works(index)
        index.close()
        with pytest.raises(IndexUnavailable, match="certificate"):
            open_index(f"rediss://:{SECRET}@localhost:{free_port}", NAMESPACE)
