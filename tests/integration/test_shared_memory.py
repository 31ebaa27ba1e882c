"""Memory that is not there: every way of running out is a typed error with the numbers, none a signal."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from aaflow_langgraph.errors import ConfigError
from aaflow_langgraph.pool import _memory
from aaflow_langgraph.pool.shared import SharedPool
from tests.processes import Failed, Worker, num_descriptors, num_mappings

MIB = 1 << 20


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[Worker]:
    worker = Worker(tmp_path / "run")
    yield worker
    worker.end()


@pytest.fixture
def without_memfd(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise OSError(errno.ENOSYS, "not here")

    monkeypatch.setattr(os, "memfd_create", refuse)


def test_more_than_the_machine_has_is_refused_before_a_page_is_taken(worker: Worker) -> None:
    worker("limit", "RLIMIT_FSIZE", 64 * MIB)  # so that a failure of this test is not the machine's
    before = worker("num_descriptors")
    with pytest.raises(
        Failed, match=r"ConfigError: .* needs \d+ bytes of memory and \d+ are available; pass a smaller pool_bytes"
    ):
        worker("open", 1 << 50)
    assert worker("num_descriptors") == before


def test_what_is_available_is_a_number_of_this_machine() -> None:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert 0 < _memory.available_bytes() <= total


@pytest.mark.parametrize("refuse_memfd", [False, True])
@pytest.mark.parametrize("what", ["RLIMIT_AS", "RLIMIT_FSIZE"])
def test_a_process_that_may_not_have_so_much_gets_an_error_and_stays(
    worker: Worker, what: str, refuse_memfd: bool
) -> None:
    if refuse_memfd:
        worker("refuse_memfd")
    worker("open", MIB)
    before = worker("num_descriptors")
    worker("limit", what, 64 * MIB)
    with pytest.raises(
        Failed, match=r"ConfigError: cannot take \d+ bytes of .*, for the pool: .*; pass a smaller pool_bytes"
    ):
        worker("open_another", 128 * MIB)
    assert worker("num_descriptors") == before
    assert worker("check") == []


def test_memory_that_somebody_else_took_first_is_an_error_too(
    without_memfd: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Between the look at what is free and the allocation. Filling the real /dev/shm could end the machine's processes."""

    def taken(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", taken)
    descriptors, mappings = num_descriptors(), num_mappings()
    with pytest.raises(ConfigError, match=r"of /dev/shm, where \d+ are free, for the pool: No space left"):
        SharedPool(MIB, run_dir=tmp_path / "run")
    assert (num_descriptors(), num_mappings()) == (descriptors, mappings)


@pytest.fixture
def small_shm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A tmpfs of 2 MiB."""
    folder = tmp_path / "shm"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(folder)], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"cannot mount a tmpfs: {mounted.stderr.decode().strip()}")
    monkeypatch.setattr(_memory, "_FALLBACK_PARENT", folder)
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_full_dev_shm_is_an_error_and_a_pool_that_fits_afterwards_works(
    without_memfd: None, small_shm: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="No space left"):
        SharedPool(3 * MIB, run_dir=tmp_path / "run")
    assert list(_memory.fallback_dir().iterdir()) == []
    pool = SharedPool(MIB, run_dir=tmp_path / "run")
    assert list(_memory.fallback_dir().iterdir()) == []  # the file has lost its name already
    with pytest.raises(ConfigError, match="No space left"):
        SharedPool(MIB, run_dir=tmp_path / "run")
    whole = pool.reserve(MIB)
    assert whole is not None
    pool.close()
    del pool
    SharedPool(MIB, run_dir=tmp_path / "run").close()


def test_a_kernel_without_these_seals_gets_the_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(_memory, "_SEALS", 0x17 | 0x4000)  # a seal that no kernel knows
    descriptors, mappings = num_descriptors(), num_mappings()
    memory = _memory.create(8192, "pool.mem")
    assert memory.kind == "file"
    assert _memory.is_protected(memory.fd, "file")
    os.close(memory.fd)
    memory.mapping.close()
    assert (num_descriptors(), num_mappings()) == (descriptors, mappings)


def test_a_directory_of_others_in_dev_shm_is_refused(
    without_memfd: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(_memory, "_FALLBACK_PARENT", tmp_path)
    _memory.fallback_dir().mkdir(mode=0o755)
    with pytest.raises(ConfigError, match="mode 0755"):
        SharedPool(4096, run_dir=tmp_path / "run")


def test_a_pool_is_zeroed_whoever_had_the_memory_before(tmp_path: Path) -> None:
    pool = SharedPool(MIB, run_dir=tmp_path / "run")
    whole = pool.reserve(MIB)
    assert whole is not None
    assert not pool.tensor(whole, torch.uint8, (MIB,)).any()
    pool.close()
