"""Compiles attention over extents for CPUs while the package is built or installed, and goes on without where it cannot.

Knows compilers and wheels. Does not know what the C file does, nor which CPU will run it: that is seen when it is loaded.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.builders.wheel import WheelBuilderConfig
from packaging.tags import platform_tags

SOURCE = "aaflow_langgraph/native/attention.c"
LIBRARY = "aaflow_langgraph/native/_attention.so"
# No -march: the file chooses its instructions itself, so that one library runs on every CPU of the architecture.
FLAGS = ("-O3", "-std=c11", "-fPIC", "-shared", "-fvisibility=hidden", "-Wall")


class NotBuilt(Exception):
    """Why there is no library (``why``), and the way out as a sentence (``todo``)."""

    def __init__(self, why: str, todo: str) -> None:
        super().__init__(why, todo)
        self.why = why
        self.todo = todo


class NativeBuildHook(BuildHookInterface[WheelBuilderConfig]):
    """Puts the library into a wheel, or beside its source for an editable install. Never fails a build."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile; a wheel that got the library is named after the platform, any other is pure Python."""
        # A wheel's library is compiled elsewhere: the checkout may be read-only, or another environment may run from it.
        self._scratch = None if version == "editable" else tempfile.TemporaryDirectory(prefix="aaflow-native-")
        library = Path(self._scratch.name if self._scratch else self.root, LIBRARY)
        try:
            build(Path(self.root), library)
        except NotBuilt as error:
            self.app.display_warning(
                f"aaflow-langgraph is built without its compiled attention: {error.why}. torch computes the same instead; "
                f"decoding on CPU is slower. {error.todo}"
            )
            return
        self.app.display_info(f"compiled {SOURCE}")
        if self._scratch:
            build_data["force_include"][str(library)] = LIBRARY
            build_data["pure_python"] = False
            # Called through ctypes, so no Python's ABI is in the name; manylinux would promise what nobody has checked.
            platform = next(tag for tag in platform_tags() if tag.startswith("linux_"))
            build_data["tag"] = f"py3-none-{platform}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove what the wheel has a copy of."""
        if self._scratch:
            self._scratch.cleanup()


def build(root: Path, library: Path) -> None:
    """Compile ``SOURCE`` of the tree at ``root`` into ``library``, which is replaced whole or, without a compiler, removed.

    Raises:
        NotBuilt: Always with the reason and the way out. No library of an older source is left, unless the folder
            cannot be written.
    """
    try:
        library.parent.mkdir(parents=True, exist_ok=True)
        # Renamed within one folder: a process that has the old library open keeps it, none ever sees half of one.
        with tempfile.TemporaryDirectory(prefix="_attention.", dir=library.parent) as scratch:
            output = Path(scratch, library.name)
            try:
                run_compiler(root, output)
            except NotBuilt:
                library.unlink(missing_ok=True)
                raise
            output.replace(library)
    except OSError as error:
        raise NotBuilt(
            f"{library.parent} cannot be written ({error.strerror})",
            "Make it writable, or install from this checkout without -e, and install again.",
        ) from error


def run_compiler(root: Path, output: Path) -> None:
    """Run the compiler once, in ``root``."""
    if sys.platform != "linux":
        raise NotBuilt(f"it is compiled on Linux only, this is {sys.platform}", "There is nothing to do.")
    command = compiler()
    again = "Mend that, or name another compiler in CC, and install again."
    try:
        done = subprocess.run(
            [*command, *FLAGS, "-o", str(output), SOURCE],
            cwd=root,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
        )
    except OSError as error:
        raise NotBuilt(f"the compiler {command[0]!r} cannot be run ({error.strerror})", again) from error
    said = [line.strip() for line in (done.stderr + done.stdout).splitlines() if line.strip()]
    if done.returncode or not output.exists():
        told = next((line for line in said if "error" in line.lower()), said[-1] if said else "it said nothing")
        raise NotBuilt(f"{shlex.join(command)} ended with exit status {done.returncode} ({told})", again)
    with output.open("rb") as made:
        if made.read(4) != b"\x7fELF" or made.read(14)[-2:] not in (b"\x03\x00", b"\x00\x03"):
            raise NotBuilt(f"{shlex.join(command)} made no shared library", again)


def compiler() -> list[str]:
    """The words of ``$CC``, or else the first compiler on PATH."""
    named = os.environ.get("CC", "")
    try:
        if words := shlex.split(named):
            return words
    except ValueError as error:
        raise NotBuilt(
            f"CC is {named!r}, which is no command ({error})", "Mend or unset CC, and install again."
        ) from error
    for name in ("cc", "gcc", "clang"):
        if shutil.which(name):
            return [name]
    raise NotBuilt(
        "there is no C compiler (CC is not set, and neither cc nor gcc nor clang is on PATH)",
        "Install one (Debian: apt-get install gcc libc6-dev), and install again.",
    )
