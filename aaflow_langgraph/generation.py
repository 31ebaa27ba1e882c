"""Text and randomness of one generation. Pure: no model, no KV.

``TextStream`` turns token ids into text as they come: characters that are still incomplete and text that may be the
beginning of a stop string are held back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from aaflow_langgraph.engine.sampling import Sampling
from aaflow_langgraph.hashing import digest, token_bytes

_INCOMPLETE = "\ufffd"


class TextStream:
    """Text of a growing list of token ids.

    Decodes only the tokens since the last complete word boundary, with the ones before as context, as vLLM's incremental
    detokeniser does: some tokenizers decode a token differently at the start of a text.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], stop: Sequence[str]) -> None:
        self.text = ""
        self.stopped = False
        self._decode = decode
        self._stop = tuple(stop)
        self._ids: list[int] = []
        self._context = 0
        self._read = 0
        self._decoded = ""

    def push(self, token_id: int) -> str:
        """Add a token; the text that can be shown now."""
        self._ids.append(token_id)
        known = self._decode(self._ids[self._context : self._read])
        grown = self._decode(self._ids[self._context :])
        if not grown.endswith(_INCOMPLETE) and len(grown) > len(known):
            self._decoded += grown[len(known) :]
            self._context, self._read = self._read, len(self._ids)
        return self._release(final=False)

    def flush(self) -> str:
        """The text that was held back, at the end of the generation. An incomplete last character is dropped."""
        if not self.stopped:
            known = self._decode(self._ids[self._context : self._read])
            grown = self._decode(self._ids[self._context :]).rstrip(_INCOMPLETE)
            self._decoded += grown[len(known) :]
            self._context = self._read = len(self._ids)
        return self._release(final=True)

    def _release(self, *, final: bool) -> str:
        """Move what cannot belong to a stop string any more from decoded to shown."""
        shown = len(self.text)
        if not self.stopped:
            found = [at for at in (self._decoded.find(s, max(0, shown - len(s))) for s in self._stop) if at >= 0]
            if found:
                self.stopped = True
                self._decoded = self._decoded[: min(found)]
        safe = len(self._decoded)
        if not (self.stopped or final):
            for s in self._stop:
                for size in range(min(len(s) - 1, len(self._decoded)), 0, -1):
                    if self._decoded.endswith(s[:size]):
                        safe = min(safe, len(self._decoded) - size)
                        break
        self.text = self._decoded[: max(safe, shown)]
        return self.text[shown:]


def derive_seed(parent: str, token_ids: Sequence[int], sampling: Sampling, path: str) -> int:
    """Seed from what is asked and where: a re-run repeats, siblings differ."""
    named = digest("seed", parent, token_bytes(token_ids), repr(sampling), path)
    return int(named[:16], 16) >> 1


def make_generator(sampling: Sampling, seed: Callable[[], int]) -> torch.Generator | None:
    """Randomness of a generation; None for greedy."""
    if sampling.temperature == 0.0:
        return None
    generator = torch.Generator("cpu")
    generator.manual_seed(sampling.seed if sampling.seed is not None else seed())
    return generator
