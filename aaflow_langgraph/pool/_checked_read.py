"""Bytes of a file into memory, hashed on the way. Knows files and buffers; knows no format.

Measured, page cache to touched memory, extents of 16 MiB, 2 shared cores: one mapped copy 9.5 GB/s, ``preadv`` 6, xxh3-128
27. Mapping a window at once, then copying and hashing 512 KiB at a time, keeps 0.94 of the mapped copy: the hash finds what
was copied in the cache. Larger pieces leave it, smaller ones pay for calls, and a second thread for the hash costs more in
hand-over than it wins.
"""

from __future__ import annotations

import errno
import mmap
import os
from typing import Any

import numpy as np
import xxhash

from aaflow_langgraph.errors import IntegrityError

PIECE_BYTES = 512 << 10
_WINDOW_BYTES = 16 << 20
_MADV_POPULATE_READ = 22  # Linux 5.14; Python does not name it

DAMAGED = frozenset({errno.EIO, errno.EFAULT, errno.EBADMSG, errno.EUCLEAN})
"""What a file system answers when the bytes are lost; everything else may pass."""


def read_checked(fd: int, offset: int, into: memoryview) -> str:
    """Fill ``into`` from ``offset`` on; xxh3-128, in hex, of what is in ``into`` afterwards.

    What is hashed is the destination, so a byte that went wrong on its way is seen as well.

    Raises:
        IntegrityError: The file ends before ``into`` is full. Way out: fail.
        OSError: The file cannot be read.
    """
    state = xxhash.xxh3_128()
    if not into.nbytes:
        return state.hexdigest()
    mapping = _map(fd, offset + into.nbytes)
    source: Any = np.frombuffer(mapping or b"", dtype=np.uint8)
    target: Any = np.frombuffer(into, dtype=np.uint8)
    for start in range(0, into.nbytes, _WINDOW_BYTES):
        stop = min(start + _WINDOW_BYTES, into.nbytes)
        mapped = mapping is not None and _populate(mapping, offset + start, offset + stop)
        if not mapped:
            _pread(fd, offset + start, into[start:stop])
        for at in range(start, stop, PIECE_BYTES):
            end = min(at + PIECE_BYTES, stop)
            if mapped:
                np.copyto(
                    target[at:end], source[offset + at : offset + end]
                )  # without the GIL, unlike a slice of a memoryview
            state.update(into[at:end])
    return state.hexdigest()


def checksum(fd: int, offset: int, num_bytes: int) -> str:
    """xxh3-128, in hex, of a range of a file; raises as ``read_checked``."""
    state = xxhash.xxh3_128()
    piece = memoryview(bytearray(min(PIECE_BYTES, num_bytes)))
    for start in range(0, num_bytes, PIECE_BYTES):
        part = piece[: min(PIECE_BYTES, num_bytes - start)]
        _pread(fd, offset + start, part)
        state.update(part)
    return state.hexdigest()


def _map(fd: int, num_bytes: int) -> mmap.mmap | None:
    """None where that fails: too short a file, no memory, a file system without mappings. ``pread`` says what it is.

    Never closed by hand: arrays over it may live on in a traceback, and the last of them unmaps it.
    """
    try:
        return mmap.mmap(fd, num_bytes, access=mmap.ACCESS_READ)
    except (OSError, ValueError):
        return None


def _populate(mapping: mmap.mmap, start: int, stop: int) -> bool:
    """Map the pages of a range now. False where that fails: an old kernel, or a page that the disk does not give, which
    would be a SIGBUS at its first use and is an error number for ``pread``.
    """
    start -= start % mmap.PAGESIZE
    try:
        mapping.madvise(_MADV_POPULATE_READ, start, stop - start)
    except OSError:
        return False
    return True


def _pread(fd: int, offset: int, into: memoryview) -> None:
    done = 0
    while done < into.nbytes:
        count = os.preadv(fd, [into[done:]], offset + done)
        if count == 0:
            raise IntegrityError(f"ends at byte {offset + done}, {into.nbytes - done} bytes early")
        done += count
