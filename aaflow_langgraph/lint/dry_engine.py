"""An engine that computes nothing: the real tokenizer, the real chat template, and answers that were written before.

Its "logits" point at the next token of the answer. Answers are spelled in single characters, as a model may: whoever encodes
an answer's text again gets other token ids, and that is to be seen.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch
from transformers import PreTrainedTokenizerBase

from aaflow_langgraph.engine.base import Piece, Tail
from aaflow_langgraph.engine.transformers import TransformersEngine
from aaflow_langgraph.engine.turns import ChatFrame
from aaflow_langgraph.model import KVLayout, Namespace

ANSWER = "That is all there is to say about it."
_THINKS = "</think>"
_REASONING = "<think>\nYes.\n</think>\n\n"
_TAG = re.compile(r"(<[^<>\s]+>|\[/?[A-Z_]+\])")

# As small as a layout can be: what is kept is never read.
_LAYOUT = KVLayout(num_layers=1, num_kv_heads=1, head_dim=2, dtype="float32", itemsize=4)


class DryEngine(TransformersEngine):
    """Takes the place of an engine for as long as an app is looked at.

    Args:
        tokenizer: The real one.
        namespace: Of the engine it stands for.
        window: Most tokens of a sequence.
        vocab_size: Of the model.
        stop_ids: Ids that end a generation.
        answers: What the model says, in turn; the last one from then on.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        namespace: Namespace,
        *,
        window: int,
        vocab_size: int,
        stop_ids: frozenset[int],
        answers: Sequence[str] = (),
    ) -> None:
        self.tokenizer = tokenizer
        self.namespace = namespace
        self.window = window
        self.vocab_size = vocab_size
        self.stop_ids = stop_ids or frozenset({vocab_size - 1})
        self.layout = _LAYOUT
        self.device = torch.device("cpu")
        self.frame = ChatFrame(tokenizer)  # a new one: frames are kept, and a template may put the date into them
        self.lean = None
        self.folder = None
        self.rotation = "nothing is computed here, so nothing can be moved"
        self.read_path = "dry"
        self._num_answers = 0
        thinks = _THINKS in str(tokenizer.chat_template)
        self._answers = [self._spelled(text) for text in answers or ((_REASONING if thinks else "") + ANSWER,)]

    @classmethod
    def like(cls, engine: TransformersEngine, answers: Sequence[str]) -> DryEngine:
        """The stand-in of an engine."""
        return cls(
            engine.tokenizer,
            engine.namespace,
            window=engine.window,
            vocab_size=engine.vocab_size,
            stop_ids=engine.stop_ids,
            answers=answers,
        )

    def start(  # type: ignore[override]
        self, past: Sequence[Piece], tail: Tail, *, grid: int | None, priority: int = 0
    ) -> _DryRun:
        """A run that notes positions and nothing else."""
        return _DryRun(self, tail)

    def next_answer(self, *, take: bool) -> tuple[int, ...]:
        """Token ids of the next answer, its end included."""
        answer = self._answers[min(self._num_answers, len(self._answers) - 1)]
        self._num_answers += take
        return (*answer, min(self.stop_ids))

    def _spelled(self, text: str) -> tuple[int, ...]:
        """Ids of a text, character by character, tags whole; as a text where that says something else."""
        parts = [part for piece in _TAG.split(text) for part in ([piece] if _TAG.fullmatch(piece) else piece)]
        ids = tuple(token for part in parts if part for token in self.frame.split_at((), part))
        if self.tokenizer.decode(list(ids)) == text and not self.stop_ids.intersection(ids):
            return ids
        return self.frame.split_at((), text)


class _DryRun:
    def __init__(self, engine: DryEngine, tail: Tail) -> None:
        self._engine = engine
        self._tail = tail
        self._answer: tuple[int, ...] = ()
        self._num_decoded = 0
        self.position = tail.start + tail.length
        self.was_shared = False

    def prefill(self, token_ids: Sequence[int]) -> torch.Tensor:
        self._advance(len(token_ids))
        return self._logits(self._engine.next_answer(take=False)[0])

    def decode(self, token_id: int) -> torch.Tensor:
        self._advance(1)
        if not self._num_decoded:
            self._answer = self._engine.next_answer(take=True)
        self._num_decoded += 1
        return self._logits(self._answer[min(self._num_decoded, len(self._answer) - 1)])

    def _advance(self, num_tokens: int) -> None:
        self._tail.ensure(self._tail.length + num_tokens)
        self._tail.length += num_tokens
        self.position += num_tokens

    def _logits(self, token_id: int) -> torch.Tensor:
        logits = torch.full((self._engine.vocab_size,), -1e4)
        logits[token_id] = 0.0
        return logits
