"""The compiled attention against plain products in fp64, over everything a forward may ask of it."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from aaflow_langgraph import native
from aaflow_langgraph.engine.attention import FastPathRefused, Past
from aaflow_langgraph.engine.base import Piece
from aaflow_langgraph.engine.kernel import Kernel, KernelPast
from aaflow_langgraph.errors import ConfigError

needs_kernel = pytest.mark.skipif(
    native.library() is None, reason="the compiled attention is not built, or this CPU has no AVX512-BF16"
)
SHAPES = [(9, 3, 64), (8, 8, 32), (8, 2, 128), (4, 1, 256), (6, 2, 96), (32, 1, 64)]


class Tail:
    """Memory of one request that holds NaN where nothing was written."""

    def __init__(self, start: int, length: int, layers: int, heads: int, dim: int, capacity: int) -> None:
        self.start, self.length = start, length
        self.kv = torch.full((layers, 2, heads, capacity, dim), float("nan"), dtype=torch.bfloat16)
        self.kv[..., :length, :] = torch.randn(layers, 2, heads, length, dim)

    def ensure(self, num_tokens: int) -> None:
        assert num_tokens <= self.kv.shape[3]


def kernel_of(shape: tuple[int, int, int]) -> Kernel:
    kernel = Kernel.of(*shape, torch.bfloat16, torch.device("cpu"))
    assert kernel is not None
    return kernel


def attend(
    shape: tuple[int, int, int], requests: list[tuple[list[torch.Tensor], int, int]], layer: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    """What the kernel makes of ``(extents, written tail, new tokens)`` per request in one forward, and what is right."""
    num_heads, num_kv_heads, dim = shape
    pasts, counts = [], []
    for extents, written, count in requests:
        ends = torch.tensor([0, *(kv.shape[3] for kv in extents)]).cumsum(0).tolist()
        pieces = [Piece(kv, a, b) for kv, a, b in zip(extents, ends, ends[1:], strict=False)]
        pasts.append(Past(pieces, Tail(ends[-1], written, 2, num_kv_heads, dim, written + count + 3), None))
        counts.append(count)
    rows = sum(counts)
    query = torch.randn(rows, num_heads, dim).bfloat16()
    new = torch.randn(2, 1, num_kv_heads, rows, dim).bfloat16()
    past = KernelPast(kernel_of(shape), pasts, counts)
    past.write_layer(layer, new[0], new[1])
    found = past.attend(layer, query, None).view(rows, num_heads, dim)
    wanted, row = [], 0
    for own, count in zip(pasts, counts, strict=True):
        for number in range(count):
            seen = own.tail.length + number + 1
            kv = torch.cat([*(e[layer] for e in own.extents), own.tail.kv[layer, :, :, :seen]], 2).double()
            assert torch.equal(kv[:, :, -1].bfloat16(), new[:, 0, :, row])
            keys, values = kv.repeat_interleave(num_heads // num_kv_heads, 1)
            scores = torch.einsum("hd,htd->ht", query[row].double(), keys) / math.sqrt(dim)
            wanted.append(torch.einsum("ht,htd->hd", scores.softmax(-1), values))
            row += 1
    return found.double(), torch.stack(wanted)


def extent(shape: tuple[int, int, int], length: int) -> torch.Tensor:
    return torch.randn(2, 2, shape[1], length, shape[2]).bfloat16()


@needs_kernel
@pytest.mark.parametrize("shape", SHAPES)
def test_one_request_reads_its_extents_and_its_tail(shape: tuple[int, int, int]) -> None:
    found, wanted = attend(shape, [([extent(shape, 700), extent(shape, 5), extent(shape, 1290)], 37, 1)])
    torch.testing.assert_close(found, wanted, rtol=0.02, atol=2e-3)


@needs_kernel
@pytest.mark.parametrize("shape", SHAPES)
def test_new_tokens_attend_to_each_other_causally(shape: tuple[int, int, int]) -> None:
    found, wanted = attend(shape, [([extent(shape, 300)], 0, 130), ([], 70, 67)])
    torch.testing.assert_close(found, wanted, rtol=0.02, atol=4e-3)


@needs_kernel
@settings(max_examples=40, deadline=None)
@given(
    shape=st.sampled_from(SHAPES),
    trunk=st.integers(0, 700),
    cuts=st.lists(st.integers(1, 700), min_size=1, max_size=5),
    tails=st.lists(st.tuples(st.integers(0, 200), st.integers(1, 40)), min_size=1, max_size=5),
    threads=st.sampled_from([1, 2, 3]),
    seed=st.integers(0, 1000),
)
def test_a_forest_of_requests_reads_what_each_of_them_has(
    shape: tuple[int, int, int],
    trunk: int,
    cuts: list[int],
    tails: list[tuple[int, int]],
    threads: int,
    seed: int,
) -> None:
    """Some share the trunk, some read a common branch up to different positions, some have nothing in common."""
    torch.manual_seed(seed)
    shared = [extent(shape, trunk)] if trunk else []
    branch = extent(shape, max(cuts))
    requests = []
    for number, (written, count) in enumerate(tails):
        extents = [*shared] if number % 3 else []
        if number % 2 == 0:
            extents.append(branch[..., : cuts[number % len(cuts)], :])
        requests.append((extents, written, count))
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        found, wanted = attend(shape, requests)
    finally:
        torch.set_num_threads(before)
    torch.testing.assert_close(found, wanted, rtol=0.02, atol=8e-3)


@needs_kernel
def test_equal_forwards_give_equal_bits_whoever_computes_which_part() -> None:
    shape = (9, 3, 64)
    tail = Tail(4000, 60, 1, 3, 64, 70)
    past = Past([Piece(torch.randn(1, 2, 3, 4000, 64).bfloat16(), 0, 4000)], tail, None)
    query = torch.randn(8, 9, 64).bfloat16()
    new = torch.randn(2, 1, 3, 8, 64).bfloat16()
    results = []
    for _ in range(20):
        read = KernelPast(kernel_of(shape), [past], [8])
        read.write_layer(0, new[0], new[1])
        results.append(read.attend(0, query, None))
    assert all(torch.equal(result, results[0]) for result in results)


@needs_kernel
def test_scores_far_apart_neither_overflow_nor_vanish() -> None:
    """One key among thousands takes all the weight, wherever it stands; and all keys alike share it evenly."""
    kernel = kernel_of((1, 1, 64))
    for place in (0, 1023, 2999):
        kv = torch.zeros(1, 2, 1, 3000, 64, dtype=torch.bfloat16)
        kv[0, 1, 0] = torch.arange(3000)[:, None] % 7
        kv[0, 0, 0, :] = -30.0
        kv[0, 0, 0, place] = 30.0
        kv[0, 1, 0, place] = 100.0
        past = KernelPast(kernel, [Past([Piece(kv, 0, 3000)], Tail(3000, 0, 1, 1, 64, 1), None)], [1])
        low = torch.full((1, 1, 1, 64), -30.0).bfloat16()
        past.write_layer(0, low, low)
        out = past.attend(0, torch.full((1, 1, 64), 30.0).bfloat16(), None)
        assert out.eq(100.0).all()
    even = KernelPast(kernel, [Past([Piece(kv * 0 + 2, 0, 3000)], Tail(3000, 0, 1, 1, 64, 1), None)], [1])
    two = torch.full((1, 1, 1, 64), 2.0).bfloat16()
    even.write_layer(0, two, two)
    assert even.attend(0, torch.zeros(1, 1, 64).bfloat16(), None).eq(2.0).all()


@needs_kernel
@pytest.mark.parametrize("which", ["key", "value"])
@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_kv_that_is_no_number_does_not_become_a_plausible_answer(which: str, number: float) -> None:
    kv = torch.randn(1, 2, 1, 600, 64).bfloat16()
    kv[0, int(which == "value"), 0, 300, 5] = number
    past = KernelPast(kernel_of((2, 1, 64)), [Past([Piece(kv, 0, 600)], Tail(600, 0, 1, 1, 64, 1), None)], [1])
    new = torch.randn(1, 1, 1, 64).bfloat16()
    past.write_layer(0, new, new)
    out = past.attend(0, torch.ones(1, 2, 64).bfloat16(), None).view(2, 64)
    assert not out[:, 5].isfinite().any()


@needs_kernel
def test_it_rotates_as_torch_does() -> None:
    num_heads, num_kv_heads, dim = shape = (9, 3, 64)
    tail = Tail(0, 0, 1, num_kv_heads, dim, 5)
    past = KernelPast(kernel_of(shape), [Past([], tail, None)], [5])
    qkv = torch.randn(5, (num_heads + 2 * num_kv_heads) * dim).bfloat16()
    cos, sin = torch.randn(5, dim).bfloat16(), torch.randn(5, dim).bfloat16()
    rotated = qkv.clone()
    heads = rotated.view(5, -1, dim)[:, : num_heads + num_kv_heads]
    swapped = heads.roll(dim // 2, -1)
    heads.mul_(cos[:, None]).addcmul_(swapped, sin[:, None])
    past.through(0, qkv, cos, sin, dim**-0.5)
    assert torch.equal(qkv, rotated)
    assert torch.equal(tail.kv[0, 0].transpose(0, 1), heads[:, num_heads:])
    assert torch.equal(tail.kv[0, 1].transpose(0, 1), qkv.view(5, -1, dim)[:, num_heads + num_kv_heads :])


@needs_kernel
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((4, 2, 16), torch.bfloat16),
        ((4, 2, 288), torch.bfloat16),
        ((4, 3, 64), torch.bfloat16),
        ((4, 2, 64), torch.float32),
    ],
)
def test_other_shapes_and_dtypes_are_left_to_torch(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    assert Kernel.of(*shape, dtype, torch.device("cpu")) is None


@needs_kernel
def test_kv_laid_otherwise_is_left_to_torch() -> None:
    kernel = kernel_of((4, 2, 64))
    bf16, fp32 = torch.zeros(1, 2, 2, 9, 64, dtype=torch.bfloat16), torch.zeros(1, 2, 2, 9, 64)
    tail = Tail(9, 0, 1, 2, 64, 4)
    assert kernel.reads([Past([Piece(bf16, 0, 9)], tail, None)], 1)
    assert not kernel.reads([Past([Piece(fp32, 0, 9)], tail, None)], 1)
    assert not kernel.reads([Past([Piece(bf16.transpose(3, 4).contiguous().transpose(3, 4), 0, 9)], tail, None)], 1)


@needs_kernel
def test_forwards_of_many_rows_are_left_to_matrix_tiles_where_the_cpu_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, past = kernel_of((4, 2, 64)), Past([], Tail(0, 0, 1, 2, 64, 64), None)
    for tiles, rows, expected in ((False, 33, True), (True, 33, False), (True, 32, True)):
        monkeypatch.setattr("aaflow_langgraph.engine.kernel.has_tiles", lambda tiles=tiles: tiles)
        assert kernel.reads([past], rows) is expected


@needs_kernel
def test_a_model_that_computes_in_another_dtype_than_it_was_opened_in_is_refused() -> None:
    """Read as bf16, its numbers would be finite nonsense."""
    past = KernelPast(kernel_of((4, 2, 64)), [Past([], Tail(0, 0, 1, 2, 64, 1), None)], [1])
    keys = torch.zeros(1, 2, 1, 64)
    for other in (torch.float32, torch.float16):
        with pytest.raises(ConfigError, match="was opened in torch.bfloat16"):
            past.write_layer(0, keys.to(other), keys.to(other))
        with pytest.raises(ConfigError, match=str(other)):
            past.attend(0, torch.zeros(1, 4, 64, dtype=other), None)
        with pytest.raises(ConfigError, match=str(other)):
            past.through(0, torch.zeros(1, 8 * 64, dtype=other), keys[0, 0], keys[0, 0], 1.0)


@needs_kernel
def test_attention_of_another_shape_than_configured_is_refused() -> None:
    past = KernelPast(kernel_of((4, 2, 64)), [Past([], Tail(0, 0, 1, 2, 64, 1), None)], [1])
    with pytest.raises(FastPathRefused, match=r"\(1, 2, 2, 64\) where"):
        past.write_layer(0, torch.zeros(1, 2, 2, 64).bfloat16(), torch.zeros(1, 2, 2, 64).bfloat16())
    with pytest.raises(FastPathRefused, match=r"\(2, 4, 64\) where"):
        past.attend(0, torch.zeros(2, 4, 64).bfloat16(), None)


@needs_kernel
def test_bits_do_not_depend_on_how_many_threads_there_are_later() -> None:
    kernel = kernel_of((9, 3, 64))
    past = Past([Piece(torch.randn(1, 2, 3, 3000, 64).bfloat16(), 0, 3000)], Tail(3000, 0, 1, 3, 64, 4), None)
    query, new, results = torch.randn(4, 9, 64).bfloat16(), torch.randn(2, 1, 3, 4, 64).bfloat16(), []
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            read = KernelPast(kernel, [past], [4])
            read.write_layer(0, new[0], new[1])
            results.append(read.attend(0, query, None))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(result, results[0]) for result in results)


@needs_kernel
@pytest.mark.parametrize("kept", [0, 64, 1000, 20_000, -1])
def test_a_library_that_was_cut_short_is_none(kept: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Loading it would end the process with SIGBUS."""
    whole = Path(native.__file__).with_name("_attention.so").read_bytes()
    (tmp_path / "_attention.so").write_bytes(whole[:kept])
    monkeypatch.setattr(native, "__file__", str(tmp_path / "__init__.py"))
    native.library.cache_clear()
    try:
        assert native.library() is None
    finally:
        native.library.cache_clear()


@pytest.mark.parametrize("missing", ["file", "threads"])
def test_without_it_there_is_none(missing: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    if missing == "file":
        monkeypatch.setattr(native, "__file__", f"{tmp_path}/__init__.py")
    else:
        monkeypatch.setattr(native, "parallel", lambda: None)
    native.library.cache_clear()
    try:
        assert native.library() is None
        assert Kernel.of(9, 3, 64, torch.bfloat16, torch.device("cpu")) is None
    finally:
        native.library.cache_clear()
