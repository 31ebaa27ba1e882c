"""What a model computes, asked by running it: the shape of its KV, and which read path equals its stock forward.

Runs a few dozen tokens once per model; the answer is cached per configuration, dtype, device and library versions.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import transformers

from aaflow_langgraph.engine import cache_adapter
from aaflow_langgraph.engine.attention import FastPathRefused
from aaflow_langgraph.engine.base import Piece
from aaflow_langgraph.engine.fingerprint import read_cached, write_cached
from aaflow_langgraph.engine.loading import first_line
from aaflow_langgraph.engine.runs import FastRun, Run, UniversalRun
from aaflow_langgraph.engine.scattered import Rows
from aaflow_langgraph.engine.together import together
from aaflow_langgraph.errors import UnsupportedModel
from aaflow_langgraph.hashing import digest
from aaflow_langgraph.model import KVLayout
from aaflow_langgraph.tensors import dtype_name

if TYPE_CHECKING:
    from aaflow_langgraph.engine.transformers import TransformersEngine

# Mean difference of logits, relative to their spread, that a read path may show against the stock forward. In 16 bits the
# stock forward itself moves by 0.02-0.06 when the same tokens are cut differently; a path that is wrong moves by 0.3 and more.
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.15, torch.float16: 0.15}
_NUM_TOKENS = 40


def measure_layout(engine: TransformersEngine) -> KVLayout:
    """Shape of the KV, read off one stock token instead of guessed from the configuration."""
    shapes: dict[int, tuple[torch.Size, torch.Size, torch.dtype]] = {}

    def note(layer: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        shapes[layer] = (keys.shape, values.shape, keys.dtype)
        return keys, values

    layers = [cache_adapter.UniversalLayer(n, note, lambda: 0, is_sliding=s) for n, s in enumerate(engine.sliding)]
    kind = type(engine.model).__name__
    try:
        engine.forward([0], 0, cache_adapter.as_cache(layers))
    except (ValueError, AttributeError, NotImplementedError, TypeError, RuntimeError, IndexError) as error:
        failed = next((number for number in range(len(layers)) if number not in shapes), 0)
        raise UnsupportedModel(
            f"layer {failed} of {kind} does not run on a plain key/value cache ({first_line(error)}): a recurrent or "
            "convolutional state can be neither cut at a prefix nor shared by forks; use a model whose layers are all attention"
        ) from error
    missing = [number for number in range(len(layers)) if number not in shapes]
    if missing:
        raise UnsupportedModel(
            f"layer {missing[0]} of {kind} writes no keys and values ({len(missing)} of {len(layers)} layers do not): its "
            "state is recurrent, convolutional or shared and cannot be cut at a prefix; use a model whose layers are all "
            "attention"
        )
    keys, _values, dtype = shapes[0]
    for number, (k, v, d) in sorted(shapes.items()):
        if k != v or (k, d) != (keys, dtype):
            raise UnsupportedModel(
                f"layer {number} of {kind} has keys {tuple(k)} and values {tuple(v)} in {d}, layer 0 has {tuple(keys)} in "
                f"{dtype}: extents hold one shape for all layers, so latent or mixed layouts cannot be carried"
            )
    if dtype != engine.model.dtype:
        raise UnsupportedModel(
            f"{kind} computes keys in {dtype} but is loaded in {engine.model.dtype}: a quantised or mixed model's KV is not "
            "covered by the fingerprint; load it in one dtype"
        )
    return KVLayout(len(layers), int(keys[1]), int(keys[3]), dtype_name(dtype), dtype.itemsize)


def choose(engine: TransformersEngine, folder: Path | None) -> str:
    """Which read path is right for this model; cached per configuration, dtype, device and library versions.

    Drops the lean forward where it is not: one that the fast path does not use or that misses the stock logits.
    """
    # A windowed layer differs from a full one only beyond its window, so the probe reaches beyond it.
    config = engine.model.config.get_text_config(decoder=True)
    reach = int(getattr(config, "sliding_window", None) or 0) if any(engine.sliding) else 0
    num_tokens = min(_NUM_TOKENS + reach, engine.window, 2200)
    key = digest(
        "probe-4",
        engine.model.config.to_json_string(use_diff=False),
        dtype_name(engine.model.dtype),
        engine.device.type,
        str(num_tokens),
        str(engine.lean is not None),
        str(engine.kernel is not None),
        torch.__version__,
        transformers.__version__,
    )
    known = read_cached("probes", key) if folder else None
    if known in ("lean", "fast", "fast alone", "universal"):
        engine.lean = engine.lean if known == "lean" else None
        engine.shares = known != "fast alone"
        path = "universal" if known == "universal" else "fast"
        engine.select(path)
        return path
    ids = [(7919 * n + 13) % engine.vocab_size for n in range(num_tokens)]
    stock = _stock_logits(engine, ids)
    spread = float(stock.float().std()) + 1e-6
    missed: list[str] = []
    for path in ("lean", "fast", "universal"):
        if path == "lean" and engine.lean is None:
            continue
        if path != "lean":
            engine.lean = None
        if path != "universal" and any(engine.sliding):
            missed.append(f"{path}: layers attend through a window")
            continue
        read_path = "universal" if path == "universal" else "fast"
        engine.select(read_path)
        engine.shares = path == "lean"  # whether modules may is asked when it is known what each computes alone
        try:
            difference = float((_logits(engine, read_path, ids) - stock).abs().mean()) / spread
        except (
            FastPathRefused,
            RuntimeError,
        ) as refused:  # a kernel of torch that does not take this head dim raises the latter
            missed.append(f"{path}: {first_line(refused)}")
            continue
        if difference <= _TOLERANCE[engine.model.dtype]:
            engine.shares = path == "lean" or (path == "fast" and _shares(engine, ids, spread))
            if folder:
                write_cached("probes", key, path if engine.shares or path == "universal" else "fast alone")
            return read_path
        missed.append(f"{path}: logits differ by {difference:.2e} of their spread on average")
    raise UnsupportedModel(
        f"no read path of {type(engine.model).__name__} equals its stock forward over {num_tokens} tokens "
        f"({'; '.join(missed)}; allowed {_TOLERANCE[engine.model.dtype]:.0e}); its KV cannot be reused safely"
    )


def _stock_logits(engine: TransformersEngine, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = engine.model(input_ids=torch.tensor([ids], device=engine.device), use_cache=False).logits
    return logits[0, -1].float()


def _logits(engine: TransformersEngine, path: str, ids: list[int]) -> torch.Tensor:
    """The same logits by the read path: a first run, its tail read as a piece by a second, then token by token."""
    cut, last = len(ids) // 2, len(ids) - 2
    first = _tail(engine, 0)
    kind: Callable[..., Run] = FastRun if path == "fast" else lambda e, p, t, _, n: UniversalRun(e, p, t, n)
    kind(engine, (), first, None, 0).prefill(ids[:cut])
    second = _tail(engine, cut)
    run = kind(engine, (Piece(first.kv[..., :cut, :], 0, cut),), second, None, 0)
    run.prefill(ids[cut:last])
    run.decode(ids[last])
    return run.decode(ids[last + 1]).float()


def _shares(engine: TransformersEngine, ids: list[int], spread: float) -> bool:
    """Are the logits of two requests in one forward through the model's modules those of each alone?"""
    cut = len(ids) // 2
    first = _tail(engine, 0)
    FastRun(engine, (), first, None, 0).prefill(ids[:cut])
    pieces = (Piece(first.kv[..., :cut, :], 0, cut),)
    runs = [FastRun(engine, pieces, _tail(engine, cut), None, 0) for _ in range(2)]
    runs[1].prefill(ids[cut : cut + 5])
    steps = [runs[0].next_step(ids[cut : cut + 3]), runs[1].next_step(ids[cut + 5 : cut + 6])]
    try:
        with engine.lock:
            alone = [engine.forward_alone(step).float() for step in steps]
            shared = together(engine, steps, engine.kernel, engine.tail_room)
    except (FastPathRefused, RuntimeError, TypeError, ValueError, IndexError):
        return False  # it runs alone, as it did
    differences = [float((a - b.float()).abs().mean()) / spread for a, b in zip(alone, shared, strict=True)]
    return max(differences) <= _TOLERANCE[engine.model.dtype]


def _tail(engine: TransformersEngine, start: int) -> Rows:
    """A tail outside any pool."""
    return Rows(torch.empty(engine.layout.shape(2304), dtype=engine.model.dtype, device=engine.device), start)
