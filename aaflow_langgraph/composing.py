"""The operator compose: handles are joined exactly, or under a name of their own by a rung of the ladder.

Knows requests, recipes and the policy that was asked for; takes checked input.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from aaflow_langgraph.compose.assemble import Assembly
from aaflow_langgraph.compose.audit import audit
from aaflow_langgraph.compose.cost import costs_of
from aaflow_langgraph.compose.ladder import THRESHOLD, Climb, climb
from aaflow_langgraph.compose.work import Work
from aaflow_langgraph.composite import APPROXIMATE_RUNGS, KVComposite, joint_digest
from aaflow_langgraph.engine.rotary import rotation_of
from aaflow_langgraph.engine.transformers import TransformersEngine
from aaflow_langgraph.errors import NotComposable
from aaflow_langgraph.handle import KVHandle
from aaflow_langgraph.hashing import Joint
from aaflow_langgraph.journal import asked_by
from aaflow_langgraph.model import Composition, Operator, Recipe, Turn
from aaflow_langgraph.recipes import RecipeBook
from aaflow_langgraph.requests import How, Requests
from aaflow_langgraph.results import Audit, Composed, ComposeReport, Prefilled
from aaflow_langgraph.store import ExtentStore


@dataclass(frozen=True, slots=True)
class _Composing:
    """A compose on its way."""

    composite: KVComposite
    labels: tuple[str, ...]
    children: tuple[str, ...]
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
        if how.deterministic and not policy.exact:
            raise NotComposable(
                "deterministic=True promises bits, which no approximate rung keeps: pass exact=True with it"
            )
        assembly = self._requests.composer.assemble(children)
        self._engine.check_fits(len(assembly.token_ids))
        made = _Composing(
            composite, tuple(labels), tuple(child.kv_id for child in children), assembly, how, gate, started
        )
        is_exact = policy.exact or policy.rung in ("prefix", "suffix", "dense") or not how.kv
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
        return self._from_nearest(ids, recipe.turns, how).handle

    def _exactly(self, made: _Composing) -> Composed:
        """The tokens of a composite, computed as one sequence: an ordinary handle."""
        policy, ids, how = made.composite.policy, made.assembly.token_ids, made.how
        sequence = self._store.sequence(ids)
        near = self._recipes.nearest(sequence)
        known = self._recipes.find(near.kv_id) if near.kv_id else None
        there = self._store.covered(sequence, len(ids), self._recipes.borders(known) if known else ()) if how.kv else 0
        if policy.rung == "prefix" and there < len(ids):
            raise NotComposable(
                f"rung='prefix' needs a composite that was computed as one before: {there} of its {len(ids)} tokens were; take "
                "rung='suffix' to compute the rest"
            )
        prefilled = self._from_nearest(ids, made.assembly.turns, how, anew=policy.rung == "dense")
        recipe = self._recipes.find(prefilled.handle.kv_id)
        assert recipe is not None
        rung = policy.rung if policy.rung in ("prefix", "dense") else "prefix" if there >= len(ids) else "suffix"
        num_run = prefilled.usage.num_prefilled
        report = self._report(made, recipe, Climb(rung, 0, 0.0), prefilled.usage.num_reused, 0, num_run)
        return Composed(prefilled.handle, report)

    def _from_nearest(
        self, ids: tuple[int, ...], turns: tuple[Turn, ...], how: How, *, anew: bool = False
    ) -> Prefilled:
        """Prefill behind the nearest known prefix."""
        near = self._recipes.nearest(self._store.sequence(ids))
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
            with self._requests.whole(known):
                pass  # there again, if it was evicted
            return Composed(self._requests.handle(known, how, ""), ComposeReport.from_json(known.composition.report))
        costs = costs_of(self._engine, rotation_of(self._engine))
        done: list[tuple[Climb, int, Audit | None]] = []

        def run(work: Work) -> None:
            climbed = climb(work, made.composite.policy, costs)
            num_run = work.num_run
            done.append((climbed, num_run, audit(work) if audited and work.moved else None))

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
            if session.pieces and session.pieces[-1].stop > first.stop - first.num_pending and first.num_pending:
                session.split(len(ids) - first.stop)
            self._requests.composer.fill(session, ids, assembly.copied, self._requests.whole, run)
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
                children=made.children,
                labels=made.labels,
                copied=assembly.copied,
                rung=climbed.rung,
                k=climbed.k,
                r=climbed.r,
            ),
        )
        num_reused = len(ids) - first.stop - num_run
        report = self._report(made, recipe, climbed, first.stop, num_reused, num_run, audited_as)
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
    ) -> ComposeReport:
        policy = made.composite.policy
        is_exact = climbed.rung not in APPROXIMATE_RUNGS and (
            recipe.composition is None or self._recipes.is_exact(made.assembly.first.recipe)
        )
        return ComposeReport(
            rung=climbed.rung,
            requested=policy.rung,
            k=climbed.k,
            r=climbed.r,
            exact=is_exact and (recipe.composition is not None or self._recipes.is_exact(recipe)),
            num_segments=len(made.children),
            num_tokens=len(made.assembly.token_ids),
            num_shared=num_shared,
            num_reused=num_reused,
            num_recomputed=num_run,
            num_bytes=self._engine.layout.num_bytes(num_reused + num_run),
            seconds=time.perf_counter() - made.started,
            gate=made.gate,
            num_checked=climbed.num_checked,
            deviation_max=climbed.deviation_max,
            deviation_mean=climbed.deviation_mean,
            deviation_share=climbed.deviation_share,
            threshold=THRESHOLD if policy.max_deviation is None else policy.max_deviation,
            predicted_s=climbed.predicted_s,
            audit=audited,
        )
