"""Assets come whole, checked and once, or not at all. Wheels are small ones made here; pip never reaches a network."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import subprocess
import sys
import threading
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from aaflow_langgraph import _wheel, assets
from aaflow_langgraph.errors import CapacityError, ConfigError, IntegrityError
from tests.real import real_cache  # noqa: F401

PREFIX = "toy_docs/data/"


def make_wheel(folder: Path, members: dict[str, bytes]) -> Path:
    """A valid wheel of ``toy-docs`` 1.0 with the given members."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "toy_docs-1.0-py3-none-any.whl"
    described = {
        "toy_docs-1.0.dist-info/METADATA": b"Metadata-Version: 2.1\nName: toy-docs\nVersion: 1.0\n",
        "toy_docs-1.0.dist-info/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        "toy_docs-1.0.dist-info/RECORD": b"",
    }
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in {**members, **described}.items():
            archive.writestr(name, content)
    return path


def asset_of(wheel: Path) -> _wheel.Asset:
    return _wheel.Asset(
        folder="toy",
        package="toy-docs",
        version="1.0",
        sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        wheel_bytes=wheel.stat().st_size,
        room_bytes=1000,
        prefix=PREFIX,
        licence="CC0",
    )


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small wheel that pip finds, and an empty cache."""
    made = make_wheel(tmp_path / "links", {f"{PREFIX}a.json": b"{}", "toy_docs/__init__.py": b"raise SystemExit"})
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_FIND_LINKS", str(made.parent))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    return made


@pytest.fixture
def without_pip(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The same, with pip replaced by a copy: fast, and it accepts wheels that pip itself would refuse."""

    def copy(asset: _wheel.Asset, work: Path, console: Console) -> Path:
        copied = work / wheel.name
        copied.write_bytes(wheel.read_bytes())
        return copied

    monkeypatch.setattr(assets, "download", copy)
    return wheel


def ensure(asset: _wheel.Asset, progress: bool = False) -> Path:
    return assets._ensure(asset, assets._build_copy, progress)


def leftovers() -> list[str]:
    return sorted(path.name for path in assets.cache_dir().iterdir() if not path.name.endswith(".lock"))


def test_a_wheel_is_fetched_once_and_later_runs_are_offline(wheel: Path) -> None:
    asset = asset_of(wheel)
    folder = ensure(asset)
    assert sorted(path.name for path in folder.iterdir()) == ["SOURCE.json", "a.json"]
    assert json.loads((folder / "SOURCE.json").read_text())["wheel_sha256"] == asset.sha256
    wheel.unlink()
    assert ensure(asset) == folder
    assert leftovers() == ["toy"]


def test_pip_failing_is_a_config_error_that_names_the_pin_and_the_way_out(wheel: Path) -> None:
    asset = asset_of(wheel)
    wheel.unlink()
    with pytest.raises(ConfigError, match=r"toy-docs==1\.0.*PIP_FIND_LINKS.*pip said"):
        ensure(asset)
    assert leftovers() == []


def test_a_missing_pip_is_named(wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho 'python: No module named pip' >&2\nexit 1\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    with pytest.raises(ConfigError, match="has no pip.*ensurepip"):
        ensure(asset_of(wheel))


def test_another_digest_is_refused_and_leaves_nothing(without_pip: Path) -> None:
    with pytest.raises(IntegrityError, match=f"{'0' * 64}.*discarded"):
        ensure(replace(asset_of(without_pip), sha256="0" * 64))
    assert leftovers() == []


def test_a_truncated_wheel_is_refused_then_repaired_by_another_run(without_pip: Path) -> None:
    asset, whole = asset_of(without_pip), without_pip.read_bytes()
    without_pip.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(IntegrityError, match="discarded"):
        ensure(asset)
    without_pip.write_bytes(whole)
    assert ensure(asset).is_dir()


def test_a_truncated_wheel_through_pip_is_a_typed_error(wheel: Path) -> None:
    asset = asset_of(wheel)
    wheel.write_bytes(wheel.read_bytes()[:100])
    with pytest.raises((ConfigError, IntegrityError), match="toy-docs==1"):
        ensure(asset)
    assert leftovers() == []


def test_a_file_that_is_no_archive_is_refused_even_with_the_right_digest(without_pip: Path) -> None:
    without_pip.write_bytes(b"not a zip")
    with pytest.raises(IntegrityError, match="cannot be unpacked"):
        ensure(asset_of(without_pip))


@pytest.mark.parametrize("name", ["../evil", "../../../evil", "a/../../../../evil", "..\\evil", "C:evil"])
def test_a_member_that_would_leave_the_folder_is_refused(without_pip: Path, name: str) -> None:
    make_wheel(without_pip.parent, {PREFIX + name: b"evil"})
    with pytest.raises(IntegrityError, match="may not be unpacked"):
        ensure(asset_of(without_pip))
    assert not list(without_pip.parents[1].rglob("*evil*"))


def test_a_symbolic_link_is_refused(without_pip: Path) -> None:
    link = zipfile.ZipInfo(f"{PREFIX}link")
    link.external_attr = 0o120777 << 16
    with zipfile.ZipFile(without_pip, "a") as archive:
        archive.writestr(link, "/etc/passwd")
    with pytest.raises(IntegrityError, match="may not be unpacked"):
        ensure(asset_of(without_pip))


def test_a_wheel_without_the_wanted_members_is_refused(without_pip: Path) -> None:
    with pytest.raises(IntegrityError, match="lacks other/"):
        ensure(replace(asset_of(without_pip), prefix="other/"))


def test_a_pinned_member_is_checked(without_pip: Path) -> None:
    good = hashlib.sha256(b"{}").hexdigest()
    with pytest.raises(IntegrityError, match=f"{PREFIX}a.json has SHA-256"):
        ensure(replace(asset_of(without_pip), members=((f"{PREFIX}a.json", "0" * 64),)))
    assert ensure(replace(asset_of(without_pip), members=((f"{PREFIX}a.json", good),))).is_dir()


def test_a_damaged_or_foreign_folder_is_made_anew(without_pip: Path) -> None:
    asset = asset_of(without_pip)
    folder = ensure(asset)
    (folder / "a.json").write_bytes(b"")
    assert (ensure(asset) / "a.json").read_bytes() == b"{}"
    make_wheel(without_pip.parent, {f"{PREFIX}a.json": b"[1]"})
    assert (ensure(asset_of(without_pip)) / "a.json").read_bytes() == b"[1]"
    (folder / "SOURCE.json").write_text("[]")
    assert (ensure(asset_of(without_pip)) / "a.json").read_bytes() == b"[1]"


def test_what_a_killed_process_left_is_swept(without_pip: Path) -> None:
    left = assets.cache_dir() / "toy.tmp-dead"
    left.mkdir(parents=True)
    (left / "half").write_bytes(b"x")
    ensure(asset_of(without_pip))
    assert leftovers() == ["toy"]


def test_threads_at_once_build_once_and_all_succeed(without_pip: Path) -> None:
    asset, built, found, start = asset_of(without_pip), [], [], threading.Barrier(6)

    def build(asset: _wheel.Asset, unpacked: Path, target: Path, console: Console) -> None:
        built.append(1)
        assets._build_copy(asset, unpacked, target, console)

    def run() -> None:
        start.wait()
        found.append(assets._ensure(asset, build, False))

    threads = [threading.Thread(target=run) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(built) == 1
    assert set(found) == {assets.cache_dir() / "toy"}
    assert len(found) == 6


def test_two_processes_at_once_both_succeed(wheel: Path, tmp_path: Path) -> None:
    script = tmp_path / "two.py"
    script.write_text(
        "import sys\nfrom aaflow_langgraph import _wheel, assets\n"
        f"print(assets._ensure(_wheel.{asset_of(wheel)!r}, assets._build_copy, True))\n"
    )
    running = [
        subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    ended = [(*process.communicate(timeout=60), process.returncode) for process in running]
    assert [(out.strip(), code) for out, _, code in ended] == [(str(assets.cache_dir() / "toy"), 0)] * 2
    assert sum("fetching toy-docs==1.0" in err for _, err, _ in ended) == 1
    assert leftovers() == ["toy"]


def test_a_disk_too_small_is_refused_before_the_download(without_pip: Path) -> None:
    with pytest.raises(CapacityError, match=r"needs 1,000,000,000,000 MB in .*XDG_CACHE_HOME"):
        ensure(replace(asset_of(without_pip), room_bytes=10**18))


def test_a_disk_that_fills_up_is_a_capacity_error(without_pip: Path) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(CapacityError, match="free some space"):
        assets._ensure(asset_of(without_pip), full, False)
    assert leftovers() == []


def test_a_cache_folder_that_cannot_be_made_is_a_config_error(without_pip: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file in the way")
    with pytest.raises(ConfigError, match="cannot write the cache folder .*XDG_CACHE_HOME"):
        ensure(asset_of(without_pip))


def test_a_relative_cache_home_is_ignored(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert assets.cache_dir() == tmp_path / ".cache" / "aaflow-langgraph"


def test_progress_goes_to_stderr_and_can_be_switched_off(
    without_pip: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def build(asset: _wheel.Asset, unpacked: Path, target: Path, console: Console) -> None:
        console.print("building")
        assets._build_copy(asset, unpacked, target, console)

    for progress, shown in ((False, ""), (True, "building\n")):
        assets._ensure(replace(asset_of(without_pip), folder=f"toy-{progress}"), build, progress)
        assert capsys.readouterr() == ("", shown)


@pytest.mark.parametrize(
    ("says", "code", "error", "match"),
    [
        ("ModuleNotFoundError: No module named 'gguf'", "1", ConfigError, r"aaflow-langgraph\[demo\]"),
        ("OSError: [Errno 28] No space left on device", "1", CapacityError, "free some space"),
        ("ValueError: odd file", "1", ConfigError, "could not be converted: ValueError: odd file"),
        ("", "$(kill -9 $$)", CapacityError, "signal 9"),
    ],
)
def test_a_failed_conversion_says_what_to_do(
    without_pip: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    says: str,
    code: str,
    error: type[Exception],
    match: str,
) -> None:
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\necho "{says}" >&2\nexit {code}\n')
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    with pytest.raises(error, match=match):
        assets._ensure(asset_of(without_pip), assets._build_model, False)
    assert leftovers() == []


@pytest.mark.slow
def test_the_factbook_holds_256_country_files(real_cache: None) -> None:
    folder = assets.factbook(progress=False)
    assert len(list(folder.glob("*/*.json"))) == 256


@pytest.mark.slow
def test_the_demo_model_loads_in_bf16_with_its_chat_template(real_cache: None) -> None:
    from transformers import AutoConfig, AutoTokenizer

    folder = assets.demo_model(progress=False)
    config, tokenizer = AutoConfig.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert (config.model_type, config.num_hidden_layers, config.num_key_value_heads) == ("llama", 30, 3)
    assert config.max_position_embeddings == 8192
    assert not hasattr(config, "quantization_config")
    assert tokenizer.convert_ids_to_tokens(config.eos_token_id) == "<|im_end|>"
    rendered = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False)
    assert rendered.endswith("<|im_start|>user\nHi<|im_end|>\n")
