"""What a broker does for one request: reuse what is there, compute the rest, publish it, name it, and note what it cost.

Knows sessions, recipes and the journal; takes checked input. What callers may say, and in which form, is the broker's matter.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from aaflow_langgraph.admission import Admission
from aaflow_langgraph.compose.ladder import again
from aaflow_langgraph.composer import Composer
from aaflow_langgraph.engine.line import check_priority
from aaflow_langgraph.engine.sampling import Sampling, choose, log_probability
from aaflow_langgraph.engine.transformers import TransformersEngine
from aaflow_langgraph.engine.turns import Extension
from aaflow_langgraph.errors import Cancelled, ConfigError, NotComposable
from aaflow_langgraph.generation import TextStream, derive_seed, make_generator
from aaflow_langgraph.handle import KVHandle, check_label, make_preview
from aaflow_langgraph.inflight import InFlight
from aaflow_langgraph.journal import Journal, Origin, asked_by
from aaflow_langgraph.model import BLOCK_TOKENS, Operator, Recipe, Span, Turn
from aaflow_langgraph.nearest import Nearest
from aaflow_langgraph.pool.base import PoolClosed
from aaflow_langgraph.recipes import RecipeBook
from aaflow_langgraph.results import Generation, Prefilled, Reuse, TokenDelta, Usage
from aaflow_langgraph.session import Session
from aaflow_langgraph.store import ExtentStore, TokenSequence

EndOfTurn = Callable[[tuple[int, ...], tuple[Turn, ...]], Sequence[int]]
"""The template's own ids behind a generated turn, given all ids and turns up to there."""


@dataclass(slots=True)
class RequestCounts:
    """Tokens and events since the broker was opened."""

    reused: int = 0
    prefilled: int = 0
    decoded: int = 0
    recomputed: int = 0
    failures: int = 0


@dataclass(frozen=True, slots=True)
class How:
    """The options that every request has.

    Attributes:
        deterministic: Run alone, read canonical KV only.
        kv: Look up and publish at all?
        label: For people.
        cancel: Set from anywhere to stop before the next forward.
        priority: Smaller numbers go first.
    """

    deterministic: bool = False
    kv: bool = True
    label: str = ""
    cancel: threading.Event | None = None
    priority: int = 0

    def __post_init__(self) -> None:
        for name in ("deterministic", "kv"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name} must be True or False, got {getattr(self, name)!r}")
        check_cancel(self.cancel)
        check_priority(self.priority)
        check_label(self.label)


@dataclass(slots=True)
class _Begun:
    """A request on its way: what it runs over and what was known of that before it began."""

    sequence: TokenSequence
    nearest: Nearest
    num_nearest_computed: int
    started: float
    asker: Origin
    num_recomputed: int = 0


class Requests:
    """Runs the requests of one broker. Thread-safe.

    Args:
        check_open: Raises when the broker serves nothing (any more, or in this process).
        is_closed: Was the broker closed while a request ran?
    """

    def __init__(
        self,
        engine: TransformersEngine,
        store: ExtentStore,
        recipes: RecipeBook,
        *,
        previews: bool,
        check_open: Callable[[], None],
        is_closed: Callable[[], bool],
    ) -> None:
        self.counts = RequestCounts()
        self.journal = Journal()
        self._engine = engine
        self._namespace = engine.namespace.digest
        self._store = store
        self._recipes = recipes
        self._in_flight = InFlight(store.index)
        self.composer = Composer(engine, recipes)
        self._previews = previews
        self._check_open = check_open
        self._is_closed = is_closed
        self.lock = threading.Lock()
        self.admission = Admission(lambda: engine.batcher.progress)

    def prefill(
        self,
        parent: Recipe | None,
        ids: tuple[int, ...],
        turns: tuple[Turn, ...],
        operator: Operator,
        how: How,
        *,
        num_shared: int | None = None,
        text: str = "",
        anew: bool = False,
    ) -> Prefilled:
        """Make the KV of ``ids`` exist, publish it, register the recipe; ``anew`` computes it even where it is there."""
        started = time.perf_counter()
        self._engine.check_fits(len(ids))
        if num_shared is None:
            num_shared = parent.stop if parent else 0
        with self.session(how) as session:
            begun = self._begin(session, parent, ids, num_shared, 0, how, started, whole=True, anew=anew)
            if session.position < len(ids):
                session.prefill(len(ids))
            session.seal(begun.sequence, len(ids))  # also what was only copied from a sequence that goes on otherwise
            recipe = self._register(parent, begun.sequence, 0, turns, operator, num_shared)
            usage = self._usage(session, len(ids), 0, 0.0, begun, _reuse(session, parent, num_shared))
        self._note(begun, recipe, how, usage, len(ids))
        return Prefilled(self.handle(recipe, how, text), usage)

    def stream(
        self,
        parent: Recipe | None,
        extension: Extension,
        sampling: Sampling,
        how: How,
        *,
        text: Callable[[], str],
        seed_name: str,
        seed_path: str,
        end_of_turn: EndOfTurn,
        started: float,
    ) -> Generator[TokenDelta | Generation, None, None]:
        """Generate behind ``extension``: every ``TokenDelta`` as it is known, then the ``Generation``.

        Args:
            text: The prompt for the preview; asked for behind the last token, and only where there are previews.
            seed_name: What a seed is derived from, beside tokens, settings and ``seed_path``.
        """
        self._engine.check_fits(len(extension.token_ids), sampling.max_tokens)
        generator = make_generator(sampling, lambda: derive_seed(seed_name, extension.token_ids, sampling, seed_path))
        num_prompt = len(extension.token_ids)
        with self.session(how) as session:
            begun = self._begin(
                session, parent, extension.token_ids, extension.num_shared, sampling.max_tokens, how, started
            )
            logits = session.prefill(num_prompt)
            if session.claim is not None:
                # Others wait for the prompt, not for the answer: neither where there was no room to publish it.
                session.split(min(sampling.max_tokens, BLOCK_TOKENS))
                session.end_claim()
            answer = TextStream(self._engine.frame.decode, sampling.stop)
            ids: list[int] = []
            logprobs: list[float] = []
            finish: str | None = None
            ttft = longest_s = 0.0
            while finish is None:
                token_id = choose(logits, sampling, generator)
                ttft = ttft or time.perf_counter() - started
                logprob = log_probability(logits, token_id) if sampling.logprobs else None
                if token_id in self._engine.stop_ids:
                    finish = "stop"
                    break
                ids.append(token_id)
                if logprob is not None:
                    logprobs.append(logprob)
                piece = answer.push(token_id)
                if answer.stopped or len(ids) == sampling.max_tokens:
                    finish = "stop" if answer.stopped else "length"
                    piece += answer.flush()
                yield TokenDelta(token_id, piece, logprob)
                if finish is None:
                    asked = time.perf_counter()
                    logits = session.decode(token_id)
                    longest_s = max(longest_s, time.perf_counter() - asked)
            rest = answer.flush()
            if rest:
                yield TokenDelta(None, rest)
            content = self._engine.frame.split_at(ids, answer.text) if answer.stopped else tuple(ids)
            recipe = self._seal_generation(session, parent, extension, begun.sequence, content, ids, end_of_turn)
            usage = self._usage(
                session, num_prompt, len(ids), ttft, begun, _reuse(session, parent, extension.num_shared), longest_s
            )
        self._note(begun, recipe, how, usage, num_prompt - 1)
        yield Generation(
            handle=self.handle(recipe, how, f"{text()} {answer.text}" if self._previews else ""),
            text=answer.text,
            token_ids=tuple(ids),
            finish_reason="length" if finish == "length" else "stop",
            usage=usage,
            logprobs=tuple(logprobs) if sampling.logprobs else None,
        )

    def first_logits(self, parent: Recipe, ids: tuple[int, ...]) -> torch.Tensor:
        """Logits ``[vocab]`` after ``ids``, which begin with the parent's; nothing is published."""
        self._engine.check_fits(len(ids))
        how = How()
        with self.session(how) as session:
            self._begin(session, parent, ids, parent.stop, 0, how, 0.0)
            return session.prefill(len(ids))

    # ---------------------------------------------------------------- inside

    def _begin(
        self,
        session: Session,
        parent: Recipe | None,
        ids: tuple[int, ...],
        num_shared: int,
        num_new: int,
        how: How,
        started: float,
        *,
        whole: bool = False,
        anew: bool = False,
    ) -> _Begun:
        """Start a session over ``ids``; rebuild the parent's KV first, as an extent of its own, when it is gone.

        Unless ``whole``, the last token is left to run: its logits are needed.
        """
        self._check_still_open()
        base = self._recipes.sequence(parent.kv_id) if parent else TokenSequence((), ())
        if parent and num_shared < parent.stop:
            # Nothing goes on behind a part of what was composed: from its beginning on, tokens are computed.
            num_shared = min([num_shared, *(joint.start for joint in base.joints)])
            base = replace(base, joints=())
        sequence = self._store.sequence(ids, base.hashes[: num_shared // BLOCK_TOKENS], base.joints)
        if how.deterministic and parent and not self._recipes.is_exact(parent) and sequence.joints:
            raise NotComposable(
                f"handle {parent.kv_id[:12]} was composed approximately, so no run without a cache equals it bit for bit: read "
                "its exact composition, broker.exact(handle), or leave deterministic out"
            )
        nearest = self._recipes.nearest(sequence)
        begun = _Begun(sequence, nearest, self._recipes.num_computed(nearest), started, asked_by())
        borders = self._recipes.borders(parent) if parent else ()
        limit = len(ids) if whole else len(ids) - 1
        expected = min(num_new, BLOCK_TOKENS)
        if not how.kv or anew:
            session.begin(sequence, 0, (), expected)
            return begun
        if how.deterministic:
            # Runs alone: it recomputes at most the blocks it misses, inside its own extent.
            session.begin(sequence, limit, borders, expected)
            return begun
        if parent and num_shared < parent.stop:
            session.begin_beside(sequence, limit, self._recipes.sequence(parent.kv_id), num_shared, borders, expected)
            self._claim(session, sequence, limit, borders, expected)
            return begun
        needed = min(parent.stop - parent.num_pending, num_shared, limit) if parent else 0
        if parent and needed:
            begun.num_recomputed = self.cover(session, parent, sequence, needed, limit, borders, expected)
        else:
            session.begin(sequence, limit, borders, expected)
        if not begun.num_recomputed:
            self._claim(session, sequence, limit, borders, expected)
        return begun

    def cover(
        self,
        session: Session,
        parent: Recipe,
        sequence: TokenSequence,
        needed: int,
        limit: int,
        borders: Sequence[int],
        expected: int,
    ) -> int:
        """Begin behind at least ``needed`` tokens of a parent; how many of them had to be computed again."""
        session.claim = self._in_flight.unless_done(
            parent.kv_id, lambda: self._store.covered(sequence, needed, borders) >= needed, session.tick
        )
        reused = session.begin(sequence, limit, borders, expected)
        if reused < needed:
            self._recompute(session, parent, sequence, needed, borders, expected)
            session.split(len(sequence.token_ids) - needed + expected)
        session.end_claim()
        return max(0, needed - reused)

    def _recompute(
        self,
        session: Session,
        parent: Recipe,
        sequence: TokenSequence,
        needed: int,
        borders: Sequence[int],
        expected: int,
    ) -> None:
        """Make the KV of a parent again: prefilled, and composed where it had been composed."""
        for step in self._recipes.parents(parent):
            made = step.composition
            if made is None or step.stop <= session.position:
                continue
            if step.start < session.position:  # a part of it is there: it is made as a whole
                session.close()
                session.begin(sequence, step.start, borders, expected)
            if session.position < step.start:
                session.prefill(step.start)
            self.composer.fill(
                session,
                sequence.token_ids[: step.stop],
                made.copied,
                self.whole,
                lambda work, made=made: again(work, made.rung, made.k, made.r),  # type: ignore[misc]
            )
        if session.position < needed:
            session.prefill(needed)

    @contextmanager
    def whole(self, recipe: Recipe, cancel: threading.Event | None = None) -> Iterator[Session]:
        """A session that stands behind the last token of a recipe."""
        sequence, borders = self._recipes.sequence(recipe.kv_id), self._recipes.borders(recipe)
        with self.session(How(cancel=cancel)) as session:
            self.cover(session, recipe, sequence, recipe.stop - recipe.num_pending, recipe.stop, borders, 0)
            if session.position < recipe.stop:
                session.prefill(recipe.stop)
            yield session

    def _claim(
        self, session: Session, sequence: TokenSequence, limit: int, borders: Sequence[int], expected: int
    ) -> None:
        """Where whole blocks are left to compute: be the one who computes them, or wait and read what another published."""
        while (block := session.position // BLOCK_TOKENS) < limit // BLOCK_TOKENS:
            position = session.position
            session.claim = self._in_flight.acquire(
                sequence.hashes[block],
                lambda at=position: self._store.covered(sequence, limit, borders) > at,  # type: ignore[misc]
                session.tick,
            )
            if session.claim is not None:
                return
            session.close()
            session.begin(sequence, limit, borders, expected)
            if session.position <= position:
                return  # what was published cannot be read here: compute it

    @contextmanager
    def session(self, how: How) -> Iterator[Session]:
        """A session that stops when the broker is closed or the request cancelled; what it lost on the way is counted."""
        self._check_open()
        cancel = how.cancel

        def tick() -> None:
            self._check_still_open()
            if cancel is not None and cancel.is_set():
                raise Cancelled("the request was cancelled before its next forward; nothing was published")

        session = Session(
            self._engine,
            self._store,
            canonical=how.deterministic,
            publishes=how.kv,
            priority=how.priority,
            tick=tick,
        )
        asked = time.perf_counter()
        try:
            with self.admission.admitted(how.priority, tick), session:
                session.queued_s = time.perf_counter() - asked
                yield session
        except PoolClosed as error:  # between a forward and what comes behind it
            raise Cancelled("the broker was closed while the request ran; nothing was published") from error
        finally:
            with self.lock:
                self.counts.failures += session.num_failures

    def _check_still_open(self) -> None:
        if self._is_closed():
            raise Cancelled("the broker was closed while the request ran; nothing was published")

    def _seal_generation(
        self,
        session: Session,
        parent: Recipe | None,
        extension: Extension,
        prompted: TokenSequence,
        content: tuple[int, ...],
        decoded: list[int],
        end_of_turn: EndOfTurn,
    ) -> Recipe:
        """Publish what was computed of a generated turn and name prompt, answer and end of turn by one recipe."""
        prompt_ids = prompted.token_ids
        raw = bool(extension.turns) and extension.turns[-1].role == ""
        span = Span(len(prompt_ids), len(prompt_ids) + len(content))
        turns = (*extension.turns, Turn("" if raw else "assistant", span, False))
        ids = prompt_ids + content
        ids += tuple(end_of_turn(ids, turns))
        kept = sum(1 for _ in _equal_front(content, decoded))
        computed = min(session.position, len(prompt_ids) + kept)
        sequence = self._store.sequence(ids, prompted.hashes, prompted.joints)
        session.seal(sequence, computed)
        return self._register(parent, sequence, len(ids) - computed, turns, "generate", extension.num_shared)

    def _register(
        self,
        parent: Recipe | None,
        sequence: TokenSequence,
        num_pending: int,
        turns: tuple[Turn, ...],
        operator: Operator,
        num_shared: int,
    ) -> Recipe:
        """Make the recipe and keep it."""
        ids = sequence.token_ids
        name = self._store.name(sequence, len(ids))
        # Behind a rewritten turn the parent's tokens are not a prefix any more: the recipe then stands alone.
        whole = parent is None or num_shared < parent.stop or parent.kv_id == name
        start = 0 if whole or parent is None else parent.stop
        recipe = Recipe(
            kv_id=name,
            namespace=self._namespace,
            parent=None if whole or parent is None else parent.kv_id,
            start=start,
            token_ids=ids[start:],
            num_pending=num_pending,
            turns=turns,
            operator=operator,
        )
        self._recipes.keep(recipe, sequence)
        return recipe

    def handle(self, recipe: Recipe, how: How, text: str) -> KVHandle:
        """The handle of a recipe; ``text`` is for its preview."""
        return KVHandle(
            kv_id=recipe.kv_id,
            kv_namespace=self._namespace,
            kv_tokens=recipe.stop,
            kv_exact=self._recipes.is_exact(recipe),
            kv_label=how.label,
            kv_preview=make_preview(text) if self._previews else "",
        )

    def _usage(
        self,
        session: Session,
        num_context: int,
        num_decoded: int,
        ttft: float,
        begun: _Begun,
        reuse: Reuse,
        longest_s: float = 0.0,
    ) -> Usage:
        total = time.perf_counter() - begun.started
        num_reused = min(session.num_reused, num_context)
        with self.lock:
            self.counts.reused += num_reused
            self.counts.prefilled += num_context - num_reused
            self.counts.decoded += num_decoded
            self.counts.recomputed += begun.num_recomputed
        return Usage(
            num_context,
            num_reused,
            num_context - num_reused,
            num_decoded,
            ttft or total,
            total,
            reuse,
            session.queued_s,
            longest_s,
            session.num_shared,
        )

    def _note(self, begun: _Begun, recipe: Recipe, how: How, usage: Usage, most: int) -> None:
        """Enter a request that has ended. ``most``: as many of its tokens could have been reused."""
        self.journal.enter(
            recipe.operator,
            begun.asker,
            label=how.label,
            kv_id=recipe.kv_id,
            parent=recipe.parent,
            num_context=usage.num_context,
            num_reused=usage.num_reused,
            num_reusable=max(usage.num_reused, min(begun.num_nearest_computed, most)),
            num_decoded=usage.num_decoded,
            num_recomputed=begun.num_recomputed,
            ttft_s=usage.ttft_s,
            total_s=usage.total_s,
            nearest=begun.nearest.kv_id,
            num_nearest=begun.nearest.num_shared,
        )


def check_cancel(cancel: threading.Event | None) -> None:
    """Refuse what is no event.

    Raises:
        ConfigError: It is none. Way out: fail.
    """
    if cancel is not None and not isinstance(cancel, threading.Event):
        raise ConfigError(f"cancel must be a threading.Event, got {type(cancel).__name__}")


def _reuse(session: Session, parent: Recipe | None, num_shared: int) -> Reuse:
    if not session.num_reused:
        return "none"
    if parent is None:
        return "blocks"
    return "handle" if num_shared >= parent.stop else "common-prefix"


def _equal_front(a: Sequence[int], b: Sequence[int]) -> Iterator[int]:
    for x, y in zip(a, b, strict=False):
        if x != y:
            return
        yield x
