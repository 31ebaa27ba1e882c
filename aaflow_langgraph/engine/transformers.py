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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from numbers import Integral
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from aaflow_langgraph.engine import attention, cache_adapter, lean, mixed, probe
from aaflow_langgraph.engine.base import Piece, Tail
from aaflow_langgraph.engine.batch import Batcher, Step
from aaflow_langgraph.engine.fingerprint import make_namespace
from aaflow_langgraph.engine.kernel import Kernel
from aaflow_langgraph.engine.loading import first_line, pick_device, restore_rotary, stop_ids, weights_folder, window_of
from aaflow_langgraph.engine.rotary import Rotation
from aaflow_langgraph.engine.runs import FastRun, Run, UniversalRun
from aaflow_langgraph.engine.shared_attention import TailRoom
from aaflow_langgraph.engine.together import together
from aaflow_langgraph.engine.turns import ChatFrame
from aaflow_langgraph.errors import ConfigError, ContextTooLong
from aaflow_langgraph.handle import is_unicode
from aaflow_langgraph.model import Namespace
from aaflow_langgraph.tensors import DTYPES, dtype_name


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
        self.sliding = cache_adapter.layer_plan(model)
        self.keeps_logits = "logits_to_keep" in inspect.signature(inspect.unwrap(type(model).forward)).parameters
        config = model.config.get_text_config(decoder=True)
        self.window = window_of(config)
        self.vocab_size = int(config.vocab_size)
        restore_rotary(model)
        self._stock_attention = model.config._attn_implementation or "eager"
        if self._stock_attention == attention.NAME:  # the model already serves another engine
            self._stock_attention = "sdpa"
        self.select("universal")
        self.layout = probe.measure_layout(self)
        self.lean = lean.recognise(model, self.window)
        self.kernel = Kernel.of(
            int(config.num_attention_heads),
            self.layout.num_kv_heads,
            self.layout.head_dim,
            model.dtype,
            self.device,
        )
        if self.lean is not None and not self.lean.suits_kernel:
            self.kernel = None
        self.read_path = ""  # not known yet: no step shares a forward
        self.shares = True
        self.tail_room = TailRoom()
        self.read_path = probe.choose(self, folder)
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
        self.stop_ids = stop_ids(model, tokenizer)

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
            folder = weights_folder(source)
            tokenizer = AutoTokenizer.from_pretrained(source)
            answer: Any = AutoModelForCausalLM.from_pretrained(
                source, dtype="auto" if dtype == "auto" else DTYPES[dtype], output_loading_info=True
            )
        except (OSError, ValueError, KeyError, ImportError, RuntimeError, SafetensorError) as error:
            raise ConfigError(
                f"cannot load {source!r} as a causal language model: {first_line(error)}. Pass a local directory written by "
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
            self.select("universal")
            try:
                yield
            finally:
                self.select(self.read_path)

    @property
    def attention(self) -> str:
        """``"native"`` where forwards attend through the compiled kernel, else ``"torch"``."""
        return "native" if self.kernel is not None and self.batches else "torch"

    @property
    def batches(self) -> bool:
        """Do steps of several requests share a forward? On CPU, on the fast read path."""
        return self.shares and self.read_path == "fast" and self.device.type == "cpu"

    def _forward_steps(self, steps: Sequence[Step]) -> list[torch.Tensor]:
        """One forward over the steps of several requests, or over one."""
        kernel = self.kernel if self.shares else None
        if kernel is not None and not kernel.reads(
            [step.past for step in steps], sum(len(step.token_ids) for step in steps)
        ):
            kernel = None
        if kernel is not None or len(steps) > 1:
            if self.lean is None:
                return together(self, steps, kernel, self.tail_room)
            if self.lean.ready():
                return [logits.clone() for logits in self.lean.together(steps, kernel)]
        return [self.forward_alone(step) for step in steps]

    def forward_step(self, step: Step) -> torch.Tensor:
        """One forward over one step on the fast path. The caller holds ``lock``."""
        return self._forward_steps([step])[0]

    def forward_alone(self, step: Step) -> torch.Tensor:
        """``forward_step`` on torch's own kernels."""
        past = step.past
        with attention.reading(past), torch.no_grad():
            past.begin(len(step.token_ids))
            if self.lean is not None and self.lean.ready():
                # Out of inference mode again: callers may do with logits what they like.
                return self.lean(step.token_ids, step.position, past).clone()
            if dtype_name(self.model.dtype) != self.layout.dtype:
                raise ConfigError(
                    f"the model is in {self.model.dtype} and was opened in {self.layout.dtype}: it was cast since; open a "
                    "broker on the model as it is now"
                )
            return self.forward(step.token_ids, step.position, step.cache)

    def start(self, past: Sequence[Piece], tail: Tail, *, grid: int | None, priority: int = 0) -> Run:
        """See ``Engine.start``."""
        if self.read_path == "fast":
            return FastRun(self, past, tail, grid, priority)
        return UniversalRun(self, past, tail, priority)

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

    def select(self, path: str) -> None:
        """Put the model on the attention that ``path`` needs."""
        wanted = attention.NAME if path == "fast" else self._stock_attention
        if self.model.config._attn_implementation != wanted:
            self.model.set_attn_implementation(wanted)
