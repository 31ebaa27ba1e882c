"""The engine on transformers and torch: loads a model, refuses what it cannot carry, runs tokens over pieces of KV.

Two read paths. *fast*: our attention under the unmodified model, KV read where it lies. *universal*: the model's own
attention over one contiguous copy of the past. A probe compares both with the stock forward once per model and keeps the
first that is right; where neither is, the model is refused with the numbers. On the fast path llama-like models run
through ``LeanForward`` instead of their modules, if the probe finds that right too.
"""

from __future__ import annotations

import inspect
import os
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from numbers import Integral
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils.hub import cached_file

from aaflow_langgraph.engine import attention, cache_adapter, lean, mixed
from aaflow_langgraph.engine.attention import FastPathRefused, Past
from aaflow_langgraph.engine.base import Piece, Tail, chunk_spans
from aaflow_langgraph.engine.batch import Batcher, Step
from aaflow_langgraph.engine.fingerprint import make_namespace, read_cached, write_cached
from aaflow_langgraph.engine.kernel import Kernel
from aaflow_langgraph.engine.rotary import Rotation
from aaflow_langgraph.engine.shared_attention import TailRoom
from aaflow_langgraph.engine.together import together
from aaflow_langgraph.engine.turns import ChatFrame
from aaflow_langgraph.errors import ConfigError, ContextTooLong, UnsupportedModel
from aaflow_langgraph.handle import is_unicode
from aaflow_langgraph.hashing import digest
from aaflow_langgraph.model import KVLayout, Namespace
from aaflow_langgraph.tensors import DTYPES, dtype_name

# Mean difference of logits, relative to their spread, that a read path may show against the stock forward. In 16 bits the
# stock forward itself moves by 0.02-0.06 when the same tokens are cut differently; a path that is wrong moves by 0.3 and more.
_PROBE_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.15, torch.float16: 0.15}
_PROBE_TOKENS = 40
_LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")


class TransformersEngine:
    """See ``Engine`` for the contract.

    Args:
        model: A decoder model. Its attention implementation is set to ``"aaflow"``, which outside of this engine's runs
            behaves as ``"sdpa"``.
        tokenizer: The model's tokenizer.
        name: For people.
        folder: Where the weights' files lie, when known: their digests are cached.
        tenant: Salt of the namespace: KV is never shared between tenants.

    Raises:
        UnsupportedModel: Says which layer keeps what state, or by how much the probe missed. Way out: fail.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        name: str = "",
        folder: Path | None = None,
        tenant: str = "",
    ) -> None:
        if not isinstance(tenant, str) or not is_unicode(tenant) or len(tenant.encode()) > 256:
            raise ConfigError("tenant must be valid Unicode text of at most 256 bytes")
        self.model = model.eval()
        self.tokenizer = tokenizer
        self.frame = ChatFrame(tokenizer)
        self.folder = folder
        self.rotation: Rotation | str | None = None  # of rotary.rotation_of: a str says why there is none
        self.device = model.device
        self.lock = threading.Lock()
        self.batcher = Batcher(self._forward_steps, self.lock)
        self._keyword = cache_adapter.cache_keyword(model)
        self._sliding = cache_adapter.layer_plan(model)
        self.keeps_logits = "logits_to_keep" in inspect.signature(inspect.unwrap(type(model).forward)).parameters
        config = model.config.get_text_config(decoder=True)
        self.window = _window(config)
        self.vocab_size = int(config.vocab_size)
        restore_rotary(model)
        self._stock_attention = model.config._attn_implementation or "eager"
        if self._stock_attention == attention.NAME:  # the model already serves another engine
            self._stock_attention = "sdpa"
        self._select("universal")
        self.layout = self._measure_layout()
        self.lean = lean.recognise(model, self.window)
        self.kernel = Kernel.of(
            int(config.num_attention_heads),
            self.layout.num_kv_heads,
            self.layout.head_dim,
            model.dtype,
            self.device,
        )
        self.read_path = ""  # not known yet: no step shares a forward
        self._shares = True
        self._tail_room = TailRoom()
        self.read_path = self._probe(folder)
        self.namespace: Namespace = make_namespace(
            model,
            tokenizer,
            name=name or getattr(config, "name_or_path", "") or type(model).__name__,
            folder=folder,
            tenant=tenant,
            read_path=self.read_path,
            lean=self.lean is not None,
            attention=self.attention,
        )
        self.stop_ids = _stop_ids(model, tokenizer)

    @classmethod
    def load(
        cls, model: str | os.PathLike[str], *, dtype: str = "auto", device: str = "auto", tenant: str = ""
    ) -> TransformersEngine:
        """Load a hub id or a local path.

        Args:
            model: Hub id or directory.
            dtype: ``"float32"``, ``"bfloat16"``, ``"float16"``, or ``"auto"`` for the checkpoint's own.
            device: ``"cpu"``, ``"cuda"``, ``"cuda:1"``, or ``"auto"`` for CUDA when there is one.
            tenant: See the class.

        Raises:
            ConfigError: Unknown model, dtype or device. Way out: fail.
            UnsupportedModel: See the class.
        """
        if not isinstance(dtype, str) or (dtype != "auto" and dtype not in DTYPES):
            raise ConfigError(f"dtype must be one of auto, {', '.join(DTYPES)}, got {dtype!r}")
        target = pick_device(device)
        source = os.fspath(model) if isinstance(model, str | os.PathLike) else ""
        if not isinstance(source, str) or not source.strip():
            raise ConfigError(f"model must be a hub id or a local directory, got {model!r}")
        try:
            folder = _weights_folder(source)
            tokenizer = AutoTokenizer.from_pretrained(source)
            answer: Any = AutoModelForCausalLM.from_pretrained(
                source, dtype="auto" if dtype == "auto" else DTYPES[dtype], output_loading_info=True
            )
        except (OSError, ValueError, KeyError, ImportError, RuntimeError, SafetensorError) as error:
            raise ConfigError(
                f"cannot load {source!r} as a causal language model: {_first_line(error)}. Pass a local directory written by "
                "save_pretrained(), or the id of a model on the hub (and check that the hub is reachable)"
            ) from error
        loaded, notes = answer
        # Weights that the files lack were made up at random: the files' digest would name a model that nobody has (I6).
        lacking = sorted({*notes["missing_keys"], *(str(key) for key in notes["mismatched_keys"])})
        if lacking:
            raise ConfigError(
                f"the checkpoint {source!r} does not fit its configuration: {len(lacking)} weights are missing or of another "
                f"shape, {lacking[0]} first; use a complete checkpoint"
            )
        torch.nn.Module.to(loaded, target)  # the method itself is wrapped without types
        return cls(loaded, tokenizer, name=source, folder=folder, tenant=tenant)

    @contextmanager
    def stock_attention(self) -> Iterator[None]:
        """Run the model with its own attention inside, for baselines. Holds the engine's lock."""
        with self.lock:
            self._select("universal")
            try:
                yield
            finally:
                self._select(self.read_path)

    @property
    def attention(self) -> str:
        """``"native"`` where forwards attend through the compiled kernel, else ``"torch"``."""
        return "native" if self.kernel is not None and self.read_path == "fast" and self._shares else "torch"

    @property
    def batches(self) -> bool:
        """Do steps of several requests share a forward? On CPU, on the fast read path."""
        return self._shares and self.read_path == "fast" and self.device.type == "cpu"

    def _forward_steps(self, steps: Sequence[Step]) -> list[torch.Tensor]:
        """One forward over the steps of several requests, or over one."""
        kernel = self.kernel if self._shares else None
        if kernel is not None and not kernel.reads(
            [step.past for step in steps], sum(len(step.token_ids) for step in steps)
        ):
            kernel = None
        if kernel is not None or len(steps) > 1:
            if self.lean is None:
                return together(self, steps, kernel, self._tail_room)
            if self.lean.ready():
                return [logits.clone() for logits in self.lean.together(steps, kernel)]
        return [self._forward_alone(step) for step in steps]

    def forward_step(self, step: Step) -> torch.Tensor:
        """One forward over one step on the fast path. The caller holds ``lock``."""
        return self._forward_steps([step])[0]

    def _forward_alone(self, step: Step) -> torch.Tensor:
        past = step.past
        with attention.reading(past), torch.no_grad():
            past.begin(len(step.token_ids))
            if self.lean is not None and self.lean.ready():
                # Out of inference mode again: callers may do with logits what they like.
                return self.lean(step.token_ids, step.position, past).clone()
            return self.forward(step.token_ids, step.position, step.cache)

    def start(self, past: Sequence[Piece], tail: Tail, *, grid: int | None, priority: int = 0) -> _Run:
        """See ``Engine.start``."""
        if self.read_path == "fast":
            return _FastRun(self, past, tail, grid, priority)
        return _UniversalRun(self, past, tail, priority)

    def check_fits(self, num_tokens: int, max_tokens: int = 0) -> None:
        """Refuse a request that does not fit the model's window.

        Raises:
            ContextTooLong: With the numbers. Way out: fail.
        """
        if num_tokens + max_tokens > self.window:
            raise ContextTooLong(
                f"{num_tokens} context tokens + {max_tokens} new ones exceed the window of {self.window} tokens of "
                f"{type(self.model).__name__}; shorten the context by {num_tokens + max_tokens - self.window} tokens"
                f"{' or lower max_tokens' if max_tokens else ''}"
            )

    def check_token_ids(self, token_ids: Sequence[int]) -> tuple[int, ...]:
        """Token ids as a tuple of plain ints.

        Raises:
            ConfigError: Empty, not ints, or outside the vocabulary; a cache or a padded batch was passed. Way out: fail.
        """
        cache_adapter.refuse_foreign_cache(token_ids)
        if isinstance(token_ids, torch.Tensor):
            if (token_ids.dim() > 1 and token_ids.shape[0] != 1) or token_ids.dim() > 2:
                raise ConfigError(
                    f"token ids have the shape {tuple(token_ids.shape)}: pass one sequence at a time, without padding, so that "
                    "no pad slot is ever stored"
                )
            token_ids = token_ids.reshape(-1).tolist()
        if isinstance(token_ids, str | bytes):
            raise ConfigError("token ids are ints; for text use prefill() or generate()")
        if isinstance(token_ids, Mapping):
            raise ConfigError(
                f"token ids are a sequence of ints, got {type(token_ids).__name__}; pass its ['input_ids']"
            )
        try:
            # NumPy's integers are integers too; bool is one by accident.
            ids = tuple(int(x) if isinstance(x, Integral) and not isinstance(x, bool) else x for x in token_ids)
        except TypeError as error:
            raise ConfigError(f"token ids are a sequence of ints, got {type(token_ids).__name__}") from error
        if not ids:
            raise ConfigError("there are no token ids; pass at least one")
        bad = [x for x in ids if type(x) is not int or not 0 <= x < self.vocab_size]
        if bad:
            raise ConfigError(f"token id {bad[0]!r} is not an int in [0, {self.vocab_size}), the model's vocabulary")
        return ids

    def run_at(self, token_ids: Sequence[int], positions: Sequence[int], over: mixed.Mixed) -> torch.Tensor:
        """See ``mixed.run_at``."""
        return mixed.run_at(self, token_ids, positions, over)

    def check_layer(
        self, token_ids: Sequence[int], positions: Sequence[int], over: mixed.Mixed
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See ``mixed.check_layer``."""
        return mixed.check_layer(self, token_ids, positions, over)

    def forward(
        self,
        token_ids: Sequence[int],
        position: int | torch.Tensor,
        cache: Any,
        mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """One stock forward through ``cache``; logits of the last token, ``[vocab]``.

        ``position`` is that of the first token, or those of all ``[T]``; ``mask`` is additive, ``[1, 1, T, S]``.
        """
        if isinstance(position, int):
            position = torch.arange(position, position + len(token_ids), device=self.device)
        return self.forward_rows(token_ids, position, cache, None, mask)[-1]

    def forward_rows(
        self,
        token_ids: Sequence[int],
        position: torch.Tensor,
        cache: Any,
        rows: torch.Tensor | None,
        mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """One stock forward of tokens at positions ``[T]``; logits ``[n, vocab]`` of these ``rows [n]`` of them, or, without,
        of the last one at the end.
        """
        ids = torch.tensor([list(token_ids)], device=self.device)
        arguments: dict[str, Any] = {self._keyword: cache, "use_cache": True, "position_ids": position[None]}
        if mask is not None:
            arguments["attention_mask"] = mask
        if self.keeps_logits:
            arguments["logits_to_keep"] = 1 if rows is None else rows
        with torch.no_grad():
            logits: torch.Tensor = self.model(input_ids=ids, **arguments).logits[0]
        return logits if rows is None or self.keeps_logits else logits[rows]

    def _measure_layout(self) -> KVLayout:
        """Shape of the KV, read off one stock token instead of guessed from the configuration."""
        shapes: dict[int, tuple[torch.Size, torch.Size, torch.dtype]] = {}

        def note(layer: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            shapes[layer] = (keys.shape, values.shape, keys.dtype)
            return keys, values

        layers = [cache_adapter.UniversalLayer(n, note, lambda: 0, is_sliding=s) for n, s in enumerate(self._sliding)]
        kind = type(self.model).__name__
        try:
            self.forward([0], 0, cache_adapter.as_cache(layers))
        except (ValueError, AttributeError, NotImplementedError, TypeError, RuntimeError, IndexError) as error:
            failed = next((number for number in range(len(layers)) if number not in shapes), 0)
            raise UnsupportedModel(
                f"layer {failed} of {kind} does not run on a plain key/value cache ({_first_line(error)}): a recurrent or "
                "convolutional state can be neither cut at a prefix nor shared by forks; use a model whose layers are all attention"
            ) from error
        missing = [number for number in range(len(layers)) if number not in shapes]
        if missing:
            raise UnsupportedModel(
                f"layer {missing[0]} of {kind} writes no keys and values ({len(missing)} of {len(layers)} layers do not): its "
                "state is recurrent, convolutional or shared and cannot be cut at a prefix; use a model whose layers are all "
                "attention"
            )
        keys, _values, dtype = shapes[0]
        for number, (k, v, d) in sorted(shapes.items()):
            if k != v or (k, d) != (keys, dtype):
                raise UnsupportedModel(
                    f"layer {number} of {kind} has keys {tuple(k)} and values {tuple(v)} in {d}, layer 0 has {tuple(keys)} in "
                    f"{dtype}: extents hold one shape for all layers, so latent or mixed layouts cannot be carried"
                )
        if dtype != self.model.dtype:
            raise UnsupportedModel(
                f"{kind} computes keys in {dtype} but is loaded in {self.model.dtype}: a quantised or mixed model's KV is not "
                "covered by the fingerprint; load it in one dtype"
            )
        return KVLayout(len(layers), int(keys[1]), int(keys[3]), dtype_name(dtype), dtype.itemsize)

    def _probe(self, folder: Path | None) -> str:
        """Which read path is right for this model; cached per configuration, dtype, device and library versions.

        Drops the lean forward where it is not: one that the fast path does not use or that misses the stock logits.
        """
        # A windowed layer differs from a full one only beyond its window, so the probe reaches beyond it.
        config = self.model.config.get_text_config(decoder=True)
        reach = int(getattr(config, "sliding_window", None) or 0) if any(self._sliding) else 0
        num_tokens = min(_PROBE_TOKENS + reach, self.window, 2200)
        key = digest(
            "probe-4",
            self.model.config.to_json_string(use_diff=False),
            dtype_name(self.model.dtype),
            self.device.type,
            str(num_tokens),
            str(self.lean is not None),
            str(self.kernel is not None),
            torch.__version__,
            transformers.__version__,
        )
        known = read_cached("probes", key) if folder else None
        if known in ("lean", "fast", "fast alone", "universal"):
            self.lean = self.lean if known == "lean" else None
            self._shares = known != "fast alone"
            path = "universal" if known == "universal" else "fast"
            self._select(path)
            return path
        ids = [(7919 * n + 13) % self.vocab_size for n in range(num_tokens)]
        stock = self._stock_logits(ids)
        spread = float(stock.float().std()) + 1e-6
        missed: list[str] = []
        for path in ("lean", "fast", "universal"):
            if path == "lean" and self.lean is None:
                continue
            if path != "lean":
                self.lean = None
            if path != "universal" and any(self._sliding):
                missed.append(f"{path}: layers attend through a window")
                continue
            read_path = "universal" if path == "universal" else "fast"
            self._select(read_path)
            self._shares = path == "lean"  # whether modules may is asked when it is known what each computes alone
            try:
                difference = float((self._probe_logits(read_path, ids) - stock).abs().mean()) / spread
            except (
                FastPathRefused,
                RuntimeError,
            ) as refused:  # a kernel that does not take this head dim raises RuntimeError
                missed.append(f"{path}: {_first_line(refused)}")
                continue
            if difference <= _PROBE_TOLERANCE[self.model.dtype]:
                self._shares = path == "lean" or (path == "fast" and self._probe_shared(ids, spread))
                if folder:
                    write_cached("probes", key, path if self._shares or path == "universal" else "fast alone")
                return read_path
            missed.append(f"{path}: logits differ by {difference:.2e} of their spread on average")
        raise UnsupportedModel(
            f"no read path of {type(self.model).__name__} equals its stock forward over {num_tokens} tokens "
            f"({'; '.join(missed)}; allowed {_PROBE_TOLERANCE[self.model.dtype]:.0e}); its KV cannot be reused safely"
        )

    def _select(self, path: str) -> None:
        """Put the model on the attention that ``path`` needs."""
        wanted = attention.NAME if path == "fast" else self._stock_attention
        if self.model.config._attn_implementation != wanted:
            self.model.set_attn_implementation(wanted)

    def _stock_logits(self, ids: list[int]) -> torch.Tensor:
        with torch.no_grad():
            logits: torch.Tensor = self.model(input_ids=torch.tensor([ids], device=self.device), use_cache=False).logits
        return logits[0, -1].float()

    def _probe_logits(self, path: str, ids: list[int]) -> torch.Tensor:
        """The same logits by the read path: a first run, its tail read as a piece by a second, then token by token."""
        cut, last = len(ids) // 2, len(ids) - 2
        first = _HeapTail(self, 0)
        kind: Callable[..., _Run] = _FastRun if path == "fast" else lambda e, p, t, _, n: _UniversalRun(e, p, t, n)
        kind(self, (), first, None, 0).prefill(ids[:cut])
        second = _HeapTail(self, cut)
        run = kind(self, (Piece(first.kv[..., :cut, :], 0, cut),), second, None, 0)
        run.prefill(ids[cut:last])
        run.decode(ids[last])
        return run.decode(ids[last + 1]).float()

    def _probe_shared(self, ids: list[int], spread: float) -> bool:
        """Are the logits of two requests in one forward through the model's modules those of each alone?"""
        cut = len(ids) // 2
        first = _HeapTail(self, 0)
        _FastRun(self, (), first, None, 0).prefill(ids[:cut])
        pieces = (Piece(first.kv[..., :cut, :], 0, cut),)
        runs = [_FastRun(self, pieces, _HeapTail(self, cut), None, 0) for _ in range(2)]
        runs[1].prefill(ids[cut : cut + 5])
        steps = [runs[0].next_step(ids[cut : cut + 3]), runs[1].next_step(ids[cut + 5 : cut + 6])]
        try:
            with self.lock:
                alone = [self._forward_alone(step).float() for step in steps]
                shared = together(self, steps, self.kernel, self._tail_room)
        except (FastPathRefused, RuntimeError, TypeError, ValueError, IndexError):
            return False  # it runs alone, as it did
        differences = [float((a - b.float()).abs().mean()) / spread for a, b in zip(alone, shared, strict=True)]
        return max(differences) <= _PROBE_TOLERANCE[self.model.dtype]


class _Run:
    """Shared part of both read paths."""

    def __init__(self, engine: TransformersEngine, tail: Tail, priority: int) -> None:
        self._engine = engine
        self._tail = tail
        self._priority = priority
        self.position = tail.start + tail.length
        self.was_shared = False

    def prefill(self, token_ids: Sequence[int]) -> torch.Tensor:
        logits: torch.Tensor | None = None
        start = self.position
        for a, b in chunk_spans(start, start + len(token_ids)):
            logits = self._step(token_ids[a - start : b - start])
        if logits is None:
            raise ValueError("prefill needs at least one token")
        return logits

    def decode(self, token_id: int) -> torch.Tensor:
        return self._step((token_id,))

    def _step(self, token_ids: Sequence[int]) -> torch.Tensor:
        raise TypeError("a run is either fast or universal")


class _FastRun(_Run):
    """Reads pieces where they lie."""

    def __init__(
        self, engine: TransformersEngine, past: Sequence[Piece], tail: Tail, grid: int | None, priority: int
    ) -> None:
        super().__init__(engine, tail, priority)
        self._past = Past(past, tail, grid)
        me = weakref.proxy(
            self
        )  # no cycle: what is read in place must be let go with the run, not with the next collection
        self._cache = cache_adapter.as_cache(
            [
                cache_adapter.FastLayer(layer, self._past.write, lambda: me.position)
                for layer in range(engine.layout.num_layers)
            ]
        )

    def next_step(self, token_ids: Sequence[int]) -> Step:
        """These tokens behind what was run; not run yet."""
        return Step(token_ids, self.position, self._past, self._cache)

    def _step(self, token_ids: Sequence[int]) -> torch.Tensor:
        engine, step = self._engine, self.next_step(token_ids)
        # One forward at a time per engine: two that share the cores are slower than two in turn, and one for both is faster.
        if engine.batches and self._past.grid is None:
            logits = engine.batcher.step(step, self._priority)
            self.was_shared = step.num_together > 1
        else:
            logits = engine.batcher.alone(partial(engine.forward_step, step), self._priority)
        self._tail.length += len(token_ids)
        self.position += len(token_ids)
        return logits


class _UniversalRun(_Run):
    """Keeps one contiguous copy of the whole past beside the tail and hands it to the model's own attention."""

    def __init__(self, engine: TransformersEngine, past: Sequence[Piece], tail: Tail, priority: int) -> None:
        super().__init__(engine, tail, priority)
        self._num_new = 0
        self._all = torch.empty(
            engine.layout.shape(_roomy(self.position)), dtype=engine.model.dtype, device=engine.device
        )
        for piece in past:
            self._all[..., piece.start : piece.stop, :] = piece.kv
        if tail.length:
            self._all[..., tail.start : self.position, :] = tail.kv[..., : tail.length, :]
        me = weakref.proxy(self)
        self._cache = cache_adapter.as_cache(
            [
                cache_adapter.UniversalLayer(
                    layer, lambda *new: me._update(*new), lambda: me.position, is_sliding=sliding
                )
                for layer, sliding in enumerate(engine._sliding)
            ]
        )

    def _step(self, token_ids: Sequence[int]) -> torch.Tensor:
        self._num_new = len(token_ids)
        self._tail.ensure(self._tail.length + self._num_new)
        stop = self.position + self._num_new
        if stop > self._all.shape[3]:
            larger = self._all.new_empty(self._engine.layout.shape(_roomy(stop)))
            larger[..., : self.position, :] = self._all[..., : self.position, :]
            self._all = larger
        forward = partial(self._engine.forward, token_ids, self.position, self._cache)
        logits = self._engine.batcher.alone(forward, self._priority)
        self._tail.length += self._num_new
        self.position = stop
        return logits

    def _update(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        stop = self.position + self._num_new
        at = self._tail.length
        for which, new in enumerate((keys, values)):
            self._all[layer, which, :, self.position : stop] = new[0]
            self._tail.kv[layer, which, :, at : at + self._num_new] = new[0]
        return self._all[layer, 0, :, :stop][None], self._all[layer, 1, :, :stop][None]


class _HeapTail:
    """A tail outside any pool, for the probe."""

    def __init__(self, engine: TransformersEngine, start: int) -> None:
        self.start = start
        self.length = 0
        self.kv = torch.empty(engine.layout.shape(2304), dtype=engine.model.dtype, device=engine.device)

    def ensure(self, num_tokens: int) -> None:
        if num_tokens > self.kv.shape[3]:
            raise ValueError(f"the probe's tail holds {self.kv.shape[3]} tokens, {num_tokens} asked")


def pick_device(device: str) -> torch.device:
    """The torch device of a name; ``"auto"`` is CUDA when there is one.

    Raises:
        ConfigError: Unknown or absent. Way out: fail.
    """
    if not isinstance(device, str):
        raise ConfigError(f"device must be auto, cpu, cuda or cuda:N, got {device!r}")
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        picked = torch.device(device)
    except RuntimeError as error:
        raise ConfigError(f"device must be auto, cpu, cuda or cuda:N, got {device!r}") from error
    if picked.type not in ("cpu", "cuda"):
        raise ConfigError(f"device must be auto, cpu, cuda or cuda:N, got {device!r}")
    if picked.type == "cuda" and (picked.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"device {device!r} is not there: torch sees {torch.cuda.device_count()} CUDA devices")
    return picked


def restore_rotary(model: PreTrainedModel) -> None:
    """Put rotary frequencies back to fp32: casting a whole model to 16 bits rounds them, and with them every position."""
    for module in model.modules():
        rounded = [
            name
            for name, buffer in module.named_buffers(recurse=False)
            if name.endswith("inv_freq") and buffer.dtype != torch.float32
        ]
        if not rounded:
            continue
        config = getattr(module, "config", None)
        if config is None:
            raise UnsupportedModel(
                f"{type(module).__name__} holds rotary frequencies in {getattr(module, rounded[0]).dtype} and cannot rebuild "
                "them; load the model with dtype=... instead of casting it"
            )
        fresh = dict(type(module)(config=config).named_buffers(recurse=False))
        for name in rounded:
            setattr(module, name, fresh[name].to(getattr(module, name).device))


def _window(config: Any) -> int:
    """Most tokens a sequence may have. Frequencies that change with length are exact up to the original window only."""
    window = int(getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None) or 1 << 20)
    rope = getattr(config, "rope_parameters", None) or {}
    flat = [rope, *(value for value in rope.values() if isinstance(value, dict))]
    for entry in flat:
        if entry.get("rope_type") in _LENGTH_DEPENDENT_ROPE:
            original = int(entry.get("original_max_position_embeddings") or window)
            if original < window:
                warnings.warn(
                    f"rotary frequencies of type {entry['rope_type']} change beyond {original} tokens, which would change KV that "
                    f"is already stored: the window is {original} tokens instead of {window}",
                    stacklevel=4,
                )
            window = min(window, original)
    return window


def _stop_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Ids that end a generation: the generation configuration's and the tokenizer's."""
    configured = getattr(model.generation_config, "eos_token_id", None) if model.generation_config else None
    ids = configured if isinstance(configured, list) else [configured]
    return frozenset(int(i) for i in (*ids, tokenizer.eos_token_id) if i is not None)


def _weights_folder(source: str) -> Path | None:
    """Directory of the checkpoint's files."""
    if os.path.isdir(source):
        return Path(source)
    found = cached_file(source, "config.json")
    return Path(found).parent if found else None


def _roomy(num_tokens: int) -> int:
    """``num_tokens`` and room to grow, in whole blocks."""
    return (num_tokens // 256 + 2) * 256


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0][:300] if text else type(error).__name__
