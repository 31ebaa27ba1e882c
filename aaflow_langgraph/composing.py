"""The operator compose: handles are joined exactly, or under a name of their own by a rung of the ladder.

Knows requests, recipes and the policy that was asked for; takes checked input.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

import torch

from aaflow_langgraph.compose.assemble import Assembly
from aaflow_langgraph.compose.audit import audit
from aaflow_langgraph.compose.cost import costs_of
from aaflow_langgraph.compose.ladder import THRESHOLD, Climb, climb, predict
from aaflow_langgraph.compose.work import Work
from aaflow_langgraph.composite import EXACT_RUNGS, KVComposite, joint_digest
from aaflow_langgraph.engine.mixed import Mixed
from aaflow_langgraph.engine.rotary import rotation_of
from aaflow_langgraph.engine.transformers import TransformersEngine
from aaflow_langgraph.errors import NotComposable
from aaflow_langgraph.handle import KVHandle
from aaflow_langgraph.hashing import Joint
from aaflow_langgraph.journal import asked_by
from aaflow_langgraph.model import Composition, Copied, Operator, Recipe, Span, Turn
from aaflow_langgraph.nearest import Nearest
from aaflow_langgraph.recipes import RecipeBook
from aaflow_langgraph.requests import How, Requests
from aaflow_langgraph.results import Audit, Composed, ComposeReport, Prefilled
from aaflow_langgraph.session import Session
from aaflow_langgraph.store import ExtentStore


@dataclass(frozen=True, slots=True)
class _Composing:
    """A compose on its way."""

    composite: KVComposite
    labels: tuple[str, ...]
    children: tuple[Recipe, ...]
    assembly: Assembly
    how: How
    gate: str
    started: float


class Composing:
    """Joins handles for one broker. Thread-safe."""

    def __init__(
        self,
        engine: TransformersEngine,
        store: ExtentStore,
        recipes: RecipeBook,
        requests: Requests,
        *,
        check_open: Callable[[], None],
    ) -> None:
        self._engine = engine
        self._namespace = engine.namespace.digest
        self._store = store
        self._recipes = recipes
        self._requests = requests
        self._check_open = check_open

    def compose(
        self,
        children: Sequence[Recipe],
        labels: Sequence[str],
        composite: KVComposite,
        how: How,
        *,
        gate: str,
        audited: bool,
    ) -> Composed:
        """Join handles. See ``KVBroker.compose``."""
        started = time.perf_counter()
        self._check_open()
        policy = composite.policy
        is_exact = policy.exact or policy.rung in EXACT_RUNGS or not how.kv
        if how.deterministic and not is_exact:
            raise NotComposable(
                "deterministic=True promises bits, which no approximate rung keeps: pass exact=True with it"
            )
        assembly = self._requests.composer.assemble(children)
        self._engine.check_fits(len(assembly.token_ids))
        made = _Composing(composite, tuple(labels), tuple(children), assembly, how, gate, started)
        if not assembly.copied and len(assembly.token_ids) == assembly.first.recipe.stop and not is_exact:
            recipe, climbed = assembly.first.recipe, Climb("prefix", 0, 0.0)
            report = self._report(made, recipe, climbed, len(assembly.token_ids), 0, 0)
            return Composed(self._requests.handle(recipe, how, ""), report)
        if not is_exact and policy.rung == "auto":
            try:
                rotation_of(self._engine).check_span(len(assembly.token_ids))
            except NotComposable as refusal:
                made = replace(made, gate=str(refusal))
                is_exact = True
        return self._exactly(made) if is_exact else self._approximately(made, audited)

    def exact(self, recipe: Recipe, how: How) -> KVHandle:
        """The handle of the same tokens, computed as one sequence."""
        if self._recipes.is_exact(recipe) and not self._recipes.sequence(recipe.kv_id).joints:
            return self._requests.handle(recipe, how, "")
        ids = self._recipes.sequence(recipe.kv_id).token_ids
        near = self._recipes.nearest(self._store.sequence(ids))
        return self._from_nearest(ids, near, recipe.turns, how).handle

    def _exactly(self, made: _Composing) -> Composed:
        """The tokens of a composite, computed as one sequence: an ordinary handle."""
        policy, ids, how = made.composite.policy, made.assembly.token_ids, made.how
        near = self._recipes.nearest(self._store.sequence(ids))
        if policy.rung == "prefix" and (there := self._num_there(near)) < len(ids):
            raise NotComposable(
                f"rung='prefix' needs a composite that was computed as one before: {there} of its {len(ids)} tokens were; take "
                "rung='suffix' to compute the rest"
            )
        before = time.perf_counter()
        predicted = self._predicted(made, near.num_shared) if how.kv else {}
        paused_s = time.perf_counter() - before
        prefilled = self._from_nearest(ids, near, made.assembly.turns, how, anew=policy.rung == "dense")
        recipe = self._recipes.find(prefilled.handle.kv_id)
        assert recipe is not None
        num_reused, num_run = prefilled.usage.num_reused, prefilled.usage.num_prefilled
        rung = "prefix" if num_run == 0 else "suffix" if num_reused else "dense"
        climbed = Climb(rung, 0, 0.0, predicted_s=predicted)
        return Composed(
            prefilled.handle, self._report(made, recipe, climbed, num_reused, 0, num_run, paused_s=paused_s)
        )

    def _num_there(self, near: Nearest) -> int:
        """How many tokens of a known handle's prefix have KV somewhere."""
        known = self._recipes.find(near.kv_id) if near.kv_id else None
        if known is None:
            return 0
        return self._store.covered(self._recipes.sequence(known.kv_id), near.num_shared, self._recipes.borders(known))

    def _predicted(self, made: _Composing, num_known: int) -> dict[str, float]:
        """Predicted seconds of the rungs beside an exact one; nothing where keys cannot be moved."""
        try:
            costs = costs_of(self._engine, rotation_of(self._engine))
        except NotComposable:
            return {}
        assembly, policy = made.assembly, made.composite.policy
        spans = tuple(Span(one.at, one.at + one.stop - one.start) for one in assembly.copied)
        nothing = Mixed((), torch.empty(0, device="cpu"), 0)
        work = Work(self._engine, assembly.token_ids, nothing, len(assembly.first.token_ids), spans)
        return {
            **predict(work, costs, policy.k, policy.r),
            "suffix": costs.run(range(num_known, len(assembly.token_ids))),
        }

    def _from_nearest(
        self, ids: tuple[int, ...], near: Nearest, turns: tuple[Turn, ...], how: How, *, anew: bool = False
    ) -> Prefilled:
        """Prefill behind the nearest known prefix."""
        parent = self._recipes.find(near.kv_id) if near.kv_id and not anew else None
        operator: Operator = "materialize" if parent is None or near.num_shared < parent.stop else "append"
        return self._requests.prefill(
            parent, ids, turns, operator, how, num_shared=near.num_shared if parent else 0, anew=anew
        )

    def _approximately(self, made: _Composing, audited: bool) -> Composed:
        """A composite under a name of its own."""
        assembly, how, ids = made.assembly, made.how, made.assembly.token_ids
        first = assembly.first.recipe
        base = self._recipes.sequence(first.kv_id)
        joint = Joint(first.stop, joint_digest(self._namespace, made.composite.kv_composite_id))
        sequence = self._store.sequence(ids, base.hashes, (*base.joints, joint))
        known = self._recipes.find(self._store.name(sequence, len(ids)))
        if known is not None and known.composition is not None and not audited:
            with self._requests.whole(known, how.cancel):
                pass  # there again, if it was evicted
            return Composed(self._requests.handle(known, how, ""), ComposeReport.from_json(known.composition.report))
        before = time.perf_counter()
        costs = costs_of(self._engine, rotation_of(self._engine))
        paused_s = [time.perf_counter() - before]
        done: list[tuple[Climb, int, Audit | None]] = []
        near = self._recipes.nearest(self._store.sequence(ids))
        copied = assembly.copied
        is_there = (
            made.composite.policy.rung == "auto" and near.num_shared >= len(ids) and self._recipes.is_exact(first)
        )
        if is_there and near.kv_id is not None and self._num_there(near) >= len(ids):
            # The cheapest rung of all: copied under the composite's own name from what was computed as one.
            copied = (Copied(near.kv_id, first.stop, len(ids), first.stop),)

        def run(work: Work) -> None:
            if copied is not assembly.copied:
                climbed = Climb("prefix", 0, 0.0, predicted_s={**predict(work, costs, 0, 0.0), "prefix": 0.0})
            else:
                climbed = climb(work, made.composite.policy, costs)
            num_run, before = len(work.ran), time.perf_counter()
            done.append((climbed, num_run, audit(work) if audited and work.moved else None))
            paused_s.append(time.perf_counter() - before)

        def whole(recipe: Recipe) -> AbstractContextManager[Session]:
            return self._requests.whole(recipe, how.cancel)

        with self._requests.session(how) as session:
            self._requests.cover(
                session,
                first,
                sequence,
                first.stop - first.num_pending,
                first.stop,
                self._recipes.borders(first),
                len(ids) - first.stop,
            )
            if session.position < first.stop:
                session.prefill(first.stop)
                session.split(len(ids) - first.stop)  # its own last tokens are not part of what is composed
            self._requests.composer.fill(session, ids, copied, whole, run)
            session.seal(sequence, len(ids))
        climbed, num_run, audited_as = done[-1]
        recipe = Recipe(
            kv_id=self._store.name(sequence, len(ids)),
            namespace=self._namespace,
            parent=first.kv_id,
            start=first.stop,
            token_ids=ids[first.stop :],
            num_pending=0,
            turns=assembly.turns,
            operator="compose",
            composition=Composition(
                composite_id=made.composite.kv_composite_id,
                children=tuple(child.kv_id for child in made.children),
                labels=made.labels,
                copied=assembly.copied,
                rung=climbed.rung,
                k=climbed.k,
                r=climbed.r,
            ),
        )
        num_reused = len(ids) - first.stop - num_run
        report = self._report(
            made, recipe, climbed, first.stop, num_reused, num_run, audited_as, paused_s=sum(paused_s)
        )
        assert recipe.composition is not None
        recipe = replace(recipe, composition=replace(recipe.composition, report=report.to_json()))
        self._recipes.keep(recipe, sequence)
        with self._requests.lock:
            self._requests.counts.reused += first.stop + num_reused
            self._requests.counts.prefilled += num_run
        self._requests.journal.enter(
            "compose",
            asked_by(),
            label=how.label,
            kv_id=recipe.kv_id,
            parent=recipe.parent,
            num_context=len(ids),
            num_reused=len(ids) - num_run,
            num_reusable=len(ids) - num_run,
            num_decoded=0,
            num_recomputed=0,
            ttft_s=report.seconds,
            total_s=report.seconds,
            nearest=recipe.parent,
            num_nearest=first.stop,
        )
        return Composed(self._requests.handle(recipe, how, ""), report)

    def _report(
        self,
        made: _Composing,
        recipe: Recipe,
        climbed: Climb,
        num_shared: int,
        num_reused: int,
        num_run: int,
        audited: Audit | None = None,
        *,
        paused_s: float = 0.0,
    ) -> ComposeReport:
        policy, assembly = made.composite.policy, made.assembly
        num_standing = len(assembly.first.token_ids) + sum(one.stop - one.start for one in assembly.copied)
        return ComposeReport(
            rung=climbed.rung,
            requested=policy.rung,
            k=climbed.k,
            r=climbed.r,
            exact=self._recipes.is_exact(recipe),
            num_segments=len(made.children),
            num_tokens=len(assembly.token_ids),
            num_left_out=sum(child.stop for child in made.children) - num_standing,
            num_shared=num_shared,
            num_reused=num_reused,
            num_recomputed=num_run,
            num_bytes=self._engine.layout.num_bytes(num_reused + num_run),
            seconds=time.perf_counter() - made.started - paused_s,
            gate=made.gate,
            num_checked=climbed.num_checked,
            deviation_max=climbed.deviation_max,
            deviation_mean=climbed.deviation_mean,
            deviation_share=climbed.deviation_share,
            threshold=THRESHOLD if policy.max_deviation is None else policy.max_deviation,
            predicted_s=climbed.predicted_s,
            audit=audited,
        )
