"""The permutation workload: five documents of a question, joined in several orders by every rung, against the dense forward.

A question's documents are prefilled apart, once. In every order they are joined densely and by each rung; what a rung left is
judged by the stock modules of transformers over a copy of its KV: the distribution of the first token of the answer, and the
teacher-forced likelihood of the answer that dense gives (greedy, at most 16 tokens). Where the two part, the rung's own answer
is generated; elsewhere it is dense's.

Three controls put mismatched KV of the same shape in the moved tokens' place: the next question's documents, zeroes, noise of
the same spread. Where they do as well as a rung, the KV carries nothing.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache

from aaflow_langgraph.bench.questions import Case
from aaflow_langgraph.broker import KVBroker
from aaflow_langgraph.engine.cache_adapter import cache_keyword
from aaflow_langgraph.engine.sampling import Sampling
from aaflow_langgraph.engine.transformers import TransformersEngine
from aaflow_langgraph.handle import KVHandle

ANSWER_TOKENS = 16
ANSWERED_ORDERS = 4
"""Answers are the dearest part: they are generated in so many orders, and judged by their likelihood in all."""
CONTROLS = ("other documents", "zeroed", "random")
_ANSWER = Sampling(max_tokens=ANSWER_TOKENS)


@dataclass(frozen=True, slots=True)
class Rung:
    """A rung of the ladder as it is asked for."""

    name: str
    k: int | None = None
    r: float | None = None

    def options(self) -> dict[str, Any]:
        """Arguments of ``compose``."""
        chosen = {name: value for name, value in (("k", self.k), ("r", self.r)) if value is not None}
        return {"rung": self.name, **chosen}

    def __str__(self) -> str:
        if self.k is not None:
            return f"{self.name} k={self.k}"
        return self.name if self.r is None else f"{self.name} r={self.r:g}"


@dataclass(frozen=True, slots=True)
class Seen:
    """What one rung made of one order of one question's documents. ``nll`` is per token of dense's answer, in nats."""

    rung: Rung
    question: int
    order: int
    cpu_s: float | None
    dense_cpu_s: float
    kl: float
    top1: bool
    nll: float
    deviation: float | None
    deviation_max: float | None
    is_right: bool | None


DENSE = Rung("dense")
NO_CONTEXT = Rung("no context")


def ladder(ks: Sequence[int], rs: Sequence[float]) -> list[Rung]:
    """Every rung that is measured, exact ones first."""
    lego = [Rung("legolink", k=k) for k in ks]
    return [Rung("suffix"), Rung("prefix"), *lego, *(Rung("blend", r=r) for r in rs)]


def orders_of(count: int, seed: int = 0) -> list[tuple[int, ...]]:
    """``count`` orders of five documents, the order of retrieval first."""
    found = list(itertools.permutations(range(5)))
    rest = found[1:]
    random.Random(seed).shuffle(rest)
    return [found[0], *rest[: count - 1]]


class Workload:
    """Runs questions on one engine. ``tell`` is called after every join."""

    def __init__(self, engine: TransformersEngine, rungs: Sequence[Rung], tell: Callable[[], None]) -> None:
        self._engine = engine
        self._rungs = rungs
        self._tell = tell

    def run(self, cases: Sequence[Case], orders: Sequence[tuple[int, ...]]) -> Iterator[Seen]:
        """Everything that was seen, as it is seen."""
        for number, case in enumerate(cases):
            other = cases[(number + 1) % len(cases)]
            size = self._engine.layout.num_bytes(len(self._engine.frame.encode("".join(case.documents))) + 256)
            with KVBroker.open(self._engine, pool_bytes=(len(self._rungs) + 6) * size) as broker:
                yield from _Question(broker, case, other, number, self._rungs, self._tell).run(orders)


class _Question:
    """One question's documents, prefilled apart."""

    def __init__(
        self,
        broker: KVBroker,
        case: Case,
        other: Case,
        number: int,
        rungs: Sequence[Rung],
        tell: Callable[[], None],
    ) -> None:
        self._broker = broker
        self._case = case
        self._other = other
        self._number = number
        self._rungs = rungs
        self._tell = tell
        self._prompt = f"\n\n{case.question} Answer in one short sentence."
        self._handles = [self._prefill(place) for place in range(len(case.documents))]

    def run(self, orders: Sequence[tuple[int, ...]]) -> Iterator[Seen]:
        alone = self._broker.generate(self._prompt.strip(), sampling=_ANSWER)
        yield Seen(
            NO_CONTEXT,
            self._number,
            0,
            None,
            1.0,
            float("nan"),
            False,
            float("nan"),
            None,
            None,
            self._is_right(alone.text),
        )
        for place, order in enumerate(orders):
            # Rungs whose result is dense's by construction are shown to be that once per question.
            exact = [rung for rung in self._rungs if rung.name in ("suffix", "prefix") or rung.r == 1]
            yield from self._order(place, order, [rung for rung in self._rungs if place == 0 or rung not in exact])

    def _order(self, place: int, order: tuple[int, ...], rungs: Sequence[Rung]) -> Iterator[Seen]:
        broker, documents = self._broker, [self._handles[number] for number in order]
        exact_first = [rung for rung in rungs if rung.name == "suffix"]
        results = {rung: self._compose(documents, rung) for rung in exact_first}
        dense, dense_s, _ = self._compose(documents, DENSE)
        truth = broker.generate(self._prompt, parent=dense, sampling=_ANSWER)
        ids = broker.token_ids(truth.handle)
        num_context, stop = truth.usage.num_context, dense.kv_tokens
        judge = _Judge(broker, stop, ids[stop:num_context], truth.token_ids)
        right = judge.logits(self._kv(dense))
        is_right = self._is_right(truth.text)

        def seen(rung: Rung, logits: torch.Tensor, cpu_s: float | None, report: Any, answer: bool | None) -> Seen:
            found = judge.compare(right, logits)
            checked = report is not None and report.num_checked > 0
            return Seen(
                rung,
                self._number,
                place,
                cpu_s,
                dense_s,
                *found,
                report.deviation_mean if checked else None,
                report.deviation_max if checked else None,
                answer,
            )

        yield seen(DENSE, right, dense_s, None, is_right if place < ANSWERED_ORDERS else None)
        waiting: list[tuple[Rung, torch.Tensor]] = []
        for rung in rungs:
            if rung not in results:
                results[rung] = self._compose(documents, rung)
            logits = judge.logits(self._kv(results[rung][0]))
            waiting.append((rung, logits))
        asked = place < ANSWERED_ORDERS
        parted = [rung for rung, logits in waiting if asked and not judge.follows(logits)]
        # A batch reads the weights once for all of them.
        with ThreadPoolExecutor(max(1, len(parted))) as pool:
            texts = pool.map(
                lambda rung: broker.generate(self._prompt, parent=results[rung][0], sampling=_ANSWER).text, parted
            )
            answers = {rung: self._is_right(text) for rung, text in zip(parted, texts, strict=True)}
        for rung, logits in waiting:
            handle, cpu_s, report = results[rung]
            yield seen(rung, logits, cpu_s, report, answers.get(rung, is_right) if asked else None)
        if place == 0:
            first = documents[0].kv_tokens
            for name, rows in self._controls(self._kv(dense), broker.token_ids(dense), first):
                yield seen(Rung(name), judge.logits(rows), None, None, None)
        for handle in (truth.handle, *(handle for handle, _, _ in results.values()), dense):
            broker.evict(handle)
        # With the last of them its beginning went, which is the first document.
        self._prefill(order[0])

    def _prefill(self, place: int) -> KVHandle:
        return self._broker.prefill(self._case.documents[place], label=f"document {place}").handle

    def _compose(self, documents: Sequence[KVHandle], rung: Rung) -> tuple[KVHandle, float, Any]:
        """The joined handle, CPU seconds and the report."""
        started = time.process_time()
        composed = self._broker.compose(documents, **rung.options())
        taken = time.process_time() - started
        self._tell()
        return composed.handle, taken, composed.report

    def _kv(self, handle: KVHandle) -> torch.Tensor:
        """A copy of a handle's KV, ``[L, 2, H, T, D]``."""
        with self._broker._requests.whole(self._broker.recipe(handle)) as session:
            return torch.cat([piece.kv for piece in session.pieces], 3)

    def _controls(self, kv: torch.Tensor, ids: tuple[int, ...], first: int) -> Iterator[tuple[str, torch.Tensor]]:
        """Dense KV with something else behind the first document."""
        broker, moved = self._broker, kv[..., first:, :]
        text = "\n\n".join(self._other.documents)
        others = broker.engine.frame.encode(text)
        filled = (*ids[:first], *itertools.islice(itertools.cycle(others), len(ids) - first))
        handle = broker.materialize(filled)
        other = self._kv(handle)[..., first:, :]
        broker.evict(handle)
        generator = torch.Generator().manual_seed(self._number)
        noise = torch.randn(moved.shape, generator=generator) * moved.float().std((3, 4), keepdim=True).cpu()
        for name, rows in zip(CONTROLS, (other, torch.zeros_like(moved), noise.to(moved)), strict=True):
            yield name, torch.cat((kv[..., :first, :], rows), 3)

    def _is_right(self, text: str) -> bool:
        return self._case.gold.lower() in text.lower()


class _Judge:
    """Logits behind a prompt and behind every token of an answer, over any KV of the ``stop`` tokens before them."""

    def __init__(self, broker: KVBroker, stop: int, prompt: Sequence[int], answer: Sequence[int]) -> None:
        self._engine = broker.engine
        self._stop = stop
        self._ids = torch.tensor([[*prompt, *answer[:-1]]], device=self._engine.device)
        self._answer = torch.tensor(answer, device=self._engine.device)

    def logits(self, kv: torch.Tensor) -> torch.Tensor:
        """``[answer tokens, vocab]``, fp32, by the stock modules."""
        engine = self._engine
        cache = DynamicCache(config=engine.model.config)
        for layer, (keys, values) in enumerate(kv[..., : self._stop, :]):
            cache.update(keys[None], values[None], layer)
        positions = torch.arange(self._stop, self._stop + self._ids.shape[1], device=engine.device)[None]
        options: dict[str, Any] = {cache_keyword(engine.model): cache, "use_cache": True, "position_ids": positions}
        if engine.keeps_logits:
            options["logits_to_keep"] = len(self._answer)
        with engine.stock_attention(), torch.no_grad():
            found: torch.Tensor = engine.model(input_ids=self._ids, **options).logits[0, -len(self._answer) :]
        return found.float()

    def follows(self, logits: torch.Tensor) -> bool:
        """Would greedy decoding give the answer?"""
        return bool((logits.argmax(-1) == self._answer).all())

    def compare(self, right: torch.Tensor, logits: torch.Tensor) -> tuple[float, bool, float]:
        """KL of the first token's distribution from the right one, is its most likely token the same, and the answer's
        negative log-likelihood per token.
        """
        p, q = right[0].log_softmax(-1), logits[0].log_softmax(-1)
        kl = max(0.0, float((p.exp() * (p - q)).sum()))
        nll = -float(logits.log_softmax(-1).gather(1, self._answer[:, None]).mean())
        return kl, bool(p.argmax() == q.argmax()), nll
