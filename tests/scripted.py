"""A broker whose model says what a test wants: every token is run for real, only the choice of the next one is the test's."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Sequence
from typing import Any

import pytest
import torch

from aaflow_langgraph import requests
from aaflow_langgraph.broker import KVBroker
from aaflow_langgraph.engine.sampling import Sampling, choose
from aaflow_langgraph.results import Generation, TokenDelta

_thread = threading.local()


class ScriptedBroker(KVBroker):
    """Answers a prompt with ``script(text of the prompt)``, then ends the turn. None leaves the choice to the model."""

    script: Callable[[str], str | None] = staticmethod(lambda prompt: None)

    def stream_complete(
        self, token_ids: Sequence[int], **options: Any
    ) -> Generator[TokenDelta | Generation, None, None]:
        words = self.script(self.engine.frame.spell(token_ids))
        ids = None if words is None else [*self.engine.frame.encode(words), self.engine.tokenizer.eos_token_id]
        _thread.script = ids
        try:
            yield from super().stream_complete(token_ids, **options)
        finally:
            _thread.script = None


def _choose(logits: torch.Tensor, sampling: Sampling, generator: torch.Generator | None) -> int:
    script = getattr(_thread, "script", None)
    return script.pop(0) if script else choose(logits, sampling, generator)


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Import it into a test module to use it."""
    monkeypatch.setattr(requests, "choose", _choose)
