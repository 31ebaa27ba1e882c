"""Runs chosen tokens over KV that was put together from several places, and writes their new KV into it.

Composed KV is ``pieces`` (a shared prefix, read-only) followed by writable ``rows``, one per position. ``run_at`` recomputes some
positions in all layers; ``check_layer`` says what the keys and values of layer 1 would be if layer 0 had seen everything, the
measure of how wrong rows are (CacheBlend, arXiv 2405.16444).

Positions without gaps run as an ordinary prefill whose tail are the rows; others through ``ScatteredPast`` on the fast read path,
and on the universal one through the model's own attention with a mask of ours. Knows an engine; knows no segment and no rung.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NoReturn, Protocol

import torch

from aaflow_langgraph.engine import attention, cache_adapter
from aaflow_langgraph.engine.attention import Past
from aaflow_langgraph.engine.base import Piece, chunk_spans
from aaflow_langgraph.engine.batch import Step
from aaflow_langgraph.engine.scattered import Rows, ScatteredPast
from aaflow_langgraph.model import BLOCK_TOKENS

if TYPE_CHECKING:
    from aaflow_langgraph.engine.transformers import TransformersEngine

KeysValues = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Mixed:
    """KV of one composite: ``pieces`` without gaps over ``[0, start)``, then ``rows`` ``[L, 2, H, n, D]`` over
    ``[start, start + n)``, writable. A row that nothing has been written to may hold anything, as long as it is written before
    a later position attends to it.
    """

    pieces: Sequence[Piece]
    rows: torch.Tensor
    start: int


def run_at(
    engine: TransformersEngine, token_ids: Sequence[int], positions: Sequence[int], mixed: Mixed
) -> torch.Tensor:
    """Run ``token_ids`` at strictly ascending absolute ``positions`` among the rows; write their KV there, in every layer.

    Every token attends to all positions before it and to itself. Runs in chunks of at most 256 tokens, later chunks see what
    earlier ones wrote; the engine is free for others in between. Not atomic: an error leaves some rows new.

    Returns:
        Logits after the last token, ``[vocab]``.

    Raises:
        ValueError: No token, or positions that do not ascend, lie outside of the rows or are not one per token.
    """
    reader = _reader(engine, mixed)
    logits: torch.Tensor | None = None
    for a, b in _chunks(token_ids, positions, mixed):
        logits = reader.run(token_ids[a:b], positions[a:b])
    assert logits is not None
    return logits


def check_layer(
    engine: TransformersEngine, token_ids: Sequence[int], positions: Sequence[int], mixed: Mixed
) -> KeysValues:
    """Keys and values ``[H, T, D]`` of layer 1 of tokens whose layer 0 has attended to everything before them.

    Keys and values of layer 0 depend on token and position alone, so rows hold them however they were put together; those of
    ``token_ids`` are computed anew, and no row is written. A model of one layer gives the keys and values of layer 0.

    Raises:
        ValueError: See ``run_at``.
    """
    pieces = [Piece(piece.kv[:1], piece.start, piece.stop) for piece in mixed.pieces]
    reader = _reader(engine, Mixed(pieces, mixed.rows[:1].clone(), mixed.start))
    found = [reader.check(token_ids[a:b], positions[a:b]) for a, b in _chunks(token_ids, positions, mixed)]
    keys, values = zip(*found, strict=True)
    return torch.cat(keys, 1), torch.cat(values, 1)


class _Reader(Protocol):
    """A read path over one ``Mixed``. ``positions`` are absolute."""

    def run(self, token_ids: Sequence[int], positions: Sequence[int]) -> torch.Tensor:
        """One forward; logits ``[vocab]`` of the last token."""

    def check(self, token_ids: Sequence[int], positions: Sequence[int]) -> KeysValues:
        """One forward as far as layer 1's keys and values, ``[H, T, D]``."""


def _reader(engine: TransformersEngine, mixed: Mixed) -> _Reader:
    return _Fast(engine, mixed) if engine.read_path == "fast" else _Universal(engine, mixed)


class _Fast:
    """KV is read and written where it lies."""

    def __init__(self, engine: TransformersEngine, mixed: Mixed) -> None:
        self._engine = engine
        self._mixed = mixed
        self._rows = Rows(mixed.rows, mixed.start)
        self._plain = Past(mixed.pieces, self._rows, None)

    def run(self, token_ids: Sequence[int], positions: Sequence[int]) -> torch.Tensor:
        step = self._step(token_ids, positions, self._engine.layout.num_layers)
        return self._engine.batcher.alone(partial(self._engine.forward_step, step))

    def check(self, token_ids: Sequence[int], positions: Sequence[int]) -> KeysValues:
        engine, step = self._engine, self._step(token_ids, positions, 1)

        def check() -> KeysValues:
            with attention.reading(step.past), torch.no_grad():
                step.past.begin(len(token_ids))
                if engine.lean is not None and engine.lean.ready():
                    return engine.lean.second_layer(token_ids, step.position, step.past)
                return _until_second(engine, token_ids, step.position, step.cache.layers[0])

        return engine.batcher.alone(check)

    def _step(self, token_ids: Sequence[int], positions: Sequence[int], num_layers: int) -> Step:
        first, mixed = positions[0], self._mixed
        past: Past = self._plain
        where: int | torch.Tensor = first
        if _has_no_gap(positions):
            self._rows.length = first - mixed.start
        else:
            past = ScatteredPast(mixed.pieces, self._rows, [position - mixed.start for position in positions])
            where = torch.tensor(positions, device=self._engine.device)
        layers = [cache_adapter.FastLayer(number, past.write, lambda: first) for number in range(num_layers)]
        return Step(token_ids, where, past, cache_adapter.as_cache(layers))


class _Universal:
    """Everything in one contiguous tensor, for the model's own attention; what is new goes into the rows as well."""

    def __init__(self, engine: TransformersEngine, mixed: Mixed) -> None:
        self._engine = engine
        self._mixed = mixed
        self._all = mixed.rows
        if mixed.start:
            num_layers, two, num_heads, num_rows, dim = mixed.rows.shape
            self._all = mixed.rows.new_empty(num_layers, two, num_heads, mixed.start + num_rows, dim)
            for piece in mixed.pieces:
                self._all[..., piece.start : piece.stop, :] = piece.kv
            self._all[..., mixed.start :, :] = mixed.rows

    def run(self, token_ids: Sequence[int], positions: Sequence[int]) -> torch.Tensor:
        engine = self._engine
        where, mask = self._place(positions)
        layers = [self._layer(number, where) for number in range(engine.layout.num_layers)]
        return engine.batcher.alone(partial(engine.forward, token_ids, where, cache_adapter.as_cache(layers), mask))

    def check(self, token_ids: Sequence[int], positions: Sequence[int]) -> KeysValues:
        where, mask = self._place(positions)
        return self._engine.batcher.alone(
            partial(_until_second, self._engine, token_ids, where, self._layer(0, where), mask)
        )

    def _place(self, positions: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Positions ``[T]`` and the additive mask ``[1, 1, T, S]`` of what each of them attends to."""
        where = torch.tensor(positions, device=self._all.device)
        hidden = torch.arange(positions[-1] + 1, device=where.device) > where[:, None]
        return where, self._all.new_zeros(hidden.shape).masked_fill_(hidden, float("-inf"))[None, None]

    def _layer(self, number: int, where: torch.Tensor) -> cache_adapter.UniversalLayer:
        start, stop = self._mixed.start, int(where[-1]) + 1

        def update(layer: int, keys: torch.Tensor, values: torch.Tensor) -> KeysValues:
            for which, new in enumerate((keys, values)):
                self._all[layer, which].index_copy_(1, where, new[0])
                if start:
                    self._mixed.rows[layer, which].index_copy_(1, where - start, new[0])
            return self._all[layer, 0, :, :stop][None], self._all[layer, 1, :, :stop][None]

        return cache_adapter.UniversalLayer(number, update, lambda: stop - len(where), is_sliding=False)


class _Reached(Exception):
    """A forward has come to the layer whose keys and values were asked for. Internal: it carries them."""

    def __init__(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        super().__init__()
        self.found = keys[0], values[0]


def _until_second(
    engine: TransformersEngine,
    token_ids: Sequence[int],
    position: int | torch.Tensor,
    first: cache_adapter.UniversalLayer | cache_adapter.FastLayer,
    mask: torch.Tensor | None = None,
) -> KeysValues:
    """Run the model's own modules through layer 0 (its cache layer is ``first``) and up to the keys and values of layer 1."""

    def reached(_layer: int, keys: torch.Tensor, values: torch.Tensor) -> NoReturn:
        raise _Reached(keys, values)

    num_layers = engine.layout.num_layers
    last = [
        cache_adapter.UniversalLayer(number, reached, first.get_seq_length, is_sliding=False)
        for number in range(min(1, num_layers - 1), num_layers)
    ]
    layers = [first, *last] if num_layers > 1 else last
    try:
        engine.forward(token_ids, position, cache_adapter.as_cache(layers), mask)
    except _Reached as reached_:
        return reached_.found
    raise RuntimeError(f"{type(engine.model).__name__} ran to its end without a cache update")


def _has_no_gap(positions: Sequence[int]) -> bool:
    return positions[-1] - positions[0] == len(positions) - 1


def _chunks(token_ids: Sequence[int], positions: Sequence[int], mixed: Mixed) -> list[tuple[int, int]]:
    """Spans of one forward each. Without gaps they are cut as every prefill is, so that they are the same arithmetic."""
    first, stop = mixed.start, mixed.start + mixed.rows.shape[3]
    if not positions or len(positions) != len(token_ids):
        raise ValueError(f"{len(token_ids)} tokens at {len(positions)} positions: at least one, and one position each")
    if positions[0] < first or positions[-1] >= stop or any(a >= b for a, b in itertools.pairwise(positions)):
        raise ValueError(
            f"positions must ascend strictly within [{first}, {stop}), got {positions[0]} to {positions[-1]}"
        )
    if _has_no_gap(positions):
        start = positions[0]
        return [(a - start, b - start) for a, b in chunk_spans(start, positions[-1] + 1)]
    return [(a, min(a + BLOCK_TOKENS, len(positions))) for a in range(0, len(positions), BLOCK_TOKENS)]
