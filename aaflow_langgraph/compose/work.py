"""One composite in the making: rows of KV behind a past that stands as it is, and which of them came from where.

Knows tensors and positions; knows no pool and no policy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from aaflow_langgraph.engine.base import Piece
from aaflow_langgraph.engine.mixed import Mixed, check_layer, run_at
from aaflow_langgraph.engine.rotary import Rotation
from aaflow_langgraph.engine.transformers import TransformersEngine
from aaflow_langgraph.model import BLOCK_TOKENS, Copied, Span


@dataclass(slots=True)
class Work:
    """What the rungs work on.

    Attributes:
        engine: Runs tokens.
        token_ids: All tokens of the composite.
        mixed: Its KV: the past in front, and rows, of which those of ``segments`` hold moved KV.
        start: First position that is composed; rows may begin before it.
        segments: Positions of the moved spans, in order.
        ran: Positions that were run through all layers so far.
        tick: Called between chunks; may raise to stop.
    """

    engine: TransformersEngine
    token_ids: Sequence[int]
    mixed: Mixed
    start: int
    segments: tuple[Span, ...]
    ran: set[int] = field(default_factory=set)
    tick: Callable[[], None] = field(default=lambda: None)

    @property
    def moved(self) -> list[int]:
        """Positions whose KV was moved."""
        return [at for span in self.segments for at in range(span.start, span.stop)]

    @property
    def new(self) -> list[int]:
        """Positions that no child has: they are run on every rung."""
        moved = set(self.moved)
        return [at for at in range(self.start, len(self.token_ids)) if at not in moved]

    def run(self, positions: Sequence[int]) -> None:
        """Run tokens through all layers, each over everything in front of it as it is now, and keep their KV."""
        ordered = sorted(set(positions))
        for start in range(0, len(ordered), BLOCK_TOKENS):
            chunk = ordered[start : start + BLOCK_TOKENS]
            self.tick()
            run_at(self.engine, [self.token_ids[at] for at in chunk], chunk, self.mixed)
        self.ran.update(ordered)

    def check(self, positions: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values ``[H, T, D]`` of layer 1 as the tokens at ``positions`` have them in this context."""
        return check_layer(self.engine, [self.token_ids[at] for at in positions], list(positions), self.mixed)

    def rows_of(self, layer: int, positions: Sequence[int]) -> torch.Tensor:
        """KV ``[2, H, T, D]`` of a layer at positions of the rows; a copy."""
        return self.mixed.rows[layer][:, :, self._places(positions)]

    def _places(self, positions: Sequence[int]) -> torch.Tensor:
        return torch.tensor(positions, device=self.mixed.rows.device) - self.mixed.start

    def write(self, layer: int, positions: Sequence[int], keys: torch.Tensor, values: torch.Tensor) -> None:
        """Put ``[H, T, D]`` each at positions of the rows."""
        where = self._places(positions)
        self.mixed.rows[layer, 0][:, where] = keys
        self.mixed.rows[layer, 1][:, where] = values


def move_in(
    rotation: Rotation, copied: Sequence[Copied], pieces: Mapping[str, Sequence[Piece]], mixed: Mixed
) -> tuple[Span, ...]:
    """Move what children computed to its place in the rows; where it is now, one span per stretch moved as one."""
    for one in copied:
        for piece in pieces[one.kv_id]:
            a, b = max(piece.start, one.start), min(piece.stop, one.stop)
            if a < b:
                at = one.at + a - one.start - mixed.start
                rotation.move(
                    piece.kv[..., a - piece.start : b - piece.start, :],
                    one.at - one.start,
                    mixed.rows[..., at : at + b - a, :],
                )
    spans: list[Span] = []
    before: Copied | None = None
    for one in copied:
        stop = one.at + one.stop - one.start
        if before and spans[-1].stop == one.at and (before.kv_id, before.stop) == (one.kv_id, one.start):
            spans[-1] = Span(spans[-1].start, stop)
        else:
            spans.append(Span(one.at, stop))
        before = one
    return tuple(spans)
