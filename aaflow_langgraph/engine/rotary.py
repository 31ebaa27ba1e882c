"""Can stored keys be moved to other positions, and how: a probe on the loaded model, and the move itself.

Rotary keys are ``k_m = R(m) W_k h``: moving them by ``d`` positions is ``R(d)``, pair by pair (RoFormer, arXiv 2104.09864).

    x1' = x1 cos(d w) - x2 sin(d w)        x2' = x2 cos(d w) + x1 sin(d w)

The probe runs the same tokens at position 0 and at several offsets and asks, layer by layer, which of the model's own sets of
frequencies, which pairing and which leading dims map the one keys to the other; and whether tokens at scattered positions come
out as in order. It goes by what the model computes and knows no names of models. Where keys or values do anything else, the
model is refused with the layer and the reason. Scaled rotary (linear, llama3, yarn) is in the frequencies already; a module that
also scales its cosines scales keys, not the move.

Knows a loaded engine and tensors; knows no segment, no extent and no broker.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
import transformers

from aaflow_langgraph.engine import cache_adapter
from aaflow_langgraph.engine.fingerprint import read_cached, write_cached
from aaflow_langgraph.engine.mixed import Mixed
from aaflow_langgraph.errors import NotComposable
from aaflow_langgraph.hashing import digest

if TYPE_CHECKING:
    from aaflow_langgraph.engine.transformers import TransformersEngine

Pairing = Literal["halves", "interleaved"]

# Error allowed between keys moved and keys computed, and between values at two offsets: root mean square over the dims of the
# difference relative to the dim itself, so that a few large dims (key biases) hide nothing. fp32: the model's own angles
# (position times frequency, in fp32) are off by up to 1e-4 rad at position 3,000, a wrong set of frequencies is off by 0.3 and
# more. 16 bits: cosines, keys and hidden states are rounded, and differently at every offset: 0.01-0.05 on models of 3 and of 30
# layers; learned positions show as 0.8.
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.15, torch.float16: 0.15}
_PROBE_TOKENS = 24
_MOVES = (7, 301, 3001)
_TILE_ELEMENTS = 1 << 18
"""Elements of keys rotated at once: fp32 temporaries of 1 MB stay in the cache of a core."""


@dataclass(frozen=True, slots=True)
class LayerRotation:
    """How the keys of one layer move.

    ``kind`` is ``"rotary"`` or ``"nope"`` (keys do not know their position). ``frequencies`` names the buffer of the model
    that holds the layer's inverse frequencies; the leading ``num_rotated`` dims of a head are rotated, dim ``i`` with dim
    ``i + num_rotated / 2`` (``"halves"``) or dims ``2 i`` and ``2 i + 1`` (``"interleaved"``).
    """

    kind: Literal["rotary", "nope"]
    frequencies: str = ""
    pairing: Pairing = "halves"
    num_rotated: int = 0


class Rotation:
    """Moves keys of one model. Immutable and thread-safe.

    Attributes:
        layers: Per layer, how its keys move.
        windows: Per layer, the number of tokens it attends to, or None for all.
        most_tokens: Longest composite that the frequencies and the model's window allow.
    """

    def __init__(
        self,
        layers: Sequence[LayerRotation],
        frequencies: dict[str, torch.Tensor],
        windows: Sequence[int | None],
        most_tokens: int,
        length_dependent: str = "",
    ) -> None:
        self.layers = tuple(layers)
        self.windows = tuple(windows)
        self.most_tokens = most_tokens
        self._length_dependent = length_dependent
        self._frequencies = frequencies
        self._groups = _runs(self.layers)

    def check_span(self, num_tokens: int) -> None:
        """Refuse a composite of ``num_tokens`` tokens where one move per segment would not be all there is to it.

        Raises:
            NotComposable: Names the layer and the reason. Way out: fail, or compute the tokens together.
        """
        if num_tokens > self.most_tokens:
            why = (
                f"its rotary frequencies ({self._length_dependent}) change with length beyond that"
                if self._length_dependent
                else "that is the model's window"
            )
            raise NotComposable(
                f"layer 0 can hold moved keys up to {self.most_tokens} tokens and the composite has {num_tokens}: {why}; "
                "compose fewer tokens"
            )
        for number, window in enumerate(self.windows):
            if window is not None and window < num_tokens:
                raise NotComposable(
                    f"layer {number} attends to the last {window} tokens only and the composite has {num_tokens}: what its "
                    "tokens saw depends on where a segment stands; compose at most "
                    f"{window} tokens, or prefill the text as one"
                )

    def move(self, kv: torch.Tensor, by: int, out: torch.Tensor) -> None:
        """Write ``kv`` ``[L, 2, H, T, D]`` moved by ``by`` positions (negative: towards 0) to ``out``, of the same shape.

        Keys are rotated in fp32 and rounded once, values copied bit by bit; ``by == 0`` copies both. Rotate what was computed,
        never what was moved before: rounding adds up. ``kv`` and ``out`` may be any views, but not overlap.
        """
        if by == 0:
            out.copy_(kv)
            return
        out[:, 1].copy_(kv[:, 1])
        per_layer = max(1, kv.shape[2] * kv.shape[3] * kv.shape[4])
        for layer, start, stop in self._groups:
            keys, moved = kv[start:stop, 0], out[start:stop, 0]
            if layer.kind == "nope":
                moved.copy_(keys)
                continue
            cos, sin = _table(self._frequencies[layer.frequencies], layer.pairing, by, kv.device)
            step = max(1, _TILE_ELEMENTS // per_layer)
            for at in range(0, stop - start, step):
                moved[at : at + step] = _turned(keys[at : at + step], cos, sin, layer.pairing)


def rotation_of(engine: TransformersEngine) -> Rotation:
    """The rotation of a loaded model, found by a probe once per engine; kept on disk by namespace for checkpoints.

    Raises:
        NotComposable: Names the layer and the reason. Way out: fail, or compute everything together.
    """
    if engine.rotation is None:
        engine.rotation = _find(engine)
    if isinstance(engine.rotation, str):
        raise NotComposable(engine.rotation)
    return engine.rotation


def _find(engine: TransformersEngine) -> Rotation | str:
    """The rotation, or why there is none."""
    key = digest("rotary-2", engine.namespace.digest, engine.device.type, torch.__version__, transformers.__version__)
    known = read_cached("rotary", key) if engine.folder else None
    frequencies = _frequencies(engine.model)
    if isinstance(known, str):
        return known
    layers = _read(known, frequencies, engine.layout.num_layers)
    if not layers:
        try:
            layers = _probe(engine, frequencies)
        except NotComposable as refused:
            if engine.folder:
                write_cached("rotary", key, str(refused))
            return str(refused)
        if engine.folder:
            entries = [[x.kind, x.frequencies, x.pairing, x.num_rotated] for x in layers]
            write_cached("rotary", key, entries)
    windows = cache_adapter.layer_windows(engine.model)
    length_dependent = ", ".join(sorted(_rope_types(engine.model) & {"dynamic", "longrope"}))
    return Rotation(layers, frequencies, windows, engine.window, length_dependent)


def _read(known: Any, frequencies: dict[str, torch.Tensor], num_layers: int) -> list[LayerRotation]:
    """Layers as they were written by an earlier probe; none when the file says anything else."""
    if not isinstance(known, list) or len(known) != num_layers:
        return []
    if not all(isinstance(x, list) and len(x) == 4 and (x[0] == "nope" or x[1] in frequencies) for x in known):
        return []
    return [LayerRotation(*entry) for entry in known]


def _probe(engine: TransformersEngine, frequencies: dict[str, torch.Tensor]) -> list[LayerRotation]:
    kind = type(engine.model).__name__
    if any("mrope_section" in entry for entry in _rope_entries(engine.model)):
        raise NotComposable(
            f"layer 0 of {kind} rotates by positions with several axes (multimodal rotary, mrope_section): where an image stands "
            "is not one number, so its keys cannot be moved by one"
        )
    num_tokens = max(1, min(_PROBE_TOKENS, engine.window // 2))
    room = engine.window - num_tokens
    moves = [move for move in _MOVES if move <= room] or [room]
    ids = [(7919 * number + 13) % engine.vocab_size for number in range(num_tokens)]
    base, _logits = _encode(engine, ids, 0)
    moved = [(by, _encode(engine, ids, by)[0]) for by in moves]
    bound = _TOLERANCE[engine.model.dtype]
    layers = [
        _judge(
            f"layer {number} of {kind}",
            base[number],
            [(by, kv[number]) for by, kv in moved],
            frequencies,
            bound,
        )
        for number in range(base.shape[0])
    ]
    if all(layer.kind == "nope" for layer in layers):
        how = "has no rotary frequencies" if not frequencies else "has rotary frequencies that touch no key"
        raise NotComposable(
            f"layer 0 of {kind}, as all others, computes keys that do not know their position, and the model {how}: order enters "
            "through the attention scores (ALiBi and other biases), through positions that cannot be given, or not at all, and "
            "such scores are not computed for tokens at chosen positions"
        )
    # Where a layer's window is shorter, so is every composite.
    _check_scattered(engine, ids[: min([num_tokens, *(x for x in cache_adapter.layer_windows(engine.model) if x)])])
    return layers


def _judge(
    name: str,
    base: torch.Tensor,
    moved: Sequence[tuple[int, torch.Tensor]],
    frequencies: dict[str, torch.Tensor],
    bound: float,
) -> LayerRotation:
    """How one layer's keys move; ``base`` and ``moved`` are ``[2, H, T, D]``."""
    for by, kv in moved:
        error = _error(base[1], kv[1])
        if not error <= bound:
            raise NotComposable(
                f"{name} computes other values {by} positions later (off by {error:.1e}, allowed {bound:g}): positions are "
                "added to what the layer reads (learned absolute positions or the like), so KV holds at one place only"
            )
    if max(_error(base[0], kv[0]) for _by, kv in moved) <= bound:
        return LayerRotation("nope")
    best, least = LayerRotation("nope"), float("inf")
    for candidate in _candidates(frequencies, base.shape[-1]):
        worst = 0.0
        for by, kv in moved:
            cos, sin = _table(frequencies[candidate.frequencies], candidate.pairing, by, base.device)
            worst = max(worst, _error(_turned(base[0], cos, sin, candidate.pairing), kv[0]))
        if worst < least:
            best, least = candidate, worst
    if least <= bound:
        return best
    if not frequencies:
        raise NotComposable(
            f"{name} computes keys that move with their position, and the model keeps no rotary frequencies"
        )
    raise NotComposable(
        f"{name} computes keys that move with their position, but not by a rotation of its leading dims with the model's own "
        f"frequencies ({', '.join(frequencies)}): off by {least:.1e} at best over moves of "
        f"{', '.join(str(by) for by, _ in moved)} positions, allowed {bound:g}"
    )


def _candidates(frequencies: dict[str, torch.Tensor], dim: int) -> Iterator[LayerRotation]:
    pairings: tuple[Pairing, ...] = ("halves", "interleaved")
    for name, values in frequencies.items():
        if 2 * len(values) <= dim:
            for pairing in pairings:
                yield LayerRotation("rotary", name, pairing, 2 * len(values))


def _error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Difference of two ``[H, T, D]``, every dim relative to its own size; root mean square over dims."""
    found, wanted = found.double(), wanted.double()
    off = (found - wanted).square().mean((0, 1))
    size = (found.square() + wanted.square()).mean((0, 1)) / 2
    floor = 1e-2 * float(size.mean())  # a dim that carries nothing carries no error either
    return float((off / size.clamp_min(floor + 1e-30)).mean().sqrt())


def _check_scattered(engine: TransformersEngine, ids: list[int]) -> None:
    """Refuse a model that does not run tokens at scattered positions over given KV as it runs them in order."""
    kind = type(engine.model).__name__
    kv, wanted = _encode(engine, ids, 0)
    chosen = sorted({*range(1, len(ids), 3), len(ids) - 1})
    rows = kv.to(engine.device, engine.model.dtype)
    try:
        found = engine.run_at([ids[number] for number in chosen], chosen, Mixed([], rows, 0))
    except (RuntimeError, ValueError, TypeError, AttributeError, NotImplementedError, IndexError) as error:
        raise NotComposable(
            f"layer 0 of {kind} does not run tokens at scattered positions ({type(error).__name__}: {error}): its attention takes "
            "no mask of ours"
        ) from error
    off = float((found.float() - wanted.float()).abs().mean() / (wanted.float().std() + 1e-6))
    bound = _TOLERANCE[engine.model.dtype]
    if not off <= bound:
        raise NotComposable(
            f"layer 0 of {kind}, or a later one, computes something else for tokens at scattered positions than in order: "
            f"logits differ by {off:.1e} of their spread, allowed {bound:g}; it does not go by the mask and the positions it gets"
        )


def _encode(engine: TransformersEngine, ids: list[int], position: int) -> tuple[torch.Tensor, torch.Tensor]:
    """KV ``[L, 2, H, T, D]`` in fp32 of ``ids`` at ``position`` with nothing before them, by the model's own attention, and the
    logits after the last.
    """
    kept: list[torch.Tensor] = [torch.empty(0, device="cpu")] * engine.layout.num_layers

    def note(layer: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        kept[layer] = torch.stack((keys[0], values[0])).float()
        return keys, values

    layers = [cache_adapter.UniversalLayer(n, note, lambda: 0, is_sliding=False) for n in range(len(kept))]
    with engine.lock:
        logits = engine.forward(ids, position, cache_adapter.as_cache(layers))
    return torch.stack(kept), logits


def _frequencies(model: Any) -> dict[str, torch.Tensor]:
    """The model's sets of inverse frequencies by buffer name, in fp32. Sets that are equal appear once."""
    found: dict[str, torch.Tensor] = {}
    named = [
        (name, buffer) for name, buffer in model.named_buffers() if name.endswith("inv_freq") and buffer.dim() == 1
    ]
    for name, buffer in sorted(named, key=lambda x: ("original" in x[0], x[0])):
        if not any(torch.equal(buffer.float().cpu(), other) for other in found.values()):
            found[name] = buffer.detach().float().cpu().clone()
    return found


def _rope_entries(model: Any) -> list[dict[str, Any]]:
    rope = getattr(model.config.get_text_config(decoder=True), "rope_parameters", None) or {}
    return [rope, *(value for value in rope.values() if isinstance(value, dict))]


def _rope_types(model: Any) -> set[str]:
    return {str(entry.get("rope_type")) for entry in _rope_entries(model)}


def _table(
    frequencies: torch.Tensor, pairing: Pairing, by: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and signed sines of a move, ``[num_rotated]`` in fp32; angles in fp64, which large moves need."""
    angles = frequencies.double() * by
    cos, sin = angles.cos().float().to(device), angles.sin().float().to(device)
    if pairing == "halves":
        return torch.cat((cos, cos)), torch.cat((-sin, sin))
    return cos.repeat_interleave(2), torch.stack((-sin, sin), -1).flatten()


def _turned(keys: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, pairing: Pairing) -> torch.Tensor:
    """``keys [..., D]`` with their leading ``len(cos)`` dims rotated, in fp32."""
    whole = keys.float()
    num_rotated = len(cos)
    turned = whole[..., :num_rotated]
    if pairing == "halves":
        swapped = turned.roll(num_rotated // 2, -1)
    else:
        swapped = turned.reshape(*turned.shape[:-1], -1, 2).flip(-1).flatten(-2)
    result = (turned * cos).addcmul_(swapped, sin)
    return result if num_rotated == whole.shape[-1] else torch.cat((result, whole[..., num_rotated:]), -1)


def _runs(layers: Sequence[LayerRotation]) -> list[tuple[LayerRotation, int, int]]:
    """Neighbouring layers that move alike, as ``(layer, start, stop)``."""
    runs: list[tuple[LayerRotation, int, int]] = []
    for number, layer in enumerate(layers):
        if runs and runs[-1][0] == layer:
            runs[-1] = (layer, runs[-1][1], number + 1)
        else:
            runs.append((layer, number, number + 1))
    return runs
