"""The package's one compiled part: attention over pieces of KV for CPUs with AVX512-BF16 (``attention.c``).

Built when the package is installed, where there is a compiler; whoever asks gets None where it was not, where the CPU lacks the
instructions, or where torch brings no OpenMP threads to share. Knows addresses and structures; knows no tensor.
"""

from __future__ import annotations

import ctypes
import struct
from functools import lru_cache
from pathlib import Path
from typing import Any

_ABI = 2


class Stretch(ctypes.Structure):
    """Keys and values ``[L, 2, H, length, D]`` in place, strides in numbers, and who of the plan's readers reads them."""

    _fields_ = (
        ("address", ctypes.c_void_p),
        ("layer", ctypes.c_int64),
        ("value", ctypes.c_int64),
        ("head", ctypes.c_int64),
        ("token", ctypes.c_int64),
        ("length", ctypes.c_int32),
        ("first_reader", ctypes.c_int32),
        ("num_readers", ctypes.c_int32),
        ("unused", ctypes.c_int32),
    )


class Reader(ctypes.Structure):
    """A new token, and how many tokens of a stretch it attends to. A stretch's readers ascend in what they see."""

    _fields_ = (("row", ctypes.c_int32), ("num_seen", ctypes.c_int32))


class Slot(ctypes.Structure):
    """Where the key and the value of a new token go."""

    _fields_ = (("stretch", ctypes.c_int32), ("at", ctypes.c_int32))


class Plan(ctypes.Structure):
    """Who attends to what in one forward. What stands behind ``parallel`` is filled in by ``aaflow_prepare``."""

    _fields_ = (
        ("stretches", ctypes.POINTER(Stretch)),
        ("readers", ctypes.POINTER(Reader)),
        ("slots", ctypes.POINTER(Slot)),
        ("num_stretches", ctypes.c_int32),
        ("num_readers", ctypes.c_int32),
        ("num_rows", ctypes.c_int32),
        ("num_shares", ctypes.c_int32),
        ("num_heads", ctypes.c_int32),
        ("num_kv_heads", ctypes.c_int32),
        ("dim", ctypes.c_int32),
        ("num_threads", ctypes.c_int32),
        ("scale", ctypes.c_float),
        ("num_chunks", ctypes.c_int32),
        ("parallel", ctypes.c_void_p),
        ("chunks", ctypes.c_void_p),
        ("shares", ctypes.c_void_p),
        ("first_share", ctypes.c_void_p),
        ("parts", ctypes.c_void_p),
        ("rooms", ctypes.c_void_p),
        ("room_bytes", ctypes.c_int64),
        ("cost", ctypes.c_int64),
    )


@lru_cache(maxsize=1)
def library() -> ctypes.CDLL | None:
    """The compiled functions with their types, or None where they are not to be had. Import torch before: it brings the threads."""
    if parallel() is None:
        return None
    plan, address, number, stride = ctypes.POINTER(Plan), ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64
    arguments: dict[str, tuple[Any, ...]] = {
        "aaflow_prepare": (plan, address),
        "aaflow_store": (plan, number, address, stride, stride, address, stride, stride),
        "aaflow_attend": (plan, number, address, stride, stride, address),
        "aaflow_layer": (plan, number, address, address, address, address),
        "aaflow_add_norm": (address, address, address, ctypes.c_float, address, stride, stride),
        "aaflow_gate": (address, address, stride, stride),
    }
    try:
        file = Path(__file__).with_name("_attention.so")
        if not _is_whole(file):
            return None
        loaded = ctypes.CDLL(str(file))
        loaded.aaflow_plan_bytes.restype = ctypes.c_int64
        if loaded.aaflow_abi() != _ABI or loaded.aaflow_plan_bytes() != ctypes.sizeof(Plan):
            return None  # built from another version of the source
        if not loaded.aaflow_supported():
            return None
        loaded.aaflow_scratch_bytes.restype = ctypes.c_int64
        loaded.aaflow_scratch_bytes.argtypes = (plan,)
        for name, types in arguments.items():
            function = getattr(loaded, name)
            function.restype, function.argtypes = None, types
    except (OSError, AttributeError):
        return None
    return loaded


def _is_whole(file: Path) -> bool:
    """Does a 64-bit ELF file reach to the end of its section headers, its last part? Loading one that was cut ends the process."""
    with file.open("rb") as opened:
        head = opened.read(64)
        if len(head) < 64 or head[:5] != b"\x7fELF\x02":
            return False
        offset, size, count = struct.unpack_from("<Q", head, 40)[0], *struct.unpack_from("<HH", head, 58)
        return bool(opened.seek(0, 2) >= offset + size * count)


@lru_cache(maxsize=1)
def parallel() -> int | None:
    """Address of ``GOMP_parallel`` in the OpenMP runtime that torch brings into the process: its threads are ours, too."""
    try:
        return ctypes.cast(ctypes.CDLL(None).GOMP_parallel, ctypes.c_void_p).value
    except (OSError, AttributeError):
        return None
