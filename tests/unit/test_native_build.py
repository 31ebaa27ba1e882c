"""The build hook: a library where there is a compiler, a package without it and one clear line where there is none."""

from __future__ import annotations

import ctypes
import shutil
import stat
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from hatchling.builders.sdist import SdistBuilder
from hatchling.builders.wheel import WheelBuilder

ROOT = Path(__file__).parents[2]
NATIVE = "aaflow_langgraph/native"
LIBRARY = f"{NATIVE}/_attention.so"
COMPILER = next((path for name in ("cc", "gcc", "clang") if (path := shutil.which(name))), None)
BUILT_WITHOUT = "aaflow-langgraph is built without its compiled attention: "

needs_compiler = pytest.mark.skipif(
    COMPILER is None or sys.platform != "linux",
    reason="needs Linux and a C compiler (Debian: apt-get install gcc libc6-dev)",
)


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What a build reads of the checkout, without a library, and no compiler named by the caller's environment."""
    root = tmp_path / "checkout"
    (root / NATIVE).mkdir(parents=True)
    for name in (
        "pyproject.toml",
        "hatch_build.py",
        "README.md",
        "LICENSE",
        ".gitignore",
        "aaflow_langgraph/__init__.py",
    ):
        shutil.copy(ROOT / name, root / name)
    for path in (ROOT / NATIVE).glob("*.*"):
        if path.suffix in (".c", ".py"):
            shutil.copy(path, root / NATIVE)
    monkeypatch.delenv("CC", raising=False)
    return root


def install_editable(root: Path) -> None:
    """What ``pip install -e`` has the hook do; its wheel holds a path only."""
    assert (
        list(WheelBuilder(str(root)).build(directory=str(root / "dist"), versions=["editable"], hooks_only=True)) == []
    )


def build_wheel(root: Path) -> Path:
    (wheel,) = WheelBuilder(str(root)).build(directory=str(root / "dist"), versions=["standard"])
    return Path(wheel)


def wheel_facts(wheel: Path) -> dict[str, str]:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/WHEEL"))
        lines = archive.read(name).decode().splitlines()
    return dict(line.split(": ", 1) for line in lines if line)


def compiler_that(folder: Path, body: str) -> str:
    script = folder / "compiler"
    script.write_text(f"#!/bin/sh\n{body}\n")
    script.chmod(0o755)
    return str(script)


def no_compiler(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "empty").mkdir()
    monkeypatch.setenv("PATH", str(folder / "empty"))


@needs_compiler
def test_an_editable_install_compiles_beside_the_source(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", f"{COMPILER} -Werror")
    before = {path.name for path in (tree / NATIVE).iterdir()}
    install_editable(tree)
    assert {path.name for path in (tree / NATIVE).iterdir()} == before | {"_attention.so"}
    assert ctypes.CDLL(str(tree / LIBRARY)).aaflow_abi() > 0


@needs_compiler
def test_a_wheel_holds_the_library_and_is_named_after_the_platform(
    tree: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tree / LIBRARY).write_bytes(b"left by an editable install of another day")
    wheel = build_wheel(tree)
    facts = wheel_facts(wheel)
    assert facts["Root-Is-Purelib"] == "false"
    assert facts["Tag"].startswith("py3-none-linux_")
    assert wheel.name.endswith(f"-{facts['Tag']}.whl")
    with zipfile.ZipFile(wheel) as archive:
        assert [name for name in archive.namelist() if "_attention" in name] == [LIBRARY]
        archive.extract(LIBRARY, tmp_path / "site-packages")
    assert ctypes.CDLL(str(tmp_path / "site-packages" / LIBRARY)).aaflow_abi() > 0
    assert (tree / LIBRARY).read_bytes().startswith(b"left")  # an environment may run from here
    assert BUILT_WITHOUT not in capfd.readouterr().err


@needs_compiler
def test_a_source_distribution_holds_what_a_wheel_is_made_of(tree: Path, tmp_path: Path) -> None:
    install_editable(tree)
    (path,) = SdistBuilder(str(tree)).build(directory=str(tree / "dist"), versions=["standard"])
    with tarfile.open(path) as archive:
        names = {name.split("/", 1)[1] for name in archive.getnames()}
        archive.extractall(tmp_path / "unpacked", filter="data")
    assert {"hatch_build.py", f"{NATIVE}/attention.c"} <= names
    assert LIBRARY not in names
    (unpacked,) = (tmp_path / "unpacked").iterdir()
    assert LIBRARY in zipfile.ZipFile(build_wheel(unpacked)).namelist()


def test_without_a_compiler_the_wheel_is_pure_python(
    tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tree / LIBRARY).write_bytes(b"left by an editable install of another day")
    no_compiler(tmp_path, monkeypatch)
    wheel = build_wheel(tree)
    facts = wheel_facts(wheel)
    assert (facts["Root-Is-Purelib"], facts["Tag"]) == ("true", "py3-none-any")
    assert not [name for name in zipfile.ZipFile(wheel).namelist() if "_attention" in name]
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith(BUILT_WITHOUT)
    assert "no C compiler" in line
    assert line.endswith("Install one (Debian: apt-get install gcc libc6-dev), and install again.")


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (
            "echo 'attention.c:7: error: unknown target' >&2; echo 'stopped' >&2; exit 1",
            "exit status 1 (attention.c:7: error: unk",
        ),
        ("exit 3", "exit status 3 (it said nothing)"),
        ("exit 0", "exit status 0 (it said nothing)"),
        ('while [ "$1" != -o ]; do shift; done; echo text > "$2"', "made no shared library"),
        (f'exec {COMPILER} -c "$@"', "made no shared library"),
    ],
    ids=["with an error", "silently", "without writing anything", "into text", "into an object file"],
)
def test_a_compiler_that_fails_is_quoted_and_leaves_no_older_library(
    body: str, said: str, tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tree / LIBRARY).write_bytes(b"of an older source")
    before = {path.name for path in (tree / NATIVE).iterdir()}
    monkeypatch.setenv("CC", compiler_that(tmp_path, body))
    install_editable(tree)
    assert {path.name for path in (tree / NATIVE).iterdir()} == before - {"_attention.so"}
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith(BUILT_WITHOUT)
    assert said in line
    assert line.endswith("Mend that, or name another compiler in CC, and install again.")


@pytest.mark.parametrize(
    ("named", "said"),
    [
        ("/nowhere/cc -O1", "the compiler '/nowhere/cc' cannot be run (No such file or directory)"),
        ("cc '", 'CC is "cc \'", which is no command (No closing quotation)'),
    ],
    ids=["not there", "no command"],
)
def test_a_compiler_that_cannot_be_run_is_named(
    named: str, said: str, tree: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CC", named)
    assert wheel_facts(build_wheel(tree))["Tag"] == "py3-none-any"
    assert said in capfd.readouterr().err


def test_other_platforms_get_the_package_without_it(
    tree: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    install_editable(tree)
    assert not (tree / LIBRARY).exists()
    assert f"{BUILT_WITHOUT}it is compiled on Linux only, this is darwin" in capfd.readouterr().err


@pytest.mark.skipif(not Path("/sys/kernel").is_dir(), reason="needs a folder in which not even root may create one")
def test_a_checkout_that_cannot_be_written_is_installed_as_it_is(tree: Path, capfd: pytest.CaptureFixture[str]) -> None:
    shutil.rmtree(tree / NATIVE)
    (tree / NATIVE).symlink_to("/sys/kernel", target_is_directory=True)
    install_editable(tree)
    (line,) = capfd.readouterr().err.splitlines()
    assert f"{tree / NATIVE} cannot be written (" in line
    assert "or install from this checkout without -e" in line


@needs_compiler
def test_the_library_is_readable_by_whoever_may_read_what_is_installed_beside_it(tree: Path) -> None:
    (tree / NATIVE / "beside").touch()
    install_editable(tree)
    may_read = stat.S_IRUSR | stat.S_IRGRP | stat.S_IROTH
    assert (tree / LIBRARY).stat().st_mode & may_read == (tree / NATIVE / "beside").stat().st_mode & may_read
