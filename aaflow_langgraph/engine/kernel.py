"""Attention of the new tokens of one forward through the compiled kernel: bf16 on CPUs with AVX512-BF16.

Does what ``SharedPast`` does, for one request as for many: everything in one call per layer, every extent once for all of its
readers, new keys and values written straight to their tails. Bits depend on shapes and on the number of threads when the engine
was opened, not on who computes which part; a deterministic request runs alone, and its tail is cut at the grid, as on torch's
kernels.

Knows a forward's ``Past``; knows no model.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence

import torch
from torch.nn import functional

from aaflow_langgraph import native
from aaflow_langgraph.engine.attention import FastPathRefused, Past, has_tiles
from aaflow_langgraph.engine.base import Piece
from aaflow_langgraph.engine.scattered import Rows
from aaflow_langgraph.errors import ConfigError

KEPT_BYTES = 128 << 20
"""Room to work in of at most this size is kept from one forward to the next: fresh pages cost more than the work."""

MOST_ROWS_BESIDE_TILES = 32
"""CPUs with matrix tiles compute many rows faster through torch, which uses them, than by vectors. Not measured on one: from
here on their rate of products should outweigh what the kernel saves in bytes and calls."""

_LOG2E = math.log2(math.e)

# Keys and values ``[L, 2, H, T, D]``, and who reads them: row of a new token, and how many tokens it sees.
_Read = tuple[torch.Tensor, list[tuple[int, int]]]


class Kernel:
    """The compiled functions for one shape of heads, and their room to work in. Used by one forward at a time.

    Args:
        num_heads: Query heads.
        num_kv_heads: KV heads.
        dim: Numbers per head.
    """

    def __init__(self, library: ctypes.CDLL, num_heads: int, num_kv_heads: int, dim: int) -> None:
        self.library = library
        self.shape = (num_heads, num_kv_heads, dim)
        # Work is cut for this many threads from now on, however many do it: the cut decides about bits.
        self.num_threads = torch.get_num_threads()
        self._room = torch.empty(0, dtype=torch.uint8, device="cpu")

    @classmethod
    def of(cls, num_heads: int, num_kv_heads: int, dim: int, dtype: torch.dtype, device: torch.device) -> Kernel | None:
        """A kernel for this shape, or None where there is none: it was not built, or the CPU, dtype or shape is none of its.

        It has attended to something here, in the threads of this process, before it is handed out.
        """
        library = native.library()
        if library is None or dtype != torch.bfloat16 or device.type != "cpu":
            return None
        plan = native.Plan(num_heads=num_heads, num_kv_heads=num_kv_heads, dim=dim, num_shares=1, num_threads=1)
        if not library.aaflow_scratch_bytes(plan):
            return None
        kernel = cls(library, num_heads, num_kv_heads, dim)
        return kernel if kernel._agrees() else None

    def reads(self, pasts: Sequence[Past], num_rows: int) -> bool:
        """Is a forward of so many new tokens its business, and does all of their KV lie as pools lay it?"""
        if num_rows > MOST_ROWS_BESIDE_TILES and has_tiles():
            return False
        return all(_fits(kv) for past in pasts for kv in (*past.extents, past.tail.kv))

    @staticmethod
    def suits(*widths: int) -> bool:
        """Can ``add_norm`` and ``gate`` work on rows of all these widths?"""
        return all(width % 16 == 0 for width in widths)

    def add_norm(
        self, hidden: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """Add ``delta`` to ``hidden [rows, width]`` in place; the RMS norm of that, times ``weight [width]``."""
        out = torch.empty_like(hidden)
        self.library.aaflow_add_norm(
            hidden.data_ptr(),
            None if delta is None else delta.data_ptr(),
            weight.data_ptr(),
            eps,
            out.data_ptr(),
            *hidden.shape,
        )
        return out

    def gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        """``silu(gate) * up`` of both beside each other, ``[rows, 2 * width]``: ``[rows, width]``."""
        rows, width = gate_up.shape[0], gate_up.shape[1] // 2
        out = gate_up.new_empty(rows, width)
        self.library.aaflow_gate(gate_up.data_ptr(), out.data_ptr(), rows, width)
        return out

    def _agrees(self) -> bool:
        """Is what it computes here what torch computes?"""
        num_heads, num_kv_heads, dim = self.shape
        at_random = torch.Generator("cpu").manual_seed(0)
        kv = torch.randn((1, 2, num_kv_heads, 1500, dim), generator=at_random, device="cpu").to(torch.bfloat16)
        query = torch.randn((1, num_heads, dim), generator=at_random, device="cpu").to(torch.bfloat16)
        extent, rest = kv[..., :1400, :], kv[..., 1400:, :]
        tail = Rows(rest, 1400)
        tail.length = 99  # the last one is the new token's, and written
        past = KernelPast(self, [Past([Piece(extent, 0, 1400)], tail, None)], [1])
        found = past.attend(0, query, None).view(num_heads, dim).float()
        repeated = kv[0].repeat_interleave(num_heads // num_kv_heads, 1).float()
        wanted = functional.scaled_dot_product_attention(query[0, :, None].float(), repeated[0], repeated[1])[:, 0]
        return bool((found - wanted).abs().max() < 0.02 * wanted.abs().max())

    def prepare(self, plan: native.Plan) -> None:
        """Lay out a plan."""
        num_bytes = self.library.aaflow_scratch_bytes(plan)
        room = self._room
        if room.numel() < num_bytes:
            room = torch.empty(num_bytes * 3 // 2, dtype=torch.uint8, device="cpu")
            if num_bytes <= KEPT_BYTES:
                self._room = room
        plan.room = room  # keeps it alive as long as the plan
        self.library.aaflow_prepare(plan, room.data_ptr())


class KernelPast:
    """What the layers of one forward over some requests attend to, and where they write. Lives for one forward.

    Rows are the new tokens of all requests, one after the other.
    """

    layer = -1

    def __init__(self, kernel: Kernel, pasts: Sequence[Past], counts: Sequence[int]) -> None:
        self._kernel = kernel
        self._num_rows = sum(counts)
        extents: dict[int, _Read] = {}
        tails: list[_Read] = []
        slots: list[tuple[int, int]] = []
        at = 0
        for past, count in zip(pasts, counts, strict=True):
            past.make_room(count)
            for kv in past.extents:
                known, readers = extents.setdefault(kv.data_ptr(), (kv, []))
                if known.shape[3] < kv.shape[3]:  # the same extent, read further
                    extents[kv.data_ptr()] = (kv, readers)
                readers += [(row, kv.shape[3]) for row in range(at, at + count)]
            places = past.places(count)
            for a, b in past.cuts(places[-1] + 1):
                slots += [(len(tails), place - a) for place in places if a <= place < b]
                seen = [(row, min(place + 1, b) - a) for row, place in enumerate(places, at) if place >= a]
                tails.append((past.tail.kv[..., a:b, :], seen))
            at += count
        # In the order of their positions: parts are joined in this order, so that equal requests get equal bits.
        everything = [*extents.values(), *tails]
        self._memory = [kv for kv, _ in everything]  # the plan knows addresses, which keep nothing alive
        all_readers: list[tuple[int, int]] = []
        stretches = []
        for kv, own in everything:
            own.sort(key=_num_seen)
            stretches.append(
                native.Stretch(kv.data_ptr(), *kv.stride()[:4], _num_seen(own[-1]), len(all_readers), len(own), 0)
            )
            all_readers += own
        num_heads, num_kv_heads, dim = kernel.shape
        self._plan = native.Plan(
            stretches=(native.Stretch * len(stretches))(*stretches),
            readers=(native.Reader * len(all_readers))(*(native.Reader(*one) for one in all_readers)),
            slots=(native.Slot * at)(*(native.Slot(len(extents) + tail, place) for tail, place in slots)),
            num_stretches=len(stretches),
            num_readers=len(all_readers),
            num_rows=at,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            dim=dim,
            num_shares=kernel.num_threads,
            num_threads=torch.get_num_threads(),
            parallel=native.parallel(),
        )
        kernel.prepare(self._plan)

    def through(
        self, layer: int, qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """Rotate queries and keys of ``qkv [rows, (Hq + 2 H) * D]`` in place, keep keys and values, attend: ``[rows, Hq * D]``.

        ``cos, sin [rows, D]`` are the tables, the first half of the sines with its sign turned.
        """
        num_heads, num_kv_heads, dim = self._kernel.shape
        qkv = self._checked(qkv, (self._num_rows, (num_heads + 2 * num_kv_heads) * dim))
        out = qkv.new_empty(self._num_rows, num_heads * dim)
        self._plan.scale = scale * _LOG2E
        self._kernel.library.aaflow_layer(
            self._plan, layer, qkv.data_ptr(), cos.data_ptr(), sin.data_ptr(), out.data_ptr()
        )
        return out

    def write_layer(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Keep the new keys and values of a layer, ``[1, H, rows, D]`` each, as modules hand them to their cache."""
        self.layer = layer
        _, num_kv_heads, dim = self._kernel.shape
        keys, values = (self._checked(x, (1, num_kv_heads, self._num_rows, dim)) for x in (keys, values))
        self._kernel.library.aaflow_store(
            self._plan,
            layer,
            keys.data_ptr(), keys.stride(2), keys.stride(1),
            values.data_ptr(), values.stride(2), values.stride(1),
        )  # fmt: skip

    def attend(self, layer: int, query: torch.Tensor, scale: float | None) -> torch.Tensor:
        """``query [rows, Hq, D]``, each over everything up to itself; ``[rows, Hq * D]``."""
        num_heads, _, dim = self._kernel.shape
        query = self._checked(query, (self._num_rows, num_heads, dim))
        out = query.new_empty(self._num_rows, num_heads * dim)
        self._plan.scale = (scale or dim**-0.5) * _LOG2E
        self._kernel.library.aaflow_attend(
            self._plan, layer, query.data_ptr(), query.stride(0), query.stride(1), out.data_ptr()
        )
        return out

    def _checked(self, tensor: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        """A tensor whose memory is what the kernel takes it for, rows without gaps.

        Raises:
            FastPathRefused: The model hands its attention another shape than its configuration says.
            ConfigError: It computes in another dtype, or elsewhere, than when its engine was opened.
        """
        if tensor.shape != shape:
            raise FastPathRefused(f"attention got {tuple(tensor.shape)} where the configuration says {shape}")
        if tensor.dtype != torch.bfloat16 or tensor.device.type != "cpu":
            raise ConfigError(
                f"the model computes in {tensor.dtype} on {tensor.device} and was opened in torch.bfloat16 on the CPU (was it "
                "cast, moved, or put under autocast since?); open a broker on the model as it is now"
            )
        return tensor if tensor.stride(-1) == 1 else tensor.contiguous()

    def finish(self) -> None:
        """See ``SharedPast.finish``: everything is where it belongs."""


def _num_seen(reader: tuple[int, int]) -> int:
    return reader[1]


def _fits(kv: torch.Tensor) -> bool:
    return kv.dtype == torch.bfloat16 and kv.device.type == "cpu" and kv.stride(4) == 1
