"""``KVBroker``: the operators. Composes index, pool and engine; policy lives here and nowhere else.

The sync body is the truth; every method with an ``a`` prefix runs it in a thread and keeps the event loop free.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from typing import Any, Literal, TypeVar

import torch

from aaflow_langgraph.composing import Composing
from aaflow_langgraph.composite import ComposePolicy, KVComposite, Rung, coerce_segment, is_composite_shaped
from aaflow_langgraph.engine.cache_adapter import refuse_foreign_cache
from aaflow_langgraph.engine.sampling import Sampling
from aaflow_langgraph.engine.transformers import TransformersEngine
from aaflow_langgraph.engine.turns import Extension, check_text
from aaflow_langgraph.errors import (
    ConfigError,
    IncompatibleHandle,
    NotComposable,
    RecipeMissing,
)
from aaflow_langgraph.evict.base import Policy
from aaflow_langgraph.evict.guarded import Guarded
from aaflow_langgraph.evict.lru import least_recently_used
from aaflow_langgraph.evict.policies import policy
from aaflow_langgraph.handle import DIGEST_PATTERN, KVHandle, check_label
from aaflow_langgraph.index.base import ExtentRecord, Index
from aaflow_langgraph.index.guarded import GuardedIndex
from aaflow_langgraph.index.opening import open_index
from aaflow_langgraph.journal import Journal
from aaflow_langgraph.keeper import Keeper
from aaflow_langgraph.model import Finding, Namespace, Operator, Receipt, Recipe, Span, Tier, Turn
from aaflow_langgraph.movements import Movement
from aaflow_langgraph.nearest import Nearest
from aaflow_langgraph.pool.base import Pool
from aaflow_langgraph.pool.device import DeviceTier
from aaflow_langgraph.pool.disk import DiskPool
from aaflow_langgraph.pool.host import HostPool
from aaflow_langgraph.pool.peers import Peers
from aaflow_langgraph.pool.shared import SharedPool
from aaflow_langgraph.pool.sweep import sweep as sweep_pools
from aaflow_langgraph.recipes import RecipeBook
from aaflow_langgraph.requests import How, Requests, check_cancel
from aaflow_langgraph.results import Composed, ComposeReport, Generation, Prefilled, Stats, TokenDelta, Transfer
from aaflow_langgraph.store import ExtentStore
from aaflow_langgraph.threads import Stop, in_thread

HandleLike = KVHandle | KVComposite | Mapping[str, Any]
Result = TypeVar("Result")


class KVBroker:
    """Knows where the KV behind every handle lives, moves it, and computes what is missing.

    Thread-safe. Use as a context manager or call ``close``. Two brokers in one process share nothing.

    Examples:
        >>> broker = KVBroker.open("HuggingFaceTB/SmolLM2-135M-Instruct")  # doctest: +SKIP
        >>> docs = broker.prefill("Berlin is the capital of Germany.").handle  # doctest: +SKIP
        >>> broker.generate("Which city is named?", parent=docs).text  # doctest: +SKIP
        'Berlin'
    """

    def __init__(
        self,
        engine: TransformersEngine,
        index: Index,
        pool: Pool,
        *,
        peers: Peers | None = None,
        disk: DiskPool | None = None,
        device_tier: DeviceTier | None = None,
        policy: Policy = least_recently_used,
        previews: bool = True,
        kv: bool = True,
    ) -> None:
        self.engine = engine
        self.namespace: Namespace = engine.namespace
        self.kv = kv
        self._previews = previews
        policy = Guarded(policy)
        self._store = ExtentStore(
            engine.namespace.digest, engine.layout, index, pool, policy, peers=peers, disk=disk, device_tier=device_tier
        )
        self._pool = pool
        self._lock = threading.RLock()
        self._recipes = RecipeBook(engine.namespace.digest, self._store)
        self._requests = Requests(
            engine,
            self._store,
            self._recipes,
            previews=previews,
            check_open=self._check_open,
            is_closed=lambda: self._closed,
        )
        self._composing = Composing(engine, self._store, self._recipes, self._requests, check_open=self._check_open)
        self._keeper = Keeper(self._store, policy, chores=self._chores)
        self._num_announced = 0
        if disk is not None:
            self._store.announce_disk()
        if index.shared or disk is not None:
            self._keeper.start()
        self._closed = False
        self._pid = os.getpid()

    @classmethod
    def open(
        cls,
        model: str | os.PathLike[str] | TransformersEngine,
        *,
        index: str = "memory://",
        pool_bytes: int = 1 << 30,
        device_bytes: int | None = None,
        disk: str | os.PathLike[str] | None = None,
        disk_bytes: int = 16 << 30,
        evict: str | Policy = "lru",
        dtype: str = "auto",
        device: str = "auto",
        tenant: str = "",
        previews: bool = True,
        share_recipes: bool = True,
        kv: bool = True,
    ) -> KVBroker:
        """Load a model and open a broker for it.

        Args:
            model: Hub id, local directory, or an engine that is already loaded.
            index: Where the metadata lives. ``"memory://"`` keeps it in this process; ``"redis://"``, ``"rediss://"``,
                ``"unix://"`` share it through a Redis or Valkey server; ``"embedded://PATH"`` through a private server
                that the first user starts. Processes of one host that share an index read each other's KV in place.
            pool_bytes: Capacity of this broker's KV pool in main memory. It is taken and touched at once and never exceeded.
            device_bytes: The most that copies of the pool's KV may take on the accelerator that the model computes on, beside
                what running requests write there; as much as the pool when None. On CPU KV is read in the pool itself.
            disk: Directory for the tier below the pool: what leaves the pool goes there, and a later process finds it.
            disk_bytes: The most that the files of this namespace (model, dtype, tenant) may take there.
            evict: Which extents leave a full pool first: ``"lru"``, ``"lfu"``, ``"gdsf"``, ``"fifo"``, or a policy of your own
                such as ``by_value(...)``. One that raises is logged once, and what was used least recently goes instead.
            dtype: ``"float32"``, ``"bfloat16"``, ``"float16"`` or ``"auto"`` (the checkpoint's).
            device: ``"cpu"``, ``"cuda"``, ``"cuda:N"`` or ``"auto"``.
            tenant: Salt: KV is never shared between tenants.
            previews: Put the first and last words of texts into handles. Off for confidential text.
            share_recipes: Let a shared index hold token ids. Without, it holds hashes only, and a handle made by another
                process is a ``RecipeMissing`` unless the disk knows it.
            kv: False passes text: every request prefills all of its tokens, nothing is looked up or published, handles and
                answers stay the same. For measuring one's own app both ways.

        Raises:
            ConfigError: Unknown model, dtype, device, policy or index; a pool, a directory or a server that cannot be
                used. Way out: fail.
            IndexUnavailable: The index' server does not answer. Way out: retry.
            UnsupportedModel: The model's state cannot be carried as keys and values; says why. Way out: fail.
        """
        if not isinstance(index, str):
            raise ConfigError(
                f"index must be a URL such as 'memory://' or 'redis://localhost', got {type(index).__name__}"
            )
        if "\0" in index:
            raise ConfigError("index must be a URL, and no URL has a null byte")
        if not isinstance(previews, bool):
            raise ConfigError(f"previews must be True or False, got {previews!r}")
        if not isinstance(kv, bool):
            raise ConfigError(f"kv must be True or False, got {kv!r}")
        if not isinstance(share_recipes, bool):
            raise ConfigError(f"share_recipes must be True or False, got {share_recipes!r}")
        if not isinstance(evict, str) and (isinstance(evict, type) or not callable(evict)):
            raise ConfigError(f"evict must be the name of a policy or a policy of your own, got {evict!r:.100}")
        ordered = policy(evict) if isinstance(evict, str) else evict
        if isinstance(model, TransformersEngine):
            if (dtype, device, tenant) != ("auto", "auto", ""):
                raise ConfigError("dtype, device and tenant belong to the engine that was passed; set them there")
            engine = model
        else:
            engine = TransformersEngine.load(model, dtype=dtype, device=device, tenant=tenant)
        namespace = engine.namespace.digest
        opened = open_index(index, namespace, share_recipes=share_recipes)
        with ExitStack() as undo:
            undo.callback(opened.close)
            below = None if disk is None else DiskPool(disk, namespace, engine.layout, disk_bytes)
            if below is not None:
                undo.callback(below.close)
                below.sweep()
            if opened.shared:
                sweep_pools()
                peers = Peers()
                pool: Pool = SharedPool(pool_bytes)
                opened = GuardedIndex(opened)
            else:
                peers = None
                pool = HostPool(pool_bytes)
            undo.callback(pool.close)
            broker = cls(
                engine,
                opened,
                pool,
                peers=peers,
                disk=below,
                device_tier=DeviceTier.of(engine.device, pool_bytes if device_bytes is None else device_bytes),
                policy=ordered,
                previews=previews,
                kv=kv,
            )
            undo.pop_all()
        return broker

    def __enter__(self) -> KVBroker:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Give the pool back. Handles stay valid names; this broker serves them no more. Idempotent.

        With a disk, what the pool holds is written there first. Without one, processes that read this broker's KV in place
        may keep it: they copy what they have room for.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._keeper.stop()
        self._recipes.save()
        self._store.close()

    # ---------------------------------------------------------------- operators on token ids

    def materialize(self, token_ids: Sequence[int], *, label: str = "", deterministic: bool = False) -> KVHandle:
        """Make the KV of ``token_ids`` (``[T]``) exist and name it. Idempotent: equal ids give the equal handle.

        Raises:
            ConfigError: No ids, ids outside the vocabulary, a padded batch, a cache object. Way out: fail.
            ContextTooLong: More ids than the model's window. Way out: fail.
        """
        ids = self.engine.check_token_ids(token_ids)
        how = self._how(deterministic, label)
        return self._requests.prefill(None, ids, (Turn("", _whole(ids), False),), "materialize", how).handle

    def append(
        self, handle: HandleLike, token_ids: Sequence[int], *, label: str = "", deterministic: bool = False
    ) -> KVHandle:
        """A new handle: the tokens of ``handle``, then ``token_ids``. ``handle`` itself never changes (I5).

        Raises:
            ConfigError, ContextTooLong: As in ``materialize``.
            MalformedHandle, IncompatibleHandle, RecipeMissing: ``handle`` is not one, is foreign, or is unknown here.
        """
        parent = self._known(handle)
        ids = self.engine.check_token_ids(token_ids)
        before = self._recipes.sequence(parent.kv_id).token_ids
        turns = tuple(replace(turn, open=False) for turn in parent.turns)
        added = Turn("", _whole(ids, len(before)), False)
        how = self._how(deterministic, label)
        return self._requests.prefill(parent, before + ids, (*turns, added), "append", how).handle

    def fork(self, handle: HandleLike, *, label: str | None = None) -> KVHandle:
        """A handle on the same KV: zero bytes, no copy, no count. Children of forks never change the parent (I5).

        Raises:
            MalformedHandle, IncompatibleHandle, RecipeMissing: As in ``append``.
        """
        coerced = self._segment(handle)
        self._known(coerced)
        return coerced if label is None else replace(coerced, kv_label=check_label(label))

    def compose(
        self,
        segments: Sequence[HandleLike] | KVComposite,
        *,
        exact: bool = False,
        max_deviation: float | None = None,
        rung: Rung = "auto",
        k: int = 16,
        r: float = 0.15,
        audit: bool = False,
        gate: str = "",
        label: str = "",
        deterministic: bool = False,
        kv: bool = True,
        cancel: threading.Event | None = None,
    ) -> Composed:
        """Join segments that were not computed in each other's context, in the order given: documents encoded apart, branches
        that meet. The first segment stands as it is, with what it shares with the others; what the others add is moved behind
        it (keys are rotated to their new positions) and repaired as far as the rung says.

        An approximate composite has an identity of its own, made of its segments and the policy, and is never returned for the
        same tokens computed as one. An exact one is the ordinary handle of its tokens.

        Args:
            segments: Handles, at least one. A ``KVComposite`` brings its own policy; the options that follow are then refused,
                except ``exact``. One among several is joined first, by itself, and nothing that its policy forbids is done.
            exact: Take no approximate rung: what is not there as a prefix is computed.
            max_deviation: With ``rung="auto"``: leave no moved token whose values at the check layer deviate by more, relative
                to their norm. A threshold on a measured proxy, not a bound on the output. None sets none.
            rung: ``"auto"`` takes the cheapest that is allowed by predicted cost; ``"prefix"``, ``"suffix"`` and ``"dense"``
                are exact; ``"legolink"`` recomputes the first ``k`` tokens of each segment but the first (EPIC, arXiv
                2410.15332), ``"blend"`` the share ``r`` that deviates most (CacheBlend, arXiv 2405.16444).
            k: For legolink.
            r: For blend.
            audit: Also compare the next-token distribution with the dense one, and with mismatched caches. Costs two dense
                runs. An exact join has no audit: it is what it would be compared with.
            gate: Why ``exact`` is set although the caller allowed less; goes into the report. At most 200 characters.
            label: Short name for people.
            deterministic: With ``exact=True``: bit-equal to a run without any cache.
            kv: False computes all of it as one sequence and publishes nothing.
            cancel: Set it from anywhere to stop before the next forward; nothing is published.

        Raises:
            NotComposable: No segments; a rung that the model or the segments do not allow: says which layer and why. Way out:
                fail, or ``rung="auto"``, which computes what cannot be moved.
            ConfigError: An option is out of range. Way out: fail.
            ContextTooLong: More tokens than the window. Way out: fail.
            MalformedHandle, IncompatibleHandle, RecipeMissing: As in ``append``.
        """
        if not isinstance(audit, bool):
            raise ConfigError(f"audit must be True or False, got {audit!r}")
        if not isinstance(gate, str) or len(gate) > 200:
            raise ConfigError(f"gate must be text of at most 200 characters, got {gate!r:.80}")
        how = self._how(deterministic, label, cancel, kv)
        policy = ComposePolicy(exact=exact, rung=rung, k=k, r=r, max_deviation=max_deviation)
        if is_composite_shaped(segments):
            composite = KVComposite.coerce(segments)
            if policy != ComposePolicy() and not exact:
                raise ConfigError(
                    "a KVComposite brings its own policy: leave rung, k, r and max_deviation out, or pass its children"
                )
            if exact:
                composite = KVComposite.joined(
                    composite.kv_children, replace(composite.policy, exact=True, rung="auto")
                )
        else:
            if isinstance(segments, str | bytes | KVHandle | Mapping) or not isinstance(segments, Sequence):
                raise ConfigError(f"segments must be a list of handles, got {type(segments).__name__}")
            if not segments:
                raise NotComposable("there is nothing to compose: no segment was given; pass at least one handle")
            inner = [KVComposite.coerce(one).policy for one in segments if is_composite_shaped(one)]
            composite = KVComposite.joined([self._segment(one) for one in segments], policy.stricter(inner))
        recipes = [self._known(child) for child in composite.kv_children]
        labels = [child.kv_label for child in composite.kv_children]
        return self._composing.compose(recipes, labels, composite, how, gate=gate, audited=audit)

    def exact(self, handle: HandleLike, *, label: str | None = None) -> KVHandle:
        """The handle of the same tokens computed as one sequence: ``handle`` itself unless an approximate compose took part.

        Raises:
            MalformedHandle, IncompatibleHandle, RecipeMissing: As in ``append``.
        """
        shown = self._segment(handle)
        how = self._how(False, shown.kv_label if label is None else label)
        return self._composing.exact(self._known(shown), how)

    def compose_report(self, handle: HandleLike) -> ComposeReport | None:
        """How a composite was materialised the first time; None for a handle that no approximate compose made.

        Raises:
            MalformedHandle, IncompatibleHandle, RecipeMissing: As in ``append``.
        """
        made = self._known(handle).composition
        return ComposeReport.from_json(made.report) if made is not None else None

    def evict(self, handle: HandleLike, *, tier: Tier = "host") -> int:
        """Drop the KV of ``handle`` from this broker's pool, last extent first, down to what others build on or read; bytes
        freed.

        The handle stays valid: its KV is fetched from disk, where there is one, or recomputed when it is read again. One that ends
        inside of what was merged in the background, with others behind it, frees nothing: what is merged goes as a whole.

        Args:
            tier: ``"host"`` keeps a copy on disk where there is a disk; ``"disk"`` forgets that too; ``"device"`` drops only
                the copies on an accelerator.

        Raises:
            ConfigError: Another tier. Way out: fail.
            MalformedHandle, IncompatibleHandle, RecipeMissing: As in ``append``.
        """
        if tier not in ("device", "host", "disk"):
            raise ConfigError(f"tier must be 'device', 'host' or 'disk', got {tier!r}")
        recipe = self._known(handle)
        sequence, borders = self._recipes.sequence(recipe.kv_id), self._recipes.borders(recipe)
        if tier == "device":
            return self._store.evict_copies(sequence, borders)
        return self._store.evict(sequence, borders, from_disk=tier == "disk")

    def transfer(self, handle: HandleLike) -> Transfer:
        """Make the KV of ``handle`` readable here now, instead of when it is read: the pool of another process is mapped,
        what its owner left behind is copied, what is on disk is fetched. Computes nothing; what is missing is recomputed
        at the next read.

        Raises:
            MalformedHandle, IncompatibleHandle, RecipeMissing: As in ``append``.
        """
        started = time.perf_counter()
        recipe = self._known(handle)
        sequence, computed = self._recipes.sequence(recipe.kv_id), recipe.stop - recipe.num_pending
        moved = self._store.transfer(sequence, self._recipes.borders(recipe), computed)
        return replace(moved, seconds=time.perf_counter() - started)

    # ---------------------------------------------------------------- operators on text

    def prefill(
        self,
        text: str,
        *,
        parent: HandleLike | None = None,
        role: str = "user",
        raw: bool = False,
        label: str = "",
        deterministic: bool = False,
        priority: int = 0,
        kv: bool = True,
        cancel: threading.Event | None = None,
    ) -> Prefilled:
        """Prefill ``text`` as a chat turn that stays open: the next prompt of the same role continues and closes it.

        Args:
            text: Content of the turn; UTF-8 bytes are decoded.
            parent: Handle to go on from; None starts fresh.
            role: A role that the model's chat template knows.
            raw: No chat frame: only the text's own token ids.
            label: Short name for people.
            deterministic: Read canonical KV only, so that bits do not depend on what was cached.
            priority: Requests with a smaller number go first; equal ones in the order they came. Nobody waits for ever.
            kv: False looks nothing up and publishes nothing, for this request.
            cancel: Set it from anywhere to stop before the next forward.

        Raises:
            Cancelled: ``cancel`` was set; nothing was published. Way out: fail.
            ConfigError: Empty or invalid text, special tokens only, no chat template, refused role. Way out: fail.
            ContextTooLong: The text does not fit the window. Way out: fail.
            MalformedHandle, IncompatibleHandle, RecipeMissing: As in ``append``.
        """
        known = None if parent is None else self._known(parent)
        text = check_text(text, "the text to prefill")
        extension = self._extend(known, role, text, what="the text to prefill", raw=raw, generate=False)
        operator: Operator = "materialize" if known is None else "append"
        return self._requests.prefill(
            known,
            extension.token_ids,
            extension.turns,
            operator,
            self._how(deterministic, label, cancel, kv, priority),
            num_shared=extension.num_shared,
            text=text,
        )

    def generate(
        self,
        prompt: str,
        *,
        parent: HandleLike | None = None,
        role: str = "user",
        raw: bool = False,
        sampling: Sampling | None = None,
        label: str = "",
        deterministic: bool = False,
        priority: int = 0,
        seed_path: str = "",
        kv: bool = True,
        on_token: Callable[[TokenDelta], None] | None = None,
        cancel: threading.Event | None = None,
    ) -> Generation:
        """Append ``prompt`` as a chat turn, generate the assistant's, and name both by one new handle.

        Args:
            prompt: Content of the turn; continues the parent's open turn when it has the same role.
            parent: Handle to go on from; None starts fresh.
            role: Role of the prompt's turn.
            raw: Plain continuation without a chat frame.
            sampling: Greedy with up to 256 new tokens unless given.
            label: Short name for people.
            deterministic: Run alone, read canonical KV only: tokens equal those of a run without any cache, bit for bit.
            priority: As in ``prefill``.
            seed_path: Mixed into a derived seed, so that siblings differ and a re-run repeats.
            kv: As in ``prefill``.
            on_token: Called with every new token as it is known, on the calling thread. What it raises ends the request and
                is raised here; a ``StopIteration`` or ``StopAsyncIteration`` as the cause of a ``RuntimeError``.
            cancel: Set it from anywhere to stop before the next forward.

        Raises:
            ConfigError, ContextTooLong, MalformedHandle, IncompatibleHandle, RecipeMissing: As in ``prefill``.
            Cancelled: ``cancel`` was set; nothing was published. Way out: fail.
        """
        stream = self.stream(
            prompt,
            parent=parent,
            role=role,
            raw=raw,
            sampling=sampling,
            label=label,
            deterministic=deterministic,
            priority=priority,
            seed_path=seed_path,
            kv=kv,
            cancel=cancel,
        )
        return _drained(stream, on_token)

    def stream(
        self,
        prompt: str,
        *,
        parent: HandleLike | None = None,
        role: str = "user",
        raw: bool = False,
        sampling: Sampling | None = None,
        label: str = "",
        deterministic: bool = False,
        priority: int = 0,
        seed_path: str = "",
        kv: bool = True,
        cancel: threading.Event | None = None,
    ) -> Generator[TokenDelta | Generation, None, None]:
        """``generate`` as an iterator: every ``TokenDelta`` as it is known, then the ``Generation``.

        Input is checked at the first ``next``. Closing the iterator early stops the request; nothing is published.
        """
        started = time.perf_counter()
        sampling = _checked(sampling)
        known = None if parent is None else self._known(parent)
        prompt = check_text(prompt, "the prompt")
        extension = self._extend(known, role, prompt, what="the prompt", raw=raw, generate=True)
        yield from self._requests.stream(
            known,
            extension,
            sampling,
            self._how(deterministic, label, cancel, kv, priority),
            text=lambda: prompt,
            seed_name=known.kv_id if known else "",
            seed_path=seed_path,
            end_of_turn=self.engine.frame.end_of_turn,
            started=started,
        )

    def complete(
        self,
        token_ids: Sequence[int],
        *,
        near: Sequence[str] = (),
        turns: Sequence[Turn] = (),
        end_of_turn: Sequence[int] = (),
        sampling: Sampling | None = None,
        label: str = "",
        deterministic: bool = False,
        priority: int = 0,
        seed_path: str = "",
        kv: bool = True,
        on_token: Callable[[TokenDelta], None] | None = None,
        cancel: threading.Event | None = None,
    ) -> Generation:
        """Generate behind a whole prompt given as token ids, for callers that render chat templates themselves.

        The known handle that shares the longest token prefix is found and reused by itself, to the token.

        Args:
            token_ids: The prompt, ``[T]``.
            near: ``kv_id`` of handles that are likely to share a long prefix: looked up in index, disk and saver where this
                process does not know them. Unknown ones are ignored.
            turns: Chat turns of the prompt, for the recipe.
            end_of_turn: Token ids that end the assistant's turn in the model's template; the new handle names them as well.
            sampling: Greedy with up to 256 new tokens unless given.
            label: Short name for people.
            deterministic: As in ``generate``.
            priority: As in ``prefill``.
            seed_path: As in ``generate``.
            kv: False looks nothing up and publishes nothing, for this request.
            on_token: As in ``generate``.
            cancel: As in ``generate``.

        Raises:
            ConfigError, ContextTooLong: As in ``materialize``.
            Cancelled: ``cancel`` was set; nothing was published. Way out: fail.
        """
        stream = self.stream_complete(
            token_ids,
            near=near,
            turns=turns,
            end_of_turn=end_of_turn,
            sampling=sampling,
            label=label,
            deterministic=deterministic,
            priority=priority,
            seed_path=seed_path,
            kv=kv,
            cancel=cancel,
        )
        return _drained(stream, on_token)

    def stream_complete(
        self,
        token_ids: Sequence[int],
        *,
        near: Sequence[str] = (),
        turns: Sequence[Turn] = (),
        end_of_turn: Sequence[int] = (),
        sampling: Sampling | None = None,
        label: str = "",
        deterministic: bool = False,
        priority: int = 0,
        seed_path: str = "",
        kv: bool = True,
        cancel: threading.Event | None = None,
    ) -> Generator[TokenDelta | Generation, None, None]:
        """``complete`` as an iterator: every ``TokenDelta`` as it is known, then the ``Generation``.

        Input is checked at the first ``next``. Closing the iterator early stops the request; nothing is published.
        """
        started = time.perf_counter()
        sampling = _checked(sampling)
        ids = self.engine.check_token_ids(token_ids)
        end = self.engine.check_token_ids(end_of_turn) if end_of_turn else ()
        how = self._how(deterministic, label, cancel, kv, priority)
        self._check_open()
        for kv_id in near if how.kv else ():
            self.find_recipe(kv_id)
        nearest = self._recipes.nearest(self._store.sequence(ids)) if how.kv else Nearest(None, 0)
        known = self._recipes.find(nearest.kv_id) if nearest.kv_id else None
        yield from self._requests.stream(
            known,
            Extension(ids, tuple(turns), nearest.num_shared),
            sampling,
            how,
            text=lambda: self.engine.frame.decode(ids),
            seed_name="",
            seed_path=seed_path,
            end_of_turn=lambda *_: end,
            started=started,
        )

    def first_logits(self, handle: HandleLike, token_ids: Sequence[int]) -> torch.Tensor:
        """Logits ``[vocab]`` after ``handle`` and ``token_ids``; nothing is published. What time to first token is made of.

        Raises:
            ConfigError, ContextTooLong, MalformedHandle, IncompatibleHandle, RecipeMissing: As in ``append``.
        """
        parent = self._known(handle)
        ids = self._recipes.sequence(parent.kv_id).token_ids + self.engine.check_token_ids(token_ids)
        return self._requests.first_logits(parent, ids)

    # ---------------------------------------------------------------- leases, recipes, inspection

    def lease(self, handle: HandleLike) -> Receipt:
        """Pin the KV that ``handle`` has now, for at most a minute; the receipt is the only way to give it back.

        Raises:
            MalformedHandle, IncompatibleHandle, RecipeMissing: As in ``append``.
        """
        recipe = self._known(handle)
        return self._store.lease(self._recipes.sequence(recipe.kv_id), self._recipes.borders(recipe))

    def release(self, receipt: Receipt) -> bool:
        """Give a lease back. False when it had run out or was given back before; nothing of others is ever freed (I9).

        Raises:
            ConfigError: ``receipt`` is none. Way out: fail.
        """
        if not isinstance(receipt, Receipt):
            raise ConfigError(f"release() takes the receipt that lease() returned, got {type(receipt).__name__}")
        return self._store.release(receipt)

    def recipe(self, handle: HandleLike) -> Recipe:
        """The recipe of a handle.

        Raises:
            MalformedHandle, IncompatibleHandle, RecipeMissing: As in ``append``.
        """
        return self._known(handle)

    @property
    def journal(self) -> Journal:
        """The last requests: who asked, what was reused, and what could have been."""
        return self._requests.journal

    def find_recipe(self, kv_id: str) -> Recipe | None:
        """The recipe of an id, from wherever it is known: here, in the index, on disk, at a saver; None when it is nowhere.

        Raises:
            ConfigError: ``kv_id`` is no id. Way out: fail.
        """
        if not isinstance(kv_id, str) or not DIGEST_PATTERN.fullmatch(kv_id):
            raise ConfigError(f"a kv_id is 64 lower-case hex digits, got {kv_id!r:.80}")
        self._check_open()
        return self._recipes.find(kv_id)

    def tokens_of(self, kv_id: str) -> tuple[int, ...]:
        """Every token id that ``kv_id`` names.

        Raises:
            ConfigError: ``kv_id`` is no id. Way out: fail.
            RecipeMissing: It is known nowhere. Way out: fail.
        """
        if self.find_recipe(kv_id) is None:
            raise RecipeMissing(f"no recipe is known for {kv_id[:12]!r}, so its tokens are not either")
        return self._recipes.sequence(kv_id).token_ids

    def nearest(self, token_ids: Sequence[int]) -> Nearest:
        """The handle known in this process that shares the longest token prefix with ``token_ids``.

        Raises:
            ConfigError: As in ``materialize``.
        """
        return self._recipes.nearest(self._store.sequence(self.engine.check_token_ids(token_ids)))

    def lineage(self, handle: HandleLike) -> tuple[Recipe, ...]:
        """The recipes that a handle stands on, root first, its own last.

        Raises:
            MalformedHandle, IncompatibleHandle, RecipeMissing: As in ``append``.
        """
        return self._recipes.lineage(self._known(handle))

    def recipes(self) -> tuple[Recipe, ...]:
        """Every recipe that this process made or read, in that order."""
        return self._recipes.known()

    def extents(self) -> tuple[ExtentRecord, ...]:
        """Every extent that the index knows, those of other processes included.

        Raises:
            ConfigError: The broker is closed. Way out: fail.
        """
        self._check_open()
        return tuple(self._store.index.records())

    @property
    def owner(self) -> str:
        """Name of this broker's pool in the index; places of extents have it."""
        return self._pool.owner

    @property
    def is_closed(self) -> bool:
        """Was it closed?"""
        return self._closed

    def movements(self) -> tuple[Movement, ...]:
        """Extents that this process evicted, spilled, fetched or adopted lately, oldest first."""
        return self._store.movements.entries()

    def segments_of(self, handle: HandleLike) -> tuple[KVHandle, ...]:
        """The handles that were joined on the way to ``handle``, those that are known; none when nothing was.

        Raises:
            MalformedHandle, IncompatibleHandle, RecipeMissing: As in ``append``.
        """
        lineage = self._recipes.lineage(self._known(handle))
        ids = {
            kv_id: label
            for one in lineage
            if (made := one.composition)
            for kv_id, label in zip(made.children, made.labels, strict=True)
        }
        found = {recipe.kv_id: recipe for recipe in lineage}
        return tuple(
            KVHandle(kv_id, self.namespace.digest, found[kv_id].stop, self._recipes.is_exact(found[kv_id]), label)
            for kv_id, label in ids.items()
            if kv_id in found
        )

    def names_of(self, recipe: Recipe) -> tuple[str, ...]:
        """Names (64 hexadecimal digits) of the blocks and borders that a recipe of this broker adds to its parent."""
        return self._recipes.names_of(recipe)

    def add_recipe_source(self, find: Callable[[str], Recipe | None]) -> None:
        """Ask ``find(kv_id)`` for recipes that are known nowhere else. What it returns is believed only if its tokens have
        that name.
        """
        self._recipes.add_source(find)

    def remove_recipe_source(self, find: Callable[[str], Recipe | None]) -> None:
        """Ask there no more. Idempotent."""
        self._recipes.remove_source(find)

    # ---------------------------------------------------------------- persistence, for checkpointers

    def attach_disk(
        self, disk: DiskPool, *, write: Literal["evict", "behind"], wants: Callable[[Sequence[str]], bool]
    ) -> None:
        """Put a tier below the pool of a broker that has none. The caller closes ``disk`` after ``detach_disk``.

        Args:
            disk: Where extents go; what is there already is found by lookups from now on.
            write: When they go: ``"evict"``, as they leave the pool and at close; ``"behind"``, also in the background.
            wants: May an extent with these names go to disk? Called from any thread.

        Raises:
            ConfigError: There is a disk tier already. Way out: fail.
        """
        if write not in ("evict", "behind"):
            raise ConfigError(f"write must be 'evict' or 'behind', got {write!r}")
        with self._lock:
            self._check_open()
            if self._store.disk is not None:
                raise ConfigError("this broker has a disk tier; open it without disk=... to attach another")
            self._store.attach_disk(disk, writes_behind=write == "behind", wants=wants)
        self._keeper.start()

    def detach_disk(self) -> None:
        """Write what is wanted, then forget the tier that ``attach_disk`` added. Idempotent, also after ``close``."""
        with self._lock:
            if not self._closed and self._store.wants is not None:
                self._store.detach_disk()

    @property
    def has_disk(self) -> bool:
        """Is there a tier below the pool?"""
        return self._store.disk is not None

    def persist(self, handle: HandleLike) -> bool:
        """Write the KV of ``handle`` to disk now; False when some of it is not there afterwards (evicted before, or the disk
        cannot take it).

        Raises:
            MalformedHandle, IncompatibleHandle, RecipeMissing: As in ``append``.
        """
        recipe = self._known(handle)
        sequence = self._recipes.sequence(recipe.kv_id)
        return self._store.persist(sequence, self._recipes.borders(recipe), recipe.stop - recipe.num_pending)

    def forget_names(self, names: Sequence[str], is_needed: Callable[[Sequence[str]], bool]) -> int:
        """Remove copies on disk of extents known by one of ``names``, except those of whose names ``is_needed`` says yes;
        bytes removed.
        """
        return self._store.forget_names(names, is_needed)

    def token_ids(self, handle: HandleLike) -> tuple[int, ...]:
        """Every token id that ``handle`` names.

        Raises:
            MalformedHandle, IncompatibleHandle, RecipeMissing: As in ``append``.
        """
        return self._recipes.sequence(self._known(handle).kv_id).token_ids

    def check(self) -> list[Finding]:
        """Every violated invariant that can be seen; an empty list when all is well. Reads all bytes once."""
        if self._closed:
            return []
        return self._store.check() + self._recipes.check()

    def stats(self) -> Stats:
        """Counters, and what is held now; bytes are measured from the pool."""
        store = self._store
        store.sweep()
        return Stats(
            pool_capacity_bytes=self._pool.capacity_bytes,
            pool_used_bytes=self._pool.used_bytes,
            pool_peak_bytes=self._pool.peak_bytes,
            num_extents=len(store.index.records()),
            num_leases=store.index.num_leases(),
            num_recipes=len(self._recipes),
            num_reused_tokens=self._requests.counts.reused,
            num_prefilled_tokens=self._requests.counts.prefilled,
            num_decoded_tokens=self._requests.counts.decoded,
            num_recomputed_tokens=self._requests.counts.recomputed,
            num_evictions=store.counts.evictions,
            num_lost_receipts=store.counts.lost_receipts,
            num_kv_load_failures=self._requests.counts.failures
            + store.counts.fetch_failures
            + store.counts.lost_extents,
            overflow_bytes=store.overflow_bytes,
            peak_overflow_bytes=store.peak_overflow_bytes,
            device_capacity_bytes=store.device_tier.capacity_bytes if store.device_tier else 0,
            device_used_bytes=store.device_tier.used_bytes if store.device_tier else 0,
            num_device_copies=store.device_tier.num_copies if store.device_tier else 0,
            disk_capacity_bytes=store.disk.capacity_bytes if store.disk else 0,
            disk_used_bytes=store.disk.used_bytes if store.disk else 0,
            num_spills=store.counts.spills,
            num_spill_failures=store.counts.spill_failures,
            num_compactions=store.counts.compactions,
            num_fetches=store.counts.fetches,
            num_adoptions=store.counts.adoptions,
            num_index_outages=store.index.num_outages if isinstance(store.index, GuardedIndex) else 0,
            num_running_requests=self._requests.admission.num_running,
            num_waiting_requests=self._requests.admission.num_waiting,
            longest_stall_s=self.engine.batcher.longest_stall_s,
            num_batched_steps=self.engine.batcher.num_steps,
            num_batched_forwards=self.engine.batcher.num_forwards,
            num_repeated_steps=self.engine.batcher.num_repeated,
        )

    # ---------------------------------------------------------------- async twins

    async def amaterialize(self, token_ids: Sequence[int], *, label: str = "", deterministic: bool = False) -> KVHandle:
        """Async ``materialize``."""
        return await asyncio.to_thread(self.materialize, token_ids, label=label, deterministic=deterministic)

    async def aappend(
        self, handle: HandleLike, token_ids: Sequence[int], *, label: str = "", deterministic: bool = False
    ) -> KVHandle:
        """Async ``append``."""
        return await asyncio.to_thread(self.append, handle, token_ids, label=label, deterministic=deterministic)

    async def afork(self, handle: HandleLike, *, label: str | None = None) -> KVHandle:
        """Async ``fork``."""
        return await asyncio.to_thread(self.fork, handle, label=label)

    async def acompose(
        self,
        segments: Sequence[HandleLike] | KVComposite,
        *,
        exact: bool = False,
        max_deviation: float | None = None,
        rung: Rung = "auto",
        k: int = 16,
        r: float = 0.15,
        audit: bool = False,
        gate: str = "",
        label: str = "",
        deterministic: bool = False,
        kv: bool = True,
        cancel: threading.Event | None = None,
    ) -> Composed:
        """Async ``compose``; cancelling the task stops it before its next forward."""
        return await _cancellable(
            self.compose,
            segments,
            cancel,
            exact=exact,
            max_deviation=max_deviation,
            rung=rung,
            k=k,
            r=r,
            audit=audit,
            gate=gate,
            label=label,
            deterministic=deterministic,
            kv=kv,
        )

    async def aexact(self, handle: HandleLike, *, label: str | None = None) -> KVHandle:
        """Async ``exact``."""
        return await asyncio.to_thread(self.exact, handle, label=label)

    async def aevict(self, handle: HandleLike, *, tier: Tier = "host") -> int:
        """Async ``evict``."""
        return await asyncio.to_thread(self.evict, handle, tier=tier)

    async def atransfer(self, handle: HandleLike) -> Transfer:
        """Async ``transfer``."""
        return await asyncio.to_thread(self.transfer, handle)

    async def aprefill(
        self,
        text: str,
        *,
        parent: HandleLike | None = None,
        role: str = "user",
        raw: bool = False,
        label: str = "",
        deterministic: bool = False,
        priority: int = 0,
        kv: bool = True,
        cancel: threading.Event | None = None,
    ) -> Prefilled:
        """Async ``prefill``; cancelling the task stops it before its next forward."""
        return await _cancellable(
            self.prefill,
            text,
            cancel,
            parent=parent,
            role=role,
            raw=raw,
            label=label,
            deterministic=deterministic,
            priority=priority,
            kv=kv,
        )

    async def agenerate(
        self,
        prompt: str,
        *,
        parent: HandleLike | None = None,
        role: str = "user",
        raw: bool = False,
        sampling: Sampling | None = None,
        label: str = "",
        deterministic: bool = False,
        priority: int = 0,
        seed_path: str = "",
        kv: bool = True,
        on_token: Callable[[TokenDelta], None] | None = None,
        cancel: threading.Event | None = None,
    ) -> Generation:
        """Async ``generate``; cancelling the task stops the generation. ``on_token`` runs in the worker thread."""
        return await _cancellable(
            self.generate,
            prompt,
            cancel,
            parent=parent,
            role=role,
            raw=raw,
            sampling=sampling,
            label=label,
            deterministic=deterministic,
            priority=priority,
            seed_path=seed_path,
            kv=kv,
            on_token=on_token,
        )

    async def acomplete(
        self,
        token_ids: Sequence[int],
        *,
        near: Sequence[str] = (),
        turns: Sequence[Turn] = (),
        end_of_turn: Sequence[int] = (),
        sampling: Sampling | None = None,
        label: str = "",
        deterministic: bool = False,
        priority: int = 0,
        seed_path: str = "",
        kv: bool = True,
        on_token: Callable[[TokenDelta], None] | None = None,
        cancel: threading.Event | None = None,
    ) -> Generation:
        """Async ``complete``; cancelling the task stops the generation. ``on_token`` runs in the worker thread."""
        return await _cancellable(
            self.complete,
            token_ids,
            cancel,
            near=near,
            turns=turns,
            end_of_turn=end_of_turn,
            sampling=sampling,
            label=label,
            deterministic=deterministic,
            priority=priority,
            seed_path=seed_path,
            kv=kv,
            on_token=on_token,
        )

    async def afirst_logits(self, handle: HandleLike, token_ids: Sequence[int]) -> torch.Tensor:
        """Async ``first_logits``."""
        return await asyncio.to_thread(self.first_logits, handle, token_ids)

    async def alease(self, handle: HandleLike) -> Receipt:
        """Async ``lease``."""
        return await asyncio.to_thread(self.lease, handle)

    async def arelease(self, receipt: Receipt) -> bool:
        """Async ``release``."""
        return await asyncio.to_thread(self.release, receipt)

    async def acheck(self) -> list[Finding]:
        """Async ``check``."""
        return await asyncio.to_thread(self.check)

    async def aclose(self) -> None:
        """Async ``close``."""
        await asyncio.to_thread(self.close)

    # ---------------------------------------------------------------- inside

    def _known(self, handle: HandleLike) -> Recipe:
        """The recipe behind anything that claims to be a handle."""
        coerced = self._segment(handle)
        self._check_open()
        if coerced.kv_namespace != self.namespace.digest:
            raise IncompatibleHandle(
                f"handle {coerced.kv_label or coerced.kv_id[:12]!r} belongs to namespace {coerced.kv_namespace[:12]}, this broker "
                f"serves {self.namespace.digest[:12]} ({self.namespace.model}, {self.namespace.dtype}): model, tokenizer, dtype, "
                "rotary settings and tenant must be the same; make the handle again with this broker"
            )
        recipe = self._recipes.find(coerced.kv_id)
        if recipe is None:
            raise RecipeMissing(
                f"no recipe is known for handle {coerced.kv_label or coerced.kv_id[:12]!r} ({coerced.kv_tokens} tokens): it was "
                "made by a broker that is gone, or it is forged. Run the node that wrote it again. Recipes live as long as the "
                "broker that made them, in a shared index (index='redis://...') until a day after their last use, and on disk "
                "(disk=...) as long as the directory"
            )
        if coerced.kv_exact != self._recipes.is_exact(recipe):
            said, found = ("exact", "approximate") if coerced.kv_exact else ("approximate", "exact")
            raise IncompatibleHandle(
                f"handle {coerced.kv_id[:12]!r} claims to be {said}, its recipe is {found}: it was altered"
            )
        if recipe.stop != coerced.kv_tokens:
            raise IncompatibleHandle(
                f"handle {coerced.kv_id[:12]!r} claims {coerced.kv_tokens} tokens, its recipe has {recipe.stop}: it was altered"
            )
        return recipe

    def _segment(self, handle: HandleLike) -> KVHandle:
        """Anything that claims to be a handle as one; a composite is materialised."""
        refuse_foreign_cache(handle)
        segment = coerce_segment(handle)
        if isinstance(segment, KVComposite):
            return self.compose(segment, label=segment.kv_label).handle
        return segment

    def _chores(self) -> None:
        """In the background: recipes to disk, and to an index that forgot them."""
        self._recipes.save()
        if self._num_announced != self._store.counts.announcements:
            self._num_announced = self._store.counts.announcements
            self._recipes.share_again()

    def _check_open(self) -> None:
        if os.getpid() != self._pid:
            raise ConfigError(
                f"this broker belongs to process {self._pid}, this is its forked child {os.getpid()}: the threads of torch do "
                "not survive a fork; start worker processes with 'spawn' and open a broker in each"
            )
        if self._closed:
            raise ConfigError("this broker is closed; open another one")

    def _how(
        self,
        deterministic: bool,
        label: str,
        cancel: threading.Event | None = None,
        kv: bool = True,
        priority: int = 0,
    ) -> How:
        how = How(deterministic, kv, label, cancel, priority)
        return how if self.kv else replace(how, kv=False)

    def _extend(
        self, parent: Recipe | None, role: str, text: str, *, what: str, raw: bool, generate: bool
    ) -> Extension:
        if not isinstance(raw, bool):
            raise ConfigError(f"raw must be True or False, got {raw!r}")
        before = self._recipes.sequence(parent.kv_id).token_ids if parent else ()
        turns = parent.turns if parent else ()
        return self.engine.frame.extend(before, turns, role, text, what=what, raw=raw, generate=generate)


async def _cancellable(
    call: Callable[..., Result], prompt: Any, cancel: threading.Event | None, **options: Any
) -> Result:
    """``call`` in a thread; cancelling the task stops it before its next forward, and nobody else who got the same event."""
    check_cancel(cancel)
    stop = Stop(cancel)
    return await in_thread(partial(call, prompt, cancel=stop, **options), stop)


def _checked(sampling: Sampling | None) -> Sampling:
    sampling = Sampling() if sampling is None else sampling
    if not isinstance(sampling, Sampling):
        raise ConfigError(f"sampling must be a Sampling, got {type(sampling).__name__}; write Sampling(max_tokens=...)")
    return sampling


def _drained(
    stream: Generator[TokenDelta | Generation, None, None], on_token: Callable[[TokenDelta], None] | None
) -> Generation:
    """The generation that a stream ends with."""
    if on_token is not None and not callable(on_token):
        raise ConfigError(f"on_token must be callable, got {type(on_token).__name__}")
    if inspect.iscoroutinefunction(on_token):
        raise ConfigError(
            "on_token must be a plain function, got an async one, which nobody would await: it is called by the thread that "
            "generates; from there, asyncio.run_coroutine_threadsafe(...) reaches a loop"
        )
    with closing(stream):  # also when ``on_token`` raises: leases end with the request, not with its traceback
        for event in stream:
            if isinstance(event, Generation):
                return event
            if on_token is not None:
                try:
                    on_token(event)
                except (StopIteration, StopAsyncIteration) as error:  # a caller's ``map`` or iterator would just end
                    raise RuntimeError(f"on_token raised {type(error).__name__}") from error
    raise RuntimeError("a stream ended without its generation")


def _whole(ids: Sequence[int], start: int = 0) -> Span:
    return Span(start, start + len(ids))
